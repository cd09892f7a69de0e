"""Recoveries of states: each once, with a bound, and stopped when nothing needs them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gazette.client.append.appender import AppendParams
from gazette.errors import Closed, GazetteError, Unavailable
from gazette.protocol.journal_life import JournalLife
from gazette.protocol.label_set import EVERYTHING
from gazette.run.console.lineage import Lineage
from gazette.run.console.states import STATES_MAX, States
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import ConsumerFixture
from tests.run.console.conftest import Page
from tests.run.console.shop import OUTPUT, SHARD
from tests.run.console.test_shard_view import asked, consumed, page, shop

__all__ = ["page", "shop"]
LISTED: Any = SimpleNamespace(spec=SimpleNamespace(id="a", recovery_log="a/log"), create_revision=1)
OTHER: Any = SimpleNamespace(spec=SimpleNamespace(id="b", recovery_log="b/log"), create_revision=2)


def no_life(_name: str) -> None:
    """Say of a log that no list has it."""


class Hanging:
    """A member without hints, and a broker whose reads never end."""

    address = "http://here"

    def __init__(self) -> None:
        self.is_reading = asyncio.Event()

    async def get_hints(self, _shard_id: str) -> Any:
        return SimpleNamespace(primary=None, backups=())

    @asynccontextmanager
    async def retry_reader(self, *_: object) -> Any:
        self.is_reading.set()
        await asyncio.Event().wait()
        yield


class Servers:
    """The part of a context that `States` uses."""

    timeout_s = 60.0

    def __init__(self, consumer: Any = None, broker: Any = None) -> None:
        self.hanging = Hanging()
        self.servers = consumer or self.hanging, broker or self.hanging
        self.errors: list[Exception] = []

    async def consumer(self) -> Any:
        if self.errors:
            raise self.errors.pop()
        return self.servers[0]

    async def broker(self) -> Any:
        return self.servers[1]

    @asynccontextmanager
    async def answering(self, *_: object) -> Any:
        yield


async def test_a_state_that_two_pages_want_is_recovered_once(
    page: Page, broker: BrokerFixture, shop: ConsumerFixture, tmp_path: Path
) -> None:
    at = await consumed(broker, shop, "one")
    both = [asked(page, "state", id=SHARD, at=at) for _ in range(2)]
    assert {document["offset"] for document in await asyncio.gather(*both)} == {at}
    assert len(list((tmp_path / "ui").iterdir())) == 1


async def test_more_states_than_are_kept_are_answered_all_the_same(
    page: Page, broker: BrokerFixture, shop: ConsumerFixture, tmp_path: Path
) -> None:
    at = await consumed(broker, shop, "one")
    sql = "SELECT n FROM counts"

    async def rows(moment: int) -> Any:
        return (await asked(page, "query", id=SHARD, at=moment, sql=sql))["rows"]

    answers = await asyncio.gather(*(rows(at + number) for number in range(STATES_MAX + 4)))
    assert answers == [[[1]]] * (STATES_MAX + 4)
    await page("session")
    assert len(list((tmp_path / "ui").iterdir())) <= STATES_MAX + 1  # The last removal may go on.


async def test_an_unexpected_failure_is_a_sentence_and_ends_no_other_recovery(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers: Any = Servers()
    states = States(servers, tmp_path, no_life)
    other = asyncio.gather(states.state(OTHER, "5"))
    await servers.hanging.is_reading.wait()
    for number in range(2):  # The failure is forgotten: the next request tries again.
        servers.errors.append(KeyError(f"boom {number}"))
        with pytest.raises(GazetteError, match=f"the recovery failed: KeyError: 'boom {number}'"):
            await states.state(LISTED, "5")
    assert "a recovery of the console failed" in caplog.text
    assert not other.done()
    await states.close()
    with pytest.raises(Closed):
        await other


async def test_a_checkpoint_is_known_longer_than_its_state(
    broker: BrokerFixture, shop: ConsumerFixture, tmp_path: Path
) -> None:
    at = await consumed(broker, shop, "one")
    (listed,) = (await shop.shards.list_shards(EVERYTHING)).shards
    servers: Any = Servers(shop.shards, broker.client)
    states = States(servers, tmp_path / "states", no_life)
    (tmp_path / "states").mkdir()
    offsets = range(at, at + STATES_MAX + 2)
    checkpoints = [await states.checkpoint(listed, offset) for offset in offsets]
    servers.errors = [KeyError("recovered again")] * len(offsets)
    assert [await states.checkpoint(listed, offset) for offset in offsets] == checkpoints
    await states.close()


class Slow(States):
    """States that are too large to be compared."""

    async def difference(self, *_: object) -> Any:
        raise Unavailable("the comparison did not end")


async def test_inputs_of_an_output_are_shown_though_its_rows_cannot_be(
    broker: BrokerFixture, shop: ConsumerFixture, tmp_path: Path
) -> None:
    await consumed(broker, shop, "one")
    begin = (await broker.client.append(AppendParams(OUTPUT))).commit.end
    await consumed(broker, shop, "two")
    (shard,) = (await shop.shards.list_shards(EVERYTHING)).shards
    listed = (await broker.client.list_journals(EVERYTHING)).journals
    journals = {journal.spec.name: journal for journal in listed}
    servers: Any = Servers(shop.shards, broker.client)
    states = Slow(servers, tmp_path / "states", no_life)
    (tmp_path / "states").mkdir()
    traced = await Lineage(broker.client, states, journals).trace(journals[OUTPUT], begin, [shard])
    assert '"two"' in traced["inputs"][0]["messages"][0]["text"]
    assert traced["notes"] == ["the rows that changed are not known: the comparison did not end"]
    await states.close()


async def test_a_log_that_is_made_again_has_other_states(
    broker: BrokerFixture, shop: ConsumerFixture, tmp_path: Path
) -> None:
    at = await consumed(broker, shop, "one")
    (listed,) = (await shop.shards.list_shards(EVERYTHING)).shards
    lives = [JournalLife(1, 5)]
    servers: Any = Servers(shop.shards, broker.client)
    states = States(servers, tmp_path / "states", lambda _name: lives[0])
    (tmp_path / "states").mkdir()
    known = await states.checkpoint(listed, at)
    servers.errors = [KeyError("recovered again") for _ in range(2)]
    assert await states.checkpoint(listed, at) == known
    assert (await states.state(listed, str(at))).offset == at
    lives[0] = JournalLife(1, 9)
    assert states.known_checkpoint(listed, at) is None
    with pytest.raises(GazetteError, match="recovered again"):
        await states.state(listed, str(at))
    await states.close()


async def test_a_console_that_stops_ends_recoveries_and_answers(tmp_path: Path) -> None:
    servers: Any = Servers()
    states = States(servers, tmp_path, no_life)
    asking = (states.state(LISTED, str(at)) for at in range(5))
    answers = asyncio.gather(*asking, return_exceptions=True)
    await servers.hanging.is_reading.wait()
    await states.close()
    assert all(isinstance(answer, GazetteError) for answer in await answers), await answers
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Closed):
        await states.state(LISTED, "7")
