"""Aggregates of windows: how values become one state, and a state one result. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gazette.message.values import finite

S = TypeVar("S")
V = TypeVar("V")
R = TypeVar("R")


@dataclass(frozen=True)
class Aggregate(Generic[S, V, R]):
    """An aggregate of values ``V``, by a state ``S`` that is kept as JSON, with a result ``R``.

    ``add`` and ``merge`` return the new state. ``merge`` joins the states of two sessions, the
    earlier one first. Windows other than `Sessions` do not need it. ``state_type`` is the type of states:
    ``dict[int, int]``, ``set[str]``, a Struct. Without it, states hold only what JSON has.

    ``name`` and the type are a part of the definition of windows: a state that was made by another
    aggregate is refused. Without a name, only the type is.
    """

    zero: Callable[[], S]
    add: Callable[[S, V], S]
    result: Callable[[S], R]
    merge: Callable[[S, S], S] | None = None
    state_type: Any = Any
    name: str = ""


def count() -> Aggregate[int, Any, int]:
    """Return the aggregate that counts values."""
    return Aggregate(
        zero=lambda: 0,
        add=lambda state, _: state + 1,
        result=_same,
        merge=lambda one, other: one + other,
        state_type=int,
        name="count",
    )


def total() -> Aggregate[float, float, float]:
    """Return the aggregate that sums numbers. Sums of integers are exact."""
    return Aggregate(
        zero=lambda: 0,
        add=lambda state, value: state + value,
        result=_same,
        merge=lambda one, other: one + other,
        state_type=int | float,
        name="total",
    )


def least(value_type: Any = Any) -> Aggregate[Any, Any, Any]:
    """Return the aggregate of the least value. Give ``value_type`` for values that JSON does not have."""
    return Aggregate(
        zero=_none,
        add=lambda state, value: _least(state, finite(value)),
        result=_same,
        merge=_least,
        state_type=value_type,
        name="least",
    )


def greatest(value_type: Any = Any) -> Aggregate[Any, Any, Any]:
    """Return the aggregate of the greatest value. See `least` for ``value_type``."""
    return Aggregate(
        zero=_none,
        add=lambda state, value: _greatest(state, finite(value)),
        result=_same,
        merge=_greatest,
        state_type=value_type,
        name="greatest",
    )


def mean() -> Aggregate[tuple[float, int], float, float]:
    """Return the aggregate of the arithmetic mean of numbers."""
    return Aggregate(
        zero=lambda: (0, 0),
        add=lambda state, value: (state[0] + value, state[1] + 1),
        result=lambda state: state[0] / state[1],
        merge=lambda one, other: (one[0] + other[0], one[1] + other[1]),
        state_type=tuple[int | float, int],
        name="mean",
    )


def _same(state: S) -> S:
    return state


def _none() -> Any:
    return None


def _least(one: Any, other: Any) -> Any:
    return other if one is None or other < one else one


def _greatest(one: Any, other: Any) -> Any:
    return other if one is None or other > one else one
