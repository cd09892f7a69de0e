"""Stage 3 of the byte path, for small appends whose calls have arrived as a whole: gives them to
`broker/commit/steady`, or else to `broker/commit/driver`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from gazette.auth import AUTHORIZATION, Capability, authorization_of
from gazette.broker.api.append_answers import encoded, failure_of, note_head, under_lease
from gazette.broker.append.events import AppendTerms, Ending, Outcome, SuspendControl
from gazette.broker.append.flow_control import AppendFlow, RateBalance
from gazette.broker.append.invalidation import Superseded, take_unless
from gazette.broker.append.line import SMALL_BYTES, ContentAhead, Line, SmallAppend
from gazette.broker.commit.driver import AppendCall, AppendDriver
from gazette.broker.commit.steady import AppendGroup, commit_now
from gazette.broker.context import BrokerContext
from gazette.broker.replication.pipeline import Pipeline
from gazette.broker.resolver import Resolution
from gazette.errors import Broken, Closed, GazetteError, NotAllowed
from gazette.http2.metadata import Metadata
from gazette.net.grpc.whole_call import WholeCall
from gazette.protocol.append_session import SESSION_KEY, SessionAppend
from gazette.protocol.content import COMMIT, decode_append
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.rpc import validate_append_request_opening
from gazette.protocol.status import Status
from gazette.runtime.metrics import JOURNAL_SERVER_STARTED, count_completed

EXPIRED: Final = "authorization expired during the append"
_OPENING_BYTES_MAX: Final = 1 << 10
"""Greatest length of the first request of a small append, in bytes."""


class SmallAppends:
    """The small appends of a broker whose calls have arrived as a whole."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def take_whole(self, calls: Sequence[WholeCall]) -> list[WholeCall]:
        """Serve the small appends to journals that this broker leads. Return the calls left for handlers.

        ``_small_append`` says which calls these are. Appends to one journal are one group commit, as far as
        their terms and the room in the spool permit.
        """
        unserved: list[WholeCall] = []
        appends: list[WholeAppend] = []
        lines: dict[Line, list[SmallAppend]] = {}
        for call in calls:
            append = self._small_append(call)
            if append is None:
                unserved.append(call)
            else:
                appends.append(append)
                lines.setdefault(append.line, []).append(append.small)
        for line, group in lines.items():
            line.join(*group)
        for append in appends:
            append.limit()
        return unserved

    def _small_append(self, call: WholeCall) -> WholeAppend | None:
        """Return the small append that is all of ``call``.

        Return None if the handler of the call must serve the call. The handler answers invalid and forbidden
        requests, calls other brokers, and waits.
        """
        # Three requests: the opening, the content, and an empty request, which is the intent to commit.
        context, messages = self._context, call.messages()
        if messages is None or len(messages) != 3 or messages[2]:
            return None
        if len(messages[0]) > _OPENING_BYTES_MAX:
            return None
        try:
            opening = _opening_of(messages[0])
            content = decode_append(messages[1])
            if not isinstance(content, bytes) or not 0 < len(content) <= SMALL_BYTES:
                return None
            authorization, session = _caller_of(call.invocation_metadata())
            claims = context.verifier.verify(authorization, Capability.APPEND)
            if opening.has_header:
                return None
            resolution = context.resolver.resolve_now(
                opening.terms.journal,
                claims=claims,
                may_proxy=opening.may_proxy,
                min_etcd_revision=opening.min_revision,
            )
            if resolution is None or resolution.status is not Status.OK or not resolution.is_local:
                return None
            assert resolution.replica is not None
            resolution.replica.line.check_room()
            if (
                session is not None
                and resolution.replica.sessions.refusal_of(session, resolution.tenure) is not None
            ):
                return None
        except (DecodeError, GazetteError):
            return None
        append_call = AppendCall(
            terms=opening.terms,
            claims=claims,
            may_proxy=opening.may_proxy,
            min_revision=opening.min_revision,
            session=session,
            in_line=False,
        )
        return WholeAppend(context, call, append_call, resolution.replica.line, content, resolution)


