"""Publishers of programs that are no shards: what becomes visible, when, where, and what is said if not."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
from word_count import ngram_pb2

import gazette
from gazette import CommitFailed
from gazette.client.client import Client
from gazette.client.flags import BrokerClientFlags
from gazette.client.journals import JournalChange
from gazette.client.read.reader import WRITE_HEAD, ReadParams
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Closed, Corrupt, GazetteError, Invalid, NotFound, NotYet, Unavailable
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE, MESSAGE_TYPE
from gazette.message.mapping import Partitions, modulo_mapping, rendezvous_mapping
from gazette.message.publisher import HELD_BYTES_MAX
from gazette.message.publishing import client_publisher
from gazette.message.publishing.client_publisher import ClientPublisher, SyncPublisher
from gazette.message.publishing.commit_records import CommitDirectory
from gazette.message.publishing.outputs import KnownOutput, choice_by_labels
from gazette.message.publishing.service import TIMEOUT_S
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.runtime import failpoints
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.facts import raises
from tests.support.loop_time import LoopTime, turns

LABELS = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
WORDS = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES), (MESSAGE_TYPE, "Word"))
ONE, TWO = "words/part-000", "words/part-001"
EVERY = LabelSelector.parse("prefix=words/")


class Word(gazette.Message):
    word: str


class Order(gazette.Message):
    amount: int


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec(ONE, labels=WORDS), journal_spec(TWO, labels=WORDS))
        yield broker


async def visible(broker: BrokerFixture, *journals: str) -> list[str]:
    """Return the committed words of journals, by journal and offset."""
    names = journals or (ONE, TWO)
    table = await asyncio.to_thread(
        gazette.read_table, names, broker=broker.endpoint, fields="word string", columns=["word"]
    )
    words: list[str] = table["word"].to_pylist()
    return words


async def head(broker: BrokerFixture, journal: str) -> int:
    reader = broker.client.reader(ReadParams(journal, WRITE_HEAD, metadata_only=True))
    async with reader:
        with contextlib.suppress(NotYet):
            await reader.open()
    return reader.write_head


async def test_a_transaction_is_visible_as_a_whole(broker: BrokerFixture) -> None:
    async with ClientPublisher(broker.client) as publisher:
        async with publisher.transaction() as transaction:
            await transaction.publish(ONE, Word(word="to"))
            await transaction.publish(TWO, Word(word="be"))
            assert await visible(broker) == []
        assert await visible(broker) == ["to", "be"]
        assert transaction.offsets == {ONE: await head(broker, ONE), TWO: await head(broker, TWO)}
        async with publisher.transaction() as transaction:
            await transaction.publish(ONE, Word(word="or"))
        assert transaction.offsets == {ONE: await head(broker, ONE)}
        async with publisher.transaction() as empty:
            pass
        assert empty.offsets == {}
        assert await visible(broker, ONE) == ["to", "or"]


async def test_a_message_alone_is_visible_at_once(broker: BrokerFixture) -> None:
    async with ClientPublisher(broker.client) as publisher:
        result = await publisher.publish(ONE, Word(word="to"))
        assert await visible(broker) == ["to"]
        assert result.commit.end == await head(broker, ONE)
        await asyncio.gather(*(publisher.publish(TWO, Word(word=w)) for w in ("a", "b", "c")))
        assert await visible(broker, TWO) == ["a", "b", "c"]


async def test_an_error_in_the_block_leaves_nothing(broker: BrokerFixture) -> None:
    async with ClientPublisher(broker.client) as publisher:
        with pytest.raises(ZeroDivisionError):
            async with publisher.transaction() as transaction:
                await transaction.publish(ONE, Word(word="lost"))
                raise ZeroDivisionError
        # Not even pending messages.
        assert await head(broker, ONE) == 0
        async with publisher.transaction() as transaction:
            await transaction.publish(ONE, Word(word="kept"))
        assert await visible(broker) == ["kept"]


async def test_what_was_appended_already_is_rolled_back(broker: BrokerFixture) -> None:
    """A large transaction is appended as it grows. Its end takes that back, in each of its journals."""
    lost = "lost" * (HELD_BYTES_MAX // 40)
    async with ClientPublisher(broker.client) as publisher:
        await publisher.publish(ONE, Word(word="first"))
        with pytest.raises(ZeroDivisionError):
            async with publisher.transaction() as transaction:
                for _ in range(6):
                    await transaction.publish(ONE, Word(word=lost))
                    await transaction.publish(TWO, Word(word=lost))
                raise ZeroDivisionError
        assert await head(broker, TWO) > 0
        async with publisher.transaction() as transaction:
            await transaction.publish(ONE, Word(word="second"))
            await transaction.publish(TWO, Word(word="third"))
        assert await visible(broker) == ["first", "second", "third"]


async def test_transactions_of_tasks_do_not_mix(broker: BrokerFixture) -> None:
    async with ClientPublisher(broker.client) as publisher:
        entered, leave = asyncio.Event(), asyncio.Event()

        async def slow() -> None:
            async with publisher.transaction() as transaction:
                await transaction.publish(ONE, Word(word="slow"))
                entered.set()
                await leave.wait()
                raise ZeroDivisionError

        async def alone() -> None:
            await publisher.publish(ONE, Word(word="alone"))

        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(_raises(ZeroDivisionError, slow))
            await entered.wait()
            second = tasks.create_task(alone())
            await asyncio.wait({second}, timeout=0)
            assert not second.done()
            leave.set()
        assert first.done()
        assert await visible(broker) == ["alone"]
        async with publisher.transaction() as transaction:
            with raises(Invalid, path="publish", says="transaction open"):
                await publisher.publish(ONE, Word(word="within"))
            with raises(Invalid, path="publish", says="transaction open"):
                async with publisher.transaction():
                    pass
        with raises(Closed, says="not open"):
            await transaction.publish(ONE, Word(word="late"))


async def _raises(kind: type[Exception], function: Callable[[], Any]) -> None:
    with pytest.raises(kind):
        await function()


@pytest.mark.parametrize("mapping", ["modulo", "rendezvous"])
async def test_equal_keys_go_where_applications_send_them(
    broker: BrokerFixture, mapping: Any
) -> None:
    """Also once there are more partitions: the selector is watched."""
    mapping_of = {"modulo": modulo_mapping, "rendezvous": rendezvous_mapping}[mapping]
    keys: list[str | bytes] = ["a", "b", "é", b"\x00\xff", "", *map(str, range(40))]
    async with ClientPublisher(broker.client, mapping=mapping) as publisher:
        for count in (2, 3):
            if count == 3:
                await broker.create(journal_spec("words/part-002", labels=WORDS))
            listed = (await broker.client.list_journals(EVERY)).journals
            partitions = Partitions.of_specs(one.spec for one in listed)
            choose = mapping_of(partial(_itself, partitions), _itself)
            assert len(partitions.all) == count
            wanted: dict[str, list[str]] = {}
            async with publisher.transaction() as transaction:
                for number, key in enumerate(keys):
                    word = f"{count}-{number}"
                    wanted.setdefault(choose(key).journal, []).append(word)
                    await transaction.publish(EVERY, Word(word=word), key=key)
            for journal, words in wanted.items():
                found = [w for w in await visible(broker, journal) if w.startswith(f"{count}-")]
                assert found == words


def _itself(value: Any) -> Any:
    return value


def _has_partitions(known: KnownOutput, count: int) -> bool:
    return len(known.partitions().all) == count


async def test_partitions_of_the_caller(broker: BrokerFixture) -> None:
    partitions = Partitions.of_specs([journal_spec(TWO, labels=LABELS)])
    async with ClientPublisher(broker.client) as publisher:
        await publisher.publish(partitions, Word(word="fixed"), key="any")
        await publisher.publish(lambda: partitions, Word(word="by a function"))
        with raises(NotFound):
            await publisher.publish(Partitions(()), Word(word="nowhere"))
    assert await visible(broker) == ["fixed", "by a function"]


async def test_what_cannot_be_published_is_named(broker: BrokerFixture) -> None:
    """Before anything is appended, and the transaction goes on."""
    await broker.create(
        journal_spec("bare/journal"),
        journal_spec("plain/journal", labels=LABELS),
        journal_spec(
            "counts/journal", labels=LabelSet.of((CONTENT_TYPE, "application/x-protobuf-fixed"))
        ),
    )

    class Odd(gazette.Message):
        value: Any

    class WithoutUuid(msgspec.Struct):
        word: str

    word = Word(word="w")
    async with ClientPublisher(broker.client) as publisher, publisher.transaction() as transaction:
        cases: list[tuple[Any, Any, Any, type[gazette.GazetteError], str]] = [
            ("words/part-009", word, None, NotFound, "words/part-009"),
            (LabelSelector.parse("prefix=none/"), word, None, NotFound, "prefix=none/"),
            ("no name", word, None, Invalid, "'no name' is not the name"),
            ("prefix=words/", word, None, Invalid, "is not the name"),
            (7, word, None, Invalid, "not an output: 7"),
            (EVERY, word, [7], Invalid, "list"),
            (ONE, Order(amount=1), None, Invalid, "of type Word, not Order"),
            ("bare/journal", word, None, Invalid, "no label content-type"),
            ("counts/journal", word, None, Invalid, "Word is not a protobuf"),
            ("plain/journal", ngram_pb2.NGramCount(), None, Invalid, "NGramCount is a protobuf"),
            ("plain/journal", Odd(value=object()), None, Invalid, "object"),
            ("plain/journal", WithoutUuid("w"), None, Invalid, "no uuid"),
            ("plain/journal", 7, None, Invalid, "int"),
        ]
        for output, message, key, kind, says in cases:
            with raises(kind, says=says):
                await transaction.publish(output, message, key=key)
        await transaction.publish(ONE, word)
    assert await visible(broker) == ["w"]
    assert await head(broker, "plain/journal") == 0
    with raises(Invalid, path="mapping", says="'random'"):
        ClientPublisher(broker.client, mapping="random")  # type: ignore[arg-type]
    with raises(Invalid, path="timeout_s", says="0"):
        ClientPublisher(broker.client, timeout_s=0)


async def test_each_type_of_messages_is_checked_for_each_journal(broker: BrokerFixture) -> None:
    """However often messages of another type were published there before."""
    await broker.create(journal_spec("plain/journal", labels=LABELS))
    async with ClientPublisher(broker.client) as publisher:
        for n in range(3):
            await publisher.publish(ONE, Word(word=f"w{n}"), key=n)
            await publisher.publish("plain/journal", Order(amount=n))
            with raises(Invalid, path="message", says="of type Word, not Order"):
                await publisher.publish(ONE, Order(amount=n))
            with raises(Invalid, says="int"):
                await publisher.publish("plain/journal", n)
    assert await visible(broker, ONE) == ["w0", "w1", "w2"]
    with raises(Closed):
        await publisher.publish(ONE, Word(word="late"))


async def test_a_journal_that_is_gone_fails_the_commit(broker: BrokerFixture) -> None:
    async with ClientPublisher(broker.client) as publisher:
        with raises(CommitFailed, says="nothing of it is visible") as raised:
            async with publisher.transaction() as transaction:
                await transaction.publish(ONE, Word(word="to"))
                await transaction.publish(TWO, Word(word="be"))
                await broker.client.apply_journals(
                    [JournalChange(delete=TWO, expect_mod_revision=-1)]
                )
        assert raised.value.committed == raised.value.unknown == ()
        with raises(Closed, says="nothing of it is visible"):
            await publisher.publish(ONE, Word(word="or"))
    assert await visible(broker, ONE) == []


class Between(SystemClock):
    """The machine's clock, but that something happens while a failpoint waits for ``WAIT_S`` seconds."""

    WAIT_S = 86_400.0

    def __init__(self, event: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._event = event

    async def sleep(self, seconds: float) -> None:
        await (self._event() if seconds == self.WAIT_S else super().sleep(seconds))


@contextlib.asynccontextmanager
async def decided_before(
    address: str, event: Callable[[], Awaitable[None]], **options: Any
) -> AsyncIterator[ClientPublisher]:
    """Yield a publisher. Something happens in a commit of it once all messages are in place."""
    async with (
        Client(address, clock=Between(event)) as client,
        ClientPublisher(client, **options) as publisher,
    ):
        with failpoints.armed(f"publish.decided=delay:{Between.WAIT_S}"):
            yield publisher


async def test_a_commit_that_one_journal_refuses_says_where_it_is(broker: BrokerFixture) -> None:
    """The journal goes away when all messages are in place."""

    async def gone() -> None:
        await broker.client.apply_journals([JournalChange(delete=TWO, expect_mod_revision=-1)])

    async with decided_before(broker.endpoint, gone) as publisher:
        with raises(CommitFailed, says=f"visible in {ONE}") as raised:
            async with publisher.transaction() as transaction:
                await transaction.publish(ONE, Word(word="to"))
                await transaction.publish(TWO, Word(word="be"))
        assert raised.value.committed == (ONE,)
        assert raised.value.unknown == ()
        assert f"not visible in {TWO}" in str(raised.value)
    assert await visible(broker, ONE) == ["to"]


async def test_a_refused_commit_that_is_recorded_says_how_to_give_it_up(
    broker: BrokerFixture, tmp_path: Path
) -> None:
    async def gone() -> None:
        await broker.client.apply_journals([JournalChange(delete=TWO, expect_mod_revision=-1)])

    directory = tmp_path / "commits"
    async with decided_before(broker.endpoint, gone, commits=directory) as publisher:
        with raises(CommitFailed, says=f"not visible in {TWO}") as raised:
            async with publisher.transaction() as transaction:
                await transaction.publish(ONE, Word(word="to"))
                await transaction.publish(TWO, Word(word="be"))
    record = directory / "commit.json"
    assert str(record) in raised.value.hint
    with raises(CommitFailed, says=f"not visible in {TWO}") as raised:
        async with ClientPublisher(broker.client, commits=directory):
            pass
    assert str(record) in raised.value.hint
    record.unlink()
    async with ClientPublisher(broker.client, commits=directory) as publisher:
        await publisher.publish(ONE, Word(word="or"))
    assert await visible(broker, ONE) == ["to", "or"]


@pytest.mark.parametrize("text", [b"\xff\xfe", b"", b"[1]", b'{"a": 1}', b'{"a": "?"}'])
async def test_a_damaged_record_is_named(
    broker: BrokerFixture, tmp_path: Path, text: bytes
) -> None:
    record = tmp_path / "commit.json"
    record.write_bytes(text)
    with raises(Corrupt, "file", file=record):
        async with ClientPublisher(broker.client, commits=tmp_path):
            pass


async def test_a_record_on_a_disk_that_hangs_is_waited_for_in_time(
    broker: BrokerFixture, tmp_path: Path
) -> None:
    """A pipe without a writer hangs as well."""
    record = tmp_path / "commit.json"
    os.mkfifo(record)
    with raises(
        Unavailable, directory=tmp_path, says="the record of a former commit was not read"
    ) as raised:
        async with ClientPublisher(broker.client, commits=tmp_path, timeout_s=0.1):
            pass
    assert "within 0.1 s" in str(raised.value)
    record.open("wb").close()  # The thread that reads it goes on.


async def test_an_error_of_a_disk_that_hangs_says_for_how_long_it_was_asked(tmp_path: Path) -> None:
    """Before the record, a commit waits for brokers: that time is not the disk's."""
    partial_record = tmp_path / "commit.partial"
    records, time = CommitDirectory(tmp_path), asyncio.get_running_loop().time
    deadline = time() + 1.0
    assert await records.load(deadline) == {}
    os.mkfifo(partial_record)
    with pytest.raises(TimeoutError, match=r"did not answer within 0\.1 s"):
        await records.save({ONE: b"", TWO: b""}, time() + 0.1)
    os.close(os.open(partial_record, os.O_RDONLY | os.O_NONBLOCK))
    records.close()


async def test_a_disk_that_hangs_ends_a_commit_in_time_and_keeps_its_directory(
    broker: BrokerFixture, tmp_path: Path
) -> None:
    """A pipe without a reader hangs as well. A late record must not meet another publisher."""
    partial_record = tmp_path / "commit.partial"
    os.mkfifo(partial_record)
    try:
        async with ClientPublisher(broker.client, commits=tmp_path, timeout_s=1.0) as publisher:
            with raises(
                CommitFailed, says="may become visible", advises="End this program"
            ) as raised:
                async with publisher.transaction() as transaction:
                    await transaction.publish(ONE, Word(word="to"))
                    await transaction.publish(TWO, Word(word="be"))
            assert f"{tmp_path} did not answer within" in str(raised.value)
            assert raised.value.unknown == (ONE, TWO)
        with raises(Invalid, path="commits", says=str(tmp_path)):
            async with ClientPublisher(broker.client, commits=tmp_path):
                pass
    finally:  # The thread goes on, and the disk refuses.
        os.close(os.open(partial_record, os.O_RDONLY | os.O_NONBLOCK))

    async def is_free() -> bool:
        try:
            async with ClientPublisher(broker.client, commits=tmp_path):
                return True
        except Invalid:
            return False

    async with asyncio.timeout(10):
        while not await is_free():
            pass
    assert await visible(broker) == []


@pytest.mark.parametrize(
    ("obstacle", "says", "unknown"),
    [
        ("commit.partial", "nothing of it is visible", ()),
        ("commit.json", "may become visible", (ONE, TWO)),
    ],
)
async def test_a_commit_that_cannot_be_recorded_says_what_is_known(
    broker: BrokerFixture, tmp_path: Path, obstacle: str, says: str, unknown: tuple[str, ...]
) -> None:
    directory = tmp_path / "commits"
    async with ClientPublisher(broker.client, commits=directory) as publisher:
        (directory / obstacle).mkdir()
        with raises(CommitFailed, says=says) as raised:
            async with publisher.transaction() as transaction:
                await transaction.publish(ONE, Word(word="to"))
                await transaction.publish(TWO, Word(word="be"))
        assert raised.value.committed == ()
        assert raised.value.unknown == unknown
        assert "recorded" not in raised.value.hint
    assert await visible(broker) == []


async def test_a_record_that_is_not_removed_leaves_the_commit_visible(
    broker: BrokerFixture, tmp_path: Path
) -> None:
    """Otherwise a caller would take the error of the disk for that of the commit, and publish again."""
    record = tmp_path / "commit.json"

    async def obstacle() -> None:
        record.unlink()
        record.mkdir()

    async with decided_before(broker.endpoint, obstacle, commits=tmp_path) as publisher:
        with raises(CommitFailed, says="visible in all its journals") as raised:
            async with publisher.transaction() as transaction:
                await transaction.publish(ONE, Word(word="to"))
                await transaction.publish(TWO, Word(word="be"))
        assert raised.value.committed == (ONE, TWO)
        assert raised.value.unknown == ()
    assert await visible(broker) == ["to", "be"]


@contextlib.asynccontextmanager
async def held_up(
    broker: BrokerFixture, point: str, **options: Any
) -> AsyncIterator[tuple[ClientPublisher, asyncio.Event]]:
    """Yield a publisher whose next append stops at a failpoint for good, and the event of that."""
    reached = asyncio.Event()

    async def stops() -> None:
        reached.set()
        await asyncio.Event().wait()

    async with (
        Client(broker.endpoint, clock=Between(stops)) as client,
        ClientPublisher(client, **options) as publisher,
    ):
        with failpoints.armed(f"{point}=delay:{Between.WAIT_S}"):
            yield publisher, reached


async def test_a_failed_publisher_commits_no_open_transaction(broker: BrokerFixture) -> None:
    """A caller that has caught the error may have published the messages by another publisher."""
    async with (
        held_up(broker, "append.begin", timeout_s=0.1) as (publisher, reached),
        TaskScope("test") as scope,
    ):
        task = scope.spawn(failure_of(publish_alone(publisher)), name="alone")
        await reached.wait()
        with raises(Closed, says="the publisher has failed"):
            async with publisher.transaction() as transaction:
                await transaction.publish(TWO, Word(word="be"))
                assert isinstance(await task, CommitFailed)
        assert transaction.offsets == {}
    assert await visible(broker, TWO) == []


async def publish_alone(publisher: ClientPublisher) -> None:
    await publisher.publish(ONE, Word(word="to"))


async def commit_alone(publisher: ClientPublisher) -> None:
    async with publisher.transaction() as transaction:
        await transaction.publish(ONE, Word(word="to"))


@pytest.mark.parametrize("publishes", [publish_alone, commit_alone])
async def test_a_close_leaves_it_open_what_is_visible(
    broker: BrokerFixture, publishes: Callable[[ClientPublisher], Awaitable[None]]
) -> None:
    """The journal has the content, and its broker has not answered yet."""
    async with (
        held_up(broker, "append.applied") as (publisher, reached),
        TaskScope("test") as scope,
    ):
        task = scope.spawn(failure_of(publishes(publisher)), name="publish")
        await reached.wait()
        await publisher.close()
        failure = await task
    assert isinstance(failure, CommitFailed)
    assert failure.unknown == (ONE,)
    assert await visible(broker, ONE) == ["to"]


async def test_all_waits_of_a_commit_end_together(broker: BrokerFixture) -> None:
    """A hundred journals that do not answer cost one timeout, and not a hundred.

    Most of it has passed when all messages are in place. Then no append goes on any more.
    """
    time: list[LoopTime] = []
    goes_on = asyncio.Event()

    async def passes() -> None:
        if time:
            await goes_on.wait()
        else:
            time.append(LoopTime())
            time[0].advance(0.9 * TIMEOUT_S)
            failpoints.arm(f"append.begin=delay:{Between.WAIT_S}@*")

    async def commit(publisher: ClientPublisher) -> None:
        async with publisher.transaction() as transaction:
            await transaction.publish(ONE, Word(word="to"))
            await transaction.publish(TWO, Word(word="be"))

    async with decided_before(broker.endpoint, passes) as publisher, TaskScope("test") as scope:
        task = scope.spawn(failure_of(commit(publisher)), name="commit")
        while not time:
            await turns()
        await turns(1000)
        assert not task.done()
        time[0].advance(0.1 * TIMEOUT_S)
        await turns(1000)
        assert task.done()
        assert isinstance(await task, CommitFailed)
        goes_on.set()
        time[0].go_on()


async def failure_of(commits: Awaitable[None]) -> BaseException | None:
    try:
        await commits
    except GazetteError as error:
        return error
    return None


async def test_brokers_that_are_away_fail_the_commit_in_time(etcd: Etcd, tmp_path: Path) -> None:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec(ONE, labels=WORDS), journal_spec(TWO, labels=WORDS))
        address = broker.endpoint
        async with Client(address) as client, ClientPublisher(client, timeout_s=0.5) as publisher:
            with raises(CommitFailed, says=f"{ONE}: ") as raised:
                async with publisher.transaction() as transaction:
                    await transaction.publish(ONE, Word(word="to"))
                    await broker.stop()
            assert "within 0.5 s" in str(raised.value)
            assert raised.value.unknown == (ONE,)
        async with Client(address) as client, ClientPublisher(client, timeout_s=0.2) as publisher:
            with raises(Unavailable, says="no broker has named a journal"):
                await publisher.publish(ONE, Word(word="be"))


