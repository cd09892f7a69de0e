"""A transaction from the start of its commit to its last acknowledgement. On its shard's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gazette.consumer.transaction.error_cause import error_text
from gazette.consumer.transaction.transaction import Transaction
from gazette.errors import GazetteError
from gazette.protocol.checkpoint import Checkpoint
from gazette.runtime.tasks import OpFuture, first_failure


@dataclass(slots=True)
class PriorTransaction:
    """A transaction whose commit was started and that is not acknowledged yet."""

    checkpoint: Checkpoint
    read_through: dict[str, int]
    commit: OpFuture[Any]
    acks: dict[str, OpFuture[Any]] = field(default_factory=dict)
    recovered: bool = False
    transaction: Transaction | None = None
    bytes: int = 0

    def watch(self, wake: Callable[[object], None]) -> None:
        """Call ``wake`` when the commit or an acknowledgement is done."""
        self.commit.add_done_callback(wake)
        for future in self.acks.values():
            future.add_done_callback(wake)

    @property
    def is_done(self) -> bool:
        """True if the commit and all acknowledgements have ended, with success or not."""
        return self.commit.done() and all(future.done() for future in self.acks.values())

    def require_committed(self) -> None:
        """Raise the error of the store's commit if it failed."""
        if (error := first_failure((self.commit,))) is not None:
            raise wrap_error("the store's commit failed", error)

    def is_acknowledged(self) -> bool:
        """Return True if all acknowledgements are appended. Raise the error of one that failed."""
        if (error := first_failure(self.acks.values())) is not None:
            what = "a recovered acknowledgement" if self.recovered else "an acknowledgement"
            raise wrap_error(f"{what} could not be appended", error)
        return all(future.done() for future in self.acks.values())


def wrap_error(what: str, error: BaseException) -> GazetteError:
    """Return an error of the type of ``error``, if that is possible, with ``what`` before its text."""
    if isinstance(error, GazetteError):
        hint = error.hint
        wrapped = type(error)(f"{what}: {error}", hint=hint) if _plain(error) else None
        if wrapped is not None:
            wrapped.__cause__ = error
            return wrapped
    text = error_text(error) if not isinstance(error, GazetteError) else str(error)
    failure = GazetteError(f"{what}: {text}", hint=getattr(error, "hint", None))
    failure.__cause__ = error
    return failure


def _plain(error: GazetteError) -> bool:
    """Return True if the class of the error can be made from a message only."""
    return type(error).__init__ is GazetteError.__init__
