"""What is taken for a secret: by the name of its key, or by what it looks like.

    >>> [names_secret(key) for key in ("hf_token", "api_key", "num_tokens", "eos_token", "tokenizer", "sort_key")]
    [True, True, False, False, False, False]

A key that is wrongly taken for a secret costs little (the statistics show a hash); one that is missed is written
everywhere. So an unknown `..._token` counts as one. Standard library only.
"""

from __future__ import annotations

import re
from typing import Any

LAST = {"token", "key", "secret", "password", "passwd", "passphrase", "pwd", "credential", "authorization", "auth"}
LAST |= {"bearer", "apikey", "cookie", "secrets", "passwords", "credentials"}
ALWAYS = {"secret", "password", "passwd", "passphrase", "pwd", "credential", "secrets", "passwords", "credentials"}
RUN_TOGETHER = re.compile(r"(api|access|auth|secret|private)(token|key)s?$|password$|passwd$|secret$|credentials?$")
PLURAL = {"keys", "tokens"}  # secrets only after one of these
OWNERS = {"api", "access", "auth", "secret", "private", "account", "hf", "bearer"}
TRAILING = {"id", "value", "string"}  # as in aws_access_key_id: the word before decides
# tokens of a vocabulary, and keys of mappings
HARMLESS = {
    "token": {"bos", "eos", "pad", "unk", "sep", "cls", "mask", "eot", "eom", "eod", "bot", "image", "audio", "video"}
    | {"boi", "eoi", "start", "end", "stop", "prefix", "suffix", "middle", "new", "next", "last", "first", "special"}
    | {"per", "draft", "bonus", "context", "prompt", "text", "extra", "language", "lang", "noise", "class", "by"},
    "key": {"sort", "partition", "group", "cache", "primary", "foreign", "index", "map", "dict", "json", "row"}
    | {"column", "label", "text", "image", "video", "audio", "lookup", "query", "feature", "id", "order", "name"},
}
VOCABULARY = re.compile(r"<[^<>]*>|\[[A-Za-z_]+\]|[\d.]+|.{0,2}")  # what a token of a vocabulary looks like, or its id
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

# what signs an address
SIGNED = (
    r"(?<=[?&])(?i:(?:X-(?:Amz|Goog)-)?(?:Signature|Security-Token|Credential)|sig|token|api_key|apikey|access_token)"
    r"=(?![^&\s\"':]*[*?\[\]])[^&\s\"':]{4,}"  # nothing signed is a pattern of file names
)
SHAPES = re.compile(
    r"\bhf_(?:(?=[a-z]*[0-9A-Z])[A-Za-z0-9]{8,}|[a-z]{16,})(?!\w)"  # Hugging Face
    r"|\bapi_org_\w{16,}"
    # OpenAI, Anthropic and those that copy them: letters and digits, after words
    r"|\bsk-(?:[a-z0-9]+-){0,9}(?=[A-Za-z_]*\d)(?=[\d_]*[A-Za-z])\w{8,}[\w-]*"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"  # AWS
    r"|\bgh[opsru]_\w{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\bxox[abprs]-[\w-]{10,}"  # Slack
    r"|\bAIza[\w-]{30,}"  # Google
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # a JSON web token
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*"
    r"|\b[Bb]earer\s+(?:(?=[A-Za-z_.~+/-]*\d)[\w.~+/-]{8,}|[\w.~+/-]{16,})=*"
    r"|\b(?:AccountKey|SharedAccessSignature|Password|Pwd)=[^;\s\"']{4,}"  # connection strings
    rf"|{SIGNED}"
)
LOGIN = re.compile(r"(?<=://)[^\s/@:\"']*:[^\s/@\"']+(?=@)")  # user:password of an address
# key: "value", 'key': "value", key='value'; a key of any length would take a time that grows with its square
NAMED = re.compile(r"""(["']?)(\b[A-Za-z_][\w.-]{0,99})\1\s*([:=])\s*(["'])((?:(?!\4).)+)\4""")
ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://\S*")
PATH = re.compile(r"(?:~|\.{0,2})/\S*|\S*\.[A-Za-z]\w{1,7}")
PATTERN = re.compile(r"[*?()\[\]{}|\\^<>]")  # of a regular expression, of file names, of a template
RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])\S{8,}|[\w+/=~.-]{24,}")  # what is written by no one


def names_secret(key: str) -> bool:
    """Return whether what is under `key` is a secret."""
    words = [word.lower() for word in WORD.findall(key)]
    while len(words) > 1 and words[-1] in TRAILING:
        words.pop()
    if not words:
        return False
    last, before = words[-1], set(words[:-1])
    if last in PLURAL:
        return bool(before & OWNERS)
    if RUN_TOGETHER.search(last):
        return True
    return last in LAST and not (before & HARMLESS.get(last, set()) and not before & OWNERS)


def is_secret(value: Any, key: str) -> bool:
    """Return whether `value`, a leaf under `key`, is a secret by that name. Token ids and switches are not."""
    if not names_secret(key) or isinstance(value, bool) or value in (None, ""):
        return False
    sure = WORD.findall(key)[-1].lower() in ALWAYS
    return isinstance(value, str | int | float) and (sure or not VOCABULARY.fullmatch(str(value)))


def secret_parts(text: str) -> list[str]:
    """Return the pieces of `text` that look like secrets, or that it names as one (a dictionary in a string)."""
    named = [found[5] for found in NAMED.finditer(text) if is_secret(found[5], found[2])]
    return [*LOGIN.findall(text), *SHAPES.findall(text), *named]


def parts_of_message(text: str) -> list[str]:
    """Return the same of a message, which speaks of tokens and keys that are no secrets, too.

    What a config holds is known by other means. So an address without a login stays, and after a word and a colon
    ("unknown key: 'x'") so does what looks like a pattern, a path or a word.
    """
    named = [found[5] for found in NAMED.finditer(text) if is_secret(found[5], found[2]) and _is_told(found)]
    return [*LOGIN.findall(text), *SHAPES.findall(text), *named]


def _is_told(found: re.Match[str]) -> bool:
    """Return whether a message tells a secret by name, rather than speaking of something of that name."""
    quoted, key, separator, value = bool(found[1]), found[2], found[3], found[5]
    if ADDRESS.fullmatch(value):
        return False  # a login in it, or what signs it, is hidden by itself
    if quoted or separator == "=":
        return True  # a dictionary, or an argument
    if PATTERN.search(value) or PATH.fullmatch(value):
        return False
    words = [word.lower() for word in WORD.findall(key)]
    return words[-1] in ALWAYS - {"secret", "secrets", "credential", "credentials"} or bool(RANDOM.fullmatch(value))
