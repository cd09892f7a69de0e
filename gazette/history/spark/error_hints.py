"""Shows the hints of errors in tracebacks, which are all that users of Spark see."""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Final, Self

from gazette.errors import Bug, GazetteError, NotAllowed

WHAT_TO_DO: Final = "What to do: "
"""Begin of the line with the hint in a traceback."""
_SKIP: Final = (
    "Repair or stop its producer. `mode=PERMISSIVE` reads such messages as null, "
    "`mode=DROPMALFORMED` leaves them out."
)
_WHOLE: Final = (
    "Set maxPartitionBytes to more than the journal holds, so that one task reads it all; "
    "or read with isolation=read_committed."
)
_READ_AGAIN: Final = (
    "Load the DataFrame again, or query a view of gazette.spark.create_view: Spark keeps what a "
    "DataFrame, or a view of one, has planned first. Start a stream again."
)
_GAP: Final = "Read again later. Or set failOnDataLoss=false, to continue behind the gap."
_STORE_GAP: Final = (
    "Read with broker.address and direct=true instead of store: brokers know if an operator has confirmed "
    "that these bytes are lost. Or read again later, or set failOnDataLoss=false."
)
_LOST: Final = (
    "Set failOnDataLoss=false, to continue behind them with a warning. Or begin behind them by "
    "startingOffsets, a stream with another checkpointLocation."
)
_PLACE: Final = (
    "If the journal was deleted and created again, give a stream another checkpointLocation. If "
    "startingOffsets named the offset, name one where a message begins."
)
_SIGN: Final = (
    "Set the option broker.authKeys to the brokers' keys, or broker.authToken. Members of a "
    "consumer take consumer.authKeys or consumer.authToken."
)


class with_hints(ContextDecorator):
    """Show the hints of errors below their messages in tracebacks of Python, and so in Spark's.

    Users of Spark see only tracebacks, between the stack traces of Java. So an error is shown without frames
    and cause, except a ``Bug``. This class is also a decorator, but not for generators.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if not isinstance(error, GazetteError):
            return
        note = f"{WHAT_TO_DO}{_hint_of(error)}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        if not isinstance(error, Bug):
            raise error.with_traceback(None) from None


def _hint_of(error: GazetteError) -> str:
    """Return the error's hint, in words of Spark if it names something that Spark does not have."""
    # Import here: Spark imports this module in every process that looks for a data source.
    from gazette.history.snapshot import (
        GAP_HINT,
        LOST_HINT,
        PLACE_HINT,
        READ_AGAIN_HINT,
        STORE_GAP_HINT,
    )
    from gazette.message.framing.frames import MalformedMessage, TruncatedFrame

    if isinstance(error, MalformedMessage) and error.hint == MalformedMessage.default_hint:
        return _SKIP
    if isinstance(error, TruncatedFrame):
        return _WHOLE
    if isinstance(error, NotAllowed) and error.facts.get("code") == "UNAUTHENTICATED":
        return _SIGN
    hints_for_spark = {
        READ_AGAIN_HINT: _READ_AGAIN,
        GAP_HINT: _GAP,
        STORE_GAP_HINT: _STORE_GAP,
        LOST_HINT: _LOST,
        PLACE_HINT: _PLACE,
    }
    return hints_for_spark.get(error.hint, error.hint)
