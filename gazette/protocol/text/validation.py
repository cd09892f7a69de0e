"""Context of validation errors: the path to the invalid value."""

from __future__ import annotations

from types import TracebackType

from gazette.errors import Invalid


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
