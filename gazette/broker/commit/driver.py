"""Stage 4 of the byte path: takes content from `broker/api/append`, performs the effects that
`broker/append/fsm` asks for, and gives content to `pipeline`.

One driver performs one append, in its own task. If the caller goes away, the append is interrupted and not
cancelled, so that it ends in good order. All replicas roll the append back, or all commit it. Then the
pipeline is given back or torn down.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Final, TypeVar, assert_never

import msgspec

from gazette.auth import Claims
from gazette.broker.append import events as ev
from gazette.broker.append.events import PeerAnswer
from gazette.broker.append.flow_control import TICKS_PER_S, AppendFlow
from gazette.broker.append.fsm import AppendFSM
from gazette.broker.append.invalidation import (
    Interrupted,
    Interruptible,
    Superseded,
    changed,
    take_unless,
)
from gazette.broker.append.line import ContentAhead, ContentSource
from gazette.broker.append.sessions import ADMITTED, Admission, SessionLedger
from gazette.broker.commit.pipeline_hold import PipelineHold
from gazette.broker.commit.readiness import ReadinessWatch
from gazette.broker.journal_updates import put_assignments, put_suspend
from gazette.broker.replication.pipeline import Pipeline, open_pipeline, roll_back
from gazette.errors import Bug, Closed, Conflict, GazetteError
from gazette.fragment.local_file import LocalFragment
from gazette.protocol.append_session import SessionAppend
from gazette.protocol.fragment import ZERO_SUM
from gazette.protocol.ids import JournalName, Offset, Revision
from gazette.protocol.journal import SuspendLevel
from gazette.protocol.route import Header
from gazette.protocol.status import Status
from gazette.runtime import tracing
from gazette.runtime.latch import Latch

if TYPE_CHECKING:
    from gazette.broker.context import BrokerContext
    from gazette.broker.replica import Replica
    from gazette.broker.resolver import Resolution

T = TypeVar("T")

CATCH_UP_BYTES: Final = 1 << 19
"""Upper bound of one read of the spool, in bytes, when peers get the bytes that they lack."""


class AppendCall(msgspec.Struct, frozen=True):
    """A request to append. ``min_revision`` is a revision of etcd. ``proxy_header`` is the header that the
    proxying broker resolved."""

    terms: ev.AppendTerms
    claims: Claims
    may_proxy: bool = True
    min_revision: Revision = 0
    proxy_header: Header | None = None
    session: SessionAppend | None = None
    in_line: bool = True
    """True if the append waits in line with others, and is refused if the line is full. False for pulses, and
    for the leader of small appends, which the line counts already."""


class AppendDriver:
    """Performs one append. Call ``run`` once; all other methods at any time, on the event loop.

    ``arrived`` is the monotonic time at which the append began to wait for its turn; None: not yet.
    """

    def __init__(
        self,
        context: BrokerContext,
        call: AppendCall,
        source: ContentSource,
        arrived: float | None = None,
    ) -> None:
        self._context = context
        self._call = call
        self.content = source if isinstance(source, ContentAhead) else ContentAhead(source)
        """The part of the caller's stream that is not read yet: all of it if the append ends as PROXY."""
        self._readiness = ReadinessWatch(context, arrived)
        settings = context.settings
        self._fsm = AppendFSM(
            call.terms,
            read_through=call.min_revision,
            rate_min=settings.min_append_rate,
            rate_max=settings.max_append_rate,
        )
        self._resolution: Resolution | None = None
        self._hold = PipelineHold()
        self._sessions: SessionLedger | None = None
        """The ledger that admitted the append. None if the append has no session."""
        self._sum: Any = None
        """SHA-1 of the content so far; None before the first content."""
        self._committing = (0, 0)
        """Begin and end offset of the last final proposal: a commit or a roll-back."""
        self._waits = Interruptible()

    @property
    def journal(self) -> JournalName:
        return self._call.terms.journal

    @property
    def resolution(self) -> Resolution | None:
        """The last resolution; None before the first."""
        return self._resolution

    @property
    def invalidated(self) -> Latch | None:
        """Set when the last resolution is superseded; None before the first resolution."""
        return None if self._resolution is None else self._resolution.invalidated

    @property
    def flow(self) -> AppendFlow | None:
        """The flow of content; None until content is read."""
        return self._fsm.flow

    async def run(self) -> ev.Outcome:
        """Run the append to its end and return its outcome, which holds errors of the append.

        Cancel only when the broker is torn down. Cancellation breaks the pipeline and gives it up. Content
        that was not proposed for commit gets into no journal.
        """
        self._waits.begin()
        fsm = self._fsm
        try:
            effects = fsm.start()
            while effects:
                event: ev.Event | None = None
                for effect in effects:
                    event = await self._perform(effect)
                    if event is not None:
                        # A failure drops the other effects of the step. A success comes from the last effect.
                        break
                effects = () if event is None else fsm.step(event)
            assert fsm.outcome is not None
            return fsm.outcome
        finally:
            self._leave_session(fsm.outcome)
            if fsm.outcome is None:
                self._hold.drop()

    def interrupt(self, reason: GazetteError) -> None:
        """End the append early, in good order, for ``reason``: for example, its caller has gone.

        Any wait ends now, except a wait for a replica, or for etcd to record assignments, a suspension or the
        first commit. The replicas still answer a proposal that was sent.
        """
        self._waits.interrupt(reason)

    async def _perform(self, effect: ev.Effect) -> ev.Event | None:
        """Perform an effect. Return the event to which the effect has led; None if it reports no success."""
        match effect:
            case ev.ReadContent(ticks):
                return await self._read_content(ticks)
            case ev.SendContent(content, delta):
                return await self._send_content(content, delta)
            case ev.Resolve(min_revision):
                return await self._resolve(min_revision)
            case ev.TakePipeline():
                return await self._take_pipeline()
            case ev.CheckReadiness():
                return self._see_readiness()
            case ev.SendRoll() | ev.SendFinal():
                return await self._propose(effect)
            case ev.HandOver():
                self._hold.hand_over()
                return None
            case ev.GatherAcks():
                return await self._gather_acks()
            case ev.GiveBackPipeline():
                self._hold.give_back()
                return None
        return await self._perform_rare(effect)

    async def _perform_rare(self, effect: ev.RareEffect) -> ev.Event | None:
        """Perform an effect that only some appends ask for. This call may wait long."""
        match effect:
            case ev.HoldContent(ticks):
                return await self._hold_content(ticks)
            case ev.BuildPipeline():
                return await self._build_pipeline()
            case ev.TearDownPipeline():
                await self._hold.tear_down()
            case ev.BreakPipeline(error):
                self._hold.break_pipeline(error, self._context.scope)
            case ev.SendSync(proposal, registers, opening):
                if proposal.begin > self._pipeline.spool.fragment.end:
                    # Other followers may have the bytes that this spool lacks.
                    self._hold.held_replica.others.forget()
                await self._pipeline.sync(proposal, registers, opening=opening)
                return ev.SyncSent(self._pipeline.view())
            case ev.GatherSync():
                return await self._gather_sync()
            case ev.PutAssignments(route):
                return await self._write(put_assignments(self._context, self._resolved, route))
            case ev.PutSuspend(level, offset):
                return await self._suspend(level, offset)
            case (
                ev.LoadHead()
                | ev.AwaitReadiness()
                | ev.SeekClosing()
                | ev.ConfirmHead()
                | ev.BeginTenure()
            ):
                return await self._make_ready(effect)
            case ev.AwaitAcks():
                return await self._await_acks()
            case _:
                assert_never(effect)
        return None

    async def _suspend(self, level: SuspendLevel, offset: Offset) -> ev.Event:
        """Change the suspension in etcd. To suspend, first close the known head at the agreed end, unless the
        head is beyond ``offset``."""
        if level is not SuspendLevel.NONE:
            pipeline, head = self._pipeline, self._hold.held_replica.head
            try:
                # Gather all answers first: then all replicas have the bytes before the head, and no answer
                # comes after the head is closed. Such an answer would open the head again.
                await self._waits.run(pipeline.all_turns())
                if pipeline.failure is not None:
                    return ev.SendFailed(pipeline.failure)
                if offset >= head.offset:  # The spool of a read-only journal may lack bytes.
                    await head.suspend(self._resolved.tenure, offset, pipeline.spool.registers)
            except (Interrupted, GazetteError) as error:
                return self._unfinished(error)
        return await self._write(put_suspend(self._context, self._resolved, level, offset))

    def _unfinished(self, error: BaseException) -> ev.Event:
        """Return the event for a wait that ended with ``error``. Raise any error that is not expected."""
        match error:
            case Superseded():
                return ev.Invalidated()
            case Interrupted():
                return ev.Abandoned(error.reason)
            case Closed() if self._resolved.invalidated.is_set:
                return ev.Invalidated()
            case GazetteError():
                return ev.Failed(error)
        raise error

    async def _resolve(self, min_revision: Revision) -> ev.Event:
        """Resolve the journal, without a wait if possible. Say whether a held pipeline still fits it."""
        call, context = self._call, self._context
        try:
            resolution: Resolution | None = None
            if call.proxy_header is None and self._waits.reason is None:
                resolution = context.resolver.resolve_now(
                    call.terms.journal,
                    claims=call.claims,
                    may_proxy=call.may_proxy,
                    min_etcd_revision=min_revision,
                )
            if resolution is None:
                resolution = await self._waits.run(
                    context.resolver.resolve(
                        call.terms.journal,
                        claims=call.claims,
                        may_proxy=call.may_proxy,
                        require_primary=True,
                        min_etcd_revision=min_revision,
                        proxy_header=call.proxy_header,
                    )
                )
        except Interrupted as interrupted:
            return ev.Abandoned(interrupted.reason)
        except GazetteError as error:
            return ev.Failed(error)
        self._resolution = resolution
        hold = self._hold
        if hold.replica is None:
            return resolution.as_event
        return msgspec.structs.replace(
            resolution.as_event,
            same_replica=resolution.replica is hold.replica,
            same_members=hold.pipeline is None or not hold.pipeline.reassigned.is_set,
        )

    async def _take_pipeline(self) -> ev.Event:
        """Take the pipeline when its turn comes. Report a pipeline that must be replaced as a missing one."""
        replica = self._resolved.replica
        assert replica is not None
        try:
            pipeline = await self._take_turn(replica)
        except (Superseded, Interrupted, GazetteError) as error:
            return self._unfinished(error)
        self._hold.take(replica, pipeline)
        if (
            pipeline is None
            or pipeline.reassigned.is_set
            or not pipeline.usable(self._context.clock.monotonic())
        ):
            return ev.PipelineTaken(None, None, replica.rate)
        return ev.PipelineTaken(pipeline.route, pipeline.view(), replica.rate)

    async def _take_turn(self, replica: Replica) -> Pipeline | None:
        """Wait for the pipeline. First read content ahead: a holder without content would delay all appends.

        Raise ``Conflict`` at once for an unknown session. After a wait, its client would have to repeat the
        append, and to wait again. Raise ``Unavailable`` if the line is full, ``Broken`` for a slow caller.
        """
        self._readiness.begin()
        if (session := self._call.session) is not None:
            refusal = replica.sessions.refusal_of(session, self._resolved.tenure)
            if refusal is not None:
                raise refusal
        if not self._call.in_line:
            return await self._take(replica)
        with replica.line.wait(self.content):
            rate_min = self._context.settings.min_append_rate
            await self._waits.run(self.content.read_ahead(rate_min))
            return await self._take(replica)

    async def _take(self, replica: Replica) -> Pipeline | None:
        if replica.line.store_ails_since is not None:
            await self._await_store(replica)
        return await self._waits.run(take_unless(replica.pipeline, self._resolved.invalidated))

    async def _await_store(self, replica: Replica) -> None:
        """Wait until the journal's store was listed and is healthy, or until the time for this wait is over.

        The append does not have its turn yet, so it delays no other append.
        """
        resolution, readiness = self._resolved, self._readiness
        monotonic = self._context.clock.monotonic
        while monotonic() < (until := readiness.store_until(resolution, replica)):
            await self._waits.run(readiness.change(resolution, replica, until))

    async def _build_pipeline(self) -> ev.Event:
        """Replace the pipeline: take the spool, open streams to peers, send the bytes they lack, and lead."""
        replica, resolution = self._hold.held_replica, self._resolved
        await self._hold.tear_down_former()
        try:
            spool = await self._waits.run(take_unless(replica.spool, resolution.invalidated))
        except (Superseded, Interrupted, GazetteError) as error:
            return self._unfinished(error)
        pipeline: Pipeline | None = None
        try:
            await roll_back(spool, primary=True)  # The last holder may have left pending content.
            if not replica.leads:
                # Read the known head again: the head may have grown while this replica followed.
                replica.head.loaded = False
            pipeline = open_pipeline(
                self._context,
                resolution.header,
                resolution.journal,
                spool,
                on_acknowledged=replica.all_acknowledged,
            )
            pipeline.reassigned = resolution.reassigned
        except GazetteError as error:
            return ev.Failed(error)
        finally:
            if pipeline is None:
                replica.spool.give(spool)
        self._hold.pipeline = pipeline
        if replica.has_unagreed(spool.fragment):
            failure_event = await self._catch_up(replica, pipeline)
            if failure_event is not None:
                return failure_event
        replica.lead(spool.fragment.end, spool.registers, resolution.tenure)
        now = self._context.clock.now()
        return ev.PipelineBuilt(pipeline.view(), now, pipeline.caught_up)

    async def _catch_up(self, replica: Replica, pipeline: Pipeline) -> ev.Event | None:
        """Send peers the bytes of the spool that they lack. Return None once all peers have all of them."""

        async def read(local: LocalFragment, at: Offset) -> bytes:
            return await self._context.pools.reads.run(local.pread, at, CATCH_UP_BYTES)

        error: GazetteError | None = None
        answers: tuple[PeerAnswer, ...] = ()
        try:
            answers = await pipeline.catch_up(read)
        except Conflict as conflict:
            # The next pipeline does not send these bytes again: see `Replica.has_unagreed`.
            replica.refused_to, error = pipeline.spool.fragment.end, conflict
        except GazetteError as failure:
            if self._resolved.reassigned.is_set:
                return ev.Invalidated()  # The peer that failed may have left the route.
            error = failure
        if error is None and not answers:
            return None
        return ev.SyncAnswered(answers, self._context.clock.now(), error)

    async def _write(self, writing: Awaitable[Revision]) -> ev.Event:
        try:
            return ev.EtcdWritten(await writing)
        except GazetteError as error:
            return ev.Failed(error)

    async def _make_ready(
        self,
        effect: ev.LoadHead | ev.AwaitReadiness | ev.SeekClosing | ev.ConfirmHead | ev.BeginTenure,
    ) -> ev.Event:
        resolution, replica = self._resolved, self._hold.held_replica
        try:
            match effect:
                case ev.LoadHead():
                    await self._waits.run(replica.load_head())
                case ev.AwaitReadiness(until):
                    if replica.line.store_ails_since is None:
                        replica.line.store_ails_since = self._context.clock.monotonic()
                    await self._waits.run(self._readiness.change(resolution, replica, until))
                case ev.SeekClosing():
                    await self._waits.run(replica.adopt_closing(resolution.tenure))
                case ev.ConfirmHead(offset):
                    await self._waits.run(replica.confirm(resolution.tenure, offset))
                case ev.BeginTenure(end):
                    await self._waits.run(replica.begin(resolution.tenure, end))
        except (Superseded, Interrupted, GazetteError) as error:
            return self._unfinished(error)
        return self._see_readiness()

    def _see_readiness(self) -> ev.ReadinessSeen:
        replica = self._hold.held_replica
        return self._readiness.look(self._resolved, replica, self._admission(replica.sessions))

    def _admission(self, sessions: SessionLedger) -> Admission:
        if self._call.session is None:
            return ADMITTED
        self._sessions = sessions
        return sessions.admit(self._call.session, self._resolved.tenure, self)

    def _leave_session(self, outcome: ev.Outcome | None) -> None:
        """Record in the ledger of sessions that this attempt has ended."""
        session = self._call.session
        if session is not None and self._sessions is not None:
            commit = None
            if outcome is not None and outcome.ending is ev.Ending.COMMITTED:
                commit = outcome.commit
            self._sessions.ended(session, self, commit)

    # Content.

    async def _read_content(self, ticks: int | None) -> ev.Event:
        clock = self._context.clock
        began = _ticks(clock.monotonic())
        if self.content.is_ahead and self._waits.reason is None:
            content = self.content.take()
            if content is None:
                return await self._stream_ended()
            return ev.ContentRead(content, 0, began)
        try:
            content, stalled = await self._waits.run(
                self.content.read(None if ticks is None else ticks / TICKS_PER_S)
            )
        except TimeoutError:
            return ev.ContentLate()
        except Interrupted as interrupted:
            return ev.StreamFailed(interrupted.reason)
        except GazetteError as error:
            return ev.StreamFailed(error)
        if content is None:
            return await self._stream_ended()
        now = _ticks(clock.monotonic())
        return ev.ContentRead(content, now - began, now, stalled)

    async def _hold_content(self, ticks: int) -> ev.Event:
        """Wait for ``ticks``, at most until the resolution is superseded or the append interrupted."""
        clock, superseded = self._context.clock, False
        try:
            await self._waits.run(
                changed(self._resolved.invalidated, clock.sleep(ticks / TICKS_PER_S))
            )
        except Superseded:
            superseded = True
        except Interrupted as interrupted:
            return ev.StreamFailed(interrupted.reason)
        return ev.ContentHeld(_ticks(clock.monotonic()), superseded)

    async def _stream_ended(self) -> ev.Event:
        try:
            proposal = await self._pipeline.next()
        except Bug:  # A bug is no failure of the pipeline: it ends the broker.
            raise
        except GazetteError as error:
            return ev.SendFailed(error)
        if self._sum is None:
            return ev.StreamEnded(proposal, ZERO_SUM)  # Without content, the append has no sum.
        is_alone = not self._pipeline.spool.fragment.length
        return ev.StreamEnded(proposal, proposal.sum if is_alone else self._sum.digest())

    async def _send_content(self, content: bytes, delta: int) -> ev.Event | None:
        pipeline = self._pipeline
        if not delta:
            self._sum = hashlib.sha1(usedforsecurity=False)
            # If the append begins its fragment, take the fragment's sum: do not hash the content twice.
            pipeline.local.begin(self._sum.update if pipeline.spool.fragment.length else None)
        try:
            await pipeline.content(content, delta)
        except Bug:
            raise
        except GazetteError as error:
            return ev.SendFailed(error)
        return None

    async def _propose(self, effect: ev.SendRoll | ev.SendFinal) -> ev.Event | None:
        is_final = isinstance(effect, ev.SendFinal)
        if is_final:
            self._committing = (self._pipeline.spool.fragment.end, effect.proposal.end)
        try:
            if is_final:
                # Followers show a commit to readers at once. Without a lease, do not send a commit: another
                # broker may lead the journal by now, and commit other bytes.
                self._context.lease.check()
            await self._pipeline.propose(effect.proposal, effect.registers, acknowledge=is_final)
        except Bug:
            raise
        except GazetteError as error:
            return ev.SendFailed(error)
        return None if is_final else ev.RollSent(self._pipeline.view())

    # Answers.

    async def _gather_sync(self) -> ev.Event:
        """Gather the answers to a synchronization, in the append's turn."""
        pipeline = self._pipeline
        with tracing.span("replicate", journal=self.journal, sync=1):
            async with pipeline.take_turn():
                answers, error = await pipeline.gather_sync()
        if error is not None and self._resolved.reassigned.is_set:
            return ev.Invalidated()  # The peer that failed may have left: do not fail the append.
        return ev.SyncAnswered(answers, self._context.clock.now(), error)

    async def _await_acks(self) -> ev.Event:
        pipeline = self._pipeline
        try:
            await self._waits.run(pipeline.all_turns())
        except Interrupted as interrupted:
            return ev.Abandoned(interrupted.reason)
        if pipeline.failure is not None:
            return ev.SendFailed(pipeline.failure)
        return ev.AllAcknowledged(self._context.clock.now())

    async def _gather_acks(self) -> ev.Event:
        """Gather the answers to the final proposal in turn. Record the first commit of a tenure in etcd."""
        turn = self._hold.turn
        assert turn is not None
        try:
            with tracing.span("replicate", journal=self.journal):
                async with turn:
                    answers = await turn.pipeline.gather_acks()
                    # Still in the turn: etcd must have the head before a later append is answered.
                    if all(answer.status is Status.OK for answer in answers):
                        await self._know_head()
                    return ev.AcksGathered(answers)
        except GazetteError as error:
            return ev.GatherFailed(error)

    async def _know_head(self) -> None:
        """Record in etcd that the journal has content, before this primary answers its first append."""
        begin, end = self._committing
        replica, tenure = self._hold.held_replica, self._resolved.tenure
        if end <= begin or replica.head.names(tenure):
            return
        await replica.record_first_append(tenure, begin, end)

    @property
    def _resolved(self) -> Resolution:
        assert self._resolution is not None
        return self._resolution

    @property
    def _pipeline(self) -> Pipeline:
        return self._hold.held_pipeline


def _ticks(seconds: float) -> int:
    return int(seconds * TICKS_PER_S)
