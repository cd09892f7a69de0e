"""Stage 2 of the byte path: takes content from `client/append/service`, gives one call to
`broker/api/append`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from gazette.auth import Capability
from gazette.client.rpc.credentials import journal_claims
from gazette.client.rpc.errors import (
    CALL_ERRORS,
    map_errors,
    raise_mapped,
    status_error,
    status_of,
    was_too_slow,
)
from gazette.client.waits import Grace, RepeatedCall
from gazette.errors import Broken, Bug, Closed, GazetteError, Invalid, Unavailable
from gazette.protocol.append_session import SessionAppend
from gazette.protocol.content import CHUNK_BYTES, COMMIT, WHOLE_BYTES, BytesLike, append_content
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import split_journal_meta, validate_journal_name
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Header
from gazette.protocol.rpc import validate_append_response
from gazette.protocol.status import Status
from gazette.protocol.text.validation import require_fit, within
from gazette.runtime import failpoints
from gazette.runtime.clock import Clock
from gazette.runtime.metrics import APPEND_BYTES

if TYPE_CHECKING:
    from gazette.client.access import BrokerAccess

Content: TypeAlias = BytesLike | Iterable[BytesLike] | AsyncIterator[BytesLike]

RETRIED_STATUSES: Final = frozenset(
    {
        Status.NOT_JOURNAL_PRIMARY_BROKER.name,
        Status.NO_JOURNAL_PRIMARY_BROKER.name,
        Status.INSUFFICIENT_JOURNAL_BROKERS.name,
    }
)
"""Statuses after which a plain append is repeated: its journal is being handed over."""
_EARLIER: Final = "earlier_attempt"
"""Name of the fact that says: an attempt before this error had an unknown outcome."""


class SuspendControl(IntEnum):
    """The effect of an append on the suspension of its journal.

    An append with RESUME resumes a suspended journal, even if the append has no content. Use NO_RESUME or
    KEEP for a probe that must not resume the journal.
    """

    RESUME = 0
    NO_RESUME = 1
    """Refuse the append of a suspended journal."""
    IF_FLUSHED = 2
    """Suspend the journal if its stores have had all content for the flush interval."""
    NOW = 3
    """Suspend the journal, after flushing what its stores lack."""
    KEEP = 4
    """Append as if the journal was not suspended, and leave the suspension."""


@dataclass(frozen=True, slots=True)
class AppendParams:
    """The parameters of an append, beside its content.

    An append ignores a metadata segment of ``journal``. ``offset`` zero means: append at the head. Any other
    ``offset`` must be the head: otherwise the broker refuses the append. Registers change only with content:
    ``subtract_registers`` first, then ``union_registers``. ``check_registers`` counts only if the journal has
    registers.
    """

    journal: str
    offset: int = 0
    check_registers: LabelSelector | None = None
    union_registers: LabelSet | None = None
    subtract_registers: LabelSet | None = None
    suspend: SuspendControl = SuspendControl.RESUME
    min_etcd_revision: int = 0

    def validate(self) -> None:
        with within("Journal"):
            validate_journal_name(self.journal)
        if self.offset < 0:
            raise Invalid(f"invalid Offset ({self.offset}; expected >= 0)")
        if self.offset or self.min_etcd_revision:
            require_fit("Offset", self.offset)
            require_fit("MinEtcdRevision", self.min_etcd_revision)
        if self.check_registers is not None:
            with within("CheckRegisters"):
                self.check_registers.validate()
        if self.union_registers is not None:
            with within("UnionRegisters"):
                self.union_registers.validate()
        if self.subtract_registers is not None:
            with within("SubtractRegisters"):
                self.subtract_registers.validate()

    def to_pb(self) -> broker_pb2.AppendRequest:
        check, union, subtract = (
            self.check_registers,
            self.union_registers,
            self.subtract_registers,
        )
        # Drop the metadata segment: a broker of the original crashes when it proxies an append to such a
        # name.
        return broker_pb2.AppendRequest(
            journal=split_journal_meta(self.journal)[0],
            offset=self.offset,
            check_registers=None if check is None else check.to_pb(),
            union_registers=None if union is None else union.to_pb(),
            subtract_registers=None if subtract is None else subtract.to_pb(),
            suspend=self.suspend.value,  # type: ignore[arg-type]
            min_etcd_revision=self.min_etcd_revision,
        )


@dataclass(frozen=True, slots=True)
class AppendResult:
    """The place of an append.

    ``commit`` is the range of offsets that the RPC wrote, with its SHA-1. Appends of one RPC share one
    result. ``registers`` are the journal's after the append. ``delayed_chunks`` of ``total_chunks`` waited.
    """

    commit: Fragment
    registers: LabelSet
    header: Header
    total_chunks: int = 0
    delayed_chunks: int = 0


class Appender:
    """One Append RPC: nothing of it is in the journal before ``commit`` is called.

        async with Appender(client, AppendParams("a/journal")) as appender:
            await appender.write(b"…")
            result = await appender.commit()

    Leaving the block without ``commit`` aborts the append. If ``write`` is cancelled, nothing is appended.
    If ``commit`` is cancelled, or raises ``Unavailable`` or ``Broken``, all content may have been appended.
    """

    def __init__(
        self, client: BrokerAccess, params: AppendParams, session: SessionAppend | None = None
    ) -> None:
        """Prepare the call. ``session`` names the append, so that brokers refuse a late copy of it."""
        self._opening = _opening_of(params)
        self._client = client
        self._params = params
        self._session = session
        self._call: Any = None
        self._endpoint = ""
        self._bytes = 0
        self._answered = False  # True once the response was received.

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    async def write(self, content: BytesLike) -> None:
        """Send content, and return when gRPC has taken it. Skip empty content: sent, it would commit.

        Raise ``Closed`` if the client was closed. If the broker ends the call, ``commit`` raises the reason.
        """
        view = memoryview(content).cast("B")
        await self._open()
        begin, end = 0, view.nbytes
        while begin < end and not self._answered:
            # The last piece may be twice as long: content that is slightly too long is sent in one piece.
            length = CHUNK_BYTES if end - begin > 2 * CHUNK_BYTES else end - begin
            await self._send(append_content(view[begin : begin + length]))
            self._bytes += length
            begin += length

    async def commit(self) -> AppendResult:
        """Ask for the commit and wait for it.

        Raise ``Fenced`` if the registers differ from ``check_registers``, ``Conflict`` for a wrong offset,
        and ``Corrupt`` if the index has a greater offset. Raise ``NotFound``, ``NotAllowed``, ``Moved``,
        ``Unavailable``, ``Broken`` or ``Closed`` as `Client` says. A status is in ``facts["status"]``.
        """
        await self._open()
        if not self._answered:
            await self._send(COMMIT)
        with self._translated():
            if not self._answered:
                await self._call.done_writing()
            response = await self._call
        self._answered = True
        return _result(self._client, self._params.journal, self._endpoint, self._bytes, response)

    def abort(self) -> None:
        """End the call without a commit. Has no effect after a commit."""
        if self._call is not None and not self._call.done():
            self._call.cancel()

    async def _open(self) -> None:
        if self._call is not None:
            return
        client, params = self._client, self._params
        self._endpoint, path = client.byte_path(params.journal, primary=True)
        claims = journal_claims(Capability.APPEND, params.journal)
        with self._translated():
            metadata = client.credentials.metadata(claims)
            if self._session is not None:
                metadata += self._session.metadata()
            self._call = path.append(metadata=metadata)
        await self._send(self._opening)

    async def _send(self, message: bytes) -> None:
        """Send a message. If the broker has answered already, note that instead: its answer says why."""
        if not await self._call.write(message):
            self._answered = True

    def _translated(self) -> Any:
        return map_errors(
            "Append", self._client.channels, journal=self._params.journal, endpoint=self._endpoint
        )


def _result(
    client: BrokerAccess,
    journal: str,
    endpoint: str,
    sent: int,
    response: broker_pb2.AppendResponse,
) -> AppendResult:
    """Return the result of an append of ``sent`` bytes. For a status other than OK, raise its error. Raise
    ``Broken`` for an invalid answer."""
    try:
        status, header, commit, registers = validate_append_response(response)
    except Invalid as error:
        raise Broken(f"Append: the answer is invalid: {error}") from error
    client.observe_route(journal, header.route)
    if status is not Status.OK:
        raise status_error(status, response.store_health_error, journal=journal, endpoint=endpoint)
    assert commit is not None
    _appended_to(journal).inc(sent)
    return AppendResult(commit, registers, header, response.total_chunks, response.delayed_chunks)


@lru_cache(maxsize=1 << 8)
def _kept_opening_of(params: AppendParams) -> bytes:
    params.validate()
    return params.to_pb().SerializeToString()


def _opening_of(params: AppendParams) -> bytes:
    """Return the first request of an append, from a cache if an earlier append had the same parameters.
    Raise ``Invalid`` for wrong parameters."""
    try:
        return _kept_opening_of(params)
    except TypeError:  # Labels in a list have no hash.
        return _kept_opening_of.__wrapped__(params)


@lru_cache(maxsize=1 << 10)
def _appended_to(journal: str) -> Any:
    """Return the counter of a journal's appended bytes. A cache is faster than the metrics library."""
    return APPEND_BYTES.labels(split_journal_meta(journal)[0])


