from __future__ import annotations

import io

import pytest

from gazette.testing.clock import ManualClock
from tests.support.blob_store_tests import BlobStoreTests
from tests.support.memory_store import MemoryStore


class TestMemoryStore(BlobStoreTests):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore(ManualClock().now)


def test_it_keeps_what_it_is_given(clock: ManualClock) -> None:
    """Times are the clock's, and encodings are kept: tests look at them."""
    store = MemoryStore(clock.now)
    store.put("a", io.BytesIO(b"1"), content_encoding="gzip")
    clock.advance(5)
    store.put("b", io.BytesIO(b"2"))
    times = {info.path: info.mod_time for info in store.list("")}
    assert times["b"] - times["a"] == 5
    assert store.content_encoding("a") == "gzip"
    assert store.content_encoding("b") == ""
