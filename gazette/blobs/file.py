"""Stage 8 of the byte path: objects as files below a directory, for ``file://`` stores.

A fragment's spool is dropped after ``put`` has returned, so the file may then be the only copy. Before
``put`` returns, the file is synced and renamed into place, and its directory is synced.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

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

_COPY_BYTES: Final = 1 << 18
_NEVER: Final = {
    errno.ENAMETOOLONG: "Choose a journal of a shorter name, or another store for it.",
    errno.ENOTDIR: "Remove the file that is in the place of a directory.",
    errno.EISDIR: "Remove the directory that is in the place of a file.",
    errno.ELOOP: "Remove the symbolic links that lead to themselves.",
}
"""Hints for errors that each repeated call for the same path gets, too."""
_DIRECTORY_MODE: Final = 0o750


class FileStore:
    """Files below ``root`` + the path of ``url``, which is a directory that exists.

    The root is a setting of the broker and not a part of the URL: readers may have the same files at another
    place. A path that leads out of the directory, by ``..`` or by a symbolic link, is refused.
    """

    def __init__(self, root: Path, url: FragmentStoreUrl) -> None:
        """Parse the URL. Raise ``Invalid`` for unknown query arguments. Look at no file."""
        self._path = url.path
        self._rewrite = parse_rewrite(parse_query(url.query, ("find", "replace")))
        self.directory = Path(os.path.normpath(f"{root}/{self._path}"))
        """The directory of the objects."""
        self._real = ""  # The directory's real path, as last resolved; empty before.
        if ".." in self._path.split("/"):
            raise Invalid(f"cannot traverse outside the store ({url.path})", path="url")

    def exists(self, path: str) -> bool:
        with _mapped(path):
            try:
                return stat.S_ISREG(os.stat(self._locate(path)).st_mode)
            except (FileNotFoundError, NotADirectoryError):
                return False

    def open(self, path: str) -> BinaryIO:
        with _mapped(path):
            try:
                return open(self._locate(path), "rb")
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise NotFound("no such object", file=path) from None

    def put(self, path: str, source: BinaryIO, *, content_encoding: str = "") -> None:
        """Store an object, as in ``BlobStore``. A file cannot keep ``content_encoding``, which is ignored."""
        del content_encoding
        with _mapped(path):
            self._require_directory()
            target = self._locate(path)
            _make_directories(os.path.dirname(target))
            write_durably(target, source)

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        """List objects, as in ``BlobStore``. Do not follow symbolic links to directories.

        Remove old files that killed writers have left beside the objects.
        """
        return self.list_after(prefix, "")

    def list_after(self, prefix: str, after: str) -> Iterator[BlobInfo]:
        """List as in ``OrderedListing``. Read the attributes only of listed files, and of files that killed
        writers have left.

        Do not read directories whose paths all sort before ``after``. Raise ``NotAllowed`` if the store's
        directory does not exist. Raise ``Invalid`` if ``find`` and ``replace`` turn the prefix into the
        beginning of file names.
        """
        validate_prefix(prefix)
        with _mapped(prefix):
            self._require_directory()
            # Apply ``find`` and ``replace`` to the prefix with its slash, as the paths of objects have it.
            rewritten = self._rewrite.apply(prefix)
            if rewritten and not rewritten.endswith("/"):
                raise Invalid(
                    f"find and replace turn {prefix} into the beginning of file names, not a directory",
                    path="find",
                    hint="End both with a slash, or use no slash in either.",
                )
            top = self._place(rewritten[:-1]) if rewritten else str(self.directory)
            yield from _walk(top, "", after)

    def remove(self, path: str) -> None:
        with _mapped(path), suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self._locate(path))

    def sign_get(self, path: str, ttl_s: float) -> str:
        """Return the location below the root, without a signature. The reader must know the root."""
        del ttl_s
        validate_path(path)
        return f"file://{self._path}{self._rewrite.apply(path)}"

    def sign_now(self, path: str, ttl_s: float) -> str:
        return self.sign_get(path, ttl_s)

    def _require_directory(self) -> None:
        if not self.directory.is_dir():
            raise NotAllowed(
                f"invalid file store directory ({self.directory})",
                hint=f"Create {self.directory}, or mount its file system there.",
            )

    def _locate(self, path: str) -> str:
        validate_path(path)
        return self._place(self._rewrite.apply(path))

    def _place(self, path: str) -> str:
        """Return the file of a path that ``find`` and ``replace`` have rewritten already. Raise ``Invalid``
        if the file is outside of the store."""
        validate_path(path)
        base = self._base()
        target = os.path.join(base, path)
        if _has_link(base, path):
            # Links may lead to any place below the directory, and to no place outside of it.
            parent, below = os.path.realpath(os.path.dirname(target)), base.rstrip("/") + "/"
            if parent != base and not parent.startswith(below):
                raise Invalid(f"the path leads outside of the store ({path})", path="path")
            if os.path.islink(target) and not os.path.realpath(target).startswith(below):
                raise Invalid(f"the path leads outside of the store ({path})", path="path")
        return target

    def _base(self) -> str:
        """Return the real path of the directory, as it is mounted now."""
        try:
            if os.path.samestat(os.stat(self._real), os.stat(self.directory)):
                return self._real
        except OSError:
            pass  # One of the paths does not exist.
        self._real = os.path.realpath(self.directory)
        return self._real


def _has_link(base: str, path: str) -> bool:
    """Return True if ``path`` passes a symbolic link below ``base``, or is one."""
    current = base
    for name in path.split("/"):
        current = f"{current}/{name}"
        try:
            mode = os.lstat(current).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return False
        if stat.S_ISLNK(mode):
            return True
    return False


def write_durably(
    target: str,
    source: BinaryIO,
    *,
    replace: bool = True,
    on_written: Callable[[], None] = lambda: None,
) -> bool:
    """Write a whole file, and sync it and its directory, which must exist. Raise ``OSError`` if this fails.

    Without ``replace``, keep a file that ``target`` names already. Return True if the file was written. Call
    ``on_written`` after the bytes are written, before the file gets its name.
    """
    directory, name = os.path.split(target)
    descriptor, partial = tempfile.mkstemp(prefix=f"{PARTIAL_PREFIX}{name}"[:64], dir=directory)
    try:
        with open(descriptor, "wb") as file:
            while content := source.read(_COPY_BYTES):
                file.write(content)
            file.flush()
            on_written()
            os.fchmod(descriptor, 0o640)
            os.fsync(descriptor)
        if replace:
            os.rename(partial, target)
        else:
            try:
                # Unlike a rename, this fails if another process was first.
                os.link(partial, target)
            except FileExistsError:
                return False
            finally:
                os.unlink(partial)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
    _sync_directory(directory)
    return True


def _make_directories(directory: str) -> None:
    """Make the missing directories, and sync each directory that got a new entry."""
    missing = []
    while not os.path.isdir(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    for path in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(path, _DIRECTORY_MODE)
        _sync_directory(os.path.dirname(path))


def _sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _walk(directory: str, relative: str, after: str) -> Iterator[BlobInfo]:
    """Yield the files below a directory whose paths sort after ``after``. Remove files that killed writers
    have left. ``relative`` is the directory's path in the listing: empty, or with ``/`` at its end."""
    try:
        entries = os.scandir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return  # The prefix has no objects, or was removed meanwhile.
    with entries:
        # In the order of names, fragments are added at the end of their cover set: that is fast.
        for entry in sorted(entries, key=lambda entry: entry.name):
            path = f"{relative}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                # Other directories have only paths that sort before ``after``.
                if f"{path}/" > after or after.startswith(f"{path}/"):
                    yield from _walk(entry.path, f"{path}/", after)
            elif entry.name.startswith(PARTIAL_PREFIX):
                _remove_left_over(entry)
            elif path > after:
                with suppress(FileNotFoundError):
                    info = entry.stat()
                    if stat.S_ISREG(info.st_mode):
                        yield BlobInfo(path, int(info.st_mtime), info.st_size)


def _remove_left_over(entry: os.DirEntry[str]) -> None:
    with suppress(OSError):  # The process may lack the right to remove files.
        if is_left_over(entry.stat(follow_symlinks=False).st_mtime):
            os.unlink(entry.path)


@contextmanager
def _mapped(path: str) -> Iterator[None]:
    """Turn errors of the file system into ``GazetteError``: ``NotAllowed`` or ``Invalid`` if a retry cannot
    help, otherwise ``Unavailable``."""
    try:
        yield
    except GazetteError:
        raise
    except PermissionError as error:
        raise NotAllowed(
            f"file store: {error.strerror}",
            hint="Give the user of the process rights to read and write there.",
            file=path,
        ) from error
    except OSError as error:
        text = f"file store: {error.strerror or error}"
        if error.errno == errno.EROFS:
            hint = "Mount the file system of the store for writing."
            raise NotAllowed(text, hint=hint, file=path) from error
        if error.errno in _NEVER:
            raise Invalid(text, hint=_NEVER[error.errno], file=path) from error
        raise Unavailable(text, file=path) from error
