"""The cause of an error: the message that was consumed, or the store.

A poison policy may skip a message only if the message causes the error. Otherwise a lock time-out, a
deadlock or a lost connection would drop good messages, one after the other. So the store classifies an
error before the policy decides. The message never counts as the cause of an unknown error.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Final

from gazette.errors import Aborted, GazetteError, Invalid, InvalidValue, NotAllowed, NotFound
from gazette.message.message_time import UnusableTime

ERROR_CHARS_MAX: Final = 2048
"""Longest text of an error, in characters: etcd bounds the size of values."""


class ErrorCause(enum.Enum):
    """The cause of an exception that a callback raised."""

    MESSAGE = "message"
    """The message: each delivery of it raises the same error."""
    TRANSIENT = "transient"
    """The store, for some time: another attempt may succeed."""
    ABORTED = "aborted"
    """The store, which has rolled the transaction back in favour of another. A repetition succeeds."""
    STORE = "store"
    """The store or its schema, or an unknown cause."""


def passes_through(error: BaseException) -> bool:
    """Return True for a `GazetteError` other than ``InvalidValue``. Of these errors, a policy covers only
    `UnusableTime`."""
    return isinstance(error, GazetteError) and not isinstance(error, InvalidValue)


def cause_of(error: BaseException, classify: Callable[[Exception], ErrorCause]) -> ErrorCause:
    """Return the cause of an exception. ``classify`` is `Store.classify_error`.

    Classify the exception and all exceptions that led to it. Return `ErrorCause.MESSAGE` only if each of
    them has this cause.
    """
    for link in chain_of(error):
        cause = _cause(link, classify)
        if cause is not ErrorCause.MESSAGE:
            return cause
    return ErrorCause.MESSAGE


def is_aborted(error: BaseException, classify: Callable[[Exception], ErrorCause]) -> bool:
    """Return True if an exception, or any exception that led to it, has the cause `ErrorCause.ABORTED`."""
    return any(_cause(link, classify) is ErrorCause.ABORTED for link in chain_of(error))


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its cause or else its context, and so on. For a group, yield its exceptions, too:
    they led to the group. Yield each exception once: chains may have circles."""
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions
        earlier = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        if earlier is not None:
            waiting.append(earlier)


def _cause(error: BaseException, classify: Callable[[Exception], ErrorCause]) -> ErrorCause:
    """Return the cause of one exception alone. Call ``classify`` only for exceptions that are neither ours
    nor the system's."""
    match error:
        case Invalid() | NotAllowed() | NotFound() | UnusableTime():
            return ErrorCause.MESSAGE
        case Aborted():
            return ErrorCause.ABORTED
        case GazetteError() | MemoryError():
            return ErrorCause.STORE
        case OSError():
            return ErrorCause.TRANSIENT
        case Exception():
            return classify(error)
    return ErrorCause.STORE  # No ``Exception``, but for example SystemExit.


def error_text(error: BaseException) -> str:
    """Return text and hint of an error for operators: short enough for etcd, and valid UTF-8."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a foreign __str__
        text = ""
    text = text or type(error).__name__
    hint = getattr(error, "hint", "")
    text = f"{text}\n{hint}" if hint else text
    # Names of files may hold lone surrogates, which protobuf refuses.
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= ERROR_CHARS_MAX else text[:ERROR_CHARS_MAX] + " ...[truncated]"


def wrap_error(what: str, error: BaseException) -> GazetteError:
    """Return an error with ``what`` before the text of ``error``, and of the same type if possible."""
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
    """Return True if an error of this class can be made from a message only."""
    return type(error).__init__ is GazetteError.__init__
