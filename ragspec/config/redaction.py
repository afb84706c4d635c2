"""Secrets in configs: how they are recognised, how they are stored, and how they are kept out of messages.

    >>> config = redacted({"token": "hf_abcdefghijklmnopqrst", "proxy": "${PROXY}", "dtype": "auto"})
    >>> print(config["token"], config["proxy"], revealed(config)["token"])
    secret:a5bfa9b6 ${PROXY} hf_abcdefghijklmnopqrst

A checked config contains no secret as text: a `Secret` is a string that is safe to show, and only `revealed`, called
where a library gets its arguments, returns what it hides. So code that forgets about secrets fails instead of leaking.
Limit: prompts, sampling and paths are not searched. Standard library and pydantic only.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import AfterValidator, WrapValidator

from ragspec.errors import ConfigError, ModelError, RagspecError, flat

# -- recognition -----------------------------------------------------------------------------------

# A false positive costs little (the statistics show a hash), a miss leaks: an unknown `..._token` counts as a secret.
LAST = {"token", "key", "secret", "password", "passwd", "passphrase", "pwd", "credential", "authorization", "auth"}
LAST |= {"bearer", "apikey", "cookie", "secrets", "passwords", "credentials"}
ALWAYS = {"secret", "password", "passwd", "passphrase", "pwd", "credential", "secrets", "passwords", "credentials"}
RUN_TOGETHER = re.compile(r"(api|access|auth|secret|private)(token|key)s?$|password$|passwd$|secret$|credentials?$")
PLURAL = {"keys", "tokens"}  # secrets only after one of OWNERS
OWNERS = {"api", "access", "auth", "secret", "private", "account", "hf", "bearer"}
TRAILING = {"id", "value", "string"}  # the word before decides, as in aws_access_key_id
# words that make a token part of a vocabulary, and a key part of a mapping
HARMLESS = {
    "token": {"bos", "eos", "pad", "unk", "sep", "cls", "mask", "eot", "eom", "eod", "bot", "image", "audio", "video"}
    | {"boi", "eoi", "start", "end", "stop", "prefix", "suffix", "middle", "new", "next", "last", "first", "special"}
    | {"per", "draft", "bonus", "context", "prompt", "text", "extra", "language", "lang", "noise", "class", "by"},
    "key": {"sort", "partition", "group", "cache", "primary", "foreign", "index", "map", "dict", "json", "row"}
    | {"column", "label", "text", "image", "video", "audio", "lookup", "query", "feature", "id", "order", "name"},
}
VOCABULARY = re.compile(r"<[^<>]*>|\[[A-Za-z_]+\]|[\d.]+|.{0,2}")  # a vocabulary's token or its id
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

# query parameters that sign a URL
SIGNED = (
    r"(?<=[?&])(?i:(?:X-(?:Amz|Goog)-)?(?:Signature|Security-Token|Credential)|sig|token|api_key|apikey|access_token)"
    r"=(?![^&\s\"':]*[*?\[\]])[^&\s\"':]{4,}"  # a signature contains no file name pattern
)
SHAPES = re.compile(
    r"\bhf_(?:(?=[a-z]*[0-9A-Z])[A-Za-z0-9]{8,}|[a-z]{16,})(?!\w)"  # Hugging Face
    r"|\bapi_org_\w{16,}"
    # OpenAI, Anthropic and providers with the same form: letters and digits, after words
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
LOGIN = re.compile(r"(?<=://)[^\s/@:\"']*:[^\s/@\"']+(?=@)")  # user:password in a URL
# key: "value", 'key': "value", key='value'; the key's length is limited, as matching takes quadratic time in it
NAMED = re.compile(r"""(["']?)(\b[A-Za-z_][\w.-]{0,99})\1\s*([:=])\s*(["'])((?:(?!\4).)+)\4""")
ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://\S*")
PATH = re.compile(r"(?:~|\.{0,2})/\S*|\S*\.[A-Za-z]\w{1,7}")
PATTERN = re.compile(r"[*?()\[\]{}|\\^<>]")  # a regular expression, file name pattern or template
RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])\S{8,}|[\w+/=~.-]{24,}")  # generated rather than written


def names_secret(key: str) -> bool:
    """Return whether the value under `key` is a secret.

    >>> [names_secret(key) for key in ("hf_token", "api_key", "num_tokens", "eos_token", "tokenizer", "sort_key")]
    [True, True, False, False, False, False]
    """
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
    """Return whether `value`, a leaf under `key`, is a secret by its key. Token ids and booleans are not."""
    if not names_secret(key) or isinstance(value, bool) or value in (None, ""):
        return False
    sure = WORD.findall(key)[-1].lower() in ALWAYS
    return isinstance(value, str | int | float) and (sure or not VOCABULARY.fullmatch(str(value)))


def secret_parts(text: str) -> list[str]:
    """Return the parts of `text` that look like secrets or are named as one (a dictionary in a string)."""
    named = [found[5] for found in NAMED.finditer(text) if is_secret(found[5], found[2])]
    return [*LOGIN.findall(text), *SHAPES.findall(text), *named]


