"""Stage 8 of the byte path: objects as files of one of fsspec's file systems.

`gs` and `azure` use this module. Any other file system can be named as ``fsspec+<protocol>://host/path/``,
with its credentials in fsspec's own configuration. Brokers of the original do not know such a URL.

fsspec was made for notebooks, and hides failures. This module works around that:

- caches of listings: switched off;
- walks that leave out unreadable directories: this module lists directory by directory;
- files that are stored although a ``with`` ends by an error: discarded explicitly;
- reads that return too few bytes: compared with the size;
- objects that are replaced while they are read: compared by version.
"""

from __future__ import annotations

import io
import posixpath
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from gazette.blobs import extras
from gazette.blobs.blob_store import (
    BlobInfo,
    parse_query,
    parse_rewrite,
    validate_path,
    validate_prefix,
)
from gazette.blobs.partial_files import PARTIAL_PREFIX, is_left_over
from gazette.errors import GazetteError, Invalid, NotAllowed, NotFound, Unavailable
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.runtime.numbers import is_digits

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK_BYTES: Final = 8 << 20
"""Bytes of one request to read or write. One reader or writer uses twice as many bytes of memory."""

ATTEMPTS_MAX: Final = 3
"""Greatest number of attempts to read one block, before its reader gives up."""

_COPY_BYTES: Final = 1 << 18
_GLOBS: Final = frozenset("*?[]")
_VERSION_KEYS: Final = (
    "generation",
    "etag",
    "ETag",
    "version_id",
    "size",
    "mtime",
    "last_modified",
    "LastModified",
    "created",
)
"""Keys of fsspec's infos that tell versions of a file apart. Each file system has some of these keys."""
_TIME_KEYS: Final = ("mtime", "updated", "last_modified", "LastModified", "modified", "created")
_TRANSIENT: Final = ("InvalidBlockList",)
"""Codes of Azure's errors after which to repeat a request, although their status blames the request."""

_REFUSALS: Final = frozenset(
    {
        "ClientAuthenticationError",
        "CredentialUnavailableError",
        "DefaultCredentialsError",
        "NoCredentialsError",
        "RefreshError",
    }
)
"""Names of SDKs' errors about credentials."""


