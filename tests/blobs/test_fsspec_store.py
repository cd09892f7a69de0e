"""Stores on file systems of fsspec, by its memory and a file system that fails on purpose."""

from __future__ import annotations

import gc
import io
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from gazette.blobs import extras
from gazette.blobs import fsspec as fsspec_store
from gazette.blobs.azure import AzureStore
from gazette.blobs.fsspec import (
    FsspecStore,
    NamedStore,
    check_protocols,
    map_errors,
    mod_time_of,
)
from gazette.blobs.gs import GsStore
from gazette.blobs.registry import BlobSettings, default_constructors
from gazette.errors import Corrupt, GazetteError, Invalid, NotAllowed, NotFound, Unavailable
from gazette.protocol.fragment import FragmentStoreUrl
from tests.facts import raises
from tests.support.blob_store_tests import BlobStoreTests, FailingReader, get, paths, put
from tests.support.missing import missing


class PlainFiles(LocalFileSystem):  # type: ignore[misc]
    """fsspec's local files by a name of their own: those called ``file`` are never opened."""

    protocol = "plainfiles"


fsspec.register_implementation("plainfiles", PlainFiles, clobber=True)


class LateFile(AbstractBufferedFile):  # type: ignore[misc]
    """Is written when it is closed, and finds only then that its directory is missing."""

    def _upload_chunk(self, final: bool = False) -> bool:
        Path(self.path).write_bytes(self.buffer.getvalue())
        return True

    def _initiate_upload(self) -> None:
        pass


class LateFiles(LocalFileSystem):  # type: ignore[misc]
    protocol = "latefiles"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return super()._open(path, mode) if mode == "rb" else LateFile(self, path, mode)


fsspec.register_implementation("latefiles", LateFiles, clobber=True)


class QuietFiles(LocalFileSystem):  # type: ignore[misc]
    """Does not say that a rename has failed, as WebHDFS does not."""

    protocol = "quietfiles"

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        del path1, path2


fsspec.register_implementation("quietfiles", QuietFiles, clobber=True)


def named_store(url: str) -> NamedStore:
    protocols = {"memory", "plainfiles", "latefiles", "quietfiles", "nonsense"}
    return NamedStore(FragmentStoreUrl.parse(url), protocols)


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    """Empty fsspec's memory, which belongs to the process."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    MemoryFileSystem.store.clear()


class TestNamedStore(BlobStoreTests):
    @pytest.fixture
    def store(self) -> NamedStore:
        return named_store("fsspec+memory://name/pre/fix/")


class TestNamedStoreOfFiles(BlobStoreTests):
    """fsspec's local files: written beside and renamed, in directories made on the way."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> NamedStore:
        return named_store(f"fsspec+plainfiles://{tmp_path}/new/directory/")


class BufferedFile(AbstractBufferedFile):  # type: ignore[misc]
    """Uploads as the file systems of clouds do: whole, when it is closed, by any task."""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.kept = getattr(self, "kept", b"") + self.buffer.getvalue()
        if final:
            self.fs.objects[self.path] = self.kept
        return True

    def _initiate_upload(self) -> None:
        pass


class CloudFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Objects of a cloud, with the errors that ``fail`` has for its calls."""

    protocol = "cloud"
    cachable = False

    def __init__(self) -> None:
        super().__init__(use_listings_cache=False)
        self.objects: dict[str, bytes] = {}
        self.fail: dict[str, list[Any]] = {}
        self.asked: list[tuple[int, int]] = []

    def _failing(self, call: str) -> Any:
        failures = self.fail.get(call)
        failure = failures.pop(0) if failures else None
        if isinstance(failure, Exception):
            raise failure
        return failure

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self._failing("info")
        if path not in self.objects:
            raise FileNotFoundError(path)
        content = self.objects[path]
        return {"name": path, "type": "file", "size": len(content), "etag": hash(content)}

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        self.asked.append((start, end))
        short = self._failing("cat_file")
        return self.objects[path][start:end][:short]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._failing("open")
        return BufferedFile(self, path, mode, block_size=options["block_size"])

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        self._failing("ls")
        return [self.info(one) for one in self.objects if one.startswith(f"{path}/")]

    def _rm(self, path: str) -> None:
        self._failing("rm")
        self.objects.pop(path, None)


class CloudStore(FsspecStore):
    scheme = "cloud"
    writes_whole = True

    def __init__(self) -> None:
        super().__init__("bucket", "")
        self.files = CloudFileSystem()

    def make_files(self) -> CloudFileSystem:
        return self.files


@pytest.fixture
def cloud() -> CloudStore:
    return CloudStore()


# --- URLs


def test_a_url_names_the_file_system() -> None:
    """Stores of one host and path are the same, and no others."""
    put(named_store("fsspec+memory://name/a/"), "b/c", b"content")
    assert list(MemoryFileSystem.store) == ["/name/a/b/c"]
    assert get(named_store("fsspec+memory://name/"), "a/b/c") == b"content"
    assert not named_store("fsspec+memory://other/").exists("a/b/c")
    url = named_store("fsspec+memory://name/a/").sign_get("b/c", 60)
    assert url == "fsspec+memory://name/a/b/c"


def test_paths_are_rewritten() -> None:
    store = named_store("fsspec+memory://name/?find=new/&replace=old/deep/")
    put(store, "new/journal/new/name", b"content")
    assert list(MemoryFileSystem.store) == ["/name/old/deep/journal/new/name"]
    assert paths(store, "new/journal/") == ["new/name"]
    assert paths(store, "new/") == ["journal/new/name"]
    assert get(store, "new/journal/new/name") == b"content"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("fsspec+nonsense://host/", "nonsense"),
        ("fsspec+memory://name/a*/", "/a*/"),
        ("fsspec+memory://name/?region=x", "'region'"),
    ],
)
def test_bad_urls(url: str, problem: str) -> None:
    with raises(Invalid, says=problem):
        named_store(url).exists("path")


@pytest.mark.parametrize(
    "protocol",
    ["file", "local", "simplecache", "filecache", "dir", "reference", "zip", "data", "git"],
)
def test_protocols_that_open_whatever_else_are_never_allowed(protocol: str, tmp_path: Path) -> None:
    """The author of a journal's specification could write bytes into any directory of the broker."""
    url = FragmentStoreUrl.parse(f"fsspec+{protocol}://{tmp_path}/")
    with raises(NotAllowed, says=f"fsspec+{protocol}://"):
        NamedStore(url, {protocol})
    with raises(Invalid, path="--broker.fsspec-protocols", says=protocol):
        check_protocols(["memory", protocol], "--broker.fsspec-protocols")


def test_no_protocol_is_allowed_unless_it_is_named() -> None:
    url = FragmentStoreUrl.parse("fsspec+memory://name/")
    with raises(NotAllowed, says="fsspec+memory://", advises="--broker.fsspec-protocols"):
        default_constructors(BlobSettings())["fsspec"](url)
    allowed = BlobSettings(fsspec_protocols=check_protocols(["memory"], "flag"))
    put(default_constructors(allowed)["fsspec"](url), "a/b", b"content")
    for chain in ("fsspec+memory://x::file/", "fsspec+memory://name/a::file:///etc/"):
        with pytest.raises(Invalid):
            named_store(chain)


def test_without_the_sdks_the_extra_is_named() -> None:
    constructors = default_constructors(BlobSettings(fsspec_protocols=frozenset({"memory"})))
    for text, extra in {
        "gs://bucket/": "gcs",
        "azure://container/": "azure",
        "azure-ad://tenant/account/container/": "azure",
        "fsspec+memory://name/": "fsspec",
    }.items():
        url = FragmentStoreUrl.parse(text)
        with missing("fsspec"), raises(Invalid, path="stores", says=f"pygazette[{extra}]"):
            constructors[extras.kind_of(url.scheme)](url)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("azure-ad://tenant", "storage account"),
        ("azure-ad://tenant/", "storage account"),
        ("azure-ad://tenant/account", "storage container"),
        ("azure-ad://tenant/account/", "storage container"),
        ("azure-ad:///account/container/", "tenant ID"),
        ("azure:///container/", "bucket"),
        ("gs:///bucket/", "bucket"),
        ("fsspec+://host/", "scheme"),
    ],
)
def test_malformed_urls_are_errors(text: str, problem: str) -> None:
    with raises(Invalid, says=problem):
        FragmentStoreUrl.parse(text)


