"""The staging area of a backfill: a directory or a bucket with the built states until they are published.

    <run>/PLAN.json                     what the run builds, and up to which offsets: made once
    <run>/states/<shard>.<attempt>      a built state. Its name is unique: a late attempt overwrites none
    <run>/states/<shard>.<attempt>.json the description of that state: only a complete state has one
    <run>/MANIFEST.json                 the attempt of each shard that counts: made once
    <run>/appending/<shard>.<attempt>.<n>.json  the state is about to be appended to its recovery log
    <run>/appended/<shard>.<attempt>.json  the offset of the state in its recovery log
    <run>/PUBLISHED.json                the run is done

Objects that are made once are created only if absent. Attempts that no manifest names, and published states,
are garbage. `garbage` lists only old objects, since an abandoned attempt may still end.
"""

from __future__ import annotations

import io
import os
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar
from urllib.parse import quote, unquote, urlsplit

import msgspec

from gazette.blobs.file import write_durably
from gazette.blobs.fsspec import mod_time_of
from gazette.blobs.partial_files import PARTIAL_PREFIX
from gazette.blobs.s3.access import S3Settings
from gazette.blobs.s3.store import S3Store
from gazette.blobs.wrappers import RetryingStore
from gazette.errors import (
    Broken,
    Corrupt,
    GazetteError,
    Invalid,
    NotFound,
    Unavailable,
    not_installed,
)
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.protocol.text.validation import within
from gazette.runtime.decoders import json_decoder
from gazette.runtime.failpoints import hit

T = TypeVar("T")

PLAN: Final = "PLAN.json"
MANIFEST: Final = "MANIFEST.json"
PUBLISHED: Final = "PUBLISHED.json"
STATES: Final = "states/"
APPENDING: Final = "appending/"
APPENDED: Final = "appended/"
_COPY_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class StagedObject:
    """An object. ``name`` is relative to the area. ``size`` is in bytes, ``mod_time`` in Unix seconds.

    ``mod_time`` is zero if the area does not say it.
    """

    name: str
    size: int
    mod_time: float


class Staging(ABC):
    """A staging area. All methods block, and may be called by any thread. All may raise ``Unavailable``."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Create an object if it is absent. Return True if this call created the object. Readers never see a
        part."""

    @abstractmethod
    def put(self, name: str, source: Path) -> None:
        """Store a file under a unique name. Readers see all of it or nothing."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return an object's content. Raise ``NotFound`` if there is no such object."""

    @abstractmethod
    def fetch(self, name: str, target: Path) -> None:
        """Copy an object to a local file. Raise ``NotFound`` if there is no such object."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[StagedObject]:
        """Yield all objects below a prefix. Those of one directory come in order of names. ``prefix`` is
        empty or ends with a slash."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove an object, if it exists."""

    def find(self, name: str) -> bytes | None:
        """Return an object's content; None if it does not exist."""
        try:
            return self.read(name)
        except NotFound:
            return None


def open_staging(url: str) -> Staging:
    """Return the staging area at a path, in an S3 bucket, or in a bucket that fsspec reaches.

    An S3 URL is ``s3://bucket/path``, with the arguments of blob stores. Do not connect. Raise ``Invalid``
    for another URL, and for a file system that cannot create a file only if it is absent.
    """
    scheme = urlsplit(url).scheme
    if scheme == "s3":
        return S3Staging(url)
    if scheme in ("", "file"):
        path = Path(urlsplit(url).path if scheme else url)
        if not path.is_absolute():
            raise Invalid(
                f"the staging area must be an absolute path ({url!r})",
                path="--staging",
                hint="Every process that builds or publishes must find it at the same place.",
            )
        return DirectoryStaging(path)
    return FsspecStaging(url)


