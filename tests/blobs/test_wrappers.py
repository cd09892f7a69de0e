from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator
from typing import BinaryIO

import pytest
from prometheus_client import REGISTRY

from gazette.blobs.blob_store import BlobInfo, BlobStore
from gazette.blobs.wrappers import ATTEMPTS_MAX, InstrumentedStore, RetryingStore
from gazette.errors import NotAllowed, NotFound, Unavailable
from gazette.testing.clock import ManualClock
from tests.support.blob_store_tests import BlobStoreTests, get, paths, put
from tests.support.memory_store import MemoryStore


class TestInstrumentedStore(BlobStoreTests):
    @pytest.fixture
    def store(self) -> BlobStore:
        clock = ManualClock()
        return InstrumentedStore(MemoryStore(clock.now), "memory://conformance/", clock.monotonic)


class TestRetryingStore(BlobStoreTests):
    @pytest.fixture
    def store(self) -> BlobStore:
        store = MemoryStore(ManualClock().now)
        return RetryingStore(store, random.Random(1), lambda seconds: None)


class FlakyStore(MemoryStore):
    """Fails the given number of times, at the end of what it does."""

    def __init__(self, failures: int, error: type[Exception] = Unavailable) -> None:
        super().__init__(ManualClock().now)
        self.failures = failures
        self.error = error
        self.calls = 0

    def _maybe_fail(self) -> None:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error("flaky")

    def exists(self, path: str) -> bool:
        self._maybe_fail()
        return super().exists(path)

    def open(self, path: str) -> BinaryIO:
        self._maybe_fail()
        return super().open(path)

    def put(self, path: str, source: BinaryIO, *, content_encoding: str = "") -> None:
        source.read(2)  # Some is gone when it fails.
        self._maybe_fail()
        source.seek(-2, io.SEEK_CUR)
        super().put(path, source, content_encoding=content_encoding)

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        self._maybe_fail()
        yield from super().list(prefix)

    def remove(self, path: str) -> None:
        self._maybe_fail()
        super().remove(path)

    def sign_get(self, path: str, ttl_s: float) -> str:
        self._maybe_fail()
        return super().sign_get(path, ttl_s)


def metric(name: str, store: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, {"store": store, **labels}) or 0.0


def test_hiccups_are_repeated() -> None:
    """Every operation survives two failures, and a put starts over where its source began."""
    waits: list[float] = []
    flaky = FlakyStore(0)
    store = RetryingStore(flaky, random.Random(1), waits.append)

    def again() -> None:
        flaky.calls, flaky.failures = 0, ATTEMPTS_MAX - 1

    source = io.BytesIO(b"skip:content")
    source.seek(5)
    again()
    store.put("path", source)
    again()
    assert get(store, "path") == b"content"
    again()
    assert store.exists("path")
    again()
    assert paths(store, "") == ["path"]
    again()
    assert store.sign_get("path", 1.0)
    again()
    store.remove("path")
    assert len(waits) == 6 * (ATTEMPTS_MAX - 1)
    assert all(0.1 < wait < 3 for wait in waits)
    assert waits[1] > waits[0]


def test_outages_are_not_waited_for() -> None:
    """After the last attempt the error is the caller's; others are never repeated."""
    flaky = FlakyStore(99)
    store = RetryingStore(flaky, random.Random(1), lambda seconds: None)
    with pytest.raises(Unavailable):
        store.exists("path")
    assert flaky.calls == ATTEMPTS_MAX

    for error in (NotAllowed, NotFound):
        flaky = FlakyStore(99, error)
        store = RetryingStore(flaky, random.Random(1), lambda seconds: None)
        with pytest.raises(error):
            put(store, "path", b"content")
        assert flaky.calls == 1


def test_a_put_of_a_stream_is_not_repeated() -> None:
    """What cannot be read again is not stored in part."""

    class Stream(io.BytesIO):
        def seekable(self) -> bool:
            return False

    flaky = FlakyStore(1)
    store = RetryingStore(flaky, random.Random(1), lambda seconds: None)
    with pytest.raises(Unavailable):
        store.put("path", Stream(b"content"))
    assert flaky.calls == 1


def test_a_listing_that_broke_midway_is_not_repeated() -> None:
    """Its reader has seen objects already, and must start over without help."""

    class Broken(MemoryStore):
        def list(self, prefix: str) -> Iterator[BlobInfo]:
            yield from super().list(prefix)
            raise Unavailable("page two")

    broken = Broken(ManualClock().now)
    put(broken, "a", b"")
    seen = []
    with pytest.raises(Unavailable):
        for info in RetryingStore(broken, random.Random(1), lambda seconds: None).list(""):
            seen.append(info.path)
    assert seen == ["a"]


def test_operations_are_counted() -> None:
    """By store, operation and outcome; bytes by encoding; listings by length."""
    name = f"memory://{os.urandom(4).hex()}/"
    clock = ManualClock()
    flaky = FlakyStore(0)
    store = InstrumentedStore(flaky, name, clock.monotonic)
    put(store, "a/1", b"four")
    store.put("a/2", io.BytesIO(b"three"), content_encoding="gzip")
    paths(store, "a/")
    with pytest.raises(NotFound):
        store.open("missing")
    flaky.failures = 99
    with pytest.raises(Unavailable):
        put(store, "a/3", b"lost")

    total = "gazette_store_operation_total"
    assert metric(total, name, operation="put", status="success") == 2
    assert metric(total, name, operation="put", status="error") == 1
    assert metric(total, name, operation="get", status="error") == 1
    assert metric(total, name, operation="list", status="success") == 1
    seconds = "gazette_store_operation_duration_seconds_count"
    assert metric(seconds, name, operation="put", status="success") == 2
    assert metric("gazette_store_put_bytes_total", name, encoding="none") == 4
    assert metric("gazette_store_put_bytes_total", name, encoding="gzip") == 5
    assert metric("gazette_store_list_items_count_sum", name) == 2
