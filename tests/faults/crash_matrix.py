"""The rows of the crash-point matrix: at which point of a transaction, or of a promotion, a member dies.

In a specification, ``{shard}`` is the shard that it is about and ``{n}`` a number drawn for each run, so
that it is another transaction each time.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass
from typing import Final

from gazette.dev.word_count import Member
from gazette.tasks import TaskScope
from tests.faults.fold_cluster import LOGGED, FoldCluster, shard_of

LOG: Final = "recovery/fold/{shard}"
FIRST, SECOND = "out/{shard}/a", "out/{shard}/b"


class Who(enum.Enum):
    """Who dies at the point."""

    PRIMARY = "primary"
    STANDBY = "standby, in its promotion after the primary was killed"
    FRESH = "a new member, as it begins to recover"
    NOBODY = "nobody: the point fails, and later somebody is killed"


@dataclass(frozen=True)
class Row:
    """``logged`` is what to arm for shards with a recovery log, ``remote`` for those in a database;
    None where the row does not apply."""

    name: str
    logged: str | None
    remote: str | None
    who: Who = Who.PRIMARY

    def spec(self, kind: str, n: int) -> str | None:
        text = self.logged if kind in LOGGED else self.remote
        return None if text is None else text.format(shard=shard_of(kind), n=n, m=n + 1)


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
        "the commit's content sent, not its end",
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
        Who.STANDBY,
    ),
    Row(
        "files in place, store not open",
        f"recovery.live({LOG})=kill",
        None,
        Who.STANDBY,
    ),
    Row(
        "store open, recovered hints not stored",
        "promotion.opened({shard})=kill",
        "promotion.opened({shard})=kill",
        Who.STANDBY,
    ),
    Row(
        "recovered hints stored, nothing consumed",
        "promotion.hinted({shard})=kill",
        None,
        Who.STANDBY,
    ),
    Row(
        "play-back begun",
        f"recovery.playing({LOG})=kill",
        None,
        Who.FRESH,
    ),
)


async def run(cluster: FoldCluster, row: Row, kind: str, *, cold: bool) -> bool:
    """One cell, once: die there, have others take over, check everything. False: it does not apply.

    ``cold``: without a standby, so that a process that is started then recovers everything.
    """
    spec = row.spec(kind, cluster.rng.randint(2, 12))
    if spec is None:
        return False
    shard_id = shard_of(kind)
    primary = await cluster.primary_of(shard_id)
    others = [one for one in cluster.running if one is not primary]
    match row.who:
        case Who.PRIMARY:
            if cold:
                await kill_all(others)
            await cluster.arm(primary, spec)
            if "error" in spec and "kill" not in spec:
                await _fail_and_repair(cluster, primary, shard_id)
            else:
                assert await cluster.await_death(primary) == -signal.SIGKILL
        case Who.STANDBY:
            (standby,) = others
            await cluster.arm(standby, spec)
            await primary.process.kill()
            assert await cluster.await_death(standby) == -signal.SIGKILL
        case Who.FRESH:
            await kill_all(cluster.running)
            fresh = await cluster.start_member(failpoints=spec, ready=False)
            assert await cluster.await_death(fresh) == -signal.SIGKILL
    async with TaskScope("members") as scope:
        for _ in range(2 - len(cluster.running)):
            scope.spawn(cluster.start_member(), name="member")
    await cluster.await_up(standbys=True)
    await cluster.check()
    return True


async def kill_all(members: list[Member]) -> None:
    for member in list(members):
        await member.process.kill()


async def _fail_and_repair(cluster: FoldCluster, primary: Member, shard_id: str) -> None:
    """A shard in a database fails when the answer to its COMMIT is lost; its next owner knows better."""
    while not await cluster.is_failed(shard_id):
        await cluster.clock.sleep(0.05)
    await cluster.repair()
