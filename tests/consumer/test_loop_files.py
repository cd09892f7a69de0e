"""No member waits for a disk on its event loop, whatever its shards do with their stores and logs."""

from __future__ import annotations

from typing import Any

import pytest

from gazette import Envelope, Publisher
from gazette.stores.rocksdb.store import RocksDBStore
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import shard_spec
from tests.consumer.apps import SHARD, SOURCE, Counts, Start, Tally, Word, append, frame
from tests.loop_files import files_on_the_loop

IN_MEMORY = "os.preadv in fragment/local_file.py:LocalFile.pread_now"
"""A read of the broker beside it, from the page cache: it fails instead of waiting."""


class Stored(Tally):
    """Counts words in a store of that kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def new_store(self, shard: Any, recorder: Any) -> Any:
        if self.kind == "json":
            return Counts(recorder)
        if self.kind == "rocksdb":
            return RocksDBStore(recorder)
        return SQLiteStore(recorder, "CREATE TABLE IF NOT EXISTS counts (word PRIMARY KEY, n)")

    def consume_message(
        self, shard: Any, store: Any, envelope: Envelope[Word], publisher: Publisher
    ) -> None:
        word = envelope.message.word
        if self.kind == "json":
            store.state[word] = store.state.get(word, 0) + 1
        elif self.kind == "rocksdb":
            store.put(word.encode(), str(int(store.get(word.encode()) or b"0") + 1).encode())
        else:
            upsert = "INSERT INTO counts VALUES (?, 1) ON CONFLICT DO UPDATE SET n = n + 1"
            store.execute(upsert, (word,))


@pytest.mark.parametrize("kind", ["json", "sqlite", "rocksdb"])
async def test_a_member_has_no_file_operations_on_its_loop(
    start: Start, broker: BrokerFixture, kind: str
) -> None:
    """A shard commits, is followed by a standby, is handed over, and is played back by a third member."""
    first = await start(Stored(kind))
    second = await start(Stored(kind), id="consumer-two")
    with files_on_the_loop() as found:
        await first.create(shard_spec(SHARD, SOURCE, hot_standbys=1))
        for number in range(10):
            await append(broker, *(frame(f"word-{n}", 100 * number + n + 1) for n in range(50)))
            await first.read_to_heads(SHARD)
        await second.await_standby(SHARD)
        await first.stop()
        await second.await_primary(SHARD)
        await append(broker, frame("last", 5000))
        await second.read_to_heads(SHARD)
        await second.stop()
    third = await start(Stored(kind), id="consumer-three")
    with files_on_the_loop() as played:
        await third.await_primary(SHARD)
        await append(broker, frame("again", 6000))
        await third.read_to_heads(SHARD)
        await third.stop()
    found += played
    del found[IN_MEMORY]
    assert found == {}
