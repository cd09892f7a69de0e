"""What every call of the Journal service has at its edge: who calls, for how long, how it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, NoReturn, Protocol

import grpc

from gazette.auth import Claims, Verifier, authorization_of
from gazette.clock import Clock
from gazette.errors import Closed, Corrupt, GazetteError, NotAllowed, Unavailable
from gazette.metrics import JOURNAL_SERVER_COMPLETED, JOURNAL_SERVER_STARTED
from gazette.protocol.status import Status

ERROR: Final = "<error>"


class Call(Protocol):
    """What is used of ``grpc.aio.ServicerContext``."""

    def invocation_metadata(self) -> Any: ...
    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn: ...


async def authorize(call: Call, verifier: Verifier, require: int) -> Claims:
    """The caller's claims, which hold ``require``. Ends the call as UNAUTHENTICATED otherwise."""
    try:
        return verifier.verify(authorization_of(call.invocation_metadata()), require)
    except NotAllowed as error:
        await call.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)


def code_of(error: GazetteError) -> grpc.StatusCode:
    """The code of a failed call: UNKNOWN with a text, as the protocol has it for nearly everything.

    A broker that stops or cannot reach what it needs is UNAVAILABLE, which makes every client look
    for another one; data that is not what it claims to be is DATA_LOSS.
    """
    if isinstance(error, Unavailable | Closed):
        return grpc.StatusCode.UNAVAILABLE
    if isinstance(error, Corrupt):
        return grpc.StatusCode.DATA_LOSS
    return grpc.StatusCode.UNKNOWN


@asynccontextmanager
async def failing(call: Call) -> AsyncIterator[None]:
    """Around a handler: an error of our tree ends the call with its code and text."""
    try:
        yield
    except GazetteError as error:
        await call.abort(code_of(error), str(error))


@asynccontextmanager
async def within_claims(claims: Claims, clock: Clock) -> AsyncIterator[None]:
    """Around a stream: it ends cleanly, as if there were no more to send, once the claims expire."""
    if claims.expires_at is None:
        yield
        return
    try:
        async with asyncio.timeout(max(0.0, claims.expires_at - clock.now())) as deadline:
            yield
    except TimeoutError:
        if not deadline.expired():
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
