"""Secrets of a config: whatever gets written shows a placeholder in their place.

    >>> config = concealed({"token": "hf_abcdefghijklmnopqrst", "proxy": "${PROXY}", "dtype": "auto"})
    >>> print(config["token"], config["proxy"], revealed(config)["token"])
    secret:a5bfa9b6 ${PROXY} hf_abcdefghijklmnopqrst

The config contains no secret as text: a `Secret` is the string that may be shown, and whoever writes, prints or hashes
it gets that. Only `revealed`, called when a library is given its arguments, returns what it hides. So code that forgets
about secrets breaks, but leaks nothing. Limit: prompts, sampling and paths are not searched.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, WrapValidator

from ragspec.config.secret_words import LOGIN, SIGNED, is_secret, names_secret, secret_parts
from ragspec.errors import ConfigError

REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*)\}")  # of an environment variable
SCHEME = re.compile(r"\s*(bearer|basic|token)?\s*", re.IGNORECASE)  # what may precede it in a header
SHOWN = re.compile(r"secret:[0-9a-f]{8}")
ROUNDS = 50_000  # of the hash: guessing a weak password from it should be slow
PREFIX = "RAGSPEC_"  # of the environment variables that replace secrets in a written config


class Secret(str):
    """What may be shown in place of a secret: a hash of it, or the text that names an environment variable."""

    hidden: Any
    _parts: tuple[str, ...]

    def __new__(cls, shown: str, hidden: Any, parts: tuple[str, ...] = ()) -> Secret:
        self = super().__new__(cls, shown)
        self.hidden, self._parts = hidden, parts
        return self

    def __getnewargs__(self) -> tuple[str, Any, tuple[str, ...]]:  # type: ignore[override]  # for copies
        return str(self), self.hidden, self._parts

    @property
    def is_reference(self) -> bool:
        """Whether it names environment variables and contains no secret itself."""
        return bool(str(self) == self.hidden)

    def reveal(self) -> Any:
        """Return the secret. Raises ConfigError if an environment variable that it names is not set."""
        return REFERENCE.sub(_from_environment, self.hidden) if self.is_reference else self.hidden

    def parts(self) -> list[str]:
        """Return the texts that nobody may see."""
        if self.is_reference:
            return [os.environ[name] for name in REFERENCE.findall(self.hidden) if os.environ.get(name)]
        return list(self._parts)


def concealed(value: Any, key: str = "", inside: bool = False) -> Any:
    """Return a copy of nested `value` with a Secret for every secret and for every text with a ${NAME} in it.

    key: the key it is under. inside: whether a key further out names a secret.
    """
    if isinstance(value, dict):
        inside = inside or names_secret(key)
        return {name: concealed(inner, str(name), inside) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([concealed(inner, key, inside) for inner in value])
    if isinstance(value, Secret):
        return value
    named = is_secret(value, key) or (inside and is_secret(value, "secret"))
    if isinstance(value, str) and REFERENCE.search(value):
        besides = REFERENCE.sub("", value)
        # a password may contain a ${NAME} of its own
        if SCHEME.fullmatch(besides) if named else not secret_parts(besides):
            return Secret(value, value)
    if named:
        return Secret(_shown(value), value, (str(value),))
    if isinstance(value, str) and (parts := secret_parts(value)):
        return Secret(_shown(value), value, tuple(parts))
    return value


def revealed(value: Any) -> Any:
    """Return a copy of nested `value` with what its Secrets hide. Raises ConfigError."""
    if isinstance(value, dict):
        return {key: revealed(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([revealed(inner) for inner in value])
    return value.reveal() if isinstance(value, Secret) else value


def as_given(value: Any) -> Any:
    """Return a copy of nested `value` as the user wrote it: secrets in the clear, environment variables by name."""
    if isinstance(value, dict):
        return {key: as_given(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([as_given(inner) for inner in value])
    return value.hidden if isinstance(value, Secret) else value


def by_name(value: Any, path: str, named: dict[str, str]) -> Any:
    """Return a copy of nested `value` with environment variables in place of secrets; `named` gets name -> path."""
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
    """Yield every Secret of nested `value` with the path of its keys."""
    return ((path, text) for path, text in _texts(value) if isinstance(text, Secret))


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in items:
        yield from _texts(inner, f"{path}.{key}" if path else str(key))


def _shown(value: Any) -> str:
    """Return a secret's placeholder: an address without login and signature, or a hash that shows when it changes."""
    text = str(value)
    shown = f"secret:{hashlib.pbkdf2_hmac('sha256', text.encode(), b'ragspec', ROUNDS, 4).hex()}"
    without = re.sub(SIGNED, shown, LOGIN.sub(shown, text))
    return shown if without == text or secret_parts(re.sub(SIGNED, "", LOGIN.sub("", text))) else without


def _from_environment(found: re.Match[str]) -> str:
    try:
        return os.environ[found[1]]
    except KeyError:
        raise ConfigError(f"${{{found[1]}}}: there is no such environment variable; set it") from None


def _address(value: Any, read: Any) -> Any:
    if isinstance(value, Secret):
        return value
    text = read(value)
    if not isinstance(text, str) or not LOGIN.search(text):
        return text
    return Secret(_shown(text), text, tuple(secret_parts(text)))


def _place(value: Any, read: Any) -> Any:
    if isinstance(value, Secret):
        return value
    text = read(value)
    if not isinstance(text, str):
        return text
    besides = REFERENCE.sub("", text)
    if besides != text and not LOGIN.search(besides) and not re.search(SIGNED, besides):
        return Secret(text, text)
    if LOGIN.search(text) or re.search(SIGNED, text):
        return Secret(_shown(text), text, tuple(secret_parts(text)))
    return text


def _kept(value: Any, read: Any) -> Any:
    return value if isinstance(value, Secret) else read(value)


def _settings(value: dict[str, Any]) -> dict[str, Any]:
    for path, text in _texts(value):
        if SHOWN.search(text) and not isinstance(text, Secret):
            raise ValueError(
                f"{path} is a placeholder for a secret that was not saved; put the secret there, or ${{NAME}}"
            )
    concealed_value: dict[str, Any] = concealed(value)
    return concealed_value


Settings = Annotated[dict[str, Any], AfterValidator(_settings)]  # arguments passed on to a library
StringSettings = Annotated[dict[str, Annotated[str, WrapValidator(_kept)]], AfterValidator(_settings)]
Address = Annotated[str, WrapValidator(_address)]  # a name, a path, or an address that may contain a login
Place = Annotated[str, WrapValidator(_place)]  # where files are, which a ${NAME} may be part of