SCRIPT = """
import sys
import gazette

class Word(gazette.Message):
    word: str

broker, commits, *words = sys.argv[1:]
with gazette.open_publisher(broker, commits=commits or None) as publisher:
    with publisher.transaction() as transaction:
        for number, word in enumerate(words):
            transaction.publish(f"words/part-00{number % 2}", Word(word=word))
    print(sorted(transaction.offsets))
"""


def script(
    broker: BrokerFixture, commits: str, *words: str, failpoint: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, broker.endpoint, commits, *words],
        env={**os.environ, failpoints.ENV: failpoint},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("failpoint", "commits", "then"),
    [
        ("append.applied=kill", False, []),
        ("append.applied=kill@2", False, []),
        ("publish.deciding=kill", False, []),
        ("publish.deciding=kill", True, []),
        # One journal has its acknowledgement. The record completes the other one.
        ("publish.acknowledged=kill", True, ["to", "be"]),
        ("publish.decided=kill", True, ["to", "be"]),
        ("publish.decided=kill", False, []),
    ],
)
async def test_a_crash_leaves_nothing_or_all(
    broker: BrokerFixture, tmp_path: Path, failpoint: str, commits: bool, then: list[str]
) -> None:
    directory = str(tmp_path / "commits") if commits else ""
    died = await asyncio.to_thread(script, broker, directory, "to", "be", failpoint=failpoint)
    assert died.returncode == -signal.SIGKILL
    if not then:
        assert await visible(broker) == []
    done = await asyncio.to_thread(script, broker, directory, "or", "not")
    assert done.stdout == f"{[ONE, TWO]}\n", done.stderr
    found = await visible(broker)
    assert sorted(found) == sorted([*then, "or", "not"])


