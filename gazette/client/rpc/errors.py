"""Errors of failed calls. The type of an error says what the caller can do next."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NoReturn, Protocol

import grpc
import grpc.aio

from gazette.errors import (
    Broken,
    Closed,
    Conflict,
    Corrupt,
    Fenced,
    GazetteError,
    Invalid,
    Moved,
    NotAllowed,
    NotFound,
    NotYet,
    Unavailable,
    printable,
)
from gazette.protocol.append_session import created_of, ledger_of
from gazette.protocol.content import TOO_SLOW
from gazette.protocol.error_codes import error_of
from gazette.protocol.status import ShardStatus, Status

END_OF_STREAM: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]
"""Value that a read from a call returns once the call has ended with success."""
CALL_ERRORS: Final = (asyncio.CancelledError, grpc.aio.AioRpcError, grpc.aio.UsageError)
"""Errors that end a call. `raise_mapped` turns them into errors of ours."""

_BY_STATUS: Final[dict[Status, tuple[type[GazetteError], str, str | None]]] = {
    Status.JOURNAL_NOT_FOUND: (NotFound, "journal not found", None),
    Status.NO_JOURNAL_PRIMARY_BROKER: (Unavailable, "the journal has no primary broker now", None),
    Status.NOT_JOURNAL_PRIMARY_BROKER: (Moved, "the broker is not primary of the journal", None),
    Status.INSUFFICIENT_JOURNAL_BROKERS: (
        Unavailable,
        "the journal has fewer brokers than its replication asks for",
        "Start more brokers, or lower the journal's replication; the call is retried.",
    ),
    Status.NOT_JOURNAL_BROKER: (Moved, "the broker does not serve the journal", None),
    Status.OFFSET_NOT_YET_AVAILABLE: (NotYet, "the offset is not available yet", None),
    Status.WRONG_ROUTE: (Moved, "the broker knows another route", None),
    Status.PROPOSAL_MISMATCH: (Conflict, "the replica is at another fragment", None),
    Status.ETCD_TRANSACTION_FAILED: (
        Conflict,
        "another client changed a specification meanwhile",
        None,
    ),
    Status.NOT_ALLOWED: (
        NotAllowed,
        "the journal's flags, or its suspension, do not allow it",
        "Check the flags of the journal's specification.",
    ),
    Status.WRONG_APPEND_OFFSET: (
        Conflict,
        "the journal's head is not at the offset of the append",
        "Read the write head, and append there if that is still right.",
    ),
    Status.INDEX_HAS_GREATER_OFFSET: (
        Corrupt,
        (
            "fragments of the journal reach beyond what its brokers know: all its brokers were "
            "replaced"
        ),
        "Check the newest fragments, then move the head with `gazctl journals reset-head`.",
    ),
    Status.REGISTER_MISMATCH: (Fenced, "the journal's registers are not as required", None),
    Status.SUSPENDED: (NotAllowed, "the journal is suspended", "Any append resumes it."),
    Status.FRAGMENT_STORE_UNHEALTHY: (
        Unavailable,
        "the journal's fragment store is unhealthy",
        "Check the store with `gazctl journals store-health`, and its credentials.",
    ),
}

_BY_SHARD_STATUS: Final[dict[ShardStatus, tuple[type[GazetteError], str]]] = {
    ShardStatus.SHARD_NOT_FOUND: (NotFound, "shard not found"),
    ShardStatus.NO_SHARD_PRIMARY: (Unavailable, "the shard has no primary now"),
    ShardStatus.NOT_SHARD_PRIMARY: (Moved, "the process is not primary of the shard"),
    ShardStatus.ETCD_TRANSACTION_FAILED: (
        Conflict,
        "another client changed a specification meanwhile",
    ),
    ShardStatus.SHARD_STOPPED: (Unavailable, "the shard has stopped there"),
}


class _Caller(Protocol):
    @property
    def closed(self) -> bool: ...


def status_error(status: Status, detail: str = "", **facts: Any) -> GazetteError:
    """Return the error of a status other than OK. ``facts["status"]`` has the name of the status."""
    error_type, message, hint = _BY_STATUS[status]
    if detail:
        message = f"{message}: {detail}"
    return error_type(message, hint=hint, status=status.name, **facts)


def shard_status_error(status: ShardStatus, **facts: Any) -> GazetteError:
    """Return the error of a consumer's status other than OK, with its name in ``facts["status"]``."""
    error_type, message = _BY_SHARD_STATUS[status]
    return error_type(message, status=status.name, **facts)