def _caller_of(metadata: Metadata) -> tuple[str | None, SessionAppend | None]:
    """Return the authorization and the session of a call. Raise ``Invalid`` for a malformed session."""
    authorization, session = None, None
    for pair in metadata:
        if pair[0] == AUTHORIZATION and authorization is None:
            authorization = authorization_of((pair,))
        elif pair[0] == SESSION_KEY and session is None:
            session = SessionAppend.of((pair,))
    return authorization, session


class _Opening(NamedTuple):
    """The first request of an append that arrived as a whole."""

    terms: AppendTerms
    may_proxy: bool
    min_revision: int
    has_header: bool


@lru_cache(maxsize=1 << 10)
def _opening_of(encoded: bytes) -> _Opening:
    """Decode and check a first request. Cache the result: one client often sends equal requests.

    Raise ``DecodeError`` if the bytes are no request, ``Invalid`` if the request is wrong.
    """
    opening = broker_pb2.AppendRequest.FromString(encoded)
    validate_append_request_opening(opening)
    return _Opening(
        terms=terms_of(opening),
        may_proxy=not opening.do_not_proxy,
        min_revision=opening.min_etcd_revision,
        has_header=opening.HasField("header"),
    )


def terms_of(opening: broker_pb2.AppendRequest) -> AppendTerms:
    """Return the terms in the first request of an append."""
    check = None
    if opening.HasField("check_registers"):
        check = LabelSelector.from_pb(opening.check_registers)
    return AppendTerms(
        journal=opening.journal,
        offset=opening.offset or None,  # The protocol has 0 for any offset.
        check_registers=check,
        union_registers=LabelSet.from_pb(opening.union_registers),
        subtract_registers=LabelSet.from_pb(opening.subtract_registers),
        suspend=SuspendControl(opening.suspend),
    )


