"""Tests of the behaviour that every blob store must have, to be inherited.

    class TestMyStore(BlobStoreTests):
        @pytest.fixture
        def store(self):
            return MyStore(...)         # empty

A store that keeps real time may list a ``mod_time`` of any moment around the time of the test.
"""

from __future__ import annotations

import concurrent.futures
import io
import os

import pytest

from gazette.blobs import health
from gazette.blobs.blob_store import BlobStore, list_after
from gazette.errors import GazetteError, Invalid, NotFound, Unavailable

BAD_PATHS = (
    "",
    ".",
    "..",
    "../escape",
    "/absolute",
    "a/../b",
    "a/../../escape",
    "a//b",
    "a/./b",
    "a/",
    "a\0b",
)


class FailingReader(io.RawIOBase):
    """Reader that returns some bytes and then fails, as a damaged spool does."""

    def __init__(self, content: bytes, error: Exception) -> None:
        super().__init__()
        self._content = io.BytesIO(content)
        self._error = error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._content.readinto(buffer)
        if not count:
            raise self._error
        return count


def put(store: BlobStore, path: str, content: bytes) -> None:
    store.put(path, io.BytesIO(content))


def get(store: BlobStore, path: str) -> bytes:
    with store.open(path) as source:
        return source.read()


def paths(store: BlobStore, prefix: str) -> list[str]:
    return sorted(info.path for info in store.list(prefix))


