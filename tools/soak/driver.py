"""Breaks a soaking cluster, one fault after another, and says when it works again.

After each fault the driver repairs the cluster, as supervisors and operators do. It starts processes that
have ended. It unassigns FAILED shards, unless they announce a restart. It confirms heads of journals if all
brokers had ended. The next fault waits until everything is as before. So faults never take more at once than
replication permits.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from gazette.client.client import Client
from gazette.consumer.shard.restarts import ANNOUNCED
from gazette.errors import GazetteError, Unavailable
from gazette.run.dev.heads import resume_journals
from tools.soak.cluster import SoakCluster
from tools.soak.diagnosis import diagnose
from tools.soak.faults import Fault, Faults, Process

SETTLE_S: Final = 180.0
"""Seconds after a fault within which everything must be as before."""
PAUSE_S: Final = 2.0
POLL_S: Final = 0.25
RESUME_S: Final = 20.0


@dataclass(slots=True)
class Outcome:
    """The result of one fault. Times in seconds."""

    kind: str
    target: str
    lasted_s: float
    """Time from its beginning until it was repaired."""
    service_s: float
    """The longest time between two sums of one shard, until everything was as before."""
    settled_s: float
    """Time from its beginning until everything was as before."""
    failed: dict[str, str] = field(default_factory=dict)
    """Errors of shards that were FAILED, and had to be unassigned."""
    restarted: int = 0
    """Number of times that shards were FAILED, and announced an automatic restart."""
    heads: int = 0
    """Journals whose heads had to be confirmed, because all brokers had ended."""


class Service(Protocol):
    """The load: it says when the shards did their work."""

    def served_since(self, time: float) -> float | None:
        """Return when every shard had done work that began after ``time``; None if one has not."""
        ...

    def longest_gap(self, begin: float, end: float) -> float:
        """Return the longest time within which a shard got no work done, in seconds."""
        ...


class Driver:
    """``run`` makes faults until it is cancelled; ``heal`` then repairs what is broken."""

    def __init__(
        self,
        cluster: SoakCluster,
        service: Service,
        rng: random.Random,
        note: Callable[..., None],
        *,
        scenarios: tuple[str, ...] = (),
        faults: Faults | None = None,
    ) -> None:
        """Create a driver. ``scenarios`` restricts the faults; ``note(event, **facts)`` writes history."""
        self.outcomes: list[Outcome] = []
        self._cluster = cluster
        self._clock = cluster.clock
        self._service = service
        self._rng = rng
        self._note = note
        self._client: Client = cluster.client()
        self._failed: dict[str, str] = {}
        self._restarted: dict[str, str] = {}
        """Errors of replicas that are FAILED now, and announce a restart."""
        self.ended: set[str] = set()
        """Brokers that ended since the fault began."""
        self.restarts = 0
        self._heads = 0
        self._faults = faults or Faults(cluster, note)
        found = self._faults.all()
        self.faults = [
            one
            for one in found
            # When all brokers have ended, appends are refused until an operator has confirmed the
            # heads. Faults that end all brokers are used only if they are named.
            if (one.kind in scenarios if scenarios else not one.ends_brokers)
        ]
        self._fault: Fault | None = None

    async def run(self) -> None:
        """Inject each fault once, in any order, and then again.

        Raise ``Unavailable`` when the cluster does not come back.
        """
        while True:
            faults = list(self.faults)
            self._rng.shuffle(faults)
            for fault in faults:
                await self._clock.sleep(self._rng.uniform(PAUSE_S, 2 * PAUSE_S))
                await self._one(fault)

    async def _one(self, fault: Fault) -> None:
        """Make a fault, repair the cluster until everything is as before, and note the outcome."""
        began = self._clock.monotonic()
        faults, self._fault = self._faults, fault
        faults.target, faults.outage_s = "", 0.0
        self._failed, self.ended, self._heads = {}, set(), 0
        self.restarts = 0
        self._note("fault", kind=fault.kind)
        await fault.act(self._rng)
        healed = self._clock.monotonic()
        self._note("healed", kind=fault.kind, target=faults.target)
        await self.settle(healed)
        settled = self._clock.monotonic()
        outcome = Outcome(
            fault.kind,
            faults.target,
            healed - began,
            self._service.longest_gap(began, settled),
            settled - began,
            dict(self._failed),
            self.restarts,
            self._heads,
        )
        self.outcomes.append(outcome)
        self._note(
            "settled",
            kind=fault.kind,
            target=faults.target,
            lasted_s=round(outcome.lasted_s, 2),
            service_s=round(outcome.service_s, 2),
            settled_s=round(outcome.settled_s, 2),
            failed=outcome.failed,
            heads=outcome.heads,
        )

    # -- repairing

    async def settle(self, since: float) -> None:
        """Return when all is as it was before. After `SETTLE_S`, raise ``Unavailable`` with what is missing,
        and a diagnosis."""
        began = self._clock.monotonic()
        waits: Counter[str] = Counter()
        while True:
            asked = self._clock.monotonic()
            try:
                async with asyncio.timeout(SETTLE_S):
                    missing = await self.missing(since)
            except TimeoutError:
                missing = f"looking at it does not end within {SETTLE_S:.0f} s"
            if not missing:
                return
            if asked - began > SETTLE_S:
                raise Unavailable(
                    f"not settled within {SETTLE_S:.0f} s after {self._kind}"
                    f" ({self._faults.target}): {missing}",
                    hint=await diagnose(self._cluster, waits),
                )
            await self._clock.sleep(POLL_S)
            waits[missing] += round((self._clock.monotonic() - asked) * 1000)

    @property
    def _kind(self) -> str:
        return "nothing" if self._fault is None else self._fault.kind

    async def missing(self, since: float) -> str:
        """Do what an operator does. Return what is still not as before, as text; empty if everything is."""
        cluster = self._cluster
        await self._start_what_ended()
        if missing := await cluster.missing_members():
            return missing
        if missing := cluster.has_replicas():
            return missing
        if missing := await self._confirm_heads():
            return missing
        await self._unassign_failed()
        if missing := await cluster.missing_shards():
            return missing
        if self._service.served_since(since) is None:
            return "a shard has not summed anything since"
        for spec in cluster.specs():
            if missing := await cluster.unstored(self._client, spec.name):
                return missing
        return ""

    async def _start_what_ended(self) -> None:
        """Start every process again that has ended, as the supervisor of a cluster does."""
        brokers, members = self._cluster.brokers, self._cluster.members
        self.ended |= {child.name for child in brokers if not child.process.running}
        processes: list[Process] = [*brokers, *members]
        for child in processes:
            if not child.process.running:
                self._note("ended", process=child.name, code=child.process.exit_code)
                # Do not wait until it serves: it may need another process that is down.
                await child.process.start()

    async def _confirm_heads(self) -> str:
        """Confirm heads as an operator does after all brokers have ended: no process has further bytes.

        Raise ``Unavailable`` if they ended although they should not have.
        """
        if self.ended != {one.name for one in self._cluster.brokers}:
            return ""
        lease_s, outage_s = self._cluster.settings.lease_ttl_s, self._faults.outage_s
        # Leases are renewed so often that at least two thirds were left when etcd went away.
        ends_brokers = self._fault is not None and self._fault.ends_brokers
        if not ends_brokers and outage_s < lease_s / 2:
            raise Unavailable(
                f"all brokers ended after {self._kind}, though etcd was away for {outage_s:.1f} s"
                f" of a lease of {lease_s:.0f} s",
                hint=await diagnose(self._cluster, {}),
            )
        try:
            async with asyncio.timeout(RESUME_S):
                resumed = await resume_journals(self._client)
        except (GazetteError, TimeoutError) as error:
            return f"heads cannot be confirmed: {error!r}"
        self._heads += len(resumed)
        self._note("heads-confirmed", journals=resumed, outage_s=round(outage_s, 1))
        self.ended = set()
        return ""

    async def _unassign_failed(self) -> None:
        """Note FAILED shards, and unassign those that announce no restart."""
        errors = await self._cluster.failed_shards()
        restarted = {name: error for name, error in errors.items() if ANNOUNCED in error}
        for name in restarted.keys() - self._restarted.keys():
            self.restarts += 1
            self._note("restarted", replica=name, error=restarted[name])
        self._restarted = restarted
        failed = {name: error for name, error in errors.items() if name not in restarted}
        if not failed:
            return
        new = {name: error for name, error in failed.items() if self._failed.get(name) != error}
        for name, error in new.items():
            self._note("failed", replica=name, error=error)
        self._failed |= failed
        try:
            await self._cluster.unassign_failed()
        except (GazetteError, TimeoutError) as error:
            self._note("not-unassigned", error=repr(error))

    async def heal(self) -> None:
        """Undo what faults have broken."""
        await self._faults.heal()

    async def close(self) -> None:
        await self._client.close()