class WholeAppend:
    """A small append whose call has arrived as a whole. Only an append that leads, and must wait, has a
    task."""

    __slots__ = (
        "_append_call",
        "_call",
        "_context",
        "_driver",
        "_proposed",
        "_resolution",
        "_task",
        "_timer",
        "line",
        "small",
    )

    def __init__(
        self,
        context: BrokerContext,
        call: WholeCall,
        append_call: AppendCall,
        line: Line,
        content: bytes,
        resolution: Resolution,
    ) -> None:
        self._context = context
        self._call = call
        self._append_call = append_call
        self._resolution = resolution
        self._driver: AppendDriver | None = None
        self._task: asyncio.Task[None] | None = None
        """Runs the driver, or waits for the pipeline first."""
        self._proposed = False
        """True once this append leads a proposed group: its caller cannot interrupt it any more."""
        self._timer: asyncio.TimerHandle | None = None
        """Ends a wait when the caller's claims expire."""
        self.line = line
        arrived = context.clock.monotonic()
        self.small = SmallAppend(
            append_call.terms, content, append_call.session, arrived, self._lead, self._settle
        )
        call.on_gone = self._interrupt

    def limit(self) -> None:
        """Start the timer of claims that expire, unless the append was answered at once."""
        expires_at = self._append_call.claims.expires_at
        if expires_at is not None and self._call.is_open:
            remaining_s = max(0.0, expires_at - self._context.clock.now())
            self._timer = asyncio.get_running_loop().call_later(remaining_s, self._expire)

    def _expire(self) -> None:
        """End the append, because the caller's claims have expired, unless its group is proposed already."""
        error = NotAllowed(EXPIRED)
        if self._driver is not None:
            self._driver.interrupt(error)
        elif not self._proposed and self.line.holds(self.small):
            self._give_up()
            self._settle(Outcome(Ending.FAILED, error=error, context="waiting in line"))

    def _interrupt(self) -> None:
        if self._driver is not None:
            self._driver.interrupt(Broken("the caller of the append is gone"))
        elif not self._proposed:
            self._give_up()

    def _give_up(self) -> None:
        """Leave the line, and cancel the wait for the pipeline. No effect if another append has taken this
        append along."""
        self._stop_timer()
        if self._task is not None:
            self._task.cancel()
        self.line.leave(self.small)

    def _stop_timer(self) -> None:
        """Stop the timer, which keeps the append and its content in memory."""
        if self._timer is not None:
            self._timer.cancel()

    def _lead(self) -> None:
        """Commit a group now if the pipeline is free and the journal ready. Otherwise start a task. Refuse
        the append if the broker stops."""
        scope = self._context.scope
        if scope.is_stopping:
            self._call.refuse(grpc.StatusCode.UNAVAILABLE, "the broker stops")
            self.line.leave(self.small)
            return
        resolved = self._resolved()
        try:
            group = (
                None
                if resolved is None
                else self._commit(resolved, resolved.local_replica.pipeline.free)
            )
            if group is not None:
                group.start()
                return
        except Exception as error:  # noqa: BLE001 - it ends the broker, as that of a task does
            scope.fail(error)
            return
        self._task = scope.spawn(self._run(), name=f"append {self._append_call.terms.journal}")
        self._task.add_done_callback(self._on_task_done)

    def _on_task_done(self, _: asyncio.Task[None]) -> None:
        if not self._proposed:  # Otherwise the group leaves the line.
            self.line.leave(self.small)

    def _resolved(self) -> Resolution | None:
        """Return the journal's present resolution; None unless ``line`` belongs to the replica here now."""
        resolver, append_call = self._context.resolver, self._append_call
        if not resolver.is_present(self._resolution):
            try:
                resolution = resolver.resolve_now(
                    append_call.terms.journal,
                    claims=append_call.claims,
                    may_proxy=append_call.may_proxy,
                )
            except GazetteError:
                return None
            if resolution is None or not resolution.is_local or resolution.replica is None:
                return None
            self._resolution = resolution
        return self._resolution if self._resolution.local_replica.line is self.line else None

    def _commit(self, resolution: Resolution, pipeline: Pipeline | None) -> AppendGroup | None:
        group = commit_now(self._context, resolution, pipeline, self.line, self.small)
        self._proposed = group is not None
        return group

    async def _run(self) -> None:
        """Commit a group in turn, or have a driver perform this append. Hand back a call to be proxied."""
        group = await self._commit_in_turn()
        if group is not None:
            group.start()
            return
        content = ContentAhead(_NO_MORE, (self.small.content, COMMIT, None))
        driver = AppendDriver(self._context, self._append_call, content, self.small.arrived)
        self._driver = driver
        outcome = await driver.run()
        if outcome.ending is Ending.PROXY:
            self._stop_timer()
            self._call.hand_back()  # The handler of the call passes the append on to the primary.
            return
        if driver.resolution is not None:
            self._resolution = driver.resolution
        self._answer(outcome, driver.flow)

    async def _commit_in_turn(self) -> AppendGroup | None:
        """Wait for the pipeline, if another append holds it, and commit as ``_lead`` does.

        Return None if a driver must perform the append.
        """
        resolution = self._resolved()
        if resolution is None or not resolution.takes_content:
            return None
        pipeline_mutex = resolution.local_replica.pipeline
        if pipeline_mutex.idle:
            return None  # `_lead` has tried the free pipeline already.
        try:
            pipeline = await take_unless(pipeline_mutex, resolution.invalidated)
        except (Superseded, Closed):
            return None
        try:
            resolution = self._resolved()
            return None if resolution is None else self._commit(resolution, pipeline)
        finally:
            pipeline_mutex.give(pipeline)

    def _settle(self, ended: Outcome) -> None:
        """Answer the call of an append that was committed or failed without a driver."""
        self._answer(ended, _IN_GROUP)

    def _answer(self, ended: Outcome, flow: AppendFlow | None) -> None:
        self._stop_timer()
        ended = under_lease(self._context, ended)
        _STARTED.count += 1
        if ended.ending is Ending.FAILED:
            count_completed("Append", None)
            self._call.refuse(*failure_of(ended))
            return
        count_completed("Append", ended.status.name)
        self._call.answer(encoded(ended, self._resolution.append_header, flow))
        note_head(ended)


class _NoMore:
    """The end of a caller's stream."""

    async def next(self) -> bytes | None:
        return None


_NO_MORE: Final = _NoMore()
_STARTED: Final = JOURNAL_SERVER_STARTED.labels("Append")
_IN_GROUP: Final = AppendFlow(RateBalance(), 0, 0, total_chunks=2)
"""Flow of each append of a group. An append has two chunks: its content, and the empty intent to commit."""