def parts_of_message(text: str) -> list[str]:
    """Return the secrets in a message, which may also mention tokens and keys that are none.

    Stricter than `secret_parts`, since the config's own secrets are known: a URL without a login stays, and after a
    word and a colon ("unknown key: 'x'") a pattern, a path or a word stays.
    """
    named = [found[5] for found in NAMED.finditer(text) if is_secret(found[5], found[2]) and _discloses(found)]
    return [*LOGIN.findall(text), *SHAPES.findall(text), *named]


def _discloses(found: re.Match[str]) -> bool:
    """Return whether a named value in a message is the secret itself rather than a mention of the key."""
    quoted, key, separator, value = bool(found[1]), found[2], found[3], found[5]
    if ADDRESS.fullmatch(value):
        return False  # its login or signature is found separately
    if quoted or separator == "=":
        return True  # a dictionary or an argument
    if PATTERN.search(value) or PATH.fullmatch(value):
        return False
    words = [word.lower() for word in WORD.findall(key)]
    return words[-1] in ALWAYS - {"secret", "secrets", "credential", "credentials"} or bool(RANDOM.fullmatch(value))


# -- storage ---------------------------------------------------------------------------------------

REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*)\}")  # an environment variable
SCHEME = re.compile(r"\s*(bearer|basic|token)?\s*", re.IGNORECASE)  # may precede it in a header
SHOWN = re.compile(r"secret:[0-9a-f]{8}")
ROUNDS = 50_000  # hash iterations: guessing a weak password from the hash should be slow
PREFIX = "RAGSPEC_"  # of environment variables that replace secrets in a written config


class Secret(str):
    """A string that is safe to show in place of a secret: a hash, or the name of an environment variable."""

    hidden: Any
    _parts: tuple[str, ...]

    def __new__(cls, shown: str, hidden: Any, parts: tuple[str, ...] = ()) -> Secret:
        self = super().__new__(cls, shown)
        self.hidden, self._parts = hidden, parts
        return self

    def __getnewargs__(self) -> tuple[str, Any, tuple[str, ...]]:  # type: ignore[override]  # for copy and pickle
        return str(self), self.hidden, self._parts

    @property
    def is_reference(self) -> bool:
        """Return whether this names environment variables and contains no secret itself."""
        return bool(str(self) == self.hidden)

    def reveal(self) -> Any:
        """Return the secret. Raises ConfigError if a referenced environment variable is not set."""
        return REFERENCE.sub(_from_environment, self.hidden) if self.is_reference else self.hidden

    def parts(self) -> list[str]:
        """Return the texts to keep out of messages."""
        if self.is_reference:
            return [os.environ[name] for name in REFERENCE.findall(self.hidden) if os.environ.get(name)]
        return list(self._parts)


