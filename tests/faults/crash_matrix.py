"""The rows of the crash-point matrix: at which point of a transaction, or of a promotion, a member dies.

In a specification, ``{shard}`` is the shard that it is about and ``{n}`` a number drawn for each run, so
that it is another transaction each time.
"""

from __future__ import annotations

import asyncio
import enum
import signal
from dataclasses import dataclass
from typing import Final

from gazette.run.dev.word_count import Member
from gazette.runtime.tasks import TaskScope
from tests.faults.fold_cluster import LOGGED, FoldCluster, shard_of

LOG: Final = "recovery/fold/{shard}"
DEATH_S: Final = 90.0
"""Seconds within which the armed process dies."""
FIRST, SECOND = "out/{shard}/a", "out/{shard}/b"


class Victim(enum.Enum):
    """The process that dies at the point."""

    PRIMARY = "primary"
    STANDBY = "standby, in its promotion after the primary was killed"
    FRESH = "a new member, as it begins to recover"


@dataclass(frozen=True)
class Row:
    """``logged`` is what to arm for shards with a recovery log, ``remote`` for those in a database;
    None where the row does not apply."""

    name: str
    logged: str | None
    remote: str | None
    victim: Victim = Victim.PRIMARY

    def applies_to(self, kind: str) -> bool:
        return (self.logged if kind in LOGGED else self.remote) is not None

    def spec(self, kind: str, shard_id: str, n: int) -> str | None:
        text = self.logged if kind in LOGGED else self.remote
        return None if text is None else text.format(shard=shard_id, n=n, m=n + 1)


ROWS: Final = (
    Row(
        "consuming, some publishes landed",
        f"append.applied({FIRST})=kill@{{n}}",
        f"append.applied({FIRST})=kill@{{n}}",
    ),
    Row(
        "finalized, publishes enqueued and not all sent",
        "commit.finalized({shard})=kill@{n}",
        "commit.finalized({shard})=kill@{n}",
    ),
    Row(
        "committed locally, nothing of it on its way",
        f"commit.recording({LOG})=kill@{{n}}",
        "sql.committing(*/{shard})=kill@{n}",
    ),
    Row(
        "the commit's content sent, without an answer",
        f"append.sent({LOG})=kill@{{n}}",
        "commit.enqueued({shard})=kill@{n}",
    ),
    Row(
        "commit durable, no acknowledgement sent",
        f"append.applied({LOG})=kill@{{n}}",
        "sql.committed(*/{shard})=kill@{n}",
    ),
    Row(
        "one acknowledgement in place, the other not",
        f"ack.appended({FIRST})=kill@{{n}};append.begin({SECOND})=delay:0.2@*",
        f"ack.appended({FIRST})=kill@{{n}};append.begin({SECOND})=delay:0.2@*",
    ),
    Row(
        "all acknowledged, the next transaction publishing",
        "transaction.acknowledged({shard})=kill@{n}",
        "transaction.acknowledged({shard})=kill@{n}",
    ),
    Row(
        "the commit took place, its answer was lost",
        f"append.applied({LOG})=error@{{n}};ack.appended({FIRST})=kill@{{m}}",
        "sql.committed(*/{shard})=error@{n}",
    ),
    Row(
        "a publish took place, its answer was lost",
        f"append.applied({FIRST})=error@{{n}};transaction.acknowledged({{shard}})=kill@{{m}}",
        f"append.applied({FIRST})=error@{{n}};transaction.acknowledged({{shard}})=kill@{{m}}",
    ),
    Row(
        "hand-off made, files not in place",
        f"recovery.handed_off({LOG})=kill",
        None,
        Victim.STANDBY,
    ),
    Row(
        "files in place, store not open",
        f"recovery.live({LOG})=kill",
        None,
        Victim.STANDBY,
    ),
    Row(
        "store open, recovered hints not stored",
        "promotion.opened({shard})=kill",
        "promotion.opened({shard})=kill",
        Victim.STANDBY,
    ),
    Row(
        "recovered hints stored, nothing consumed",
        "promotion.hinted({shard})=kill",
        None,
        Victim.STANDBY,
    ),
    Row(
        "play-back begun",
        f"recovery.playing({LOG})=kill",
        None,
        Victim.FRESH,
    ),
)
TIMER_ROWS: Final = (
    Row(
        "some timers fired, nothing finalized",
        "timers.fired({shard})=kill@{n}",
        "timers.fired({shard})=kill@{n}",
    ),
    *(row for row in ROWS if row.name.startswith(("committed locally", "commit durable"))),
    *(row for row in ROWS if row.name.startswith("store open")),
)
"""Rows for an application that publishes by timers."""