def status_of(error: BaseException | None) -> str:
    """Return the name of the status behind an error; empty if there was no status."""
    return str(error.facts.get("status", "")) if isinstance(error, GazetteError) else ""


def is_refusal_of_rights(error: BaseException) -> bool:
    """Return True if a server refused a call because of its token, or because it had no token."""
    code = error.facts.get("code") if isinstance(error, GazetteError) else None
    return code in (
        grpc.StatusCode.UNAUTHENTICATED.name,
        grpc.StatusCode.PERMISSION_DENIED.name,
    )


def was_too_slow(error: GazetteError) -> bool:
    """Return True if a broker gave up an append because its content came too slowly."""
    return error.facts.get("code") == grpc.StatusCode.UNKNOWN.name and TOO_SLOW in error.message


def rpc_error(error: grpc.aio.AioRpcError, method: str, **facts: Any) -> GazetteError:
    """Return the error of a call that ended with a gRPC code other than OK.

    Servers report an invalid request as UNKNOWN with a text. So UNKNOWN gives ``Broken``, as does every other
    code on which the caller cannot act.
    """
    code = error.code()
    error_type = error_of(code)
    detail = printable(error.details() or code.name, one_line=True)
    if code is grpc.StatusCode.ABORTED and (ledger := ledger_of(error.trailing_metadata())):
        facts["ledger"] = ledger
        facts["created"] = created_of(error.trailing_metadata())
    return error_type(f"{method}: {detail}", code=code.name, **facts)


@contextmanager
def map_errors(method: str, caller: _Caller, **facts: Any) -> Iterator[None]:
    """Wrap the awaits of one call. Turn errors of gRPC into errors of ours: see `raise_mapped`."""
    try:
        yield
    except CALL_ERRORS as error:
        raise_mapped(error, method, caller, **facts)


def raise_mapped(error: BaseException, method: str, caller: _Caller, **facts: Any) -> NoReturn:
    """Raise a `GazetteError` for one of `CALL_ERRORS`, which ended a call.

    For a code of gRPC, raise the error of `rpc_error`. If the channel was closed before the call, raise
    ``Closed``. If the present task was cancelled, raise the cancellation. If ``caller`` (such as the channels
    of a client) was closed, raise ``Closed``. If only the channel was closed during the call, the peer fell
    silent or lost its lease: raise ``Unavailable``.
    """
    if isinstance(error, grpc.aio.AioRpcError):
        raise rpc_error(error, method, **facts) from error
    if isinstance(error, grpc.aio.UsageError):
        raise Closed(f"{method}: {error}", **facts) from error
    if _is_cancelled():
        raise error
    if caller.closed:
        raise _closed(method, facts) from None
    raise Unavailable(f"{method}: the peer fell silent, or lost its lease", **facts) from None


@contextmanager
def open_channel(method: str, **facts: Any) -> Iterator[None]:
    """Wrap the awaits of one call. Raise ``Closed`` if the channel of the call is closed meanwhile.

    A channel is closed with its client, or when the process behind it loses its lease or falls silent. gRPC
    then cancels the channel's calls. Awaiting a cancelled call raises ``CancelledError``, although this task
    was not cancelled. If that error left this block, the caller of this task would get no answer.
    """
    try:
        yield
    except asyncio.CancelledError:
        if _is_cancelled():
            raise
        raise _closed(method, facts) from None


def _is_cancelled() -> bool:
    """Return True if the present task was cancelled, False if only the awaited call was cancelled."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _closed(method: str, facts: Mapping[str, Any]) -> Closed:
    return Closed(
        f"{method}: the channel was closed: its process has lost its lease or fell "
        "silent, or this process ends",
        hint="No action: a repeated call goes to another process.",
        **facts,
    )


@contextmanager
def answered(method: str) -> Iterator[None]:
    """Turn an ``Invalid`` of the block into ``Broken``: the peer sent an invalid answer."""
    try:
        yield
    except Invalid as error:
        raise Broken(f"{method}: the answer is invalid: {error}") from error
