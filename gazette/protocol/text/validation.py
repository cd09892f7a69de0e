"""Context of validation errors: the path to the invalid value. Bounds of integers in messages."""

from __future__ import annotations

from types import TracebackType
from typing import Final

from gazette.errors import Invalid

INT32: Final = (-(1 << 31), (1 << 31) - 1)
UINT32: Final = (0, (1 << 32) - 1)
INT64: Final = (-(1 << 63), (1 << 63) - 1)
UINT64: Final = (0, (1 << 64) - 1)


def require_fit(name: str, value: int, bounds: tuple[int, int] = INT64) -> None:
    """Raise ``Invalid`` for an integer that its field in a message of gRPC cannot hold."""
    least, most = bounds
    if not least <= value <= most:
        raise Invalid(f"invalid {name} ({value}; expected {least} <= {name} <= {most})")


class within:
    """Prefix ``context`` to the path of an ``Invalid`` that the block raises.

    Blocks nest. An error inside ``within("Fragment")`` and ``within("Stores[1]")`` reads
    ``Fragment.Stores[1]: message``. Other exceptions pass unchanged.
    """

    __slots__ = ("context",)

    def __init__(self, context: str) -> None:
        self.context = context

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if isinstance(error, Invalid):
            raise error.within(self.context) from error.__cause__
