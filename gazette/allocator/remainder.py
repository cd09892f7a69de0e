"""What a member that leaves still holds, and what each of these items waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gazette.allocator.model import MemberId
from gazette.allocator.state import State

_NAMES_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class Words:
    """What the items and members of a cluster are called: ``journal``, ``broker``."""

    item: str
    member: str

    def items(self, count: int) -> str:
        return f"{count} {self.item}{'' if count == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class Remainder:
    """The items of a member that leaves, by what they wait for. Items are in the order of names.

    ``staying`` are the other members which could hold something and do not leave, as ``zone#id``.
    """

    needing_members: tuple[str, ...] = ()
    """There are not enough other members for their replicas: nobody can take them over."""
    replicas: int = 0
    """The most that one of them wants."""
    replicas_least: int = 0
    """The fewest that one of them wants."""
    needing_room: int = 0
    """How many of the rest stay here because the other members are at their limits."""
    moving: tuple[str, ...] = ()
    """The rest. All but ``needing_room`` of them are about to be handed over."""
    staying: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.needing_members) + len(self.moving)

    @property
    def is_stuck(self) -> bool:
        """Whether something stays here for as long as no other member joins."""
        return bool(self.needing_members or self.needing_room)

    def describe(self, words: Words) -> str:
        """One line for an operator: what is left, why, and what would help."""
        if not self.count:
            return f"no {words.item} is left"
        parts = []
        if self.needing_members:
            parts.append(self._without_members(words))
        if self.needing_room:
            parts.append(
                f"the other {words.member}s are at their limits and have no room for "
                f"{words.items(self.needing_room)}: raise limits or start another {words.member}"
            )
        if moving := len(self.moving) - self.needing_room:
            are = "is" if moving == 1 else "are"
            parts.append(f"{words.items(moving)} {are} being handed over: {_some(self.moving)}")
        return f"{words.items(self.count)} left; " + "; ".join(parts)

    def _without_members(self, words: Words) -> str:
        count = len(self.needing_members)
        there = f"{len(self.staying)} {'stays' if len(self.staying) == 1 else 'stay'}" + (
            f" ({_some(self.staying)})" if self.staying else ""
        )
        return (
            f"{words.items(count)} {'waits' if count == 1 else 'wait'} for another {words.member} to "
            f"start, as a replication of {self._replication()} others and {there}: "
            f"{_some(self.needing_members)}"
        )

    def _replication(self) -> str:
        if self.replicas_least < self.replicas:
            return f"{self.replicas_least} to {self.replicas} needs as many"
        return f"{self.replicas} needs {self.replicas}"


def remainder(state: State) -> Remainder:
    """What the local member holds, if it leaves now."""
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
    # Until it is known in etcd that we leave, and when we serve nothing, what the others could hold counts.
    needed_from = demand.needed_from.get(member, len(staying) + 1)
    needing: list[str] = []
    moving: list[str] = []
    replicas: list[int] = []
    for one in state.local_items:
        item_id: str = one.item.decoded.id
        # An item that was created since the last observation is not ours yet.
        wanted = demand.replication.get(item_id, 0)
        if wanted >= needed_from:
            needing.append(item_id)
            replicas.append(wanted)
        else:
            moving.append(item_id)
    return Remainder(
        tuple(needing),
        max(replicas, default=0),
        min(replicas, default=0),
        min(demand.crowded.get(member, 0), len(moving)),
        tuple(moving),
        tuple("#".join(member.id) for member in staying),
    )


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - _NAMES_MAX
    return ", ".join(names[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
