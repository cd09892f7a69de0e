"""Queries that meet the end of their member, or of the standby that they read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from starlette.requests import Request

from gazette.client.shards import ShardChange
from gazette.cluster.etcd.values import LeaseLost
from gazette.consumer.application import StateView
from gazette.consumer.query.running_queries import RunningQueries
from gazette.consumer.shard.standby_reads import StandbyReads
from gazette.errors import Moved, NotFound
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import BlockingPool
from gazette.testing.broker import BrokerFixture, leases_of
from gazette.testing.clock import ManualClock
from gazette.testing.consumer import ConsumerFixture, shard_spec
from tests.consumer.apps import SHARD, SOURCE, Gate, Start
from tests.consumer.test_shard_queries import Words, called, question
from tests.facts import call_refused, raises
from tests.support.instant_clock import eventually

NEVER = 1 << 40
"""No source has so many bytes: a query that reads through it waits."""


class Slow(Words):
    async def initialize(self, service: Any) -> None:
        await super().initialize(service)

        async def fails(request: Request) -> Any:
            raise NotFound("nothing here", hint="Look elsewhere.")

        service.add_route("/fails", fails)


def begun(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


async def waiting(member: ConsumerFixture, http: httpx.AsyncClient) -> asyncio.Task[Any]:
    headers = {"gazette-read-through": f"{SOURCE}={NEVER}"}
    asked = begun(http.get(f"/shards/{SHARD}/count", headers=headers))
    await eventually(lambda: waiting_queries(member) == 1)
    return asked


def waiting_queries(member: ConsumerFixture) -> int:
    return len(member.service.service.running_queries._deadlines)


class Leaping(SystemClock):
    """The machine's clock, which may leap as it does for a process that was paused."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return SystemClock.monotonic() + self.ahead_s


