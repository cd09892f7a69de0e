"""What all calls of the Journal service share: authorization, expiry and the form of failures."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio

from gazette.auth import Claims, Verifier, authorization_of
from gazette.errors import GazetteError, Invalid, NotAllowed, Unavailable
from gazette.protocol.error_codes import code_of, protocol_code_of
from gazette.protocol.status import Status
from gazette.runtime.clock import Clock
from gazette.runtime.metrics import JOURNAL_SERVER_STARTED, count_completed
from gazette.runtime.timeouts import timeout

log = logging.getLogger(__name__)

T = TypeVar("T")


class Call(Protocol):
    """The part of ``grpc.aio.ServicerContext`` that this module uses."""

    def invocation_metadata(self) -> Any: ...
    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()
    ) -> NoReturn: ...


async def authorize(call: Call, verifier: Verifier, require: int) -> Claims:
    """Return the caller's claims, which hold the capabilities ``require``.

    End the call without such claims, or while the keys that verify them are not known: see `Verifier.verify`.
    """
    try:
        return verifier.verify(authorization_of(call.invocation_metadata()), require)
    except (NotAllowed, Unavailable) as error:
        await call.abort(code_of(error), error.message)


_INVALID_REQUEST: Final = (("gazette-invalid-request", "1"),)
"""Trailing metadata of a call that failed because its request is invalid. The code of such a call is UNKNOWN,
as for most failures. By this metadata the HTTP gateway can give the answer another status."""


def code_of_caller(error: grpc.aio.AioRpcError) -> grpc.StatusCode:
    """Return the code of a failed call to a broker of ours: INVALID_ARGUMENT for an invalid request."""
    trailing: Iterable[object] = error.trailing_metadata() or ()
    if any(pair in _INVALID_REQUEST for pair in trailing):
        return grpc.StatusCode.INVALID_ARGUMENT
    return error.code()


def passed_on(error: grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, str]:
    """Return the code and details with which to end a call that another broker has failed.

    If that broker refused rights, it refused the token of this broker, which has accepted the caller's token.
    Return UNAVAILABLE for such a refusal. With the code of the refusal, clients would give up, as if their
    own token was refused.
    """
    details = error.details() or ""
    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        text = f"another broker refuses the token of this one ({details}): give all brokers the same keys"
        return grpc.StatusCode.UNAVAILABLE, text
    return error.code(), details


@asynccontextmanager
async def ending_on_error(call: Call) -> AsyncIterator[None]:
    """End the call if the block raises a ``GazetteError``, with its code and text. Mark an ``Invalid`` by
    `_INVALID_REQUEST`.

    Do nothing for a caller that goes away: its handler is cancelled (`gazette.net.grpc.grpc_call`).
    """
    try:
        yield
    except GazetteError as error:
        trailing = _INVALID_REQUEST if isinstance(error, Invalid) else ()
        await call.abort(protocol_code_of(error), str(error), trailing)


class Expired(Exception):
    """The caller's claims have expired: the stream ends here, cleanly."""


class Expiry:
    """The time at which a stream's claims expire, which bounds the stream's waits. Check it between writes.

    Never use ``bound`` around a write. A write that is cancelled may have sent a part of its message: the
    caller would report a cut message in place of the clean end.
    """

    __slots__ = ("_at", "_clock")

    def __init__(self, claims: Claims, clock: Clock) -> None:
        self._at = claims.expires_at
        self._clock = clock

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the claims expire, at least 0; None for claims without an end."""
        return None if self._at is None else max(0.0, self._at - self._clock.now())

    @property
    def is_over(self) -> bool:
        """True if the claims have expired."""
        return self._at is not None and self._at <= self._clock.now()

    def check(self) -> None:
        """Raise ``Expired`` if the claims have expired."""
        if self.is_over:
            raise Expired

    async def bound(self, waiting: Awaitable[T]) -> T:
        """Return the result of ``waiting``. Raise ``Expired`` if the claims expire first. Cancellation
        cancels ``waiting``."""
        deadline = timeout(self.remaining_s)
        try:
            async with deadline:
                return await waiting
        except TimeoutError:
            if deadline.expired():
                raise Expired from None
            raise  # A time-out within ``waiting``.


class CountedOutcome:
    """The outcome of an operation, for its metric. Set ``status``, or the operation counts as an error."""

    __slots__ = ("status",)

    def __init__(self) -> None:
        self.status: Status | None = None


@contextmanager
def counted(operation: str) -> Iterator[CountedOutcome]:
    """Count one operation of the journal server in its two counters."""
    JOURNAL_SERVER_STARTED.inc(operation)
    outcome = CountedOutcome()
    try:
        yield outcome
    finally:
        count_completed(operation, None if outcome.status is None else outcome.status.name)