async def test_an_error_between_acknowledgements_names_both_journals(
    broker: BrokerFixture, tmp_path: Path
) -> None:
    # Regression: the failpoint's error was taken for that of the append, and dropped.
    result = await asyncio.to_thread(
        script, broker, str(tmp_path), "to", "be", failpoint="publish.acknowledged=error"
    )
    assert result.returncode == 1
    assert "CommitFailed" in result.stderr
    assert "publish.acknowledged" in result.stderr


async def test_a_directory_of_commits_has_one_publisher(
    broker: BrokerFixture, tmp_path: Path
) -> None:
    directory = tmp_path / "commits"
    async with ClientPublisher(broker.client, commits=directory):
        with raises(Invalid, path="commits", says="another publisher"):
            async with ClientPublisher(broker.client, commits=directory):
                pass
    (directory / "commit.json").write_text("{")
    with raises(gazette.errors.Corrupt, "file"):
        async with ClientPublisher(broker.client, commits=directory):
            pass
    (directory / "commit.json").unlink()
    async with ClientPublisher(broker.client, commits=directory):
        pass


async def test_a_script_publishes(broker: BrokerFixture) -> None:
    def run() -> None:
        with gazette.open_publisher(broker.endpoint) as publisher:
            publisher.publish(ONE, Word(word="alone"))
            with publisher.transaction() as transaction:
                transaction.publish(EVERY, Word(word="together"), key="a")
                with raises(Invalid, path="publish", says="transaction open"):
                    publisher.publish(ONE, Word(word="within"))
            with pytest.raises(ZeroDivisionError), publisher.transaction() as transaction:
                transaction.publish(ONE, Word(word="lost"))
                raise ZeroDivisionError
            with raises(NotFound, journal="words/part-009"):
                publisher.publish("words/part-009", Word(word="w"))
        with raises(Closed, says="closed"):
            publisher.publish(ONE, Word(word="late"))
        publisher.close()
        with raises(Invalid, path="broker", says="flags"):
            gazette.open_publisher("http://localhost:1", flags=BrokerClientFlags())

    await asyncio.to_thread(run)
    assert sorted(await visible(broker)) == ["alone", "together"]


