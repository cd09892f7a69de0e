from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from gazette.cluster.allocator.session import CONFLICT_RETRY_S, CONFLICT_RETRY_SOON_S, MemberSession
from gazette.cluster.etcd.client import Etcd, EtcdSettings, Lease, LeaseLost, Op
from gazette.cluster.etcd.values import KeyValue
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.errors import Broken, Unavailable
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.clock import ManualClock
from gazette.testing.etcd import etcd_for_tests
from tests.facts import raises

KEY = "/root/members/a#1"
TTL_S = 5.0


class WatchedClock(ManualClock):
    """Says when a task begins to sleep on it."""

    def __init__(self) -> None:
        super().__init__()
        self.asleep = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.asleep.set()
        await super().sleep(seconds)


async def stored(etcd: Etcd) -> KeyValue:
    kv = await etcd.get(KEY)
    assert kv is not None
    return kv


class FlakyEtcd:
    """An etcd client whose next transactions reach etcd, but whose answers are lost."""

    def __init__(self, etcd: Etcd, lost_answers: int) -> None:
        self._etcd = etcd
        self.lost_answers = lost_answers
        self.leases: list[Lease] = []

    async def grant(self, ttl_s: float) -> Lease:
        self.leases.append(await self._etcd.grant(ttl_s))
        return self.leases[-1]

    async def txn(self, *args: Any) -> Any:
        result = await self._etcd.txn(*args)
        if self.lost_answers > 0:
            self.lost_answers -= 1
            raise Unavailable("no answer", outcome="unknown")
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._etcd, name)


@pytest.fixture
def ks(paper: Any) -> KeySpace:
    return KeySpace("/root", paper.decoder)


async def start(etcd: Any, ks: KeySpace, clock: Any, value: bytes = b"9") -> MemberSession:
    return await MemberSession.start(etcd, ks, KEY, value, TTL_S, clock=clock)


async def test_a_member_is_announced_under_its_lease(
    etcd: Etcd, ks: KeySpace, clock: ManualClock
) -> None:
    session = await start(etcd, ks, clock)
    kv = await etcd.get(KEY)
    assert kv is not None
    assert (kv.value, kv.lease, kv.version) == (b"9", session.lease.id, 1)
    # The mirror was loaded as of the announcement, so we are in it.
    assert ks.header.revision == kv.mod_revision
    assert ks.get(KEY) is not None

    # Case: what is under the lease goes with it.
    await etcd.put("/root/assign/x#a#1#0", b"", lease=session.lease.id)
    await session.close()
    assert await etcd.get(KEY) is None
    assert await etcd.get("/root/assign/x#a#1#0") is None
    # Case: closing again is fine.
    await session.close()


async def test_a_conflict_is_waited_out(
    etcd: Etcd, ks: KeySpace, caplog: pytest.LogCaptureFixture
) -> None:
    """An earlier incarnation holds the key until its lease ends: soon, if it has crashed."""
    clock = WatchedClock()
    other = await etcd.grant(60)
    await etcd.put(KEY, b"7", lease=other.id)
    with caplog.at_level(logging.WARNING):
        async with TaskScope("test") as scope, asyncio.timeout(60):
            starting = scope.spawn(start(etcd, ks, clock), name="start")
            begun, pauses = clock.monotonic(), []
            # Case: tried again, and again refused.
            while CONFLICT_RETRY_S not in pauses:
                await clock.asleep.wait()
                clock.asleep.clear()
                assert (await stored(etcd)).value == b"7"
                waited = clock.monotonic() - begun
                pauses.append(CONFLICT_RETRY_SOON_S if waited < 2 * TTL_S else CONFLICT_RETRY_S)
                clock.advance(pauses[-1])
            await clock.asleep.wait()
            await other.revoke()
            clock.advance(CONFLICT_RETRY_S - 0.1)
            assert not starting.done()
            clock.advance(0.1)
            session = await starting
    assert pauses == [*[CONFLICT_RETRY_SOON_S] * int(2 * TTL_S), CONFLICT_RETRY_S]
    assert (await stored(etcd)).lease == session.lease.id
    text = caplog.records[0].getMessage()
    assert f"another lease holds member key {KEY} ({other.id:x}" in text
    assert "same zone and id" in text
    # Case: said now and then, not at each attempt.
    assert 2 <= len(caplog.records) < len(pauses)
    await session.close()


async def test_the_lease_is_kept_alive_while_waiting(etcd: Etcd, ks: KeySpace) -> None:
    """A wait for another member's lease may be longer than our own; and losing ours ends the wait."""
    clock = WatchedClock()
    recorded = FlakyEtcd(etcd, lost_answers=0)
    await etcd.put(KEY, b"7")
    with pytest.raises(LeaseLost):
        async with TaskScope("test") as scope, asyncio.timeout(60):
            scope.spawn(
                MemberSession.start(cast("Etcd", recorded), ks, KEY, b"9", 1.0, clock=clock),
                name="start",
            )
            await clock.asleep.wait()
            (lease,) = recorded.leases
            await lease.revoke()
    assert (await stored(etcd)).value == b"7"


