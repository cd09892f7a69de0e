"""The times of faults, and the combinations that a cluster must survive. Pure.

A plan follows from the seed alone. ``Bounds`` holds a planned fault back while it would break the promise
of docs/consistency.md, so that every acknowledged byte must be there in the end:

* A broker counts as *gone* when it is killed, asked to leave, or away for longer than its lease.
* It counts as gone until the others had ``store_s`` seconds in which they could store their content, and
  until every journal has all of its replicas in etcd again. ``Bounds`` never looks into stores.
* With a replication of R, at most R-1 brokers are gone at a time; with R=1, fewer than half of all.
* Seconds in which stores, etcd, disks or links between brokers were broken do not count.

Two kinds of faults end all replicas, and say so in the history: the death of all brokers at once, and an
etcd that is away for longer than all leases. With R=1, each death is such a loss.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from gazette.errors import Invalid

ETCD: Final = "etcd"
STORE: Final = "store"
LINKS: Final = "links"


class Effect(Enum):
    """The effect of a fault on the promise."""

    GONE = auto()
    """A broker, and what it holds, is away."""
    ALL = auto()
    """Every broker ends."""
    IMPAIRS = auto()
    """Survivors may be unable to store what they hold."""
    HARMLESS = auto()
    REPLACES = auto()
    """Journals end, and others begin under their names."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.

    It lasts ``shortest`` to ``longest`` times the lease. ``resource`` (empty: its broker) cannot have two
    faults at a time. ``weight`` says how often it is chosen among the kinds of its effect.
    """

    name: str
    effect: Effect
    shortest: float
    longest: float
    resource: str = ""
    weight: int = 1


KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind("kill", Effect.GONE, 0.0, 1.5, weight=4),
        Kind("terminate", Effect.GONE, 0.0, 0.3),
        Kind("pause beyond the lease", Effect.GONE, 1.3, 2.5, weight=2),
        Kind("cut from etcd beyond the lease", Effect.GONE, 1.3, 1.8),
        Kind("kill all brokers", Effect.ALL, 0.1, 1.5),
        Kind("pause etcd beyond the lease", Effect.ALL, 1.3, 1.5, resource=ETCD),
        Kind("kill etcd", Effect.IMPAIRS, 0.0, 0.25, resource=ETCD),
        Kind("pause etcd", Effect.IMPAIRS, 0.05, 0.25, resource=ETCD),
        Kind("cut from etcd", Effect.IMPAIRS, 0.05, 0.25),
        Kind("cut from brokers", Effect.IMPAIRS, 0.2, 1.2, resource=LINKS),
        Kind("cut between two brokers", Effect.IMPAIRS, 0.2, 1.2, resource=LINKS),
        Kind("store is missing", Effect.IMPAIRS, 0.2, 1.0, resource=STORE),
        Kind("store is read-only", Effect.IMPAIRS, 0.2, 1.0, resource=STORE),
        Kind("store hangs", Effect.IMPAIRS, 0.3, 2.0, resource=STORE, weight=2),
        Kind("disk is full", Effect.IMPAIRS, 0.1, 0.6),
        Kind("pause", Effect.HARMLESS, 0.05, 0.4, weight=2),
        Kind("cut from clients", Effect.HARMLESS, 0.2, 1.2, weight=2),
        Kind("clock jumps", Effect.HARMLESS, 0.2, 3.0),
        Kind("journal is created again", Effect.REPLACES, 0.0, 0.3, resource="lives"),
        Kind(
            "journal is created again while its store fails",
            Effect.REPLACES,
            0.0,
            0.03,
            resource="lives",
        ),
    )
}
_GAPS_S: Final = {
    Effect.GONE: (2.0, 14.0),
    Effect.ALL: (60.0, 140.0),
    Effect.IMPAIRS: (6.0, 18.0),
    Effect.HARMLESS: (2.0, 9.0),
    Effect.REPLACES: (10.0, 40.0),
}
"""Least and most seconds between the beginnings of two faults of an effect."""
_TWINS: Final = 0.5
"""Probability that a second broker follows a first one at once."""
_TWIN_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault to come. Times in seconds since faults began, without the quiet times between them.

    ``target`` chooses a broker, and ``dice`` (0 to 1) chooses all else.
    """

    begin: float
    seconds: float
    kind: Kind
    target: int
    dice: float