async def _append_whole(
    client: BrokerAccess,
    journal: str,
    opening: bytes,
    content: bytes,
    session: SessionAppend | None,
) -> AppendResult:
    """Append small content that is all in memory, by one call that sends all its requests at once."""
    endpoint, path = client.byte_path(journal, primary=True)
    claims, credentials = journal_claims(Capability.APPEND, journal), client.channels.credentials
    try:
        metadata = credentials.metadata(claims) if credentials.are_needed else ()
        if session is not None:
            metadata += session.metadata()
        requests = (opening, append_content(content), COMMIT) if content else (opening, COMMIT)
        call = path.append_whole(requests, metadata=metadata)
        try:
            if failpoints.armed_points:
                await failpoints.reach("append.sent", journal, client.clock)
            response = await call
        finally:
            call.cancel()  # No effect on a call that has ended.
    except CALL_ERRORS as error:
        raise_mapped(error, "Append", client.channels, journal=journal, endpoint=endpoint)
    return _result(client, journal, endpoint, len(content), response)


def _joined(content: Content) -> bytes | None:
    """Return content as one value if it is in memory and has at most ``WHOLE_BYTES``; otherwise None."""
    if isinstance(content, bytes | bytearray | memoryview):
        content = (content,)
    if not isinstance(content, tuple | list):
        return None
    length = sum([memoryview(piece).nbytes for piece in content])
    return b"".join(content) if length <= WHOLE_BYTES else None


