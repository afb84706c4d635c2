"""Remote files through fsspec (s3://, gs://, hf://, https://, ...).

>>> is_url("s3://bucket/questions.parquet"), is_url("questions.parquet")
(True, False)

The libraries behind fsspec take credentials from the environment or from `storage_options`. Every error of theirs
becomes an OSError with one line and the URL.
"""

from __future__ import annotations

import errno
import glob
import io
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ragspec.errors import ConfigError, flat

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
# the extra to install per protocol; fsspec itself also comes with the extras of pyarrow and datasets
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "http": "http", "https": "http", "hf": "hf"}
# errors of the libraries that are not OSErrors: (module, name), looked up only in imported modules
ERRORS = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("httpx", "HTTPError"),
    ("httpx2", "HTTPError"),
    ("huggingface_hub.errors", "HfHubHTTPError"),
)
# errors about missing credentials
NO_CREDENTIALS_ERRORS = (
    ("botocore.exceptions", "NoCredentialsError"),
    ("botocore.exceptions", "PartialCredentialsError"),
    ("google.auth.exceptions", "DefaultCredentialsError"),
)
NO_CREDENTIALS = (
    "no credentials were found; set them in the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    "storage_options: {anon: true} for what is public"
)
# error numbers from which Python makes the right OSError subclass
NUMBERS = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES, FileExistsError: errno.EEXIST}
SHOWN = 200  # characters of a library's message


def is_url(path: str) -> bool:
    """Return whether `path` is a URL for fsspec rather than a local file."""
    return URL.match(path) is not None and not path.lower().startswith("file://")


def local_path(path: str) -> str:
    """Return `path`, or the local file of a file:// URL."""
    return url2pathname(urlsplit(path).path) if path.lower().startswith("file://") else path


def bare(path: str) -> str:
    """Return a URL without its query: https://host/a.csv?key=1 -> https://host/a.csv."""
    return path.partition("?")[0] if is_url(path) else path


def filesystem(url: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """Return fsspec's file system for `url`, and the path in it. Raises ConfigError."""
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it also logs tracebacks of the errors that it raises
    protocol = url.partition("://")[0].lower()
    extra = EXTRAS.get(protocol, "")
    try:
        import fsspec
    except ImportError:
        raise ConfigError(f'{url}: needs fsspec: pip install "ragspec[{extra or "http"}]"') from None
    if protocol not in fsspec.available_protocols():
        raise ConfigError(f"{url}: {protocol}:// is not known; for example s3://, gs://, hf:// and https:// are")
    try:
        with address_errors(url):
            system, path = fsspec.url_to_fs(url, **(options or {}))
            system.invalidate_cache()  # listings may be stale
    except ImportError as error:
        how = f'pip install "ragspec[{extra}]"' if extra else flat(error, SHOWN)
        raise ConfigError(f"{url}: {protocol}:// needs an additional package: {how}") from None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{url}: cannot be reached ({reason(error)})") from None
    return system, path


def open_binary(path: str, options: Mapping[str, Any] | None = None, *, seeks: bool = False) -> IO[bytes]:
    """Return a local or remote file open for reading; remote ones are fetched in pieces. seeks: allow any position.

    Raises ConfigError and OSError.
    """
    if not is_url(path):
        return Path(local_path(path)).open("rb")
    system, inner = filesystem(path, options)
    web = path.lower().startswith(("http://", "https://"))  # not every server supports range requests
    with address_errors(path):
        file = system.open(inner, "rb", **({"block_size": 0} if web and not seeks else {}))
        return io.BufferedReader(_RemoteFile(path, file))


class _RemoteFile(io.RawIOBase):
    """A file of fsspec's that raises OSErrors with the URL."""

    def __init__(self, url: str, file: Any) -> None:
        self._url = url
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def readinto(self, buffer: Any) -> int:
        with address_errors(self._url):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with address_errors(self._url):
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@contextmanager
def address_errors(url: str) -> Iterator[None]:
    """Convert the libraries' errors for `url` to OSErrors with a one-line message."""
    try:
        yield
    except OSError as error:
        if error.strerror is not None and error.filename is not None:
            raise
        number = next((number for kind, number in NUMBERS.items() if isinstance(error, kind)), errno.EIO)
        raise OSError(number, reason(error), url) from error
    except _library_errors() as error:
        raise OSError(errno.EIO, reason(error), url) from error


def _library_errors() -> tuple[type[Exception], ...]:
    """Return the errors of fsspec and the libraries behind it that are not OSErrors."""
    return (ValueError, *network_errors())  # ValueError: for instance, a server without range requests


def network_errors() -> tuple[type[Exception], ...]:
    """Return the network errors of the libraries imported so far."""
    return _imported(ERRORS)


def _imported(names: Iterable[tuple[str, str]]) -> tuple[type[Exception], ...]:
    """Return the named classes of the modules imported so far."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in names)
    return tuple(error for error in found if error is not None)


def missing(error: FileNotFoundError) -> str:
    """Return the text of a message about a missing file, local or remote."""
    is_remote = isinstance(error.filename, str) and is_url(error.filename)
    return str(error.strerror) if is_remote else "no such file"


@contextmanager
def advising(advice: str, paths: Iterable[str] = ()) -> Iterator[None]:
    """End a message about a missing file with `advice`, which depends on the command.

    paths: the files read inside; a pattern among them without a match raises such a message too.
    """
    for path in paths:
        if (
            glob.has_magic(path)
            and not is_url(path)
            and not Path(path).exists()
            and not glob.glob(path, recursive=True)
        ):
            raise ConfigError(f"{path}: no file matches; {advice}")
    try:
        yield
    except ConfigError as error:
        cause = error.__context__  # the error that the source caught
        if isinstance(cause, FileNotFoundError) and cause.filename is not None:
            raise ConfigError(f"{cause.filename}: {missing(cause)}; {advice}") from None
        raise


def reason(error: Exception) -> str:
    """Return an error's message on one line."""
    if isinstance(error, OSError) and isinstance(error.filename, str) and is_url(error.filename):
        return str(error.strerror)  # from address_errors
    if isinstance(error, _imported(NO_CREDENTIALS_ERRORS)):
        return NO_CREDENTIALS
    message = flat(error, SHOWN)
    if isinstance(error, FileNotFoundError):
        cause = error.__cause__  # fsspec also raises it for a host that does not answer
        is_network_error = isinstance(cause, (ConnectionError, *network_errors()))
        return flat(cause, SHOWN) if is_network_error and isinstance(cause, Exception) else "no such file or bucket"
    if isinstance(error, PermissionError):
        return f"not allowed; are the credentials in the environment right? {message}".rstrip()
    return message if isinstance(error, OSError) and message else f"{type(error).__name__}: {message}"
