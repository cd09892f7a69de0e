"""Aggregates of windows: they add values to a state, and make a result of it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from operator import gt, lt
from typing import Any, Generic, TypeVar

from gazette.errors import InvalidValue
from gazette.message.value_parts import shown
from gazette.message.values import finite

S = TypeVar("S")
V = TypeVar("V")
R = TypeVar("R")


@dataclass(frozen=True)
class Aggregate(Generic[S, V, R]):
    """An aggregate of values ``V``, with a state ``S`` that is kept as JSON, and a result ``R``.

    ``add`` and ``merge`` return the new state. ``merge`` joins the states of two sessions, the earlier
    session first. Only `Sessions` need ``merge``. ``state_type`` is the type of states: ``dict[int, int]``,
    ``set[str]``, a Struct. Without ``state_type``, states have only values of JSON.

    ``result`` is also called with each new state. If it returns NaN or an infinity, or raises an
    ``ArithmeticError``, the added value is refused. So each window can close.

    ``name`` and ``state_type`` are a part of the definition of windows: a stored state of another aggregate
    is refused. Without a name, only the type is compared.
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
        merge=lambda earlier, later: earlier + later,
        state_type=int,
        name="count",
    )


def total() -> Aggregate[float, float, float]:
    """Return the aggregate that sums numbers. Sums of integers are exact."""
    return Aggregate(
        zero=lambda: 0,
        add=_sum,
        result=_same,
        merge=_sum,
        state_type=int | float,
        name="total",
    )


def least(value_type: Any = Any) -> Aggregate[Any, Any, Any]:
    """Return the aggregate of the least value. Values that JSON does not have need ``value_type``."""
    return Aggregate(
        zero=_none,
        add=lambda state, value: _first(lt, state, value),
        result=_same,
        merge=lambda earlier, later: _first(lt, earlier, later),
        state_type=value_type,
        name="least",
    )


def greatest(value_type: Any = Any) -> Aggregate[Any, Any, Any]:
    """Return the aggregate of the greatest value. See `least` for ``value_type``."""
    return Aggregate(
        zero=_none,
        add=lambda state, value: _first(gt, state, value),
        result=_same,
        merge=lambda earlier, later: _first(gt, earlier, later),
        state_type=value_type,
        name="greatest",
    )


def mean() -> Aggregate[tuple[float, int], float, float]:
    """Return the aggregate of the arithmetic mean of numbers."""
    return Aggregate(
        zero=lambda: (0, 0),
        add=lambda state, value: (_sum(state[0], value), state[1] + 1),
        result=lambda state: state[0] / state[1],
        merge=lambda earlier, later: (_sum(earlier[0], later[0]), earlier[1] + later[1]),
        state_type=tuple[int | float, int],
        name="mean",
    )


def _same(state: S) -> S:
    return state


def _none() -> Any:
    return None


def _sum(state: float, value: float) -> float:
    """Return the sum. Raise ``InvalidValue`` for a value that is no number, and for an overflow."""
    try:
        result = state + value
    except (ArithmeticError, TypeError) as error:
        raise _refused(f"cannot be added to {shown(state)}", value, error) from error
    if type(result) is float and not isfinite(result):
        finite(value, "value")  # Raises if the value itself is NaN or infinite.
        raise InvalidValue(
            f"is {value}: added to {state}, it makes the sum overflow",
            path="value",
            hint="Leave it out, or scale the values: a float is at most 1.8e308. Sums of int have no bound.",
        )
    return result


def _first(is_before: Callable[[Any, Any], bool], state: Any, value: Any) -> Any:
    """Return the first value in the order ``is_before``. Raise ``InvalidValue`` if the order is undefined."""
    finite(value, "value")
    if value is None:
        raise InvalidValue("is None, which has no order", path="value", hint="Leave it out.")
    try:
        return value if state is None or is_before(value, state) else state
    except (ArithmeticError, TypeError) as error:
        raise _refused(f"cannot be compared with {shown(state)}", value, error) from error


def _refused(reason: str, value: object, error: Exception) -> InvalidValue:
    return InvalidValue(
        f"is {shown(value)}, which {reason}: {error}",
        path="value",
        hint="Give all values of these windows one type.",
    )