def test_azure_needs_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ones, the error says; and arguments of others are refused."""
    for name in ("adlfs", "gcsfs"):  # They need not be installed: that is looked at first.
        (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def azure(url: str, **environ: str) -> AzureStore:
        return AzureStore(FragmentStoreUrl.parse(url), environ=environ)

    with pytest.raises(NotAllowed, match="AZURE_ACCOUNT_KEY"):
        azure("azure://container/", AZURE_ACCOUNT_NAME="name")
    with pytest.raises(NotAllowed, match="AZURE_CLIENT_SECRET"):
        azure("azure-ad://tenant/account/container/", AZURE_CLIENT_ID="id")
    keys = {"AZURE_ACCOUNT_NAME": "name", "AZURE_ACCOUNT_KEY": "key"}
    with pytest.raises(Invalid, match="region"):
        azure("azure://container/?region=x", **keys)
    with pytest.raises(Invalid, match="region"):
        GsStore(FragmentStoreUrl.parse("gs://bucket/?region=x"), environ={})


# --- Writing


BLOCK = fsspec_store.BLOCK_BYTES


@pytest.mark.parametrize("length", [0, 10, BLOCK, 3 * BLOCK + 100])
def test_files_are_written_in_blocks(cloud: CloudStore, length: int) -> None:
    content = os.urandom(length)
    put(cloud, "path", content)
    assert cloud.files.objects == {"bucket/path": content}


@pytest.mark.parametrize("length", [0, 10, 3 * BLOCK + 100])
def test_a_file_that_fails_is_not_stored(cloud: CloudStore, length: int) -> None:
    """Not at once, and not when its finalizer closes it."""

    def attempt() -> None:
        failing = io.BufferedReader(FailingReader(bytes(length), Corrupt("damaged spool")), 100)
        with pytest.raises(Corrupt, match="damaged spool"):
            cloud.put("path", failing)

    attempt()
    gc.collect()  # The error's traceback kept the file.
    assert cloud.files.objects == {}


class Watched(io.RawIOBase):
    """Content of which each piece calls ``look`` before it is there."""

    def __init__(self, content: bytes, look: Callable[[], object]) -> None:
        self._content = io.BytesIO(content)
        self._look = look

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._look()
        return self._content.readinto(buffer)


def test_partial_files_are_hidden_and_removed() -> None:
    """Where a file can be seen before it is whole, it has another name until then."""
    store = named_store("fsspec+memory://name/")
    seen: list[list[str]] = []

    def look() -> None:
        seen.append([*paths(store, ""), *(os.path.basename(one) for one in MemoryFileSystem.store)])

    content = os.urandom(3 * BLOCK)
    store.put("a/path", io.BufferedReader(Watched(content, look), 1 << 20))
    assert get(store, "a/path") == content
    *_, last = seen
    assert [name[: len(".partial-")] for name in last] == [".partial-"]
    assert not any(name in ("path", "a/path") for names in seen for name in names)
    failing = io.BufferedReader(FailingReader(bytes(1000), Corrupt("damaged")))
    with pytest.raises(Corrupt):
        store.put("a/path", failing)
    assert list(MemoryFileSystem.store) == ["/name/a/path"]


def test_a_directory_that_is_missed_late_costs_no_bytes(tmp_path: Path) -> None:
    """All of the source was read by then. It is read again from its start, not from its end."""
    store = named_store(f"fsspec+latefiles://{tmp_path}/")
    put(store, "a/path", b"content")
    assert get(store, "a/path") == b"content"
    # Case: a source that cannot be read again.
    store.put("b/path", io.BufferedReader(Watched(b"content", lambda: None)))
    assert get(store, "b/path") == b"content"


def test_a_rename_that_fails_without_an_error_is_one(tmp_path: Path) -> None:
    store = named_store(f"fsspec+quietfiles://{tmp_path}/")
    with pytest.raises(NotAllowed, match="path"):
        put(store, "a/path", b"content")
    assert os.listdir(tmp_path / "a") == []


def test_a_listing_removes_old_partial_files() -> None:
    """A killed writer leaves one. A file that a writer still writes stays."""
    store = named_store("fsspec+memory://name/")
    files = MemoryFileSystem()
    for name, age in {"old": timedelta(hours=2), "new": timedelta(0)}.items():
        files.pipe_file(f"/name/a/.partial-{name}", b"")
        MemoryFileSystem.store[f"/name/a/.partial-{name}"].created = datetime.now(UTC) - age
    assert paths(store, "a/") == []
    assert list(MemoryFileSystem.store) == ["/name/a/.partial-new"]


# --- Reading


SIZE = 10 * BLOCK // 3
CONTENT = os.urandom(SIZE)


def test_blocks_are_read_as_they_are_needed(cloud: CloudStore) -> None:
    put(cloud, "path", CONTENT)
    with cloud.open("path") as source:
        assert source.read() == CONTENT
    ends = [BLOCK, 2 * BLOCK, 3 * BLOCK, SIZE]
    assert cloud.files.asked == [*zip([0, *ends], ends, strict=False)]
    cloud.files.asked.clear()
    with cloud.open("path") as source:
        source.seek(SIZE - 50)
        assert source.read() == CONTENT[-50:]
        source.seek(-SIZE, io.SEEK_END)
        assert source.read(300) == CONTENT[:300]
        source.seek(2 * SIZE)
        assert source.read() == b""
    assert cloud.files.asked[0] == (SIZE - 50, SIZE)
    for length in (BLOCK, BLOCK - 1, BLOCK + 1, 2 * BLOCK):
        put(cloud, "path", CONTENT[:length])
        assert get(cloud, "path") == CONTENT[:length]


@pytest.mark.parametrize("length", [100, SIZE])
def test_what_comes_short_is_asked_for_again(cloud: CloudStore, length: int) -> None:
    """A few times; then it is an error and not the end of the file."""
    put(cloud, "path", CONTENT[:length])
    failures: list[Any] = [99, OSError("broken"), None]
    cloud.files.fail["cat_file"] = list(failures)
    assert get(cloud, "path") == CONTENT[:length]
    cloud.files.fail["cat_file"] = [99] * 3
    with raises(Unavailable, "expected", received=99, file="path"):
        get(cloud, "path")
    cloud.files.fail["cat_file"] = [OSError("broken")] * 3
    with pytest.raises(Unavailable, match="OSError: broken"):
        get(cloud, "path")


def test_objects_that_change_are_not_mixed(cloud: CloudStore) -> None:
    put(cloud, "path", CONTENT)
    with cloud.open("path") as source:
        source.read(10)
        put(cloud, "path", CONTENT[::-1])
        with raises(Unavailable, file="path"):
            source.read()
    with cloud.open("path") as source:
        source.read(10)
        cloud.remove("path")
        with pytest.raises(Unavailable):
            source.read()


# --- Errors


class HttpError(Exception):
    """As several SDKs have it, each with another name for the status."""

    def __init__(self, **fields: Any) -> None:
        super().__init__("text of the SDK")
        self.__dict__.update(fields)


class RefreshError(Exception):
    """By this name, Google's SDK refuses credentials."""


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PermissionError("no"), NotAllowed),
        (OSError("Forbidden: https://…"), NotAllowed),
        (HttpError(code=403), NotAllowed),
        (HttpError(code="401"), NotAllowed),
        (HttpError(status_code=400), NotAllowed),
        (HttpError(status=405), NotAllowed),
        (RefreshError("no"), NotAllowed),
        (caused(RuntimeError("upload"), HttpError(status_code=403)), NotAllowed),
        (HttpError(status_code=404), NotFound),
        (HttpError(status=408), Unavailable),
        (HttpError(code=429), Unavailable),
        (HttpError(code=503), Unavailable),
        (HttpError(code="ServiceBusy"), Unavailable),
        (caused(RuntimeError("upload"), HttpError(status_code=500)), Unavailable),
        (HttpError(status_code=400, error_code="InvalidBlockList"), Unavailable),
        (TimeoutError("late"), Unavailable),
        (ConnectionResetError("reset"), Unavailable),
        (NotImplementedError("no"), Invalid),
    ],
)
def test_what_errors_mean(error: Exception, expected: type[GazetteError]) -> None:
    raised = map_errors("cloud", error, "path")
    assert type(raised) is expected
    assert raised.hint