@pytest.mark.parametrize("error", [None, NotFound("no such word", hint="Ask for another.")])
async def test_a_member_that_was_paused_beyond_its_lease_answers_nothing_old(
    start: Start, error: NotFound | None
) -> None:
    """Another member may lead the shard by now, and have the word."""
    clock = Leaping()

    def leap() -> None:
        clock.ahead_s = 90.0  # The lease has 60 s.
        if error is not None:
            raise error

    member = await start(Slow(leap), clock=clock, query_timeout_s=300.0)
    await member.create(shard_spec(SHARD, SOURCE))
    async with httpx.AsyncClient(base_url=member.http, timeout=60) as http:
        path = f"/shards/{SHARD}/count"
        assert (await http.get(path, params={"word": "quick"})).status_code == 200
        answer = await http.get(path, params={"word": "slow"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_waiting_queries_end_at_once_when_the_member_loses_its_lease(
    start: Start, broker: BrokerFixture
) -> None:
    member = await start(Slow(), query_timeout_s=300.0, graceful_stop_s=300.0)
    await member.create(shard_spec(SHARD, SOURCE))
    async with (
        httpx.AsyncClient(base_url=member.http, timeout=60) as http,
        called(member) as call,
    ):
        asked = await waiting(member, http)
        metadata = (("gazette-read-through", f"{SOURCE}={NEVER}"),)
        rpc = call(question("a"), metadata=metadata)
        await eventually(lambda: waiting_queries(member) == 2)
        settings = member.service.settings
        (lease,) = await leases_of(member.etcd, settings.root, settings.id)
        await lease.revoke()
        answer = await asked
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert "leaves its cluster: it failed: " in answer.text
        with call_refused(grpc.StatusCode.UNAVAILABLE, "local#consumer-one") as ended:
            await rpc
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        # A later caller does not wait either.
        answer = await http.get(f"/shards/{SHARD}/count")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert member.service.failure is not None


async def test_a_query_without_a_primary_ends_before_its_member_has_stopped(
    start: Start, broker: BrokerFixture
) -> None:
    member = await start(Slow(), query_timeout_s=300.0, graceful_stop_s=0.5)
    await member.shards.apply_shards([ShardChange(upsert=shard_spec(SHARD, SOURCE, disable=True))])
    async with httpx.AsyncClient(base_url=member.http, timeout=60) as http:
        asked = await waiting(member, http)
        stopping = begun(member.stop())
        answer = await asked
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "leaves its cluster: it stops" in answer.text
        await stopping


async def test_a_query_that_is_being_served_ends_with_the_lease(
    start: Start, broker: BrokerFixture
) -> None:
    """Its answer might be older than what the next primary has acknowledged."""
    gate = Gate()
    member = await start(Slow(gate), query_timeout_s=300.0)
    await member.create(shard_spec(SHARD, SOURCE))
    async with httpx.AsyncClient(base_url=member.http, timeout=60) as http:
        asked = begun(http.get(f"/shards/{SHARD}/count", params={"word": "slow"}))
        await asyncio.to_thread(gate.entered.wait)
        member.service.fail(LeaseLost("it is gone"))
        answer = await asked
        assert answer.status_code == 503
        gate.open()


async def test_errors_of_other_routes_are_answers(start: Start) -> None:
    member = await start(Slow())
    async with httpx.AsyncClient(base_url=member.http) as http:
        answer = await http.get("/fails")
        assert answer.status_code == 404
        assert answer.json() == {"error": "nothing here", "hint": "Look elsewhere."}


async def test_the_sooner_end_counts() -> None:
    running = RunningQueries()
    async with asyncio.timeout(1000) as first:
        with running.query(first):
            running.end("it stops", 500)
            at = first.when()
            assert at is not None
            running.end("later", 900)
            assert first.when() == at
            assert not running.ended
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1000) as second:
            with running.query(second):
                assert second.when() == at
                running.end("it failed")
                await asyncio.Event().wait()
    assert running.ended
    assert "it failed" in str(running.leaving(shard="a"))


# --- Standbys


class View(StateView):
    def refresh(self, files: Any) -> Any:
        return files

    def release(self, reader: Any) -> None: ...

    def close(self) -> None: ...


class Player:
    """Plays for ever: a view is never made."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.cancels: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def view(self, call: Callable[[Any], Any]) -> Any:
        self.asked.set()
        return await self.cancels


@pytest.mark.parametrize("how", ["closed", "cancelled", "closed before"])
async def test_a_stale_query_that_meets_the_end_of_its_standby_has_moved(
    tmp_path: Path, how: str
) -> None:
    pool, player = BlockingPool("test", 1), Player()
    reads = StandbyReads(lambda directory: View(), tmp_path / "view", player, ManualClock(), pool)
    if how == "closed before":
        await reads.close(1.0)
    asked = [begun(reads.begin(1.0)) for _ in range(3)]
    if how != "closed before":
        await player.asked.wait()
    if how == "cancelled":
        player.cancels.cancel()  # By the end of play-back, for instance.
    else:
        await reads.close(1.0)
    for one in asked:
        with raises(Moved):
            await one
    await reads.close(1.0)
    pool.close()


async def test_a_stale_query_that_is_cancelled_leaves_the_others(tmp_path: Path) -> None:
    pool, player = BlockingPool("test", 1), Player()
    reads = StandbyReads(lambda directory: View(), tmp_path / "view", player, ManualClock(), pool)
    one, two = (begun(reads.begin(1.0)) for _ in range(2))
    await player.asked.wait()
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    player.cancels.set_result("files")
    assert (await two).reader == "files"
    await reads.close(0.0)
    pool.close()


async def test_a_standby_that_takes_too_long_for_a_stale_query_tries_once(tmp_path: Path) -> None:
    """Each state costs an append to the log: a query must not have one made after the other."""
    clock, pool = ManualClock(), BlockingPool("test", 1)
    made = 0

    class Slow:
        async def view(self, call: Callable[[Any], Any]) -> Any:
            nonlocal made
            made += 1
            clock.advance(1.0)
            assert made < 10
            return "files"

    reads = StandbyReads(lambda directory: View(), tmp_path / "view", Slow(), clock, pool)
    with raises(Moved, staleness_s=1.0):
        await reads.begin(0.5)
    assert made == 1
    assert (await reads.begin(2.0)).reader == "files"
    await reads.close(0.0)
    pool.close()