def kinds_of(names: Sequence[str]) -> list[Kind]:
    """Return the kinds of these names; all if there are no names. Raise ``Invalid`` for an unknown one."""
    for name in names:
        if name not in KINDS:
            raise Invalid(
                f'unknown fault "{name}"', path="--faults", hint=f"One of {', '.join(KINDS)}."
            )
    return [KINDS[name] for name in names] if names else list(KINDS.values())


def plan(
    seed: int, seconds: float, brokers: int, lease_s: float, kinds: Collection[Kind]
) -> list[Planned]:
    """Return the faults of a run, in order. They depend on the arguments only."""
    planned = [
        fault
        for effect in Effect
        for fault in _lane(
            random.Random(f"{seed} {effect.name}"),
            seconds,
            brokers,
            lease_s,
            [kind for kind in kinds if kind.effect is effect],
        )
    ]
    return sorted(planned, key=lambda fault: fault.begin)


def _lane(
    rng: random.Random, seconds: float, brokers: int, lease_s: float, kinds: Sequence[Kind]
) -> Iterator[Planned]:
    if not kinds:
        return
    weights = [kind.weight for kind in kinds]
    # Each kind once, in any order, before the dice decide.
    first = list(kinds)
    rng.shuffle(first)
    gap = _GAPS_S[kinds[0].effect]
    begin = rng.uniform(*gap) / 2
    while begin < seconds:
        kind = first.pop() if first else rng.choices(kinds, weights)[0]
        target = rng.randrange(brokers)
        yield _planned(rng, begin, kind, target, lease_s)
        if kind.effect is Effect.GONE and brokers > 1 and rng.random() < _TWINS:
            second = (target + 1 + rng.randrange(brokers - 1)) % brokers
            twin = rng.choices(kinds, weights)[0]
            yield _planned(rng, begin + rng.uniform(0.0, _TWIN_S), twin, second, lease_s)
        begin += rng.uniform(*gap)


def _planned(rng: random.Random, begin: float, kind: Kind, target: int, lease_s: float) -> Planned:
    seconds = rng.uniform(kind.shortest, kind.longest) * lease_s
    return Planned(begin, seconds, kind, target, rng.random())


class Bounds:
    """Decides which faults may begin. Call ``tick`` often, with the present faults.

    ``floor`` is the smallest replication above 1. It is 1 without such a journal: a broker is then gone as
    long as it is broken, and most brokers must be there to take over.
    """

    def __init__(self, floor: int, brokers: int, store_s: float) -> None:
        self._replicated = floor > 1
        self._most = floor - 1 if self._replicated else max((brokers - 1) // 2, 1)
        self._store_s = store_s if self._replicated else 0.0
        self._clear: dict[str, float] = {}
        """By broker that counts as gone: seconds in which others could store what they hold."""
        self.now = 0.0
        self._all_until_whole = False

    @property
    def gone(self) -> Mapping[str, float]:
        return self._clear

    @property
    def exceeded(self) -> bool:
        """True if more brokers are gone than the promise covers."""
        return self._replicated and len(self._clear) > self._most

    def admits(self, effect: Effect, broker: str) -> bool:
        """Return True if such a fault may begin now."""
        if effect is Effect.ALL:
            return not self._clear and not self._all_until_whole
        if effect is not Effect.GONE:
            return True
        return not self._all_until_whole and len({*self._clear, broker}) <= self._most

    def begin(self, effect: Effect, broker: str) -> None:
        """Note a fault that begins."""
        if effect is Effect.GONE:
            self._clear[broker] = 0.0
        elif effect is Effect.ALL:
            self._clear.clear()
            self._all_until_whole = True

    def tick(self, now: float, *, impaired: bool, whole: bool, away: Collection[str]) -> None:
        """Count the seconds since the last call.

        ``whole``: every journal has all replicas in etcd. ``away``: brokers that are broken now.
        """
        passed, self.now = now - self.now, now
        for broker in list(self._clear):
            if not impaired:
                self._clear[broker] += passed
            settled = whole or not self._replicated
            if settled and broker not in away and self._clear[broker] >= self._store_s:
                del self._clear[broker]
        if whole and not away:
            self._all_until_whole = False
