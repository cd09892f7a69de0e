"""A store that never will have a journal's fragments: refused at Apply, or named within a minute."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from gazette.client.append.appender import AppendParams, append_once
from gazette.client.journals import JournalChange, fragment_store_health
from gazette.cluster.etcd.client import Etcd
from gazette.errors import GazetteError, Unavailable
from gazette.fragment.metrics import PERSIST_FAILURES
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import STORE, BrokerFixture, journal_spec
from tests.facts import raises

CONTENT: Final = bytes(2_000)


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path, store_check_timeout_s=2.0) as broker:
        yield broker


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await SystemClock().sleep(0.02)


def objects(broker: BrokerFixture, journal: str) -> list[Path]:
    """List the stored files of a journal, without those that are still written."""
    directory = broker.file_root / "fragments" / journal
    return [path for path in directory.rglob("[!.]*") if path.is_file()]


async def test_a_name_that_is_too_long_for_a_store_is_refused(broker: BrokerFixture) -> None:
    """A journal with the longest name is stored, and one with a byte more is not applied."""
    fits, beyond = f"a/{'n' * 255}/b", f"a/{'n' * 256}/b"
    await broker.create(journal_spec(fits))
    await broker.client.append(AppendParams(fits), b"content")
    await until(lambda: objects(broker, fits))
    with raises(GazetteError) as caught:
        await broker.create(journal_spec(beyond))
    assert "255" in str(caught.value)
    # Case: any store counts, as all of them are listed.
    with raises(GazetteError):
        await broker.create(journal_spec(beyond, stores=("memory://one/", STORE)))
    # Case: a postfix that is too long. The fragment is stored without it.
    spec = journal_spec("a/postfixed")
    template = 'r={{ .Spool.Registers.ValueOf "r" }}' + "x" * 254
    fragment = replace(spec.fragment, path_postfix_template=template)
    await broker.create(replace(spec, fragment=fragment))
    await broker.client.append(AppendParams("a/postfixed"), b"content")
    await until(lambda: objects(broker, "a/postfixed"))
    [path] = objects(broker, "a/postfixed")
    assert path.parent.name == "postfixed"


async def test_a_store_that_refuses_a_journal_is_named(broker: BrokerFixture) -> None:
    """In the answer to appends, and by store-health, until it takes the fragments."""
    in_the_way = broker.file_root / "fragments" / "a"
    in_the_way.write_bytes(b"a file in the place of a directory")
    await broker.create(journal_spec("a/journal"), journal_spec("b/journal"))
    await broker.client.append(AppendParams("a/journal"), b"first")
    store = broker.service.context.blob_stores.get(STORE)
    await until(lambda: store.refusals)
    with raises(Unavailable, status="FRAGMENT_STORE_UNHEALTHY", says="Not a directory"):
        await broker.client.append(AppendParams("a/journal"), b"more")
    health = await fragment_store_health(broker.client, STORE)
    assert "a/journal" in health
    assert "Not a directory" in health
    # Case: other journals of the store are not concerned.
    await broker.client.append(AppendParams("b/journal"), b"well")
    # Case: it is cured, and nothing was lost.
    in_the_way.unlink()
    await until(lambda: objects(broker, "a/journal"))
    await until(lambda: not store.refusals)
    await broker.client.append(AppendParams("a/journal"), b"on")
    assert await fragment_store_health(broker.client, STORE) == ""


async def test_a_store_that_refuses_for_a_moment_is_not_named(etcd: Etcd, tmp_path: Path) -> None:
    """As while its permissions are changed. Its checks may succeed in between: they are other calls."""
    async with await BrokerFixture.start(etcd, tmp_path) as broker:
        in_the_way = broker.file_root / "fragments" / "a"
        in_the_way.write_bytes(b"")
        await broker.create(journal_spec("a/journal"))
        failed = failures()
        await broker.client.append(AppendParams("a/journal"), b"first")
        await until(lambda: failures() >= failed + 3)
        await broker.client.append(AppendParams("a/journal"), b"more")
        in_the_way.unlink()
        await until(lambda: objects(broker, "a/journal"))


async def test_another_store_of_a_journal_does_not_inherit_a_refusal(broker: BrokerFixture) -> None:
    other = "file:///other/"
    for directory in ("fragments", "other"):
        (broker.file_root / directory).mkdir(exist_ok=True)
        (broker.file_root / directory / "a").write_bytes(b"")
    spec = journal_spec("a/journal")
    await broker.create(spec)
    await broker.client.append(AppendParams("a/journal"), b"first")
    stores = broker.service.context.blob_stores
    await until(lambda: stores.get(STORE).refusals)
    # Case: the other one fails as well, for a moment. It has to do so for as long as the first one.
    moved = replace(spec, fragment=replace(spec.fragment, stores=(other,)))
    await broker.client.apply_journals([JournalChange(upsert=moved, expect_mod_revision=-1)])
    await until(lambda: not stores.get(STORE).refusals)
    assert not stores.get(other).refusals
    (broker.file_root / "other" / "a").unlink()
    await until(lambda: (broker.file_root / "other" / "a" / "journal").is_dir())
    await broker.client.append(AppendParams("a/journal"), b"on")


async def test_a_deleted_journal_leaves_no_refusal(broker: BrokerFixture) -> None:
    in_the_way = broker.file_root / "fragments" / "a"
    in_the_way.write_bytes(b"")
    await broker.create(journal_spec("a/journal"))
    await broker.client.append(AppendParams("a/journal"), b"first")
    store = broker.service.context.blob_stores.get(STORE)
    await until(lambda: store.refusals)
    deletion = JournalChange(delete="a/journal", expect_mod_revision=-1)
    await broker.client.apply_journals([deletion])
    await until(lambda: not broker.service.context.persister.unpersisted)
    assert not store.refusals


async def test_a_store_that_is_away_for_some_time_refuses_no_journal(broker: BrokerFixture) -> None:
    """As until it is mounted again. Its checks fail, too: appends wait for it, and none is refused."""
    stored, away = broker.file_root / "fragments", broker.file_root / "away"
    await broker.create(journal_spec("a/journal", length=len(CONTENT) - 1))
    params = AppendParams("a/journal")
    await broker.client.append(params, CONTENT)
    await until(lambda: objects(broker, "a/journal"))
    store, failed = broker.service.context.blob_stores.get(STORE), failures()

    async def append_more() -> None:
        for _ in range(4):  # Each completes the fragment of the one before.
            await append_once(broker.client, params, CONTENT)

    stored.rename(away)
    async with TaskScope("appends") as scope:
        scope.spawn(append_more(), name="append")
        await until(lambda: failures() >= failed + 9)  # Each upload fails three times.
        assert store.health.error
        assert not store.refusals
        away.rename(stored)
    await until(lambda: len(objects(broker, "a/journal")) >= 4)
    assert not store.refusals
    assert (await broker.client.append(params, b"end")).commit.begin == 5 * len(CONTENT)


def failures() -> float:
    """Return the number of uploads that have failed in this process."""
    return sum(one.value for metric in PERSIST_FAILURES.collect() for one in metric.samples)
