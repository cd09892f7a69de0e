"""Journals and shards that two programs create at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import pytest

from gazette import Application, Message, Source
from gazette.blobs.file import FileStore
from gazette.client.journals import JournalChange
from gazette.client.shards import ShardChange
from gazette.cluster.etcd.client import Etcd
from gazette.consumer.declare.apply import put_declared
from gazette.consumer.declare.changes import DeclaredChange, DeclaredChanges
from gazette.errors import Conflict, Invalid
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ShardSpec
from gazette.runconsumer import specs
from gazette.stores.json_file import JSONFileStore
from gazette.testing.broker import STORE, BrokerFixture, journal_spec
from gazette.testing.consumer import ConsumerFixture, shard_spec
from tests.facts import raises

SPECS = [journal_spec("words/part-000"), journal_spec("words/part-001")]


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        yield broker


async def missing(broker: BrokerFixture) -> DeclaredChanges:
    names = {one.spec.name for one in (await broker.client.list_journals()).journals}
    lacking = [spec for spec in SPECS if spec.name not in names]
    return DeclaredChanges(tuple(DeclaredChange(spec, 0, "") for spec in lacking), (), 0)


async def test_what_another_program_creates_meanwhile_is_left_to_it(broker: BrokerFixture) -> None:
    found: list[int] = []

    async def find() -> DeclaredChanges:
        changes = await missing(broker)
        found.append(len(changes.journals))
        if len(found) == 1:
            await broker.create(SPECS[0])
        return changes

    changes = await put_declared(find, broker.client)
    assert found == [2, 1]
    assert [one.spec.name for one in changes.journals] == ["words/part-001"]
    assert (await missing(broker)).journals == ()


async def test_a_program_that_is_always_faster_is_a_conflict(broker: BrokerFixture) -> None:
    found: list[str] = []

    async def find() -> DeclaredChanges:
        spec = journal_spec(f"words/part-{len(found):03d}")
        await broker.client.apply_journals([JournalChange(upsert=spec)])
        found.append(spec.name)
        return DeclaredChanges((DeclaredChange(spec, 0, "1 replicas"),), (), 0)

    with raises(Conflict, differing=1, advises="words/part-004  1 replicas"):
        await put_declared(find, broker.client)
    assert len(found) == 5


async def test_another_error_is_raised_at_once(broker: BrokerFixture) -> None:
    found: list[str] = []

    async def find() -> DeclaredChanges:
        found.append("once")
        return DeclaredChanges((DeclaredChange(journal_spec("bad name"), 0, ""),), (), 0)

    with pytest.raises(Invalid):
        await put_declared(find, broker.client)
    assert found == ["once"]


async def test_shards_that_another_program_creates_meanwhile_are_left_to_it(
    broker: BrokerFixture, etcd: Etcd, tmp_path: Path
) -> None:
    await broker.create(*SPECS)
    wanted = [shard_of(0), shard_of(1)]
    found: list[list[str]] = []
    async with await ConsumerFixture.start(
        etcd, broker, Words(), tmp_path, lease_ttl_s=60.0, shard_limit=0
    ) as member:

        async def find() -> DeclaredChanges:
            there = [one.spec.id for one in (await member.shards.list_shards()).shards]
            lacking = [DeclaredChange(spec, 0, "") for spec in wanted if spec.id not in there]
            found.append([one.spec.id for one in lacking])
            if len(found) == 1:
                await member.shards.apply_shards([ShardChange(upsert=wanted[0])])
            return DeclaredChanges((), tuple(lacking), 0)

        await put_declared(find, broker.client, member.shards)
        assert [one.spec for one in (await member.shards.list_shards()).shards] == wanted
    assert found == [["shard-000", "shard-001"], ["shard-001"]]


def shard_of(index: int) -> ShardSpec:
    return shard_spec(f"shard-{index:03d}", f"words/part-{index:03d}", log=False)


# `app.py apply` itself. Between its listing and its changes it checks the store, and there the other
# program comes in.


class Word(Message):
    word: str = ""


class Words(Application[JSONFileStore[Any]]):
    words = Source("words", Word, partitions=2, key="word")

    def new_store(self, shard: Any, recorder: Any) -> JSONFileStore[Any]:
        raise NotImplementedError

    def consume_message(self, *args: Any) -> None:
        raise NotImplementedError


class Meeting(FileStore):
    """A store that runs something when it is first written to."""

    first: ClassVar[list[Callable[[], None]]] = []

    def put(self, path: str, source: BinaryIO, *, content_encoding: str = "") -> None:
        while self.first:
            self.first.pop()()
        super().put(path, source, content_encoding=content_encoding)


@pytest.fixture
async def meeting(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(
        etcd,
        tmp_path,
        lease_ttl_s=60.0,
        constructors={"file": lambda url: Meeting(tmp_path / "root", url)},
    ) as broker:
        yield broker
    Meeting.first.clear()


def apply(broker: BrokerFixture) -> int:
    argv = [f"--broker.address={broker.endpoint}", f"--store={STORE}", "--shards=false"]
    return specs.run(Words(), "apply", "app.py", argv, {})


async def test_two_applies_at_the_same_time_both_end_well(
    meeting: BrokerFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    Meeting.first.append(lambda: codes.append(apply(meeting)))
    codes.append(await asyncio.to_thread(apply, meeting))
    assert codes == [0, 0]
    names = [one.spec.name for one in (await meeting.client.list_journals()).journals]
    assert [one for one in names if one.startswith("words/")] == [one.name for one in SPECS]
    *_, meanwhile, unchanged, applied = capsys.readouterr().out.splitlines()
    assert "another program" in meanwhile
    assert unchanged == f"= {len(names)} unchanged"
    assert applied == "applied"


@pytest.mark.parametrize(
    ("content_type", "code", "says"),
    [
        (CONTENT_JSON_LINES, 0, "~ journal words/part-001  "),
        (CONTENT_CSV, 1, "words/part-000 holds text/csv"),
    ],
)
async def test_what_another_program_makes_otherwise_is_named(
    meeting: BrokerFixture,
    capsys: pytest.CaptureFixture[str],
    content_type: str,
    code: int,
    says: str,
) -> None:
    """It is changed to what is declared, or refused where that would hurt the messages in it."""
    loop = asyncio.get_running_loop()
    labels = LabelSet.of((CONTENT_TYPE, content_type))
    changes = [JournalChange(upsert=replace(spec, labels=labels)) for spec in SPECS]

    def others() -> None:
        putting = meeting.client.apply_journals(changes)
        asyncio.run_coroutine_threadsafe(putting, loop).result()

    Meeting.first.append(others)
    assert await asyncio.to_thread(apply, meeting) == code
    said = capsys.readouterr()
    assert says in said.out + said.err
