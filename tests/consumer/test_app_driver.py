"""Transactions as a whole, over a real store and recovery log: a kill at every moment of one.

The crash points are those that follow from the order of barriers: publishes of a transaction, its
commit, its acknowledgements, the next commit. After each, the next owner of the shard must leave
downstream exactly one of each message.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gazette.consumer.application import DeferToNextTransaction
from gazette.consumer.contract.callbacks import ApplicationFailed
from gazette.consumer.inbox import Jump
from gazette.errors import Broken, Closed, Corrupt, Fenced, GazetteError
from gazette.message.uuid import ACK_TXN
from gazette.runtime.tasks import OpFuture
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver, MemoryJournals
from gazette.testing.recovery import LOG
from tests.consumer.apps import Echo, Tally, Word, ack, frame, pending
from tests.facts import raises
from tools.simulation.remote_store import RemoteDatabase

SOURCE = "a/source"
TARGET = "a/target"
OTHER = "b/target"


class Words(Echo):
    """Counts in SQLite, publishes each word, and words of upper case to another journal as well."""

    def __init__(self) -> None:
        super().__init__(TARGET)
        self.other = Echo(OTHER).mapping

    def new_store(self, shard: Any, recorder: Any) -> Any:
        store = SQLiteStore(recorder, "CREATE TABLE IF NOT EXISTS counts (word PRIMARY KEY, n)")
        self.stores.append(store)
        return store

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        word = envelope.message.word
        self.on_word(word)
        upsert = "INSERT INTO counts VALUES (?, 1) ON CONFLICT DO UPDATE SET n = n + 1"
        store.execute(upsert, (word,))
        publisher.publish_uncommitted(self.mapping, Word(word=word))
        if word.isupper():
            publisher.publish_uncommitted(self.other, Word(word=word))


def tally(driver: AppDriver[Any]) -> Tally:
    assert isinstance(driver.application, Tally)
    return driver.application


def counts(driver: AppDriver[Any]) -> dict[str, int]:
    return dict(driver.store.query("SELECT word, n FROM counts"))


def echoed(driver: AppDriver[Any], journal: str = TARGET) -> list[str]:
    return [one.word for one in driver.committed(journal, Word)]


def words(*texts: str) -> list[Word]:
    return [Word(word=text) for text in texts]


@pytest.fixture
def driver(tmp_path: Path) -> Any:
    with AppDriver(Words(), tmp_path, [SOURCE]) as driver:
        yield driver


# --- One transaction after the other


def test_a_transaction_is_counted_published_and_acknowledged(driver: AppDriver[Any]) -> None:
    driver.publish(SOURCE, *words("a", "b", "a"))
    assert driver.run() >= 1
    assert counts(driver) == {"a": 2, "b": 1}
    assert echoed(driver) == ["a", "b", "a"]
    assert driver.read_through == {SOURCE: len(driver.journals.content(SOURCE))}
    assert tally(driver).calls[:3] == ["begin", "finalize", "finished"]


def test_nothing_is_consumed_twice_after_a_crash_at_rest(driver: AppDriver[Any]) -> None:
    driver.publish(SOURCE, *words("a", "b"))
    driver.run()
    driver.crash()
    driver.publish(SOURCE, *words("b"))
    driver.run()
    assert counts(driver) == {"a": 1, "b": 2}
    assert echoed(driver) == ["a", "b", "b"]


def test_pending_messages_wait_for_their_acknowledgement(driver: AppDriver[Any]) -> None:
    driver.publish_pending(SOURCE, *words("a", "b"))
    driver.run()
    assert counts(driver) == {}
    driver.acknowledge()
    driver.run()
    assert counts(driver) == {"a": 1, "b": 1}


def test_a_transaction_waits_for_an_acknowledgement_that_is_likely_to_come(
    driver: AppDriver[Any],
) -> None:
    driver.publish(SOURCE, *words("x"))
    driver.publish_pending(SOURCE, *words("a"))
    assert driver.run() == 0, "committed although a span is pending"
    assert driver.advance(0.5) == 0
    assert driver.advance(0.6) == 1, "waits beyond the maximum duration"
    assert counts(driver) == {"x": 1}


def test_a_transaction_does_not_wait_when_its_shard_must_not(tmp_path: Path) -> None:
    with AppDriver(Words(), tmp_path, [SOURCE], disable_wait_for_ack=True) as driver:
        driver.publish(SOURCE, *words("x"))
        driver.publish_pending(SOURCE, *words("a"))
        assert driver.run() == 1


def test_duplicates_take_effect_once_and_are_read_through(driver: AppDriver[Any]) -> None:
    """A trailing duplicate makes no transaction, and no task waits for one."""
    driver.feed(SOURCE, frame("a", 1))
    driver.run()
    driver.feed(SOURCE, frame("a", 1))
    assert driver.run() == 0
    assert driver.read_through == {SOURCE: len(driver.journals.content(SOURCE))}
    driver.crash()
    driver.run()
    assert counts(driver) == {"a": 1}
    assert driver.read_through == {SOURCE: len(driver.journals.content(SOURCE))}


def test_the_first_two_messages_of_a_new_shard_may_be_duplicates(driver: AppDriver[Any]) -> None:
    driver.feed(SOURCE, frame("a", 1) + frame("a", 1))
    driver.run()
    assert counts(driver) == {"a": 1}
    assert driver.read_through == {SOURCE: len(driver.journals.content(SOURCE))}


def test_a_duplicate_behind_a_commit_in_flight_is_read_through_with_it(
    driver: AppDriver[Any],
) -> None:
    _ = driver.store
    driver.journals.holds = lambda journal, content: journal == LOG
    driver.feed(SOURCE, frame("a", 1))
    assert driver.run() == 0
    driver.feed(SOURCE, frame("a", 1))
    assert driver.run() == 0
    assert SOURCE not in driver.read_through, "reported before the commit is durable"
    driver.journals.release()
    driver.run()
    assert driver.read_through == {SOURCE: len(driver.journals.content(SOURCE))}


def test_a_rolled_back_span_has_no_effect(driver: AppDriver[Any]) -> None:
    driver.feed(SOURCE, frame("a", 1) + pending("b", 2) + pending("c", 3) + ack(1))
    driver.run()
    driver.feed(SOURCE, pending("d", 4) + ack(5))
    driver.run()
    assert counts(driver) == {"a": 1, "d": 1}


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 97])
def test_a_long_transaction_is_read_again_beyond_the_ring(tmp_path: Path, chunk_bytes: int) -> None:
    with AppDriver(
        Words(), tmp_path, [SOURCE], ring_buffer_size=2, chunk_bytes=chunk_bytes
    ) as driver:
        span = [pending(f"w{index}", index) for index in range(1, 30)]
        driver.feed(
            SOURCE, b"".join(span[:10]) + frame("x", 1, producer=b"others") + b"".join(span[10:])
        )
        driver.run()
        driver.crash()
        driver.feed(SOURCE, ack(30))
        driver.run()
        assert counts(driver) == {"x": 1} | {f"w{index}": 1 for index in range(1, 30)}
        assert echoed(driver) == ["x"] + [f"w{index}" for index in range(1, 30)]


def test_max_duration_splits_an_acknowledged_sequence(tmp_path: Path) -> None:
    """Time counts within a sequence, too; what is left is consumed in the next transaction."""
    application = Words()
    with AppDriver(application, tmp_path, [SOURCE]) as driver:
        application.on_word = lambda word: driver.clock.advance(0.3)
        driver.feed(SOURCE, b"".join(pending(f"w{n}", n) for n in range(1, 11)) + ack(11))
        driver.run()
        assert counts(driver) == {f"w{n}": 1 for n in range(1, 11)}
        assert len(driver.transactions) >= 2
        assert all(one.messages <= 6 for one in driver.transactions)


def test_min_duration_gathers_messages(tmp_path: Path) -> None:
    with AppDriver(Words(), tmp_path, [SOURCE], min_txn_duration_ns=500_000_000) as driver:
        driver.publish(SOURCE, *words("a"))
        assert driver.run() == 0
        driver.clock.advance(0.3)
        driver.publish(SOURCE, *words("b"))
        assert driver.run() == 0
        assert driver.advance(0.3) == 1
        assert driver.transactions[0].messages == 2


# --- Deferral


def test_a_deferred_message_is_the_first_of_the_next_transaction(driver: AppDriver[Any]) -> None:
    deferred: list[str] = []

    def on_word(word: str) -> None:
        if word == "later" and not deferred:
            deferred.append(word)
            raise DeferToNextTransaction("not with these")

    tally(driver).on_word = on_word
    driver.feed(SOURCE, pending("a", 1) + pending("later", 2) + pending("b", 3) + ack(4))
    driver.run()
    assert counts(driver) == {"a": 1, "later": 1, "b": 1}
    assert echoed(driver) == ["a", "later", "b"]
    # The acknowledgement counts as read in the transaction that it ends.
    assert [one.messages for one in driver.transactions] == [1, 3]


def test_a_deferral_survives_a_crash(driver: AppDriver[Any]) -> None:
    def on_word(word: str) -> None:
        if word == "later" and len(driver.transactions) == 0:
            raise DeferToNextTransaction("not with these")

    tally(driver).on_word = on_word
    _ = driver.store
    driver.feed(SOURCE, pending("a", 1) + pending("later", 2) + ack(3))
    # The first transaction commits, and the second does not.
    held: list[bytes] = []

    def holds(journal: str, content: bytes) -> bool:
        held.append(content)
        return journal == LOG and len(driver.transactions) > 0

    driver.journals.holds = holds
    driver.run()
    driver.crash()
    driver.journals.release()
    driver.run()
    assert counts(driver) == {"a": 1, "later": 1}
    assert echoed(driver) == ["a", "later"]


def test_the_first_message_must_not_be_deferred(driver: AppDriver[Any]) -> None:
    def on_word(word: str) -> None:
        raise DeferToNextTransaction("never")

    tally(driver).on_word = on_word
    driver.publish(SOURCE, *words("a"))
    with raises(ApplicationFailed, shard="driven-shard"):
        driver.run()


# --- Crash points


def is_ack(content: bytes) -> bool:
    """Return True if an append is an acknowledgement, by the flags in the UUID of its first message."""
    text = json.loads(content.partition(b"\n")[0])["uuid"]
    return int(text[19:23], 16) & 0x3FF == ACK_TXN


def at_publish(journal: str, content: bytes) -> bool:
    return journal == TARGET


def at_commit(journal: str, content: bytes) -> bool:
    return journal == LOG


def at_ack(journal: str, content: bytes) -> bool:
    return journal in (TARGET, OTHER) and is_ack(content)


def at_other_ack(journal: str, content: bytes) -> bool:
    return journal == OTHER and is_ack(content)


def never(journal: str, content: bytes) -> bool:
    return False


MOMENTS = {
    "some publishes landed": at_publish,
    "publishes landed, commit did not": at_commit,
    "committed, not acknowledged": at_ack,
    "committed, acknowledged in part": at_other_ack,
    "committed and acknowledged": never,
}


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
@pytest.mark.parametrize("times", [1, 3])
def test_a_crash_at_each_moment_of_a_transaction(
    driver: AppDriver[Any], moment: Callable[[str, bytes], bool], times: int
) -> None:
    driver.publish(SOURCE, *words("a", "B"))
    driver.run()
    for _ in range(times):
        driver.publish(SOURCE, *words("b", "C"))
        driver.journals.holds = moment
        driver.run()
        driver.crash()
        driver.journals.holds = never
    driver.publish(SOURCE, *words("d", "E"))
    driver.run()
    expected = ["a", "B", *["b", "C"] * times, "d", "E"]
    assert echoed(driver) == expected
    assert echoed(driver, OTHER) == [word for word in expected if word.isupper()]
    assert counts(driver) == dict(Counter(expected))


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
def test_nothing_is_visible_downstream_before_its_commit(
    driver: AppDriver[Any], moment: Callable[[str, bytes], bool]
) -> None:
    _ = driver.store
    driver.publish(SOURCE, *words("a", "B"))
    driver.journals.holds = moment
    driver.run()
    seen, other = echoed(driver), echoed(driver, OTHER)
    driver.crash()
    driver.journals.holds = never
    if moment in (at_publish, at_commit):
        assert seen == []
        assert counts(driver) == {}, "a transaction that was not committed took effect"
    else:
        assert counts(driver) == {"a": 1, "B": 1}
    assert seen == (["a", "B"] if moment in (at_other_ack, never) else [])
    assert other == (["B"] if moment is never else [])


def test_what_the_next_transaction_publishes_travels_with_the_acknowledgement(
    driver: AppDriver[Any],
) -> None:
    """Not one append later: it is enqueued behind the acknowledgement, while that waits for the commit."""
    _ = driver.store
    driver.journals.holds = at_commit
    driver.publish(SOURCE, *words("a"))
    driver.run()
    driver.publish(SOURCE, *words("b"))
    driver.run()
    acknowledgement, output = driver.journals.waiting(TARGET)
    assert is_ack(acknowledgement)
    assert json.loads(output)["word"] == "b"
    driver.publish(SOURCE, *words("c"))
    driver.run()
    assert len(driver.journals.waiting(TARGET)) == 3
    assert echoed(driver) == []
    driver.journals.release()
    driver.run()
    assert echoed(driver) == ["a", "b", "c"]
    assert counts(driver) == {"a": 1, "b": 1, "c": 1}


def test_nothing_commits_before_recovered_acknowledgements_are_in_place(
    driver: AppDriver[Any],
) -> None:
    driver.publish(SOURCE, *words("a"))
    driver.journals.holds = at_ack
    driver.run()
    driver.crash()
    driver.journals.release()
    driver.publish(SOURCE, *words("b"))
    driver.hold_recovered = True
    finished = driver.run()
    log = driver.journals.content(LOG)
    assert finished == 0
    assert echoed(driver) == []
    driver.advance(10.0)
    assert driver.journals.content(LOG) == log
    driver.hold_recovered = False
    assert driver.run() == 1
    assert echoed(driver) == ["a", "b"]
    assert counts(driver) == {"a": 1, "b": 1}


def test_a_crash_while_the_next_transaction_publishes(driver: AppDriver[Any]) -> None:
    """What it has published is rolled back by the acknowledgements that are appended again."""
    driver.publish(SOURCE, *words("a", "B"))
    driver.run()
    driver.journals.holds = at_commit
    driver.publish(SOURCE, *words("b", "C"))
    driver.run()
    assert driver.journals.content(TARGET).count(b'"b"') == 1, "it was not published at all"
    driver.crash()
    driver.journals.release()
    driver.run()
    assert driver.journals.content(TARGET).count(b'"b"') == 2
    assert echoed(driver) == ["a", "B", "b", "C"]


def test_a_commit_of_unknown_outcome_may_be_in_the_log_twice(driver: AppDriver[Any]) -> None:
    _ = driver.store
    driver.journals.doubles = lambda journal, content: journal in (LOG, TARGET)
    driver.publish(SOURCE, *words("a"))
    driver.run()
    driver.publish(SOURCE, *words("b"))
    driver.run()
    driver.journals.doubles = never
    driver.crash()
    driver.publish(SOURCE, *words("c"))
    driver.run()
    assert counts(driver) == {"a": 1, "b": 1, "c": 1}
    assert echoed(driver) == ["a", "b", "c"]


def test_acknowledgements_come_behind_their_commit_and_before_the_next_messages(
    driver: AppDriver[Any],
) -> None:
    driver.publish(SOURCE, *words("a"))
    driver.run()
    order: list[str] = []

    def note(journal: str, content: bytes) -> bool:
        if journal == LOG:
            order.append("commit")
        elif journal == TARGET:
            order.append("ack" if is_ack(content) else "messages")
        return False

    driver.journals.holds = note
    for word in ("b", "c"):
        driver.publish(SOURCE, *words(word))
        driver.run()
    assert order == ["messages", "commit", "ack"] * 2


def test_messages_of_the_next_transaction_are_consumed_while_one_commits(
    driver: AppDriver[Any],
) -> None:
    seen: list[str] = []
    tally(driver).on_word = seen.append
    _ = driver.store
    driver.journals.holds = at_commit
    driver.publish(SOURCE, *words("a"))
    driver.run()
    driver.publish(SOURCE, *words("b"))
    driver.run()
    assert seen == ["a", "b"]
    assert driver.transactions == []
    # Past its maximum duration it takes no more, however long the commit takes.
    driver.advance(1.1)
    driver.publish(SOURCE, *words("c"))
    driver.run()
    assert seen == ["a", "b"]
    driver.advance(2.0)
    driver.journals.release()
    driver.run()
    assert counts(driver) == {"a": 1, "b": 1, "c": 1}
    stalled = driver.transactions[1].phases
    assert stalled is not None
    assert stalled.stalled == pytest.approx(2.0)


# --- Zombies


def test_of_two_primaries_the_old_one_commits_nothing(tmp_path: Path) -> None:
    journals = MemoryJournals()
    old = AppDriver(Words(), tmp_path / "old", [SOURCE], journals=journals, seed=1)
    old.publish(SOURCE, *words("a"))
    old.run()
    journals.holds = at_commit
    old.publish(SOURCE, *words("b"))
    old.run()  # Its commit is on the way …
    journals.holds = never
    new = AppDriver(Words(), tmp_path / "new", [SOURCE], journals=journals, seed=2)
    assert counts(new) == {"a": 1}
    new.run()
    journals.release()  # … and arrives behind the hand-off.
    with raises(Fenced, says="journal=recovery/test"):
        old.run()
    new.publish(SOURCE, *words("c"))
    new.run()
    assert counts(new) == {"a": 1, "b": 1, "c": 1}
    assert echoed(new) == ["a", "b", "c"]
    old.close()
    new.close()


def test_two_drivers_are_two_members_and_two_publishers(tmp_path: Path) -> None:
    """Else messages of one are duplicates of the other's, and neither fences the other."""
    journals = MemoryJournals()
    with (
        AppDriver(Words(), tmp_path / "old", [SOURCE], journals=journals) as old,
        AppDriver(Words(), tmp_path / "new", [SOURCE], journals=journals) as new,
    ):
        for driver in (old, new):
            driver.publish(SOURCE, *words("a", "b"))
            driver.run()
        assert counts(new) == {"a": 2, "b": 2}
        assert echoed(new) == ["a", "b", "a", "b"]
        old.publish(SOURCE, *words("c"))
        with raises(Fenced, says="journal=recovery/test"):
            old.run()


