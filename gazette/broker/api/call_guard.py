"""What every call of the Journal service has at its edge: who calls, for how long, how it fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio

from gazette.auth import Claims, Verifier, authorization_of
from gazette.errors import Closed, Corrupt, GazetteError, NotAllowed, TooLarge, Unavailable
from gazette.protocol.status import Status
from gazette.runtime.clock import Clock
from gazette.runtime.metrics import JOURNAL_SERVER_COMPLETED, JOURNAL_SERVER_STARTED

log = logging.getLogger(__name__)

ERROR: Final = "<error>"
T = TypeVar("T")


class Call(Protocol):
    """What is used of ``grpc.aio.ServicerContext``."""

    def invocation_metadata(self) -> Any: ...
    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()
    ) -> NoReturn: ...


async def authorize(call: Call, verifier: Verifier, require: int) -> Claims:
    """The caller's claims, which hold ``require``. Ends the call as UNAUTHENTICATED otherwise."""
    try:
        return verifier.verify(authorization_of(call.invocation_metadata()), require)
    except NotAllowed as error:
        await call.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)


def code_of(error: GazetteError) -> grpc.StatusCode:
    """The code of a failed call: UNKNOWN with a text, as the protocol has it for nearly everything.

    A broker that stops or cannot reach what it needs is UNAVAILABLE, which makes every client look
    for another one; data that is not what it claims to be is DATA_LOSS. What exceeds a limit is
    INVALID_ARGUMENT, so that no client repeats it.
    """
    if isinstance(error, TooLarge):
        return grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, Unavailable | Closed):
        return grpc.StatusCode.UNAVAILABLE
    if isinstance(error, Corrupt):
        return grpc.StatusCode.DATA_LOSS
    return grpc.StatusCode.UNKNOWN


@asynccontextmanager
async def failing(call: Call) -> AsyncIterator[None]:
    """Around a handler: an error of our tree ends the call with its code and text. That nobody is there
    any more to be written to is none."""
    try:
        try:
            yield
        except GazetteError as error:
            await call.abort(code_of(error), str(error))
    except grpc.aio.InternalError as error:
        # What gRPC makes of a write when the caller's connection has ended just then.
        log.debug("a caller has gone: %(error)s", {"error": error})


class Expired(Exception):
    """The caller's claims have expired: the stream ends here, cleanly."""


class Expiry:
    """When a stream's claims expire. Bounds its waits, and is asked between its writes.

    Never around a write: a call whose handler is cancelled while it writes can not be ended any more,
    because gRPC refuses to send its status beside the message.
    """

    __slots__ = ("_at", "_clock")

    def __init__(self, claims: Claims, clock: Clock) -> None:
        self._at = claims.expires_at
        self._clock = clock

    @property
    def remaining_s(self) -> float | None:
        """Seconds until then, at least zero; None if the claims do not expire."""
        return None if self._at is None else max(0.0, self._at - self._clock.now())

    def check(self) -> None:
        """Raise ``Expired`` if the claims have."""
        if self._at is not None and self._at <= self._clock.now():
            raise Expired

    async def bound(self, waiting: Awaitable[T]) -> T:
        """The outcome of ``waiting``, or ``Expired`` if that comes first. Cancellation: passed on."""
        deadline = asyncio.timeout(self.remaining_s)
        try:
            async with deadline:
                return await waiting
        except TimeoutError:
            if deadline.expired():
                raise Expired from None
            raise


class Outcome:
    """How an operation ended, for its metric: set ``status``, or it counts as an error."""

    __slots__ = ("status",)

    def __init__(self) -> None:
        self.status: Status | None = None


@contextmanager
def counted(operation: str) -> Iterator[Outcome]:
    """Around one operation of the journal server, for its two counters."""
    JOURNAL_SERVER_STARTED.inc(operation)
    outcome = Outcome()
    try:
        yield outcome
    finally:
        status = outcome.status
        name = ERROR if status is None else "ok" if status is Status.OK else status.name
        JOURNAL_SERVER_COMPLETED.inc(operation, name)
