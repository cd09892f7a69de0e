"""Items, zones and members as a network whose cheapest flow is the desired assignment.

    item ──► zone of the item ──► member ──► sink
      └───────── not assigned ───────────────►┘

Every item sends one unit for each replica it wants. An arc from an item to a member has capacity
one, so replicas are on distinct members. With a single zone, the second column is left out. Costs
express the wishes, and each cost outweighs all that follow:

1. as many assignments as possible, then as many items as possible with at least one;

2. two zones for every item that has two or more replicas;

3. a fair share for every member, in proportion to its limit;

4. present assignments stay;

5. an even spread over zones.

A member's limit is a capacity. *How high* must a cost be to outweigh all lower levels? Two flows differ by a
set of simple cycles, which pass every item and member at most once. So a cost must exceed the gain of one
cycle in all lower levels. That gain depends on the number of members, not of items. Then the cheapest flow is
the best one by each level in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

# Bounds of bands around a member's fair share: in each next band, a unit costs one step more. Within a band,
# moving an item gains nothing. So assignments stay if a perfect balance is impossible. Around the share, each
# band is a single unit.
_BELOW_SHARE = 8
_ABOVE_SHARE = ((9, 8), (5, 4), (3, 2), (2, 1), (4, 1))
FAIRNESS_STEPS = _BELOW_SHARE + 1 + len(_ABOVE_SHARE)


@dataclass(frozen=True, slots=True)
class FlowMember:
    """A member of the network. ``zone`` counts from zero, without gaps. ``limit`` > 0.

    A member that ``leaves`` serves only items that list the member in ``kept``.
    """

    zone: int
    limit: int
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class FlowItem:
    """An item of the network. ``current`` and ``kept`` are distinct indices into the members."""

    replication: int
    current: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    """Members that leave, and may keep this item."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Price of one unit, per level."""

    spread: int
    move: int
    fairness: int
    zone: int
    unserved: int
    short: int

    @staticmethod
    def of(members: int, replication_max: int, ranks: int) -> Weights:
        """Return the prices of a network. ``ranks``: number of steps in the order of items; 0: no order."""
        # Greatest number of items in a simple cycle: between two items, the cycle passes a member.
        visits = members + 1
        below = visits * max(replication_max - 1, 1) + ranks
        move = below + 1
        below += 2 * members * move
        fairness = below + 1
        below += FAIRNESS_STEPS * fairness
        zone = below + 1
        below += 2 * visits * zone
        unserved = below + 1
        below += unserved
        return Weights(1, move, fairness, zone, unserved, below + 1)


def share_bounds(limit: int, demand: int, capacity: int) -> list[int]:
    """Return the counts of items at which the price of a member rises: ascending, one for each step of the
    price, and ``limit`` as the last. The member's share is limit·demand/capacity.
    """
    share = limit * demand
    # `-(-a // b)` rounds up.
    bounds = [-(-share * part // (capacity * _BELOW_SHARE)) for part in range(1, _BELOW_SHARE)]
    bounds += [share // capacity, -(-share // capacity)]
    bounds += [-(-share * num // (capacity * den)) for num, den in _ABOVE_SHARE]
    bounds.append(limit)
    ascending: list[int] = []
    for bound in bounds:
        least = ascending[-1] if ascending else 0
        ascending.append(min(max(bound, least), limit))
    return ascending