def test_a_log_that_moves_while_it_is_taken_over_is_played_on(tmp_path: Path) -> None:
    """The former owner commits between the new one's play-back and its hand-off."""
    journals = MemoryJournals()
    old = AppDriver(Words(), tmp_path / "old", [SOURCE], journals=journals, seed=1)
    old.publish(SOURCE, *words("a"))
    old.run()
    appended = iter("b")

    def commit_meanwhile(journal: str) -> None:
        if (word := next(appended, None)) is not None:
            old.publish(SOURCE, *words(word))
            old.run()

    new = AppDriver(Words(), tmp_path / "new", [SOURCE], journals=journals, seed=2)
    journals.on_hand_off = commit_meanwhile
    new.run()
    new.publish(SOURCE, *words("c"))
    new.run()
    assert counts(new) == {"a": 1, "b": 1, "c": 1}
    assert echoed(new) == ["a", "b", "c"]
    with raises(Fenced, says="journal=recovery/test"):
        old.run()
    old.close()
    new.close()


def test_a_zombie_may_still_acknowledge_what_it_had_committed(tmp_path: Path) -> None:
    journals = MemoryJournals()
    old = AppDriver(Words(), tmp_path / "old", [SOURCE], journals=journals, seed=1)
    _ = old.store
    journals.holds = at_ack
    old.publish(SOURCE, *words("a"))
    old.run()
    new = AppDriver(Words(), tmp_path / "new", [SOURCE], journals=journals, seed=2)
    new.run()
    journals.release()
    new.publish(SOURCE, *words("b"))
    new.run()
    assert echoed(new) == ["a", "b"]
    old.close()
    new.close()


