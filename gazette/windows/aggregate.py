"""Aggregates of windows: how values become one state, and a state one result. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

S = TypeVar("S")
V = TypeVar("V")
R = TypeVar("R")


@dataclass(frozen=True)
class Aggregate(Generic[S, V, R]):
    """An aggregate of values ``V``, by a state ``S`` that JSON can hold, with a result ``R``.

    ``add`` and ``merge`` return the new state. ``merge`` joins the states of two sessions, the
    earlier one first. Windows other than `Sessions` do not need it. ``state_type`` is the type that
    states decode to, for msgspec.
    """

    zero: Callable[[], S]
    add: Callable[[S, V], S]
    result: Callable[[S], R]
    merge: Callable[[S, S], S] | None = None
    state_type: Any = Any


def count() -> Aggregate[int, Any, int]:
    """Return the aggregate that counts values."""
    return Aggregate(
        zero=lambda: 0,
        add=lambda state, _: state + 1,
        result=_same,
        merge=lambda one, other: one + other,
        state_type=int,
    )


def total() -> Aggregate[float, float, float]:
    """Return the aggregate that sums numbers. Sums of integers are exact."""
    return Aggregate(
        zero=lambda: 0,
        add=lambda state, value: state + value,
        result=_same,
        merge=lambda one, other: one + other,
        state_type=int | float,
    )


def least() -> Aggregate[Any, Any, Any]:
    """Return the aggregate of the least value."""
    return Aggregate(zero=_none, add=_least, result=_same, merge=_least)


def greatest() -> Aggregate[Any, Any, Any]:
    """Return the aggregate of the greatest value."""
    return Aggregate(zero=_none, add=_greatest, result=_same, merge=_greatest)


def mean() -> Aggregate[tuple[float, int], float, float]:
    """Return the aggregate of the arithmetic mean of numbers."""
    return Aggregate(
        zero=lambda: (0, 0),
        add=lambda state, value: (state[0] + value, state[1] + 1),
        result=lambda state: state[0] / state[1],
        merge=lambda one, other: (one[0] + other[0], one[1] + other[1]),
        state_type=tuple[int | float, int],
    )


def _same(state: S) -> S:
    return state


def _none() -> Any:
    return None


def _least(one: Any, other: Any) -> Any:
    return other if one is None or other < one else one


def _greatest(one: Any, other: Any) -> Any:
    return other if one is None or other > one else one