async def test_an_announcement_whose_answer_was_lost_succeeds(etcd: Etcd, ks: KeySpace) -> None:
    clock = WatchedClock()
    flaky = FlakyEtcd(etcd, lost_answers=1)
    async with TaskScope("test") as scope, asyncio.timeout(60):
        starting = scope.spawn(start(flaky, ks, clock), name="start")
        await clock.asleep.wait()
        clock.advance(1.0)
        session = await starting
    kv = await stored(etcd)
    assert (kv.lease, kv.version) == (session.lease.id, 1)
    # Case: the session knows the revision of its key.
    await session.set_exiting(b"9 exiting")
    await session.close()


async def test_a_failed_start_leaves_no_key(etcd: Etcd, clock: ManualClock) -> None:
    class Unloadable(KeySpace):
        async def load(self, etcd: Any, revision: int = 0) -> None:
            raise Broken("no")

    with pytest.raises(Broken, match="no"):
        await start(etcd, Unloadable("/root", lambda kv: kv), clock)
    assert await etcd.get(KEY) is None


async def test_a_start_that_is_cancelled_leaves_no_key(etcd: Etcd, clock: ManualClock) -> None:
    """As when SIGTERM comes between the announcement and the load of the key space."""

    class Loading(KeySpace):
        begun = asyncio.Event()

        async def load(self, etcd: Any, revision: int = 0) -> None:
            self.begun.set()
            await asyncio.Event().wait()

    key_space = Loading("/root", lambda kv: kv)
    async with TaskScope("test") as scope, asyncio.timeout(60):
        starting = scope.spawn(start(etcd, key_space, clock), name="start")
        await key_space.begun.wait()
        lease = (await stored(etcd)).lease
        starting.cancel()
        await asyncio.wait({starting})
    assert lease
    assert await etcd.get(KEY) is None


async def test_exiting_is_written_under_the_same_lease(
    etcd: Etcd, ks: KeySpace, clock: ManualClock
) -> None:
    session = await start(etcd, ks, clock)
    created = (await stored(etcd)).create_revision
    for _ in range(2):  # Case: once is enough.
        await session.set_exiting(b"9 exiting")
        kv = await stored(etcd)
        assert (kv.value, kv.lease, kv.version) == (b"9 exiting", session.lease.id, 2)
        assert kv.create_revision == created
    await session.close()


async def test_exiting_whose_answer_was_lost_succeeds(etcd: Etcd, ks: KeySpace) -> None:
    clock = WatchedClock()
    flaky = FlakyEtcd(etcd, lost_answers=0)
    session = await start(flaky, ks, clock)
    flaky.lost_answers = 1
    async with TaskScope("test") as scope, asyncio.timeout(60):
        exiting = scope.spawn(session.set_exiting(b"9 exiting"), name="exiting")
        await clock.asleep.wait()
        clock.advance(1.0)
        await exiting
    assert (await stored(etcd)).version == 2
    await session.close()


@pytest.mark.parametrize("change", ["modified", "deleted", "taken over"])
async def test_exiting_fails_if_the_key_is_not_ours_any_more(
    etcd: Etcd, ks: KeySpace, clock: ManualClock, change: str
) -> None:
    session = await start(etcd, ks, clock)
    if change == "modified":
        await etcd.put(KEY, b"8", ignore_lease=True)
    else:
        await etcd.delete(KEY)
    if change == "taken over":
        await etcd.put(KEY, b"9 exiting")
    with raises(Broken, "expected_revision", "actual_revision", key="/root/members/a#1") as raised:
        await session.set_exiting(b"9 exiting")
    assert raised.value.facts["key"] == KEY
    await session.close()


async def test_a_lost_lease_ends_the_session(etcd: Etcd, ks: KeySpace, clock: ManualClock) -> None:
    session = await MemberSession.start(etcd, ks, KEY, b"9", 1.0, clock=clock)
    with pytest.raises(LeaseLost):
        async with TaskScope("test") as scope, asyncio.timeout(60):
            scope.daemon(session.run(), name="lease")
            await session.lease.revoke()
    assert await etcd.get(KEY) is None


async def test_an_etcd_that_is_away_for_longer_than_the_lease_ends_the_session(
    tmp_path: Any, ks: KeySpace, clock: ManualClock
) -> None:
    with etcd_for_tests(tmp_path) as server:
        settings = EtcdSettings(endpoints=(server.endpoint,), request_timeout_s=1.0)
        async with await Etcd.connect(settings, SystemClock()) as etcd:
            session = await MemberSession.start(etcd, ks, KEY, b"9", 1.0, clock=clock)
            server.pause()
            try:
                async with asyncio.timeout(20):
                    with pytest.raises(LeaseLost):
                        await session.run()
                    # Case: closing does what it can.
                    await session.close()
            finally:
                server.resume()


async def test_other_writes_beside_ours_are_no_conflict(
    etcd: Etcd, ks: KeySpace, clock: ManualClock
) -> None:
    """Revisions move on for other reasons; only that of our key counts."""
    session = await start(etcd, ks, clock)
    await etcd.txn((), (Op.put("/root/items/x", b"1"),))
    await session.set_exiting(b"9 exiting")
    await session.close()