def test_of_two_primaries_with_a_remote_store_the_old_one_is_fenced(tmp_path: Path) -> None:
    journals, database = MemoryJournals(), RemoteDatabase()
    old = AppDriver(
        Echo(TARGET, database=database), tmp_path, [SOURCE], journals=journals, log=False, seed=1
    )
    old.publish(SOURCE, *words("a"))
    old.run()
    new = AppDriver(
        Echo(TARGET, database=database), tmp_path, [SOURCE], journals=journals, log=False, seed=2
    )
    assert new.store.read() == {"a": 1}
    old.publish(SOURCE, *words("b"))
    with pytest.raises(Fenced):
        old.run()
    new.run()
    assert new.store.read() == {"a": 1, "b": 1}
    assert echoed(new) == ["a", "b"]
    old.close()
    new.close()


# --- Failures


class Cancelled(Tally):
    def new_store(self, shard: Any, recorder: Any) -> Any:
        store: Any = super().new_store(shard, recorder)

        def start_commit(*args: Any) -> OpFuture[None]:
            future: OpFuture[None] = OpFuture()
            future.cancel()
            return future

        store.start_commit = start_commit
        return store


class NoFuture(Tally):
    def new_store(self, shard: Any, recorder: Any) -> Any:
        store: Any = super().new_store(shard, recorder)
        store.start_commit = lambda *args: None
        return store