class DirectoryStaging(Staging):
    """A directory that is shared by all processes of the backfill."""

    def __init__(self, directory: Path) -> None:
        """Create the area; the first write creates its directory."""
        self.directory = directory

    def _path(self, name: str) -> Path:
        return self.directory / _checked(name)

    def create(self, name: str, data: bytes) -> bool:
        target = self._path(name)
        with _failing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            return write_durably(str(target), io.BytesIO(data), replace=False)

    def put(self, name: str, source: Path) -> None:
        target = self._path(name)
        with _failing(target), source.open("rb") as file:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_durably(str(target), file, on_written=lambda: hit("backfill.uploading", name))

    def read(self, name: str) -> bytes:
        with _failing(self._path(name)), self._open(name) as file:
            return file.read()

    def fetch(self, name: str, target: Path) -> None:
        with _failing(self._path(name)), self._open(name) as source:
            _copy_here(source, target)

    def _open(self, name: str) -> BinaryIO:
        try:
            return self._path(name).open("rb")
        except FileNotFoundError:
            raise NotFound("no such object in the staging area", object=name) from None

    def list(self, prefix: str = "") -> Iterator[StagedObject]:
        top = self.directory / _checked(prefix.rstrip("/")) if prefix else self.directory

        def failed(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise _failed(error, top) from error

        for parent, directories, names in os.walk(top, onerror=failed):
            directories.sort()
            for name in sorted(names):
                path = Path(parent) / name
                with suppress(FileNotFoundError):
                    status = path.stat()
                    relative = path.relative_to(self.directory).as_posix()
                    yield StagedObject(relative, status.st_size, status.st_mtime)

    def remove(self, name: str) -> None:
        path = self._path(name)
        with _failing(path):
            path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == self.directory:
                break
            try:
                parent.rmdir()
            except OSError:
                break  # The directory is not empty.


class S3Staging(Staging):
    """A part of an S3 bucket, with credentials of the environment and the calls of a blob store.

    Each call is tried a few times. Methods raise ``Unavailable``, or ``NotAllowed`` if a retry would not
    help: the bucket is missing, or the credentials or permissions are wrong.
    """

    def __init__(self, url: str, settings: S3Settings | None = None) -> None:
        """Create the area. Raise ``Invalid`` for a malformed URL, and if the SDK is not installed."""
        base, mark, query = url.partition("?")
        base = base if base.endswith("/") else f"{base}/"
        with within("--staging"):
            self._store = S3Store(FragmentStoreUrl.parse(f"{base}{mark}{query}"), settings)
        never = threading.Event()  # A pause is a wait for this event, which is never set.
        self._retrying = RetryingStore(self._store, random.SystemRandom(), never.wait)

    def create(self, name: str, data: bytes) -> bool:
        return self._retrying.repeated(lambda: self._store.create(_checked(name), data))

    def put(self, name: str, source: Path) -> None:
        with source.open("rb") as file:
            self._retrying.put(_checked(name), file)

    def read(self, name: str) -> bytes:
        def read() -> bytes:
            with self._store.open(_checked(name)) as file:
                return file.read()

        return self._retrying.repeated(read)

    def fetch(self, name: str, target: Path) -> None:
        with self._retrying.open(_checked(name)) as source:
            _copy_here(source, target)

    def list(self, prefix: str = "") -> Iterator[StagedObject]:
        top = f"{_checked(prefix.rstrip('/'))}/" if prefix else ""
        for info in self._retrying.list(top):
            yield StagedObject(f"{top}{info.path}", info.size, info.mod_time)

    def remove(self, name: str) -> None:
        self._retrying.remove(_checked(name))


_EXCLUSIVE: Final = frozenset({"gs", "gcs", "az", "abfs", "abfss", "memory"})
"""Protocols of fsspec that create a file only if it is absent, in one step.

Other protocols look first and then write: two drivers could both make the plan of a run.
"""


class FsspecStaging(Staging):
    """A bucket of Google or Azure that fsspec reaches, with credentials of the environment."""

    def __init__(self, url: str) -> None:
        """Create the area. Raise ``Invalid`` for an unknown scheme, and if its package is not installed."""
        if (scheme := urlsplit(url).scheme) not in _EXCLUSIVE:
            raise Invalid(
                f"there are no staging areas at {scheme}:// ({url!r})",
                path="--staging",
                hint="Give a directory that all processes share, or a bucket: s3://, gs:// or az://.",
            )
        try:
            import fsspec
        except ImportError as error:
            raise not_installed(
                f"a staging area at {url}",
                "fsspec",
                "fsspec",
                path="--staging",
                hint="Install the filesystem's package as well (s3fs, gcsfs …).",
            ) from error
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise Invalid(
                f"no staging area at {url}: {error}",
                path="--staging",
                hint="Give a directory, or the URL of a filesystem that fsspec knows.",
            ) from error
        self._root = str(root).rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{_checked(name)}"

    def _call(self, name: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the file system. Pass ``FileExistsError``. Turn its other errors into ``NotFound`` and
        ``Unavailable``."""
        try:
            return call(*args, **kwargs)
        except FileExistsError:
            raise
        except FileNotFoundError:
            raise NotFound("no such object in the staging area", object=name) from None
        except GazetteError:
            raise
        except Exception as error:
            # A file system raises the errors of its SDK.
            raise Unavailable(f"the staging area failed: {error}", object=name) from error

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._call(name, self._fs.pipe_file, self._path(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    def put(self, name: str, source: Path) -> None:
        path = self._path(name)
        self._call(name, self._fs.makedirs, path.rpartition("/")[0], exist_ok=True)
        self._call(name, self._fs.put_file, str(source), path)

    def read(self, name: str) -> bytes:
        data: bytes = self._call(name, self._fs.cat_file, self._path(name))
        return data

    def fetch(self, name: str, target: Path) -> None:
        self._call(name, self._fs.get_file, self._path(name), str(target))

    def list(self, prefix: str = "") -> Iterator[StagedObject]:
        top = f"{self._root}/{_checked(prefix.rstrip('/'))}" if prefix else self._root
        self._fs.invalidate_cache()
        try:
            info_by_path: dict[str, Any] = self._call(prefix, self._fs.find, top, detail=True)
        except NotFound:
            return
        for path in sorted(info_by_path):
            info = info_by_path[path]
            name = path.removeprefix(self._root).lstrip("/")
            yield StagedObject(name, int(info.get("size") or 0), mod_time_of(info))

    def remove(self, name: str) -> None:
        with suppress(NotFound):
            self._call(name, self._fs.rm_file, self._path(name))


def _checked(name: str) -> str:
    if not name or name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
        raise Invalid(f"not the name of a staged object ({name!r})")
    return name


def _copy_here(source: BinaryIO, target: Path) -> None:
    """Copy a file. Raise ``Broken`` if this machine's disk fails. Errors of the source pass unchanged."""

    def failed(error: OSError) -> Broken:
        return Broken(
            f"a staged state cannot be copied to this machine: {error.strerror or error}",
            hint="Free space there, or give another --scratch-dir, and resume the run by its --run-id.",
            path=str(target),
        )

    try:
        file = target.open("wb", buffering=0)
    except OSError as error:
        raise failed(error) from error
    with file:
        while data := memoryview(source.read(_COPY_BYTES)):
            while data:
                try:
                    data = data[file.write(data) :]
                except OSError as error:
                    raise failed(error) from error


@contextmanager
def _failing(path: Path) -> Iterator[None]:
    """Turn errors of the file system into ``Unavailable``."""
    try:
        yield
    except OSError as error:
        raise _failed(error, path) from error


def _failed(error: OSError, path: Path) -> Unavailable:
    return Unavailable(
        f"the staging area failed: {error.strerror or error}",
        hint="Free space there, or give the processes of the backfill access to it.",
        path=str(path),
    )


def check_run_id(run_id: str) -> None:
    """Raise ``Invalid`` for an invalid name of a run."""
    if (
        not run_id
        or not all(char.isalnum() or char in "-_." for char in run_id)
        or run_id[0] == "."
    ):
        raise Invalid(
            f"invalid run id ({run_id!r})",
            path="--run-id",
            hint="Use letters, digits, '-', '_' and '.', not beginning with '.'.",
        )


def state_name(run_id: str, shard_id: str, attempt: str) -> str:
    """Return the name of a built state, without a suffix."""
    return f"{run_id}/{STATES}{quote(shard_id, safe='')}.{attempt}"


def appended_name(run_id: str, shard_id: str, attempt: str) -> str:
    return f"{run_id}/{APPENDED}{quote(shard_id, safe='')}.{attempt}.json"


def appending_name(run_id: str, shard_id: str, attempt: str, number: str) -> str:
    return f"{run_id}/{APPENDING}{quote(shard_id, safe='')}.{attempt}.{number}.json"


def appending_shard(name: str) -> str:
    """Return the shard of a name that `appending_name` has made."""
    return unquote(name.rpartition("/")[2].rsplit(".", 3)[0])


def shard_of(name: str) -> tuple[str, str]:
    """Return the (shard, attempt) of a state's name."""
    shard, _, attempt = name.rpartition("/")[2].removesuffix(".json").rpartition(".")
    return unquote(shard), attempt


@dataclass(frozen=True, slots=True)
class Garbage:
    """An object that no run needs, and the reason."""

    object: StagedObject
    reason: str


def garbage(staging: Staging, now_s: float, age_s: float) -> list[Garbage]:
    """Return objects that are older than ``age_s`` seconds and that no run needs. An object of unknown age is
    not old.

    A published run needs only the record that it is published. A run with a manifest needs the attempts of
    the manifest, to be resumed. A run without a manifest is abandoned if all its objects are older.
    """
    unneeded: list[Garbage] = []
    for run, objects in sorted(runs_of(staging).items()):
        old = {item for item in objects if 0 < item.mod_time <= now_s - age_s}
        names = {item.name for item in objects}
        if names & {f"{run}/{MANIFEST}", f"{run}/{PUBLISHED}"}:
            unneeded += [item for item in garbage_of(staging, run, objects) if item.object in old]
        elif len(old) == len(objects):  # A run with a young object may still be active.
            unneeded += [Garbage(item, "its run was abandoned") for item in objects]
    return unneeded


def runs_of(staging: Staging) -> dict[str, list[StagedObject]]:
    """Return the objects of each run, by its id. Blocks."""
    runs: dict[str, list[StagedObject]] = {}
    for item in staging.list():
        run, separator, _ = item.name.partition("/")
        if separator:
            runs.setdefault(run, []).append(item)
    return runs


def garbage_of(staging: Staging, run: str, objects: Sequence[StagedObject]) -> list[Garbage]:
    """Return objects that a run does not need, of any age. Blocks. A run without a manifest may still need
    all its objects."""
    names = {item.name for item in objects}
    if f"{run}/{PUBLISHED}" in names:
        return [
            Garbage(item, "its run is published")
            for item in objects
            if item.name != f"{run}/{PUBLISHED}"
        ]
    if f"{run}/{MANIFEST}" not in names:
        return []
    needed = manifest_attempts(staging.read(f"{run}/{MANIFEST}"))
    unneeded = []
    for item in objects:
        if item.name.rpartition("/")[2].startswith(PARTIAL_PREFIX):
            unneeded.append(Garbage(item, "incomplete: the process that wrote it has died"))
        elif (
            item.name.startswith((f"{run}/{STATES}", f"{run}/{APPENDED}"))
            and shard_of(item.name) not in needed
        ):
            unneeded.append(Garbage(item, "an attempt that does not count"))
    return unneeded


def decoded(data: bytes, kind: type[T], what: str, **facts: Any) -> T:
    """Decode an object of an area from JSON. Raise ``Corrupt`` if the object is not ``what``."""
    try:
        return json_decoder(kind).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"not {what}: {error}", **facts) from error


def manifest_attempts(data: bytes) -> set[tuple[str, str]]:
    """Return the (shard, attempt) pairs of a manifest. Raise ``Corrupt`` if ``data`` is no manifest."""
    value = decoded(data, dict[str, dict[str, str]], "a manifest")
    return set(value.get("attempts", {}).items())
