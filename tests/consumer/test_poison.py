"""Poison messages: skipped with everything they did undone, kept as dead letters, each once."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gazette import DeadLetter, Envelope, PoisonPolicy, Publisher
from gazette.client.append.appender import AppendParams
from gazette.client.journals import JournalChange
from gazette.client.read.reader import ReadParams
from gazette.client.shards import ShardChange
from gazette.consumer.application import Store
from gazette.consumer.contract.callbacks import ApplicationFailed
from gazette.consumer.contract.poison import DEAD_LETTERS_LABEL, LIMIT_LABEL, POISON_LABEL
from gazette.consumer.shard.loop_shard_io import NOT_YET_S
from gazette.consumer.transaction.poison_handler import HOUR_S, TooMuchPoison
from gazette.errors import Invalid, Unavailable
from gazette.labels import CONTENT_JSON_LINES, CONTENT_PROTO_FIXED, CONTENT_TYPE
from gazette.message.envelope_reader import CommittedReader
from gazette.message.framing.frames import FRAME_BYTES_MAX, MalformedMessage
from gazette.message.mapping import fixed_mapping
from gazette.protocol.journal import Suspend, SuspendLevel
from gazette.protocol.label_set import LabelSet
from gazette.runtime.clock import SystemClock
from gazette.stores.rocksdb.store import RocksDBStore
from gazette.stores.sql.store import SQLStore, create_checkpoint_table, create_engine
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import shard_spec
from tests.consumer.apps import (
    SHARD,
    SOURCE,
    Gate,
    Start,
    Tally,
    Word,
    ack,
    append,
    frame,
    pending,
    source_spec,
)
from tests.facts import raises
from tests.support.instant_clock import eventually

DEAD = "dead/letters"
TARGET = "b/target"
TABLE = "CREATE TABLE IF NOT EXISTS counts (word TEXT PRIMARY KEY, n INTEGER)"


class Picky(Tally):
    """Counts words in a store of some kind and publishes each, and *then* refuses some of them."""

    def __init__(self, kind: str, policy: PoisonPolicy | None, directory: Path) -> None:
        super().__init__()
        self.kind, self.policy = kind, policy
        self.mapping = fixed_mapping(TARGET, CONTENT_JSON_LINES)
        self.errors: dict[str, BaseException] = {"poison": ValueError("not this one")}
        self.engine: Any = None
        if kind == "sql":
            self.engine = create_engine(f"sqlite:///{directory}/state.db")
            create_checkpoint_table(self.engine)
            with self.engine.begin() as connection:
                connection.exec_driver_sql(TABLE)

    def poison_policy(self, shard: Any) -> PoisonPolicy | None:
        return self.policy

    def new_store(self, shard: Any, recorder: Any) -> Store:
        match self.kind:
            case "sqlite":
                return SQLiteStore(recorder, TABLE)
            case "rocksdb":
                return RocksDBStore(recorder)
            case "sql":
                return SQLStore(self.engine)
        return super().new_store(shard, recorder)

    def add(self, store: Any, word: str) -> None:
        match self.kind:
            case "sqlite":
                sql = "INSERT INTO counts VALUES (?, 1) ON CONFLICT DO UPDATE SET n = n + 1"
                store.execute(sql, (word,))
            case "sql":
                sql = "INSERT INTO counts VALUES (:w, 1) ON CONFLICT (word) DO UPDATE SET n = counts.n + 1"
                store.execute(sql, {"w": word})
            case "rocksdb":
                key = word.encode()
                store.put(key, bytes([(store.get(key) or b"\0")[0] + 1]))
            case "json":
                store.state[word] = store.state.get(word, 0) + 1

    def counts(self, store: Any) -> dict[str, int]:
        match self.kind:
            case "rocksdb":
                with store.view() as view:
                    return {k.decode(): v[0] for k, v in view.iterate(begin=b"\x01")}
            case "json":
                found: dict[str, int] = store.read()
                return found
        return dict(tuple(row) for row in store.query("SELECT word, n FROM counts"))

    def consume_message(
        self, shard: Any, store: Any, envelope: Envelope[Word], publisher: Publisher
    ) -> None:
        word = envelope.message.word
        if self.kind == "rocksdb":
            store.delete_range(b"x", b"y")
        self.add(store, word)
        publisher.publish_uncommitted(self.mapping, Word(word=word))
        if word in self.errors:
            self.add(store, "wrong")
            publisher.flush()
            raise self.errors[word]


class PickyBatches(Picky):
    """The same, by batches, of which it counts the calls."""

    batches = 0

    def consume_messages(
        self, shard: Any, store: Any, batch: Sequence[Envelope[Word]], publisher: Publisher
    ) -> None:
        self.batches += 1
        for envelope in batch:
            self.consume_message(shard, store, envelope, publisher)


def driver_of(tmp_path: Path, kind: str, cls: type[Picky] = Picky, **policy: Any) -> AppDriver[Any]:
    application = cls(kind, PoisonPolicy(DEAD, **policy), tmp_path)
    return AppDriver(application, tmp_path, [SOURCE], log=kind != "sql")


def counts(driver: AppDriver[Any]) -> dict[str, int]:
    application: Any = driver.application
    return {word: n for word, n in application.counts(driver.store).items() if word}


def letters(driver: AppDriver[Any]) -> list[DeadLetter]:
    return driver.committed(DEAD, DeadLetter)


def echoed(driver: AppDriver[Any]) -> list[str]:
    return [one.word for one in driver.committed(TARGET, Word)]


@pytest.mark.parametrize("cls", [Picky, PickyBatches])
@pytest.mark.parametrize("kind", ["sqlite", "rocksdb", "sql"])
def test_a_refused_message_leaves_nothing_but_a_dead_letter(
    tmp_path: Path, kind: str, cls: type[Picky]
) -> None:
    poison = frame("poison", 3)
    with driver_of(tmp_path, kind, cls) as driver:
        driver.feed(SOURCE, frame("a", 1) + frame("b", 2) + poison + frame("a", 4) + frame("b", 5))
        driver.run()
        for _ in range(2):
            assert counts(driver) == {"a": 2, "b": 2}
            assert echoed(driver) == ["a", "b", "a", "b"]
            (letter,) = letters(driver)
            begin = len(frame("a", 1) + frame("b", 2))
            assert (letter.journal, letter.begin, letter.end) == (
                SOURCE,
                begin,
                begin + len(poison),
            )
            assert (letter.raw, letter.cut) == (poison, False)
            assert (letter.reason, letter.shard) == ("application", "driven-shard")
            assert letter.error.startswith("ValueError: not this one")
            assert letter.message_uuid in poison.decode()
            driver.crash()
            driver.run()
        assert driver.skipped == [(SOURCE, "application")]


@pytest.mark.parametrize("kind", ["sqlite", "rocksdb", "sql", "json"])
def test_what_does_not_decode_is_skipped_in_a_transaction(tmp_path: Path, kind: str) -> None:
    """Also as the only thing in it, and by stores without savepoints."""
    with driver_of(tmp_path, kind, malformed_only=True) as driver:
        driver.feed(SOURCE, b"{]\n")
        driver.run()
        driver.feed(SOURCE, frame("a", 1) + b"nothing\n" + frame("b", 2))
        driver.run()
        driver.crash()
        driver.run()
        assert counts(driver) == {"a": 1, "b": 1}
        assert [one.raw for one in letters(driver)] == [b"{]\n", b"nothing\n"]
        assert [one.reason for one in letters(driver)] == ["malformed"] * 2
        assert driver.read_through == {SOURCE: len(driver.journals.content(SOURCE))}


def test_junk_within_a_span_is_skipped_again_by_its_replay(tmp_path: Path) -> None:
    """A transaction beyond the ring is read again; what was junk then is junk now, and no new letter."""
    application = Picky("sqlite", PoisonPolicy(DEAD), tmp_path)
    with AppDriver(application, tmp_path, [SOURCE], ring_buffer_size=2) as driver:
        span = b"".join(pending(f"w{i}", i + 1) for i in range(6))
        driver.feed(SOURCE, pending("first", 0) + span[: len(span) // 2] + b"")
        driver.run()
        driver.feed(SOURCE, span[len(span) // 2 :])
        driver.run()
        driver.feed(SOURCE, b"junk\n" + pending("w6", 7) + pending("w7", 8) + ack(9))
        driver.run()
        assert counts(driver) == {**{f"w{i}": 1 for i in range(8)}, "first": 1}
        assert [one.raw for one in letters(driver)] == [b"junk\n"]


@pytest.mark.parametrize("cls", [Picky, PickyBatches])
def test_a_crash_before_the_commit_repeats_the_skip_and_its_letter_is_one(
    tmp_path: Path, cls: type[Picky]
) -> None:
    with driver_of(tmp_path, "sqlite", cls) as driver:
        assert counts(driver) == {}
        driver.journals.holds = lambda journal, content: (
            journal.startswith("recovery") or ("log" in journal)
        )
        driver.feed(SOURCE, frame("a", 1) + frame("poison", 2) + b"{]\n" + frame("b", 3))
        driver.run()
        driver.crash()
        driver.journals.release()
        driver.run()
        assert counts(driver) == {"a": 1, "b": 1}
        assert [one.reason for one in letters(driver)] == ["application", "malformed"]
        assert echoed(driver) == ["a", "b"]


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("the database is gone"),
        MemoryError(),
        SystemExit(1),
        ExceptionGroup(
            "calls", [ExceptionGroup("one", [ConnectionResetError("the peer is gone")])]
        ),
        ExceptionGroup("calls", [ValueError("not this one"), Unavailable("no broker answers")]),
        ExceptionGroup("calls", [ConnectionResetError("gone"), *map(ValueError, range(100))]),
    ],
)
def test_what_says_nothing_of_the_message_fails_the_shard(
    tmp_path: Path, error: BaseException
) -> None:
    driver = driver_of(tmp_path, "sqlite")
    application: Any = driver.application
    application.errors["poison"] = error
    with driver:
        driver.feed(SOURCE, frame("poison", 1))
        with pytest.raises((Unavailable, ApplicationFailed)):
            driver.run()
        assert letters(driver) == []


def test_only_errors_that_the_policy_names_are_poison(tmp_path: Path) -> None:
    with driver_of(tmp_path, "sqlite", errors=(KeyError,)) as driver:
        driver.feed(SOURCE, frame("poison", 1))
        with pytest.raises(ApplicationFailed, match="not this one"):
            driver.run()


def test_skipping_is_bounded_by_the_hour(tmp_path: Path) -> None:
    with driver_of(tmp_path, "sqlite", limit=3) as driver:
        driver.feed(SOURCE, b"{]\n" * 2 + frame("poison", 1))
        driver.run()
        driver.clock.advance(HOUR_S + 1)
        driver.feed(SOURCE, b"{]\n" * 3 + frame("a", 2))
        driver.run()
        assert counts(driver) == {"a": 1}
        driver.feed(SOURCE, b"{]\n")
        with raises(
            TooMuchPoison, shard="driven-shard", dead_letters="dead/letters", says="3 messages"
        ):
            driver.run()
        assert len(letters(driver)) == 6


def test_long_messages_are_cut(tmp_path: Path) -> None:
    with driver_of(tmp_path, "sqlite", raw_bytes_max=10) as driver:
        driver.feed(SOURCE, b"x" * 50 + b"\n" + frame("poison", 1))
        driver.run()
        assert [(one.raw, one.cut) for one in letters(driver)] == [
            (b"x" * 10, True),
            (frame("poison", 1)[:10], True),
        ]


def test_a_fail_over_within_a_message_that_is_too_long_skips_all_of_it(tmp_path: Path) -> None:
    """What is read later is no message of its own."""
    begin = len(frame("a", 1))
    with driver_of(tmp_path, "sqlite", malformed_only=True, raw_bytes_max=3) as driver:
        driver.feed(SOURCE, frame("a", 1) + b"x" * (FRAME_BYTES_MAX + 5))
        driver.run()
        driver.crash()
        driver.feed(SOURCE, b"\n" + frame("b", 2))
        driver.run()
        assert counts(driver) == {"a": 1, "b": 1}
        (letter,) = letters(driver)
        assert (letter.begin, letter.end) == (begin, begin + FRAME_BYTES_MAX + 6)
        assert (letter.raw, letter.cut) == (b"xxx", True)


def test_without_a_policy_a_shard_fails(tmp_path: Path) -> None:
    with AppDriver(Picky("sqlite", None, tmp_path), tmp_path, [SOURCE]) as driver:
        driver.feed(SOURCE, b"{]\n")
        with pytest.raises(MalformedMessage):
            driver.run()


def test_a_store_that_cannot_undo_is_refused(tmp_path: Path) -> None:
    with (
        driver_of(tmp_path, "json") as driver,
        raises(Invalid, says="Counts"),
    ):
        driver.run()


def labels(**values: str) -> LabelSet:
    names = {"poison": POISON_LABEL, "dead": DEAD_LETTERS_LABEL, "limit": LIMIT_LABEL}
    return LabelSet.of(*sorted((names[name], value) for name, value in values.items()))


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        (labels(), None),
        (labels(poison="fail", dead=DEAD), None),
        (labels(poison="skip", dead=DEAD), PoisonPolicy(DEAD)),
        (
            labels(poison="skip-malformed", dead=DEAD, limit="7"),
            PoisonPolicy(DEAD, malformed_only=True, limit=7),
        ),
    ],
)
def test_labels_of_a_shard_say_what_its_policy_is(
    given: LabelSet, policy: PoisonPolicy | None
) -> None:
    assert PoisonPolicy.of_labels(given) == policy


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (labels(poison="ignore", dead=DEAD), "'ignore'"),
        (labels(poison="skip"), "consumer.gazette.dev/dead-letters"),
        (labels(poison="skip", dead="/not/a journal"), "dead_letters"),
        (labels(poison="skip", dead=DEAD, limit="some"), "some"),
        (labels(poison="skip", dead=DEAD, limit="0"), "0"),
    ],
)
def test_labels_that_are_wrong(given: LabelSet, text: str) -> None:
    with raises(Invalid, says=text):
        PoisonPolicy.of_labels(given)


# --- With a real member


async def test_a_member_skips_and_counts_by_labels(start: Start, broker: BrokerFixture) -> None:
    letters_spec = journal_spec(DEAD, labels=LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES)))
    await broker.create(letters_spec)
    member = await start()
    await append(broker, frame("a", 1), b"{]\n", frame("b", 2))
    spec = shard_spec(SHARD, SOURCE, labels=labels(poison="skip-malformed", dead=DEAD))
    await member.create(spec)
    await member.read_to_heads(SHARD)
    assert {k: v for k, v in member.store(SHARD).read().items() if k} == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("content_type", "poison", "text"),
    [
        ("", "skip-malformed", "dead-letter journal dead/letters does not exist"),
        (
            CONTENT_PROTO_FIXED,
            "skip-malformed",
            "expected label content-type value application/x-ndjson",
        ),
        (CONTENT_JSON_LINES, "skip", "Counts cannot undo"),
        (CONTENT_JSON_LINES, "odd", "invalid value 'odd'"),
    ],
)
async def test_a_policy_that_cannot_work_fails_the_shard_at_once(
    start: Start, broker: BrokerFixture, content_type: str, poison: str, text: str
) -> None:
    if content_type:
        await broker.create(journal_spec(DEAD, labels=LabelSet.of((CONTENT_TYPE, content_type))))
    member = await start()
    spec = shard_spec(SHARD, SOURCE, labels=labels(poison=poison, dead=DEAD))
    await member.shards.apply_shards([ShardChange(upsert=spec)])
    assert text in await member.await_failed(SHARD)


async def dead_letters(broker: BrokerFixture) -> list[DeadLetter]:
    reader = CommittedReader(broker.client, ReadParams(DEAD), DeadLetter)
    return [letter.message async for batch in reader.batches() for letter in batch]


async def test_a_dead_letter_may_keep_no_bytes(
    start: Start, broker: BrokerFixture, tmp_path: Path
) -> None:
    """Also of the first message of a journal: a read that ends at 0 would have no end."""
    await broker.create(source_spec(DEAD), source_spec(TARGET))
    member = await start(Picky("sqlite", PoisonPolicy(DEAD, raw_bytes_max=0), tmp_path))
    poison = frame("poison", 1)
    await append(broker, poison, b"{]\n", frame("a", 2))
    await member.create(shard_spec(SHARD, SOURCE))
    await member.read_to_heads(SHARD)
    assert [(each.begin, each.end, each.raw, each.cut) for each in await dead_letters(broker)] == [
        (0, len(poison), b"", True),
        (len(poison), len(poison) + 3, b"", True),
    ]


class Waits(Picky):
    """Waits at a gate before each message."""

    def __init__(self, directory: Path) -> None:
        super().__init__("sqlite", PoisonPolicy(DEAD), directory)
        self.gate = Gate()

    def consume_message(self, *arguments: Any) -> None:
        self.gate()
        super().consume_message(*arguments)


async def looking_at_poison(
    start: Start, broker: BrokerFixture, waits: Waits, **options: Any
) -> Any:
    """Return a member whose application is at the gate with a poison message."""
    await broker.create(source_spec(DEAD), source_spec(TARGET))
    member = await start(waits, **options)
    await append(broker, frame("poison", 1))
    await member.shards.apply_shards([ShardChange(upsert=shard_spec(SHARD, SOURCE))])
    await eventually(waits.gate.entered.is_set)
    return member


async def test_a_source_that_is_suspended_is_waited_for_with_its_bytes(
    start: Start, broker: BrokerFixture, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is suspended while the application looks at the message, whose bytes are then read again. The shard
    waits for hours, perhaps: it says so once in the log, and in its status for as long as it waits."""
    waits, pauses = Waits(tmp_path), 0

    class Hasty(SystemClock):
        async def sleep(self, seconds: float) -> None:
            nonlocal pauses
            pauses += seconds == NOT_YET_S
            await super().sleep(0.01 if seconds == NOT_YET_S else seconds)

    member = await looking_at_poison(start, broker, waits, clock=Hasty())
    head = await broker.client.append(AppendParams(SOURCE), b"")
    listed = await broker.client.get_journal(SOURCE)
    suspended = replace(listed.spec, suspend=Suspend(SuspendLevel.FULL, head.commit.end))
    change = JournalChange(upsert=suspended, expect_mod_revision=listed.mod_revision)
    await broker.client.apply_journals([change])
    while (await broker.client.get_journal(SOURCE)).route.members:
        await broker.client.clock.sleep(0.02)
    waits.gate.open()
    await eventually(lambda: member.shard(SHARD).waits_for)
    assert f"{SOURCE}: SUSPENDED" in member.shard(SHARD).waits_for
    before = pauses
    await eventually(lambda: pauses >= before + 20)
    assert caplog.text.count("reads again, and waits for bytes") == 1
    await append(broker, frame("fine", 2))
    await member.read_to_heads(SHARD)
    assert not member.shard(SHARD).waits_for
    assert len(await dead_letters(broker)) == 1
    assert member.shard(SHARD).failure is None


async def test_bytes_of_another_life_of_a_source_are_not_read_again(
    start: Start, broker: BrokerFixture, tmp_path: Path
) -> None:
    """The source is created again while the application looks at the message: no read waits for its bytes."""
    waits = Waits(tmp_path)
    member = await looking_at_poison(start, broker, waits)
    listed = await broker.client.get_journal(SOURCE)
    await broker.client.apply_journals(
        [JournalChange(delete=SOURCE, expect_mod_revision=listed.mod_revision)]
    )
    shutil.rmtree(broker.file_root / "fragments" / SOURCE)
    await broker.create(source_spec())
    waits.gate.open()
    failure = await member.await_failed(SHARD)
    assert "created again" in failure
    assert await dead_letters(broker) == []