@dataclass(frozen=True)
class Death:
    """What came of one cell, once. Seconds."""

    replaced_s: float
    """From the death until the shards of the dead were served by others."""
    expired: bool
    """True if that includes the time until leases expired."""


@dataclass(frozen=True)
class Manner:
    """How it happens this time.

    ``cold``: without a standby, so that a process that is started then recovers everything. ``expire``: the
    lease of the dead expires; otherwise it is revoked, and the test does not wait for what is no part
    of the question.
    """

    cold: bool
    expire: bool


async def run(cluster: FoldCluster, row: Row, kind: str, manner: Manner) -> Death | None:
    """Run one cell once: die there, have others take over, check everything.
    Return None if it does not apply.
    """
    rng = cluster.rng
    shard_id = shard_of(kind, cluster.fleet)
    spec = row.spec(kind, shard_id, rng.randint(1, 12))
    if spec is None:
        return None
    primary = await cluster.primary_of(shard_id)
    others = [one for one in cluster.running if one is not primary]
    await cluster.clock.sleep(rng.uniform(0.0, 0.3))
    match row.victim:
        case Victim.PRIMARY:
            if manner.cold:
                await kill_all(others)
            await cluster.arm(primary, spec)
            if "kill" not in spec:
                await _fail(cluster, primary, shard_id)
            else:
                await await_kill(cluster, primary)
        case Victim.STANDBY:
            (standby,) = others
            await cluster.arm(standby, spec)
            await primary.process.kill()
            await _mourn(cluster, manner)
            await await_kill(cluster, standby)
        case Victim.FRESH:
            await kill_all(cluster.running)
            await _mourn(cluster, manner)
            fresh = await cluster.start_member(failpoints=spec, ready=False)
            await await_kill(cluster, fresh)
    died = cluster.clock.monotonic()
    await _mourn(cluster, manner)
    async with TaskScope("members") as scope:
        for _ in range(2 - len(cluster.running)):
            scope.spawn(cluster.start_member(), name="member")
        await cluster.await_up(standbys=False)
        replaced_s = cluster.clock.monotonic() - died
    await cluster.await_up(standbys=True)
    await cluster.check()
    return Death(replaced_s, manner.expire)


async def await_kill(cluster: FoldCluster, member: Member) -> None:
    code = await cluster.await_death(member, DEATH_S)
    assert code == -signal.SIGKILL, f"{member.id} ended with {code}:\n{member.process.log_tail()}"


async def kill_all(members: list[Member]) -> None:
    for member in list(members):
        await member.process.kill()


async def _mourn(cluster: FoldCluster, manner: Manner) -> None:
    if not manner.expire:
        await cluster.expel([one for one in cluster.members if not one.process.running])


async def _fail(cluster: FoldCluster, primary: Member, shard_id: str) -> None:
    """Retry a shard in a database, which fails when the answer to its COMMIT is lost.

    Its next owner knows better. That is, now and then, the same process, once an operator has had it retried.
    """
    async with asyncio.timeout(DEATH_S):
        while not await cluster.is_failed(shard_id):
            await cluster.clock.sleep(0.1)
    if cluster.rng.random() < 0.5:
        await cluster.repair()
        async with asyncio.timeout(DEATH_S):
            while await cluster.is_failed(shard_id):
                await cluster.clock.sleep(0.1)
        await cluster.await_up(standbys=False)
    await primary.process.kill()
