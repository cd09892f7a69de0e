"""Items that a leaving member still holds, and the reason why each item is still there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gazette.cluster.allocator.model import MemberId
from gazette.cluster.allocator.state import State

_NAMES_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class ItemNames:
    """Names of the items and members of a cluster: ``journal``, ``broker``."""

    item: str
    member: str

    def items(self, count: int) -> str:
        return f"{count} {self.item}{'' if count == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class DrainStatus:
    """Items of a leaving member, by the reason why they are still there. Items are sorted by name.

    ``staying`` are the other members, as ``zone#id``, that have a limit above zero and do not leave.
    """

    needing_members: tuple[str, ...] = ()
    """Items that no other member can take over: their replicas need more members."""
    replicas: int = 0
    """Greatest replication among these items."""
    replicas_least: int = 0
    """Least replication among these items."""
    needing_room: int = 0
    """Number of items in ``moving`` that stay here because the other members are at their limits."""
    moving: tuple[str, ...] = ()
    """The other items. All but ``needing_room`` of them will soon be handed over."""
    staying: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.needing_members) + len(self.moving)

    @property
    def is_stuck(self) -> bool:
        """True if an item stays here until another member joins or has capacity."""
        return bool(self.needing_members or self.needing_room)

    def describe(self, names: ItemNames) -> str:
        """Return one line for an operator: the remaining items, the reason, and a remedy."""
        if not self.count:
            return f"no {names.item} is left"
        parts = []
        if self.needing_members:
            parts.append(self._without_members(names))
        if self.needing_room:
            parts.append(
                f"the other {names.member}s are at their limits and have no room for "
                f"{names.items(self.needing_room)}: raise limits or start another {names.member}"
            )
        if moving := len(self.moving) - self.needing_room:
            are = "is" if moving == 1 else "are"
            # If some have no room, it is not known which: then no names are given.
            which = "" if self.needing_room else f": {_some(self.moving)}"
            parts.append(f"{names.items(moving)} {are} being handed over{which}")
        return f"{names.items(self.count)} left; " + "; ".join(parts)

    def _without_members(self, names: ItemNames) -> str:
        count = len(self.needing_members)
        staying = "none stays"
        if self.staying:
            stays = "stays" if len(self.staying) == 1 else "stay"
            staying = f"{len(self.staying)} {stays} ({_some(self.staying)})"
        return (
            f"{names.items(count)} {'waits' if count == 1 else 'wait'} for another {names.member} to "
            f"start, as {self._replication(names)}, and {staying}: {_some(self.needing_members)}"
        )

    def _replication(self, names: ItemNames) -> str:
        others = f"other {names.member}{'' if self.replicas == 1 else 's'}"
        if self.replicas_least < self.replicas:
            return f"replications of {self.replicas_least} to {self.replicas} need as many {others}"
        return f"a replication of {self.replicas} needs {self.replicas} {others}"


def drain_status(state: State) -> DrainStatus:
    """Return the items that the local member would hold if it left now."""
    demand = state.demand
    staying = [
        kv.decoded
        for kv in state.members
        if kv.key != state.local_key
        and not kv.decoded.value.exiting()
        and kv.decoded.value.item_limit() > 0
    ]
    local = state.local_member
    member: MemberId = ("", "") if local is None else local.decoded.id
    # ``needed`` lacks this member before its announcement, or if it serves nothing. Then compare counts.
    needed_items = demand.needed.get(member)
    needing_members: list[str] = []
    moving: list[str] = []
    replicas: list[int] = []
    for local_item in state.local_items:
        item_id: str = local_item.item.decoded.id
        # An item that was created after the last observation is not assigned here yet.
        wanted = demand.replication.get(item_id, 0)
        if item_id in needed_items if needed_items is not None else wanted > len(staying):
            needing_members.append(item_id)
            replicas.append(wanted)
        else:
            moving.append(item_id)
    return DrainStatus(
        tuple(needing_members),
        max(replicas, default=0),  # replicas
        min(replicas, default=0),  # replicas_least
        min(demand.crowded.get(member, 0), len(moving)),  # needing_room
        tuple(moving),
        tuple("#".join(member.id) for member in staying),
    )


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - _NAMES_MAX
    return ", ".join(names[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