def test_a_script_without_a_broker_ends_with_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with raises(Unavailable, says=address):
        gazette.open_publisher(address)


INTERRUPTED = """
import signal
import sys
import gazette

# A test that runs in the background inherits that interrupts are ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Word(gazette.Message):
    word: str

with gazette.open_publisher(sys.argv[1]) as publisher:
    with publisher.transaction() as transaction:
        transaction.publish("words/part-000", Word(word="lost"))
        # A signal from outside may come just before a call that blocks. It would not end that call.
        signal.raise_signal(signal.SIGINT)
"""


async def test_an_interrupt_leaves_nothing(broker: BrokerFixture) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", INTERRUPTED, broker.endpoint), stderr=subprocess.PIPE
    )
    _, stderr = await process.communicate()
    assert stderr.rstrip().endswith(b"KeyboardInterrupt")
    assert await head(broker, ONE) == 0


@contextlib.contextmanager
def interrupted(call: int) -> Iterator[Callable[[], bool]]:
    """Interrupt this thread after that many calls of C code in the module of `SyncPublisher`: these are the
    places where Python raises Ctrl-C. Yield a function: did the interrupt come?"""
    calls = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        if event == "c_return" and frame.f_code.co_filename == client_publisher.__file__:
            calls += 1
            if calls == call:
                sys.setprofile(None)
                raise KeyboardInterrupt

    try:
        sys.setprofile(profile)
        yield lambda: calls >= call
    finally:
        sys.setprofile(None)