async def append_once(
    client: BrokerAccess,
    params: AppendParams,
    content: Content,
    session: SessionAppend | None = None,
) -> AppendResult:
    """Make one Append RPC of all the content. Errors and cancellation are those of `Appender.commit`.

    If the call itself fails, the journal's route is forgotten: the next call goes to the default address.
    """
    opening = _opening_of(params)
    journal, clock = params.journal, client.clock
    try:
        if failpoints.armed_points:
            await failpoints.reach("append.begin", journal, clock)
        joined = content if isinstance(content, bytes) else _joined(content)
        if joined is not None and len(joined) <= WHOLE_BYTES:
            result = await _append_whole(client, journal, opening, joined, session)
            if failpoints.armed_points:
                await failpoints.reach("append.applied", journal, clock)
            return result
        if isinstance(content, bytes | bytearray | memoryview):
            content = (content,)
        async with Appender(client, params, session) as appender:
            if isinstance(content, AsyncIterator):
                async for chunk in content:
                    await appender.write(chunk)
            else:
                for chunk in content:
                    await appender.write(chunk)
            if failpoints.armed_points:
                await failpoints.reach("append.sent", journal, clock)
            result = await appender.commit()
        if failpoints.armed_points:
            await failpoints.reach("append.applied", journal, clock)
        return result
    except (Unavailable, Broken) as error:
        if not status_of(error):
            client.forget_route(params.journal)
        raise