@pytest.mark.parametrize(
    ("application", "error"),
    [(Cancelled, "cancelled"), (NoFuture, "NoneType")],
)
def test_a_store_that_breaks_its_contract(tmp_path: Path, application: Any, error: str) -> None:
    with AppDriver(application(), tmp_path, [SOURCE]) as driver:
        driver.publish(SOURCE, *words("a"))
        with raises(GazetteError, says=error):
            driver.run()


def test_a_commit_that_fails_later_ends_the_shard(tmp_path: Path) -> None:
    database = RemoteDatabase()
    with AppDriver(Tally(database), tmp_path, [SOURCE], log=False, commit_wait_s=0.0) as driver:
        _ = driver.store
        database.held = True
        driver.publish(SOURCE, *words("a"))
        driver.run()
        driver.publish(SOURCE, *words("b"))  # Consumed meanwhile: the state is ahead of the store.
        driver.run()
        database.failing = Broken("disk full")
        database.release()
        with raises(Broken, says="disk full"):
            driver.run()
        database.failing = None
        driver.crash()
        driver.run()
        assert driver.store.read() == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    "error", [ValueError("odd"), SystemExit(3), KeyboardInterrupt(), StopIteration()]
)
def test_whatever_a_callback_raises_ends_its_shard(
    driver: AppDriver[Any], error: BaseException
) -> None:
    def on_word(word: str) -> None:
        if word == "bad":
            raise error

    tally(driver).on_word = on_word
    driver.publish(SOURCE, *words("a", "bad"))
    with raises(
        ApplicationFailed, "begin", "end", journal=SOURCE, says=type(error).__name__
    ) as caught:
        driver.run()
    size = len(driver.journals.content(SOURCE))
    assert caught.value.facts["journal"] == SOURCE
    assert caught.value.facts["end"] == size
    tally(driver).on_word = lambda word: None
    driver.crash()
    driver.run()
    assert counts(driver) == {"a": 1, "bad": 1}, "the failed transaction had an effect"


