"""Journals that two programs create at the same time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gazette.client.journals import JournalChange
from gazette.declare.apply import put_journals
from gazette.declare.changes import DeclaredChange, DeclaredChanges
from gazette.errors import Conflict, Invalid
from gazette.etcd.client import Etcd
from gazette.testing.broker import BrokerFixture, journal_spec

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

    changes = await put_journals(broker.client, find)
    assert found == [2, 1]
    assert [one.spec.name for one in changes.journals] == ["words/part-001"]
    assert (await missing(broker)).journals == ()


async def test_a_program_that_is_always_faster_is_a_conflict(broker: BrokerFixture) -> None:
    found: list[str] = []

    async def find() -> DeclaredChanges:
        spec = journal_spec(f"words/part-{len(found):03d}")
        await broker.client.apply_journals([JournalChange(upsert=spec)])
        found.append(spec.name)
        return DeclaredChanges((DeclaredChange(spec, 0, ""),), (), 0)

    with pytest.raises(Conflict):
        await put_journals(broker.client, find)
    assert len(found) == 5


async def test_another_error_is_raised_at_once(broker: BrokerFixture) -> None:
    found: list[str] = []

    async def find() -> DeclaredChanges:
        found.append("once")
        return DeclaredChanges((DeclaredChange(journal_spec("bad name"), 0, ""),), (), 0)

    with pytest.raises(Invalid):
        await put_journals(broker.client, find)
    assert found == ["once"]