async def test_after_an_interrupt_at_any_place_others_have_their_turn(
    broker: BrokerFixture,
) -> None:
    """An interrupt while the message is appended may make the publisher fail. It never has others wait."""

    def transaction(publisher: SyncPublisher) -> None:
        with publisher.transaction() as transaction:
            transaction.publish(ONE, Word(word="w"))

    def use(work: Callable[[SyncPublisher], object]) -> int:
        for call in itertools.count(1):
            with gazette.open_publisher(broker.endpoint, timeout_s=5.0) as publisher:
                with contextlib.suppress(KeyboardInterrupt), interrupted(call) as came:
                    work(publisher)
                if not came():
                    return call
                with contextlib.suppress(Closed):
                    transaction(publisher)
                with contextlib.suppress(Closed):
                    publisher.publish(ONE, Word(word="w"))
        raise AssertionError

    assert await asyncio.to_thread(use, transaction) > 4
    assert await asyncio.to_thread(use, lambda p: p.publish(ONE, Word(word="w"))) > 3


async def test_a_transaction_that_is_ended_twice_ends_no_other(broker: BrokerFixture) -> None:
    def use() -> None:
        with gazette.open_publisher(broker.endpoint, timeout_s=5.0) as publisher:
            first = publisher.transaction()
            first.__enter__()
            first.__exit__(None, None, None)
            with publisher.transaction() as second:
                with raises(Closed, says="not open"):
                    first.__exit__(None, None, None)
                with raises(Invalid, path="publish"):  # This thread still has the second one open.
                    publisher.publish(ONE, Word(word="outside"))
                second.publish(ONE, Word(word="within"))
            assert second.offsets

    await asyncio.to_thread(use)


def test_keys_of_unknown_types_are_refused() -> None:
    partitions = Partitions.of_specs([journal_spec(ONE, labels=LABELS)])
    known = KnownOutput(
        lambda: partitions,
        {},
        choice_by_labels(lambda: partitions, "modulo", random.Random()),
    )
    assert known.partition_of(Word(word="w"), b"k").journal == ONE
    assert known.partition_of(Word(word="w"), ("k",)).journal == ONE
    with raises(Invalid, path="key", says="list"):
        known.partition_of(Word(word="w"), ["k"])
