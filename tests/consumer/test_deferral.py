"""Batches that an application defers: halved, with no effect of what was deferred."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from gazette.client.append.appender import AppendParams
from gazette.consumer.application import DeferToNextTransaction
from gazette.consumer.contract.callbacks import ApplicationFailed
from gazette.errors import NotAllowed
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.mapping import fixed_mapping
from gazette.protocol.label_set import LabelSet
from gazette.stores.rocksdb.store import RocksDBStore
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import log_spec, shard_spec
from tests.consumer.apps import SOURCE, Tally, Word, ack, pending
from tests.facts import raises

TARGET = "b/target"


class Windows(Tally):
    """Consumes batches. Each word in upper case begins a window, and a transaction is one window.

    ``store_kind``: sqlite or rocksdb. It writes and publishes *before* it sees that it has to defer.
    """

    def __init__(self, store_kind: str = "sqlite") -> None:
        super().__init__()
        self.store_kind = store_kind
        self.target = fixed_mapping(TARGET, CONTENT_JSON_LINES)
        self.attempts: list[int] = []
        self.windows: list[list[str]] = []
        self.extra: Callable[[Any, str], None] = lambda publisher, word: None

    def new_store(self, shard: Any, recorder: Any) -> Any:
        if self.store_kind == "rocksdb":
            return RocksDBStore(recorder)
        schema = "CREATE TABLE IF NOT EXISTS words (n INTEGER PRIMARY KEY, word TEXT)"
        return SQLiteStore(recorder, schema)

    def begin_transaction(self, shard: Any, store: Any) -> None:
        self.windows.append([])

    def consume_messages(
        self, shard: Any, store: Any, batch: Sequence[Any], publisher: Any
    ) -> None:
        self.attempts.append(len(batch))
        words: list[str] = []
        for envelope in batch:
            word = envelope.message.word
            if self.store_kind == "rocksdb":
                n = int(store.get(b"n") or b"0") + 1
                store.put(b"n", str(n).encode())
                store.put(b"word-%06d" % n, word.encode())
            else:
                store.execute("INSERT INTO words (word) VALUES (?)", (word,))
            publisher.publish_uncommitted(self.target, Word(word=word))
            self.extra(publisher, word)
            if word.isupper() and (self.windows[-1] or words):
                raise DeferToNextTransaction("a window begins")
            words.append(word)
        self.windows[-1] += words


def stored(driver: AppDriver[Any]) -> list[str]:
    if isinstance(driver.store, RocksDBStore):
        return [value.decode() for key, value in driver.store.iterate(b"word-")]
    return [word for (word,) in driver.store.query("SELECT word FROM words ORDER BY n")]


def transaction(words: Sequence[str]) -> bytes:
    frames = [pending(word, 1 + i) for i, word in enumerate(words)]
    return b"".join(frames) + ack(1 + len(words))


def echoed(driver: AppDriver[Any]) -> list[str]:
    return [one.word for one in driver.committed(TARGET, Word)]


@pytest.mark.parametrize("kind", ["sqlite", "rocksdb"])
@pytest.mark.parametrize("seed", range(6))
def test_transactions_end_where_the_application_wants_it(
    tmp_path: Path, kind: str, seed: int
) -> None:
    rng = random.Random(seed)
    words = ["W" if rng.random() < 0.1 else f"w{i}" for i in range(rng.choice((3, 40, 200)))]
    application = Windows(kind)
    with AppDriver(application, tmp_path, [SOURCE]) as driver:
        driver.feed(SOURCE, transaction(words))
        driver.run()
        driver.advance(2.0)
        assert stored(driver) == words
        assert echoed(driver) == words
        expected: list[list[str]] = [[]]
        for word in words:
            if word == "W" and expected[-1]:
                expected.append([])
            expected[-1].append(word)
        assert [window for window in application.windows if window] == expected
        driver.crash()
        assert stored(driver) == words


def test_a_first_batch_that_is_deferred_is_halved(tmp_path: Path) -> None:
    application = Windows()
    with AppDriver(application, tmp_path, [SOURCE]) as driver:
        words = [f"w{i}" for i in range(63)]
        driver.feed(SOURCE, transaction(words))
        driver.run()
        # Batches are long now, and this boundary is in the middle of one.
        application.attempts.clear()
        more = [*(f"x{i}" for i in range(20)), "X", *(f"y{i}" for i in range(20))]
        frames = [pending(word, 100 + i) for i, word in enumerate(more)]
        driver.feed(SOURCE, b"".join(frames) + ack(200))
        driver.run()
        driver.advance(2.0)
        assert stored(driver) == words + more
        assert echoed(driver) == words + more
        assert 1 in application.attempts
        assert max(application.attempts) > 20
        assert [w[0] for w in application.windows if w][-2:] == ["x0", "X"]


def test_a_single_message_that_is_always_deferred_fails_the_shard(tmp_path: Path) -> None:
    class Never(Windows):
        def consume_messages(
            self, shard: Any, store: Any, batch: Sequence[Any], publisher: Any
        ) -> None:
            raise DeferToNextTransaction("never")

    with AppDriver(Never(), tmp_path, [SOURCE]) as driver:
        driver.feed(SOURCE, transaction(["a", "b", "c"]))
        with raises(ApplicationFailed, shard="driven-shard"):
            driver.run()
        assert driver.journals.content(TARGET) == b""


def test_a_batch_with_poison_that_defers(tmp_path: Path) -> None:
    """Both at once: what is poison is set aside, what is deferred comes in the next transaction."""
    application = Windows()

    def extra(publisher: Any, word: str) -> None:
        if word == "poison":
            raise ValueError("no word")

    application.extra = extra
    labels = LabelSet.of(
        ("consumer.gazette.dev/dead-letters", "dead"), ("consumer.gazette.dev/poison", "skip")
    )
    with AppDriver(application, tmp_path, [SOURCE], labels=labels) as driver:
        words = ["a", "b", "poison", "c", "W", "d", "poison", "X", "e"]
        driver.feed(SOURCE, transaction(words))
        driver.run()
        driver.advance(2.0)
        good = [word for word in words if word != "poison"]
        assert stored(driver) == good
        assert echoed(driver) == good
        assert len(driver.skipped) == 2


def committed_too(publisher: Any, word: str) -> None:
    publisher.publish_committed(fixed_mapping(TARGET, CONTENT_JSON_LINES), Word(word=f"now-{word}"))


def test_what_was_published_and_cannot_be_undone_fails_the_shard(tmp_path: Path) -> None:
    application = Windows()
    application.extra = committed_too
    with AppDriver(application, tmp_path, [SOURCE]) as driver:
        driver.feed(SOURCE, transaction(["a", "b"]))
        driver.run()  # Without a deferral, both may go to one journal.
        assert echoed(driver)
        frames = [pending(word, 100 + i) for i, word in enumerate(("c", "d", "W"))]
        driver.feed(SOURCE, b"".join(frames) + ack(200))
        with raises(NotAllowed, says="b/target"):
            driver.run()


def test_a_store_without_savepoints_defers_what_it_did_not_begin(tmp_path: Path) -> None:
    """`JSONFileStore` cannot undo: the application has to defer before it changes anything."""

    class Careful(Tally):
        def consume_messages(
            self, shard: Any, store: Any, batch: Sequence[Any], publisher: Any
        ) -> None:
            words = [one.message.word for one in batch]
            if any(word.isupper() for word in words[1:]):
                raise DeferToNextTransaction("a window begins inside")
            if words and words[0].isupper() and self.calls[-1] != "begin":
                raise DeferToNextTransaction("a window begins")
            self.calls.append("consumed")
            for word in words:
                store.state[word] = store.state.get(word, 0) + 1

    with AppDriver(Careful(), tmp_path, [SOURCE]) as driver:
        words = [*(f"a{i}" for i in range(50)), "W", *(f"b{i}" for i in range(50)), "X"]
        driver.feed(SOURCE, transaction(words))
        driver.run()
        driver.advance(2.0)
        assert driver.store.state == dict.fromkeys(words, 1)


def test_savepoints_of_rocksdb_nest(tmp_path: Path) -> None:
    """An application may set one within the runtime's own."""

    class Nested(Windows):
        def consume_messages(
            self, shard: Any, store: Any, batch: Sequence[Any], publisher: Any
        ) -> None:
            for envelope in batch:
                store.put(b"first", envelope.message.word.encode())
                inner = store.savepoint()
                store.put(b"inner", b"")
                inner.roll_back()
                inner = store.savepoint()
                store.put(b"n", str(int(store.get(b"n") or b"0") + 1).encode())
                inner.release()
                if envelope.message.word.isupper() and self.calls.count("W") < 3:
                    self.calls.append("W")
                    raise DeferToNextTransaction("a window begins")

    application = Nested("rocksdb")
    with AppDriver(application, tmp_path, [SOURCE]) as driver:
        driver.feed(SOURCE, transaction(["a", "b", "c", "W", "d"]))
        driver.run()
        driver.advance(2.0)
        assert driver.store.get(b"n") == b"5"
        assert driver.store.get(b"first") == b"d"
        assert driver.store.get(b"inner") is None


async def test_bytes_of_deferred_messages_count_once(
    gazette_broker: BrokerFixture, gazette_consumer: Callable[..., Any]
) -> None:
    """They come again in the next transaction, and count there."""
    labels = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
    await gazette_broker.create(
        journal_spec(SOURCE, labels=labels),
        journal_spec(TARGET, labels=labels),
        log_spec("shard-one"),
    )
    words = ["a", *(f"w{i}" for i in range(10)), "W", *(f"x{i}" for i in range(10)), "X"]
    content = transaction(words)
    member = await gazette_consumer(Windows())
    before = read_bytes()
    await member.create(shard_spec("shard-one", SOURCE))
    await gazette_broker.client.append(AppendParams(SOURCE), content)
    await member.read_to_heads("shard-one")
    await member.stop()
    assert read_bytes() - before == len(content)


def read_bytes() -> float:
    return REGISTRY.get_sample_value("gazette_consumer_consumed_bytes_total") or 0.0
