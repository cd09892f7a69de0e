"""Where in a value a validation error was found."""

from __future__ import annotations

from types import TracebackType

from gazette.errors import Invalid


class within:
    """Put ``context`` in front of the path of an :class:`Invalid` raised in the block.

    Blocks nest, so that an error inside ``within("Fragment")`` and ``within("Stores[1]")`` reads
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
