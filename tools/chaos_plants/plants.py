"""The mistakes, and the runs in which they are found. Each was made once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Plant:
    """A mistake. In each of these modules, a function that takes the module makes the mistake. ``chaos`` are
    the flags of a run that finds it."""

    puts: Mapping[str, Callable[[Any], None]]
    chaos: tuple[str, ...]


def _late_uploads(upload_gate: Any) -> None:
    """Let a follower leave each finished spool to the primary, whether or not that has its bytes."""
    complete = upload_gate.UploadGate.spool_complete

    def spool_complete(self: Any, spool: Any) -> None:
        if self.end is not None:
            complete(self, spool)
            return
        never = asyncio.Event()
        self._uploads.spool_complete(spool, life=self._life, tenure=self._tenure, reassigned=never)

    upload_gate.UploadGate.spool_complete = spool_complete


def _survivors_wait(append_fsm: Any) -> None:
    """Let a primary that lacks replicas refuse appends, and leave its open fragment as it is."""
    machine, too_few = append_fsm.AppendFSM, append_fsm.Status.INSUFFICIENT_JOURNAL_BROKERS
    await_desired_replicas = machine._await_desired_replicas

    def refused(self: Any) -> Any:
        if len(self.at.route.members) < self.at.desired_replication:
            return self._refuse(too_few)
        return await_desired_replicas(self)

    machine._await_desired_replicas = refused


def _newcomers_lead(key_space: Any) -> None:
    """Promote a broker that has just joined as readily as the survivor that has the journal's end."""
    key_space.progress = lambda assignment: 0


def _lives_by_name(key_space: Any) -> None:
    """Take a journal that was created again for the one of before."""
    spec_of = key_space.spec_of

    def by_name(state: Any, journal: str, life: int) -> Any:
        item = state.item(journal)
        return spec_of(state, journal, life if item is None else item.raw.create_revision)

    key_space.spec_of = by_name


def _lives_unasked(known_head: Any) -> None:
    """Let etcd say of each journal that it is the one of before."""
    read = known_head.read_head

    async def unasked(*args: Any) -> Any:
        _, head = await read(*args)
        return True, head

    known_head.read_head = unasked


def _no_lease(lease_guard: Any) -> None:
    """Let a broker answer whether or not its lease holds."""
    lease_guard.LeaseGuard.holds = property(lambda self: True)


PLANTS: Final = {
    "late-uploads": Plant(
        {
            "gazette.broker.replication.upload_gate": _late_uploads,
            "gazette.broker.append.fsm": _survivors_wait,
            "gazette.broker.key_space": _newcomers_lead,
        },
        ("--minutes=3", "--lease=5s", "--seed=1", "--replication=3", "--rate=2", "--faults=kill"),
    ),
    "lives-by-name": Plant(
        {
            "gazette.broker.key_space": _lives_by_name,
            "gazette.broker.known_head": _lives_unasked,
        },
        (
            "--minutes=1.3",
            "--seed=1",
            "--replication=3",
            "--rate=2",
            "--faults=journal is created again while its store fails",
        ),
    ),
    "no-lease": Plant(
        {"gazette.broker.lease_guard": _no_lease},
        (
            "--minutes=1.3",
            "--lease=5s",
            "--seed=1",
            "--replication=1",
            "--rate=2",
            "--faults=pause beyond the lease,journal is created again",
        ),
    ),
}