def test_errors_of_every_call(cloud: CloudStore) -> None:
    """Have our types, and the SDK's text; where the bucket is missing, that is said."""
    calls: dict[str, list[Callable[[], Any]]] = {
        "info": [lambda: cloud.exists("path"), lambda: cloud.open("path")],
        "open": [lambda: put(cloud, "path", b"")],
        "ls": [lambda: list(cloud.list(""))],
        "rm": [lambda: cloud.remove("path")],
    }
    for call, operations in calls.items():
        for operation in operations:
            for status, expected in {403: NotAllowed, 500: Unavailable}.items():
                cloud.files.fail[call] = [HttpError(status=status)]
                with pytest.raises(expected, match="cloud: HttpError: text of the SDK") as raised:
                    operation()
                assert raised.value.facts["file"] in ("path", "")
    cloud.files.fail["open"] = [FileNotFoundError("bucket")]
    with raises(NotAllowed, file="path", says="bucket"):
        put(cloud, "path", b"")
    cloud.files.fail["rm"] = [FileNotFoundError("bucket/path")]
    cloud.remove("path")


def test_times_of_objects() -> None:
    """In every form that file systems have for them."""
    moment = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
    expected = int(moment.timestamp())
    assert mod_time_of({"mtime": moment}) == expected
    assert mod_time_of({"last_modified": moment.replace(tzinfo=None)}) == expected
    assert mod_time_of({"mtime": moment.timestamp()}) == expected
    assert mod_time_of({"updated": "2024-05-06T07:08:09.123Z"}) == expected
    assert mod_time_of({"updated": "soon", "created": moment}) == expected
    assert mod_time_of({}) == 0


def test_a_file_system_is_made_once_it_can_be(cloud: CloudStore) -> None:
    """What was wrong with it is not kept."""

    class Late(CloudStore):
        failures = 1

        def make_files(self) -> CloudFileSystem:
            self.failures -= 1
            if self.failures >= 0:
                raise HttpError(status_code=403)
            return self.files

    store = Late()
    with pytest.raises(NotAllowed):
        store.exists("path")
    assert not store.exists("path")