@pytest.mark.parametrize(
    "where", ["consume", "finalize_transaction", "Store.start_commit", "crash"]
)
def test_a_begun_transaction_always_learns_of_its_end(tmp_path: Path, where: str) -> None:
    """What begin_transaction took, a semaphore for one, finished_transaction can give back."""
    application: Any = Tally()

    def fail(*args: Any) -> None:
        raise ValueError(where)

    with AppDriver(application, tmp_path, [SOURCE], min_txn_duration_ns=10**9) as driver:
        store = driver.store
        if where == "consume":
            application.on_word = fail
        elif where == "finalize_transaction":
            application.finalize_transaction = fail
        elif where == "Store.start_commit":
            store.start_commit = fail
        driver.publish(SOURCE, *words("a"))
        if where == "consume":
            with pytest.raises(ApplicationFailed):
                driver.run()
        elif where == "crash":
            driver.run()
            driver.crash()
        else:
            driver.run()
            with pytest.raises(ApplicationFailed, match=where):
                driver.advance(2.0)
        assert application.calls.count("begin") == application.calls.count("finished") == 1


def test_a_malformed_message_says_where_it_is(driver: AppDriver[Any]) -> None:
    good = frame("a", 1)
    driver.feed(SOURCE, good + b"{]\n")
    with raises(Corrupt, journal="a/source", begin=62, end=65):
        driver.run()