class FsspecStore(ABC):
    """Files below ``root`` of a file system. The first call makes the file system, in its thread."""

    scheme: str
    """Scheme of the URL, for messages."""

    writes_whole = False
    """True if the file system shows only closed files. Otherwise files are written under another name in the
    same directory, and renamed."""

    def __init__(self, root: str, query: str) -> None:
        """Take ``root``, a path of the file system: not empty, without ``/`` at the end. Raise ``Invalid``
        for unknown arguments."""
        arguments = parse_query(query, ("find", "replace"))
        self._rewrite = parse_rewrite(arguments)
        self._root = root
        self._files_lock = threading.Lock()
        self._files: Any = None
        """The file system; None before the first call."""

    def exists(self, path: str) -> bool:
        with self._mapped(path) as files:
            located = self._locate(path)
            try:
                return bool(self.stat(files, located)["type"] == "file")
            except (FileNotFoundError, NotADirectoryError):
                return False

    def open(self, path: str) -> BinaryIO:
        """Read in blocks, with one request for each. The reader can seek."""
        located = self._locate(path)
        with self._mapped(path) as files:
            info = self._info(files, located)
        return io.BufferedReader(_FileReader(self, path, located, info), _COPY_BYTES)

    def put(self, path: str, source: BinaryIO, *, content_encoding: str = "") -> None:
        """Store an object, as durably as the file system writes."""
        located = self._locate(path)
        with self._mapped(path, missing_is_refusal=True) as files:
            if self.writes_whole:
                self.write(files, located, source, content_encoding)
                return
            directory, name = posixpath.split(located)
            partial = f"{directory}/{PARTIAL_PREFIX}{uuid.uuid4().hex}-{name}"
            begin = source.tell() if source.seekable() else 0
            if not source.seekable():  # It cannot be read again: make the directory first.
                files.makedirs(directory, exist_ok=True)
            try:
                try:
                    self.write(files, partial, source, content_encoding)
                except FileNotFoundError:  # The directory is missing. Bytes may have been read.
                    files.makedirs(directory, exist_ok=True)
                    source.seek(begin)
                    self.write(files, partial, source, content_encoding)
                files.mv(partial, located)
                self.stat(files, located)  # Some file systems hide that a rename has failed.
            except BaseException:
                with suppress(Exception):
                    files.rm_file(partial)
                raise

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        """List directory by directory. Memory holds all entries of one directory.

        Remove old files that killed writers have left beside the objects.
        """
        validate_prefix(prefix)
        begin = self._begin(prefix)
        directories = [begin.rstrip("/")]
        while directories:
            directory = directories.pop()
            with self._mapped(prefix) as files:
                try:
                    entries = files.ls(directory, detail=True)
                except (FileNotFoundError, NotADirectoryError):
                    continue  # The prefix has no objects, or was removed meanwhile.
            for entry in entries:
                name = entry["name"]
                if not name.startswith(f"{directory}/") or name.endswith("/"):
                    continue  # The entry is the directory itself, or a file of the same name.
                if entry["type"] == "directory":
                    directories.append(name)
                elif posixpath.basename(name).startswith(PARTIAL_PREFIX):
                    if is_left_over(mod_time_of(entry)):
                        with suppress(Exception):  # The process may lack the right to remove.
                            files.rm_file(name)
                else:
                    yield BlobInfo(name[len(begin) :], mod_time_of(entry), entry["size"] or 0)

    def remove(self, path: str) -> None:
        located = self._locate(path)
        with self._mapped(path) as files, suppress(FileNotFoundError, NotADirectoryError):
            files.rm_file(located)

    def sign_get(self, path: str, ttl_s: float) -> str:
        """Return a signed URL if the file system can make one. Otherwise return the location."""
        located = self._locate(path)
        with self._mapped(path) as files:
            try:
                return str(files.sign(located, expiration=max(1, round(ttl_s))))
            except NotImplementedError:
                return self.location(located)

    def location(self, located: str) -> str:
        """Return a URL that says where a file is, and grants no access."""
        return f"{self.scheme}://{located.lstrip('/')}"

    @abstractmethod
    def make_files(self) -> Any:
        """Make the file system. Call it in a thread: it may use the network."""

    def stat(self, files: Any, located: str) -> Mapping[str, Any]:
        """Return fsspec's info of a file. Raise ``FileNotFoundError`` if it is absent."""
        info: Mapping[str, Any] = files.info(located)
        return info

    def read_range(self, files: Any, located: str, begin: int, end: int) -> bytes:
        """Return the bytes from ``begin`` to ``end``, or to the end of the file, as they are stored."""
        content: bytes = files.cat_file(located, start=begin, end=end)
        return content

    def write(self, files: Any, located: str, source: BinaryIO, content_encoding: str) -> None:
        """Write all of ``source`` into a file, which does not keep ``content_encoding``."""
        del content_encoding
        write_file(files, located, source, {})

    def _begin(self, prefix: str) -> str:
        """Return the beginning of the paths of all files below ``prefix``."""
        rewritten = self._rewrite.apply(prefix)
        if rewritten:
            validate_path(rewritten.removesuffix("/"))
        return f"{self._root}/{rewritten}"

    def _locate(self, path: str) -> str:
        validate_path(path)
        path = self._rewrite.apply(path)
        validate_path(path)
        return f"{self._root}/{path}"

    def _info(self, files: Any, located: str) -> Mapping[str, Any]:
        try:
            info = self.stat(files, located)
        except NotADirectoryError:
            raise NotFound("no such object", file=located) from None
        if info["type"] != "file":
            raise NotFound("no such object", file=located)
        return info

    @contextmanager
    def _mapped(self, path: str, *, missing_is_refusal: bool = False) -> Iterator[Any]:
        """Yield the file system. Turn errors in the body into ``GazetteError``."""
        with self._mapping(path, missing_is_refusal=missing_is_refusal):
            with self._files_lock:
                if self._files is None:
                    self._files = self.make_files()
            yield self._files

    @contextmanager
    def _mapping(self, path: str, *, missing_is_refusal: bool = False) -> Iterator[None]:
        """Turn errors in the body into ``GazetteError``."""
        try:
            yield
        except GazetteError:
            raise
        except Exception as error:
            mapped = map_errors(self.scheme, error, path)
            if missing_is_refusal and isinstance(mapped, NotFound):
                mapped = NotAllowed(
                    f"{self.scheme}: the bucket or directory does not exist: {error}",
                    hint="Create it, or correct the URL of the store.",
                    file=path,
                )
            raise mapped from error