async def append(
    client: BrokerAccess, params: AppendParams, content: Content | Callable[[], Content]
) -> AppendResult:
    """Append, and retry while the journal's brokers are unreachable or being replaced.

    An iterator can be read only once, so it is not retried; pass a function that returns a new iterator.
    A retry after an attempt with an unknown outcome may append the content twice. After a cancellation the
    content may have been appended. Retry for `LAG_S` seconds while brokers do not know the journal. If
    content came too slowly for the broker, retry only content in memory, since this process was slow. Raise
    all other errors of `Appender.commit` at once, also of a suspended journal or an unhealthy store. Raise
    INDEX_HAS_GREATER_OFFSET at once, since commands that confirm a head ask for it by an append.
    `may_be_appended` says what an error means for the content.
    """
    attempt, call = 0, RepeatedCall()
    attempts: Attempts | None = None
    is_iterator = isinstance(content, AsyncIterator | Iterator)
    try:
        while True:
            try:
                attempt_content = content() if callable(content) else content
                return await append_once(client, params, attempt_content)
            except GazetteError as error:
                was_held_up = was_too_slow(error) and isinstance(
                    content, bytes | bytearray | memoryview
                )
                is_final = not (was_held_up or _is_retried(error))
                attempts = attempts or Attempts(client.clock)
                if is_iterator or attempts.end_with(error, is_final=is_final):
                    raise
                attempt += 1
                client.waits.note(call, params.journal, error)
            await client.clock.sleep(backoff_s(attempt - 1))
    finally:
        if attempt:
            client.waits.end(call)


class Attempts:
    """The failed attempts of one append."""

    __slots__ = ("_grace", "_is_open")

    def __init__(self, clock: Clock) -> None:
        self._grace = Grace(clock)
        self._is_open = False
        """True if one of the attempts may have been appended."""

    def end_with(self, error: Exception, *, is_final: bool) -> bool:
        """Note the error of an attempt. Return False if the caller should repeat the append.

        ``is_final`` says that no retry can help. If this error ends the append, add a fact to it when an
        earlier attempt may have been appended.
        """
        if self._grace.covers(error) or not is_final:
            self._is_open = self._is_open or may_be_appended(error)
            return False
        if self._is_open and isinstance(error, GazetteError):
            error.facts[_EARLIER] = "may have been appended"
        return True


def may_be_appended(error: BaseException) -> bool:
    """Return True if an append that failed with ``error`` may be in the journal all the same: no broker has
    refused it, or an earlier attempt had an unknown outcome."""
    facts = error.facts if isinstance(error, GazetteError) else {}
    is_refused = "status" in facts or "ledger" in facts
    return _EARLIER in facts or (
        isinstance(error, Unavailable | Broken | Closed | Bug) and not is_refused
    )


def _is_retried(error: GazetteError) -> bool:
    """Return True if brokers could not be reached, or are being replaced."""
    status = status_of(error)
    return status in RETRIED_STATUSES or (isinstance(error, Unavailable) and not status)


def backoff_s(attempt: int) -> float:
    """Return the seconds to wait after the failed attempt ``attempt``, counted from 0. Return 0 for -1."""
    if attempt < 0:
        return 0.0
    return (0.05, 0.05, 0.1, 0.1, 1.0, 1.0)[attempt] if attempt < 6 else 5.0