class BlobStoreTests:
    """Tests of a blob store. They need a fixture ``store``, which is an empty store."""

    def test_what_is_put_can_be_read(self, store: BlobStore) -> None:
        """Check that bytes of any length come back unchanged."""
        for content in (b"", b"x", os.urandom(3 << 20)):
            put(store, "a/journal/object", content)
            assert store.exists("a/journal/object")
            assert get(store, "a/journal/object") == content

    def test_put_reads_from_the_position_of_its_source(self, store: BlobStore) -> None:
        """Check that bytes before the position are not stored. Sources need not be seekable."""
        source = io.BytesIO(b"head, tail")
        source.seek(6)
        store.put("one", source)
        assert get(store, "one") == b"tail"

        reader, writer = os.pipe()
        os.write(writer, b"piped")
        os.close(writer)
        with open(reader, "rb") as piped:
            store.put("two", piped)
        assert get(store, "two") == b"piped"

    def test_put_replaces(self, store: BlobStore) -> None:
        """Check that the last write wins, without an effect on an open reader."""
        put(store, "path", b"first")
        with store.open("path") as source:
            put(store, "path", b"the second")
            assert source.read() in (b"first", b"the second")
        assert get(store, "path") == b"the second"
        assert paths(store, "") == ["path"]

    def test_a_content_encoding_is_taken(self, store: BlobStore) -> None:
        """Check that a content encoding is kept or ignored, without an effect on existence."""
        store.put("gzipped", io.BytesIO(b"stored"), content_encoding="gzip")
        assert store.exists("gzipped")

    @pytest.mark.parametrize("error", [Unavailable("disk"), OSError("disk")])
    def test_a_put_whose_source_fails_leaves_no_trace(
        self, store: BlobStore, error: Exception
    ) -> None:
        """Check that the object stays as it was, and that no new object is listed."""
        failing = io.BufferedReader(FailingReader(os.urandom(1 << 20), error))
        with pytest.raises(Exception, match="disk"):
            store.put("new", failing)
        assert not store.exists("new")
        put(store, "old", b"content")
        failing = io.BufferedReader(FailingReader(os.urandom(1 << 20), error))
        with pytest.raises(Exception, match="disk"):
            store.put("old", failing)
        assert get(store, "old") == b"content"
        assert paths(store, "") == ["old"]

    def test_what_is_not_there(self, store: BlobStore) -> None:
        """Check that opening raises NotFound, and that removing and looking do not raise."""
        put(store, "a/b", b"")
        for path in ("missing", "a", "a/b/c", "a/missing"):
            assert not store.exists(path)
            with pytest.raises(NotFound):
                store.open(path)
        store.remove("missing")
        store.remove("a/b/c")

    def test_remove(self, store: BlobStore) -> None:
        """Check that one object is removed, and no other. Removing it again is not an error."""
        put(store, "a/b", b"1")
        put(store, "a/b2", b"2")
        store.remove("a/b")
        store.remove("a/b")
        assert not store.exists("a/b")
        assert paths(store, "") == ["a/b2"]

    def test_listing(self, store: BlobStore) -> None:
        """Check that paths at every depth below a prefix are listed, relative to it, and no other
        paths.
        """
        contents = {"a/b/one": b"1", "a/b/c/two": b"22", "a/bc/three": b"3", "ab": b"4"}
        for path, content in contents.items():
            put(store, path, content)
        assert paths(store, "") == sorted(contents)
        assert paths(store, "a/b/") == ["c/two", "one"]
        assert paths(store, "a/") == ["b/c/two", "b/one", "bc/three"]
        assert paths(store, "missing/") == []
        assert paths(store, "ab/") == []
        infos = {info.path: info for info in store.list("a/b/")}
        assert infos["c/two"].size == 2
        assert infos["one"].mod_time > 1_500_000_000

    def test_listing_after_a_path(self, store: BlobStore) -> None:
        """Check that only paths that sort behind the given one are listed, of all directories."""
        names = ["0=b/one", "00ff", "00ff-one", "0100-one", "d=x/00aa", "d=x/0200", "ümlaut"]
        for name in names:
            put(store, f"a/j/{name}", b"")
        put(store, "a/k/0900", b"")
        for after in ("", "0", "00ff", "00ff-one", "0=b/one", "d=x", "d=x/00aa", "d=y", "zz", "ü"):
            found = sorted(info.path for info in list_after(store, "a/j/", after))
            assert found == [name for name in sorted(names) if name > after]
        assert [*list_after(store, "a/none/", "00ff")] == []

    def test_names_of_fragments(self, store: BlobStore) -> None:
        """Check every symbol that a fragment's path may have."""
        name = "0000000000000000-00000000000000ff-0123456789abcdef0123456789abcdef01234567.gz"
        for directory in ("a/b=c/d%20e", "ümlaut/журнал", "date=2024-01-01/hour=01"):
            put(store, f"{directory}/{name}", b"content")
            assert paths(store, f"{directory}/") == [name]
            assert get(store, f"{directory}/{name}") == b"content"
            assert store.sign_get(f"{directory}/{name}", 60.0)

    @pytest.mark.parametrize("path", BAD_PATHS)
    def test_bad_paths_are_refused(self, store: BlobStore, path: str) -> None:
        """Check that every operation refuses a bad path before it does anything."""
        with pytest.raises(Invalid):
            store.exists(path)
        with pytest.raises(Invalid):
            store.open(path)
        with pytest.raises(Invalid):
            put(store, path, b"content")
        with pytest.raises(Invalid):
            store.remove(path)
        with pytest.raises(Invalid):
            store.sign_get(path, 60.0)
        assert paths(store, "") == []

    @pytest.mark.parametrize("prefix", ["a", "/", "../", "a/../b/", "a//"])
    def test_bad_prefixes_are_refused(self, store: BlobStore, prefix: str) -> None:
        """Check that a prefix is empty, or a clean path and a slash."""
        with pytest.raises(Invalid):
            list(store.list(prefix))

    def test_threads(self, store: BlobStore) -> None:
        """Check that threads can share a store. Threads that write one object leave one of their
        versions.
        """

        def work(number: int) -> None:
            for turn in range(5):
                put(store, f"own/{number}/{turn}", b"%d" % turn)
                put(store, "shared", b"%d" % number * 10_000)
                assert get(store, f"own/{number}/{turn}") == b"%d" % turn

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert len(paths(store, "own/")) == 20
        shared = get(store, "shared")
        assert shared == shared[:1] * 10_000

    def test_health_checks_pass(self, store: BlobStore) -> None:
        """Check that a working store is found healthy and deletable."""
        health.check(store)
        health.check(store)
        health.probe_delete(store)
        health.probe_delete(store, "some/prefix/")
        assert paths(store, "") == [health.CHECK_PATH]

    def test_errors_are_of_the_tree(self, store: BlobStore) -> None:
        """Check that a path through an object is refused or not found, by an error of Gazette."""
        put(store, "object", b"content")
        try:
            put(store, "object/below", b"content")
        except GazetteError:
            assert get(store, "object") == b"content"