_NEVER: Final = frozenset(
    {
        *("file", "local", "dir", "data", "reference", "generic", "async_wrapper"),
        *("simplecache", "filecache", "blockcache", "cached", "cachingfs"),
        *("zip", "tar", "libarchive", "git", "lakefs", "jlocal", "root"),
    }
)
"""Protocols that open local files, or file systems that their arguments name."""


def check_protocols(names: Iterable[str], path: str) -> frozenset[str]:
    """Return the protocols as a set. Raise ``Invalid``, with ``path``, for a protocol in ``_NEVER``."""
    for name in names:
        if name in _NEVER:
            raise Invalid(
                f"protocol {name} cannot be allowed: it opens local files, or other file systems",
                path=path,
                hint="Use file:// stores below --broker.file-root for local directories.",
            )
    return frozenset(names)


class NamedStore(FsspecStore):
    """``fsspec+<protocol>://host/path/``. Options and credentials come from fsspec's configuration
    (``~/.config/fsspec/*.json``, ``FSSPEC_<PROTOCOL>_<OPTION>`` in the environment)."""

    def __init__(self, url: FragmentStoreUrl, allowed: Collection[str]) -> None:
        """Parse the URL. ``allowed`` are the protocols that URLs may name.

        Raise ``NotAllowed`` for another protocol. Raise ``Invalid`` if fsspec is not installed. Also raise it
        for a path that fsspec would expand, or read as a chain of file systems.
        """
        protocol = url.scheme.removeprefix(extras.FSSPEC_PREFIX)
        if protocol in _NEVER or protocol not in allowed:
            raise NotAllowed(
                f"stores of protocol {protocol} are not allowed here ({url.scheme}://)",
                hint=f"Add {protocol} to --broker.fsspec-protocols of this process."
                if protocol not in _NEVER
                else "Use file:// stores below --broker.file-root for local directories.",
            )
        if "::" in f"{url.host}{url.path}":
            raise Invalid(
                f"a chain of file systems is not a store ({url.host}{url.path})", path="url"
            )
        extras.require(url.scheme, "fsspec")
        self.scheme = url.scheme
        if _GLOBS & set(url.path):
            raise Invalid(f"path has characters that fsspec expands ({url.path})", path="url")
        self._url = f"{protocol}://{url.host}{url.path}"
        super().__init__("", url.query)

    def make_files(self) -> Any:
        import fsspec.core

        try:
            files, root = fsspec.core.url_to_fs(
                self._url, use_listings_cache=False, skip_instance_cache=True
            )
        except (ImportError, ValueError) as error:
            raise Invalid(f"{self.scheme}: {error}", path="url") from error
        self._root = root.rstrip("/")
        return files

    def _locate(self, path: str) -> str:
        # `_mapped` makes the file system, and so sets `_root`, before the call.
        with self._mapped(path):
            return super()._locate(path)

    def _begin(self, prefix: str) -> str:
        with self._mapped(prefix):
            return super()._begin(prefix)