def test_acks_are_delivered_on_request_only(tmp_path: Path) -> None:
    application = Tally()
    application.deliver_acks = True
    with AppDriver(application, tmp_path, [SOURCE]) as driver:
        driver.feed(SOURCE, pending("a", 1) + ack(2))
        driver.run()
        assert driver.store.read() == {"a": 1, "": 1}
    with AppDriver(Tally(), tmp_path / "other", [SOURCE]) as driver:
        driver.feed(SOURCE, pending("a", 1) + ack(2))
        driver.run()
        assert driver.store.read() == {"a": 1}


def test_a_commit_waits_for_futures_of_the_application(driver: AppDriver[Any]) -> None:
    future: OpFuture[None] = OpFuture()
    shards: list[Any] = []
    application: Any = driver.application
    consume = application.consume_message

    def consume_message(shard: Any, *args: Any) -> None:
        shard.publish_future(future)
        shards.append(shard)
        consume(shard, *args)

    application.consume_message = consume_message
    driver.publish(SOURCE, *words("a"))
    assert driver.run() == 0
    future.set_result(None)
    assert driver.run() == 1


class Batches(Tally):
    """Takes batches. Upper case is deferred once."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def consume_messages(self, shard: Any, store: Any, batch: Any, publisher: Any) -> None:
        self.batches.append(len(batch))
        for envelope in batch:
            self.consume_message(shard, store, envelope, publisher)


def test_batches_grow_while_they_are_cheap_and_shrink_when_they_are_not(tmp_path: Path) -> None:
    application = Batches()
    with AppDriver(application, tmp_path, [SOURCE], max_txn_duration_ns=10**12) as driver:
        driver.publish(SOURCE, *words(*["a"] * 500))
        driver.run()
        assert max(application.batches) >= 100
        application.batches.clear()
        application.on_word = lambda word: driver.clock.advance(1.0)
        driver.publish(SOURCE, *words(*["b"] * 500))
        driver.run()
        assert application.batches[-1] == 1
        assert driver.store.read() == {"a": 500, "b": 500}


def test_a_stop_takes_effect_between_two_messages(driver: AppDriver[Any]) -> None:
    seen: list[str] = []

    def on_word(word: str) -> None:
        seen.append(word)
        if word == "last":
            life = driver._life
            assert life is not None
            life.inbox.stop()

    tally(driver).on_word = on_word
    driver.publish(SOURCE, *words(*["a"] * 200, "last", *["b"] * 200))
    with pytest.raises(Closed):
        driver.run()
    assert seen[-1] == "last"


def test_ack_flag_is_what_the_helpers_make() -> None:
    assert is_ack(ack(1))
    assert not is_ack(pending("a", 1))


def test_a_source_that_jumped_is_read_through_to_there_though_nothing_follows(
    tmp_path: Path,
) -> None:
    """Else a caller that waits for its head waits for ever, and the next owner meets the jump again."""
    with AppDriver(Words(), tmp_path, [SOURCE, "b/source"]) as driver:
        driver.publish("b/source", Word(word="before"))
        driver.run()
        driver._alive().inbox.put(Jump(SOURCE, 1_000))
        driver.publish("b/source", Word(word="behind"))
        driver.run()
        assert driver.transactions[-1].read_through[SOURCE] == 1_000
        assert (
            driver.store.restore_checkpoint(driver._alive().shard).sources[SOURCE].read_through
            == 1_000
        )