def redacted(value: Any, key: str = "", inside: bool = False) -> Any:
    """Return a copy of nested `value` with a Secret for every secret and every text that contains ${NAME}.

    key: the key of `value`. inside: whether an outer key names a secret.
    """
    if isinstance(value, dict):
        inside = inside or names_secret(key)
        return {name: redacted(inner, str(name), inside) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([redacted(inner, key, inside) for inner in value])
    if isinstance(value, Secret):
        return value
    named = is_secret(value, key) or (inside and is_secret(value, "secret"))
    if isinstance(value, str) and REFERENCE.search(value):
        rest = REFERENCE.sub("", value)
        # a password may itself contain a ${NAME}
        if SCHEME.fullmatch(rest) if named else not secret_parts(rest):
            return Secret(value, value)
    if named:
        return Secret(_placeholder(value), value, (str(value),))
    if isinstance(value, str) and (parts := secret_parts(value)):
        return Secret(_placeholder(value), value, tuple(parts))
    return value


def revealed(value: Any) -> Any:
    """Return a copy of nested `value` with every Secret revealed. Raises ConfigError."""
    if isinstance(value, dict):
        return {key: revealed(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([revealed(inner) for inner in value])
    return value.reveal() if isinstance(value, Secret) else value


def as_given(value: Any) -> Any:
    """Return a copy of nested `value` as the user wrote it: secrets in clear text, environment variables by name."""
    if isinstance(value, dict):
        return {key: as_given(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([as_given(inner) for inner in value])
    return value.hidden if isinstance(value, Secret) else value


def by_name(value: Any, path: str, named: dict[str, str]) -> Any:
    """Return a copy of nested `value` with secrets as environment variables; `named` collects name -> path."""
    if isinstance(value, dict):
        return {key: by_name(inner, f"{path}.{key}" if path else str(key), named) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [by_name(inner, f"{path}.{place}", named) for place, inner in enumerate(value)]
    if not isinstance(value, Secret) or value.is_reference:
        return str(value) if isinstance(value, Secret) else value
    name = PREFIX + re.sub(r"\W+", "_", path).upper()
    named[name] = path
    return f"${{{name}}}"


def secrets_in(value: Any) -> Iterator[tuple[str, Secret]]:
    """Yield every Secret in nested `value` with its dotted path."""
    return ((path, text) for path, text in _texts(value) if isinstance(text, Secret))


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in items:
        yield from _texts(inner, f"{path}.{key}" if path else str(key))


def _placeholder(value: Any) -> str:
    """Return a hash that changes with the secret; for a URL, the URL with the hash as its login and signature."""
    text = str(value)
    shown = f"secret:{hashlib.pbkdf2_hmac('sha256', text.encode(), b'ragspec', ROUNDS, 4).hex()}"
    without = re.sub(SIGNED, shown, LOGIN.sub(shown, text))
    return shown if without == text or secret_parts(re.sub(SIGNED, "", LOGIN.sub("", text))) else without


def _from_environment(found: re.Match[str]) -> str:
    try:
        return os.environ[found[1]]
    except KeyError:
        raise ConfigError(f"${{{found[1]}}}: this environment variable is not set") from None


def _address(value: Any, read: Any) -> Any:
    if isinstance(value, Secret):
        return value
    text = read(value)
    if not isinstance(text, str) or not LOGIN.search(text):
        return text
    return Secret(_placeholder(text), text, tuple(secret_parts(text)))


def _place(value: Any, read: Any) -> Any:
    if isinstance(value, Secret):
        return value
    text = read(value)
    if not isinstance(text, str):
        return text
    rest = REFERENCE.sub("", text)
    if rest != text and not LOGIN.search(rest) and not re.search(SIGNED, rest):
        return Secret(text, text)
    if LOGIN.search(text) or re.search(SIGNED, text):
        return Secret(_placeholder(text), text, tuple(secret_parts(text)))
    return text


def _kept(value: Any, read: Any) -> Any:
    return value if isinstance(value, Secret) else read(value)


def _settings(value: dict[str, Any]) -> dict[str, Any]:
    for path, text in _texts(value):
        if SHOWN.search(text) and not isinstance(text, Secret):
            raise ValueError(
                f"{path} is a placeholder for a secret that was not saved; put the secret there, or ${{NAME}}"
            )
    result: dict[str, Any] = redacted(value)
    return result


Settings = Annotated[dict[str, Any], AfterValidator(_settings)]  # arguments for a library
StringSettings = Annotated[dict[str, Annotated[str, WrapValidator(_kept)]], AfterValidator(_settings)]
Address = Annotated[str, WrapValidator(_address)]  # a name, a path, or a URL that may contain a login
Place = Annotated[str, WrapValidator(_place)]  # a path or URL that may contain a ${NAME}


# -- messages --------------------------------------------------------------------------------------

PLACEHOLDER = "[secret]"
LEAST = 4  # characters of the shortest secret that is hidden
PIECE = 8  # characters of a fragment that is hidden


class Redactor:
    """Removes the secrets of nested `value`, such as a dumped config, from errors, notes and logs.

        >>> Redactor(config)("401 for hf_abc...")

    Hides the config's Secrets, even when a library shortened them, and anything that looks like a secret. Limit: a
    secret of fewer than four characters stays.
    """

    def __init__(self, value: Any = None) -> None:
        hidden = {part for _, secret in secrets_in(value) for part in secret.parts() if len(part) >= LEAST}
        self._whole = sorted(hidden, key=len, reverse=True)
        self._pieces = {part[i : i + PIECE] for part in hidden for i in range(len(part) - PIECE + 1)}

    def __call__(self, text: str) -> str:
        """Return `text` with each secret in it replaced."""
        for part in self._whole:
            text = _pattern_of(part).sub(PLACEHOLDER, text)
        for part in sorted(parts_of_message(text), key=len, reverse=True):
            text = text.replace(part, PLACEHOLDER)
        return self._without_pieces(text) if self._pieces else text

    def _without_pieces(self, text: str) -> str:
        """Hide fragments: libraries print the first and last characters of long values."""
        covered = [False] * len(text)
        for start in range(len(text) - PIECE + 1):
            if text[start : start + PIECE] in self._pieces:
                covered[start : start + PIECE] = [True] * PIECE
        if not any(covered):
            return text
        marked = "".join("\0" if hide else letter for letter, hide in zip(text, covered, strict=True))
        return re.sub("\0+", PLACEHOLDER, marked)

    @contextmanager
    def over_errors(self) -> Iterator[None]:
        """Redact the messages of errors raised inside; drop their causes if those contain a secret."""
        try:
            yield
        except Exception as error:  # re-raised, only its text is examined
            if all(self(text) == text for text in _messages(error)):
                raise
            if isinstance(error, RagspecError):
                raise type(error)(self(str(error))) from None
            raise ModelError(f"{type(error).__name__}: {self(flat(error))}") from None


def _messages(error: BaseException | None) -> Iterator[str]:
    """Yield the messages of an error and of its causes: a traceback shows them all."""
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__


def _pattern_of(part: str) -> re.Pattern[str]:
    """Return a pattern for a secret; a short word ("test") does not match inside another word ("latest")."""
    edge = r"\b" if len(part) < PIECE and part.isalnum() else ""
    return re.compile(f"{edge}{re.escape(part)}{edge}")