class _FileReader(io.RawIOBase):
    """The bytes of one file, by blocks. The last block is returned only if all blocks are of one version."""

    def __init__(
        self, store: FsspecStore, path: str, located: str, info: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self._store = store
        self._path = path
        self._located = located
        self._length = int(info["size"])
        self._version = _version_of(info)
        self._position = 0
        self._block = b""
        self._block_begin = 0
        if 0 < self._length < BLOCK_BYTES:
            # A single request reads a small object, even if the object is replaced meanwhile.
            self._block = self._fetched(0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        if not view or self._position >= self._length:
            return 0
        start = self._position - self._block_begin
        if not 0 <= start < len(self._block):
            self._block = b""  # Free the old block before the next block is read.
            self._block = self._fetched(self._position)
            self._block_begin, start = self._position, 0
        content = memoryview(self._block)[start : start + len(view)]
        view[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        self._block = b""
        super().close()

    def _fetched(self, begin: int) -> bytes:
        """Return the block from ``begin`` on. Attempt the request up to `ATTEMPTS_MAX` times.

        Raise ``Unavailable`` if the block cannot be read whole, or if the object was removed or replaced.
        """
        is_small = self._length < BLOCK_BYTES
        expected = min(BLOCK_BYTES, self._length - begin)
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                with self._store._mapped(self._path) as files:
                    # Ask for more bytes than a small object has: more bytes show a larger replacement.
                    end = BLOCK_BYTES if is_small else begin + expected
                    content = self._store.read_range(files, self._located, begin, end)
                    is_last = not is_small and begin + expected == self._length
                    info = self._store.stat(files, self._located) if is_last else {}
                    is_same = not is_last or _version_of(info) == self._version
            except NotFound as error:
                raise Unavailable(
                    "the object was removed while it was read", file=self._path
                ) from error
            except Unavailable:
                if attempt == ATTEMPTS_MAX:
                    raise
                continue
            if not is_same:
                raise Unavailable("the object was replaced while it was read", file=self._path)
            if len(content) == expected:
                return content
        raise Unavailable(
            "the file ended early, or was replaced while it was read",
            file=self._path,
            expected=expected,
            received=len(content),
        )


def mod_time_of(info: Mapping[str, Any]) -> int:
    """Return the Unix seconds at which a file was stored; 0 if its file system does not say."""
    for key in _TIME_KEYS:
        value = info.get(key)
        if isinstance(value, datetime):
            aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
            return int(aware.timestamp())
        if isinstance(value, int | float):
            return int(value)
        if isinstance(value, str):
            with suppress(ValueError):
                return int(datetime.fromisoformat(value).timestamp())
    return 0


def map_errors(scheme: str, error: Exception, path: str) -> GazetteError:
    """Return the ``GazetteError`` for an error of a file system.

    The error's type decides, or its HTTP status. If neither decides, judge the error's cause the same way.
    """
    text = f"{scheme}: {type(error).__name__}: {error}"
    cause: BaseException | None = error
    while cause is not None:
        status = _status_of(cause)
        names = {cls.__name__ for cls in type(cause).__mro__}
        is_forbidden = isinstance(cause, OSError) and str(cause).startswith("Forbidden")
        if isinstance(cause, PermissionError) or is_forbidden or names & _REFUSALS:
            return _refused(text, path)
        if getattr(cause, "error_code", None) in _TRANSIENT:
            break
        if status == 404 or isinstance(cause, FileNotFoundError):
            return NotFound("no such object", file=path)
        if status is not None and 400 <= status < 500 and status not in (408, 409, 412, 416, 429):
            return _refused(text, path)
        cause = cause.__cause__
    if isinstance(error, NotImplementedError):
        return Invalid(f"{scheme}: the file system cannot do this: {error}", path="url")
    return Unavailable(text, file=path)


def _refused(text: str, path: str) -> NotAllowed:
    hint = "Check the broker's credentials for the store, and what they permit."
    return NotAllowed(text, hint=hint, file=path)


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an SDK's error carries; None if it carries none."""
    for name in ("status_code", "status", "code"):
        value = getattr(error, name, None)
        if isinstance(value, str) and is_digits(value):
            value = int(value)
        if isinstance(value, int) and 100 <= value < 600:
            return value
    return None


def _version_of(info: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(info.get(key)) for key in _VERSION_KEYS)


def write_file(
    files: Any,
    located: str,
    source: BinaryIO,
    options: Mapping[str, Any],
    *,
    head: bytes = b"",
) -> None:
    """Write ``head`` and then all of ``source`` into a file that is opened with ``options``. An error leaves
    no file, or a partial file."""
    file = files.open(located, "wb", block_size=BLOCK_BYTES, **options)
    try:
        if head:
            file.write(head)
        while content := source.read(_COPY_BYTES):
            file.write(content)
        file.close()
    except BaseException:
        with suppress(Exception):
            file.discard()
        # Mark the file as closed: the finalizer of an open file stores the part that was written.
        if not file.closed:
            try:
                file.closed = True
            except AttributeError:
                file.close()  # A plain file cannot be marked. Its name marks it as partial.
        raise
