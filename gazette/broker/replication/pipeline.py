"""Stage 5 of the byte path: takes proposals and content from `broker/commit/driver`, gives them to the
replicas of peers (`peer_stream`) and, last, to the local spool.

A primary replicates through one pipeline for as long as the journal's route stays. A pipeline has one stream
to each peer, and the exclusive use of the local spool. The holder of the pipeline may send; a `Mutex` of the
replica hands the pipeline out.

Answers arrive in the order of the proposals. The holder takes a ``Turn``: the right to gather the answers to
its append, after all earlier appends have gathered theirs. So the next append can stream while this append
waits for its acknowledgements.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from gazette.auth import Capability, Claims
from gazette.broker.append.events import PeerAnswer, SpoolView
from gazette.broker.append.rules import unexpected_answer
from gazette.broker.replication.peer_stream import PeerStream
from gazette.broker.replication.spool_writer import SpoolWriter
from gazette.errors import Broken, Bug, Closed, Conflict, GazetteError, Invalid, Unavailable
from gazette.fragment.local_file import LocalFragment
from gazette.fragment.spool import Proposal
from gazette.fragment.spool_file import Spool
from gazette.http2.messages import prefixed
from gazette.protocol.content import replicate_content
from gazette.protocol.fragment import ZERO_SUM, Fragment
from gazette.protocol.ids import Offset, ProcessId
from gazette.protocol.label_set import EMPTY_LABELS, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Header, Route
from gazette.protocol.rpc import validate_replicate_response
from gazette.protocol.status import Status
from gazette.runtime.latch import Latch
from gazette.runtime.tasks import await_shared

if TYPE_CHECKING:
    from gazette.broker.replica_context import ReplicaContext

log = logging.getLogger(__name__)

_TOKEN_LIFETIME_S: Final = 24 * 3600.0
_AGE_MAX_S: Final = 11 * 3600.0
"""Greatest age of a pipeline, in seconds.

A peer may end a stream whose token has expired. A cached token is used for half of its life. So the token of
a new stream is valid for at least the other half, 12 h.
"""
_MESSAGE_BYTES_MAX: Final = 1 << 20
"""Upper bound of the content of one ReplicateRequest, in bytes. Brokers may be set to refuse messages of more
than 4 MiB. Large messages cost gRPC in Python half as much per byte as messages of 128 KiB."""
_SYNC_ANSWERS: Final = frozenset({Status.OK.value, Status.PROPOSAL_MISMATCH.value})


OnAnswered: TypeAlias = Callable[[LabelSet | GazetteError], None]
"""Gets the registers after a commit that all peers have acknowledged, or why it may not be acknowledged."""

ReadSpool: TypeAlias = Callable[[LocalFragment, Offset], Awaitable[bytes]]
"""Reads bytes of a spool from an offset on: at least one byte, at most the content of one message."""


class Turn:
    """The right to gather the answers to all messages since the last turn was taken.

    ``async with turn`` waits until the turn comes, and passes it on at the end. A turn that is skipped, or
    left by an exception, breaks the pipeline. Otherwise the next turn would gather the wrong answers.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        prior: asyncio.Future[None] | None,
        end: Offset,
        registers: LabelSet,
    ) -> None:
        self.pipeline = pipeline
        self._prior = prior
        self._end = end
        """End of the last proposal when the turn was taken."""
        self._registers = registers
        """The registers at that end."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def has_come(self) -> bool:
        """True if all earlier appends have gathered their answers."""
        return self._prior is None or self._prior.done()

    def when_come(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once the turn has come, in a later iteration of the event loop."""
        assert self._prior is not None
        self._prior.add_done_callback(lambda _: callback())

    def enter(self) -> None:
        """Begin the turn, which must have come."""
        self.pipeline.gathering_to = self._end
        self.pipeline.gathering_registers = self._registers

    async def __aenter__(self) -> Self:
        try:
            if self._prior is not None and not self._prior.done():
                await await_shared(self._prior)
        except asyncio.CancelledError as cancelled:
            self.skip(cancelled)
            raise
        self.enter()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.leave(exc)

    def leave(self, failure: BaseException | None) -> None:
        """End the turn. With a failure, the pipeline is broken."""
        if failure is not None:
            self.pipeline.fail(_failure_of(failure))
        self._pass_on()

    def skip(self, reason: BaseException) -> None:
        """Give the turn up without gathering, and break the pipeline with ``reason``."""
        self.pipeline.fail(_failure_of(reason))
        if self._prior is None or self._prior.done():
            self._pass_on()
        else:
            self._prior.add_done_callback(lambda _: self._pass_on())

    def _pass_on(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class Pipeline:
    """The replication streams of one journal under one route. Loop-bound; made by ``open_pipeline``.

    ``header`` is the header of the resolution for which the pipeline was built. After ``expires_at``
    (monotonic time), the next append replaces the pipeline. If all peers agree, gathering calls
    ``on_acknowledged`` with the end that all replicas have acknowledged, and the registers there.

    Only the holder sends, and only the owner of the current turn gathers. To close a pipeline, take it from
    its mutex.
    """

    def __init__(
        self,
        header: Header,
        local: SpoolWriter,
        peers: Sequence[PeerStream],
        *,
        expires_at: float,
        on_acknowledged: Callable[[Offset, LabelSet], None],
    ) -> None:
        self.header = header
        self._on_acknowledged = on_acknowledged
        self.gathering_to: Offset = 0
        """End of the append, or synchronization, whose answers are being gathered."""
        self.gathering_registers = EMPTY_LABELS
        """The registers at that end."""
        self._expires_at = expires_at
        self._local: SpoolWriter | None = local
        self._peers = tuple(peers)
        self._gathered: list[bytes] = []
        """Content that is not sent yet: ``_length`` bytes of the append, from its byte ``_begin`` on."""
        self._begin = 0
        self._length = 0
        self._failure: GazetteError | None = None  # The reason given to `fail`; None before.
        self.reassigned = Latch()
        """Set once an assignment was added, removed or made again: a new assignment may stand for another
        replica."""
        self.caught_up = False
        """True if a peer lacked bytes of the open fragment, and this pipeline has begun to send them."""
        self._opened = False
        """True if the route was sent to the peers."""
        self.last_turn: asyncio.Future[None] | None = None
        """Done once the last turn has passed: then no append waits for answers any more."""
        self._unanswered: deque[tuple[Turn, OnAnswered]] = deque()
        """Commits of `commit_now` that wait for answers, in the order of their turns."""
        self._gathering = False  # True while `gather_now` runs.
        for peer in self._peers:
            peer.on_progress = self.gather_now

    @property
    def route(self) -> Route:
        return self.header.route

    @property
    def failure(self) -> GazetteError | None:
        """Why the pipeline cannot be used any more; None while it is usable."""
        if self._failure is None:
            for peer in self._peers:
                if peer.failure is not None:
                    return peer.failure
        return self._failure

    def serves(self, header: Header) -> bool:
        """Return True if the pipeline has the route of ``header``: its members and its primary."""
        if header.route is not self.header.route:
            if not header.route.equivalent(self.header.route):
                return False
            self.header = header  # The next append finds the same route, and compares no members.
        return True

    def usable(self, now: float) -> bool:
        """Return True unless the pipeline has failed, or has expired at ``now``. Do not check the route."""
        return self.failure is None and now < self._expires_at

    @property
    def local(self) -> SpoolWriter:
        """The local spool, with the content that waits to be written to it."""
        if self._local is None:
            raise Bug("pipeline was used after its spool was released")
        return self._local

    @property
    def spool(self) -> Spool:
        return self.local.spool

    @property
    def delta(self) -> int:
        """Bytes of the present append so far, sent or not."""
        return self._begin + self._length if self._gathered else self.local.delta

    def view(self) -> SpoolView:
        """Return the local spool as it is."""
        spool = self.spool
        return SpoolView(spool.fragment, spool.registers, spool.first_append_time)

    # Sending.

    async def sync(self, proposal: Fragment, registers: LabelSet, *, opening: bool) -> None:
        """Propose to all replicas. Each replica answers whether it can go on from the proposal.

        With ``opening``, the first proposal of the pipeline carries the route, addressed to each peer. A peer
        that has failed raises nothing here: see ``gather_sync``. Raise ``Bug`` if the local spool disagrees.
        """
        request = _proposal(proposal, registers, acknowledge=True)
        if not opening or self._opened:
            self._send(request.SerializeToString())
        else:
            self._open(request)
        await self._apply(Proposal(proposal, registers))

    def _open(self, request: broker_pb2.ReplicateRequest) -> None:
        """Send the first request of each stream, which carries the route."""
        request.deprecated_journal = request.proposal.journal
        for peer in self._peers:
            header = Header(peer.peer, self.header.route, self.header.etcd)
            request.header.CopyFrom(header.to_pb())
            peer.send(request.SerializeToString())
        self._opened = True

    async def catch_up(self, read: ReadSpool) -> tuple[PeerAnswer, ...]:
        """Send committed bytes of the local spool to peers that have only its beginning.

        Call this before the first ``sync``. A peer that gets a proposal ahead of its spool goes on after the
        proposal, without the bytes before it. Then only some replicas would hold these bytes. If these
        replicas were lost, readers would wait for the bytes.

        Return the answers of peers that refuse the route; then no bytes were sent. Raise ``Conflict`` if
        a peer has other bytes than this broker, or the failure of the first peer that failed. After an error
        or a cancellation, tear the pipeline down.
        """
        spool_fragment = self.spool.fragment
        # An empty proposal at the beginning changes nothing in a peer that has the beginning, or more.
        beginning = replace(spool_fragment, end=spool_fragment.begin, sum=ZERO_SUM)
        self._open(_proposal(beginning, self.spool.registers, acknowledge=True))
        async with self.take_turn():
            answers = [(peer, _answer(peer, await peer.receive())) for peer in self._peers]
            refusals = tuple(
                answer for _, answer in answers if answer.status.value not in _SYNC_ANSWERS
            )
            if not refusals:
                for peer, answer in answers:
                    end = _behind(answer, spool_fragment)
                    if end is not None:
                        await self._send_missing(peer, end, read)
            return refusals

    async def _send_missing(self, peer: PeerStream, begin: Offset, read: ReadSpool) -> None:
        """Send a peer the committed bytes from ``begin`` on, and wait until the peer has them.

        Raise ``Conflict`` if the peer refuses the resulting fragment, or the failure of the peer.
        """
        self.caught_up = True
        local, offset = self.spool.committed(), begin
        log.info(
            "%(journal)s: sending [%(begin)d, %(end)d) to %(peer)s, which does not have it",
            {
                "journal": local.fragment.journal,
                "begin": begin,
                "end": local.end,
                "peer": peer.peer,
            },
        )
        while offset < local.end:
            content = await read(local, offset)
            peer.send(replicate_content(content, offset - begin))
            offset += len(content)
            if peer.crowded:
                await peer.room()
        request = _proposal(local.fragment, self.spool.registers, acknowledge=True)
        peer.send(request.SerializeToString())
        answer = _answer(peer, await peer.receive())
        if answer.status is not Status.OK:
            raise Conflict(
                "a replica has other bytes than its primary",
                hint="Look for fragments in conflict: `gazctl journals fragments`.",
                journal=local.fragment.journal,
                peer=peer.peer,
                fragment=local.fragment.content_name(),
            )

    async def propose(self, proposal: Fragment, registers: LabelSet, *, acknowledge: bool) -> None:
        """Propose to all replicas. Raise the pipeline's failure, or ``Bug`` if the local spool disagrees.

        Cancellation: some replicas may have the proposal; tear the pipeline down.
        """
        self._raise_failure()
        self._forget_gathered()  # ``next`` has sent this content, or the proposal excludes it.
        if self._peers:
            message = _proposal(proposal, registers, acknowledge=acknowledge).SerializeToString()
            self._send(message)
        await self._apply(Proposal(proposal, registers))

    async def content(self, content: bytes, delta: int) -> None:
        """Send a chunk to all replicas, ``delta`` bytes into the append.

        The first chunk is sent at once. Later chunks travel in batches; ``next`` sends the last batch.
        Return when every peer and the local spool have room for more.

        Raise the failure of a broken pipeline, or ``Unavailable`` if a peer or the local disk makes no
        progress. After an error or a cancellation, tear the pipeline down.
        """
        self._raise_failure()
        length = len(content)
        if self._gathered and self._length + length > _MESSAGE_BYTES_MAX:
            await self._send_gathered()
        if not self._gathered:
            self._begin = delta
        self._gathered.append(content)
        self._length += length
        if not delta or self._length >= _MESSAGE_BYTES_MAX:
            # Send the first chunk at once. It may be the whole append, and the end of the stream comes later.
            await self._send_gathered()

    async def next(self) -> Fragment:
        """Return the fragment that the spool would be after a commit of the content so far.

        Raise the failure of a broken pipeline, or ``Unavailable`` if a peer or the local disk makes no
        progress. After an error or a cancellation, tear the pipeline down.
        """
        self._raise_failure()
        if self._gathered:
            await self._send_gathered()
        await self.local.flush()
        return self.spool.next()

    async def _send_gathered(self) -> None:
        """Send the gathered content to the peers and then to the local spool, waiting for room at each."""
        batch = self._gathered[0] if len(self._gathered) == 1 else b"".join(self._gathered)
        self._forget_gathered()
        for start in range(0, len(batch), _MESSAGE_BYTES_MAX):
            part = (
                batch
                if len(batch) <= _MESSAGE_BYTES_MAX
                else batch[start : start + _MESSAGE_BYTES_MAX]
            )
            if self._peers:
                message = replicate_content(part, self._begin + start)
                for peer in self._peers:
                    peer.send(message)
                for peer in self._peers:
                    if peer.crowded:
                        await peer.room()
            await self.local.content(part, self._begin + start)

    def _forget_gathered(self) -> None:
        self._gathered, self._length = [], 0

    def _send(self, *messages: bytes) -> None:
        for peer in self._peers:
            peer.send(*messages)

    async def _apply(self, proposal: Proposal) -> None:
        result = await self.local.propose(proposal)
        if result.status is not Status.OK:
            raise Bug(
                "the primary's own spool refused its proposal",
                journal=proposal.fragment.journal,
                proposal=proposal.fragment.content_name(),
                spool=result.fragment.content_name(),
            )

    def _raise_failure(self) -> None:
        failure = self.failure
        if failure is not None:
            raise failure

    def is_idle(self, now: float) -> bool:
        """Return True if `commit_now` need not wait: the pipeline is usable, and nothing waits to be sent."""
        if self._gathered or not self._opened or self.reassigned.is_set:
            return False
        if self._failure is not None or now >= self._expires_at:
            return False
        for peer in self._peers:  # noqa: SIM110 - a generator costs an append as much as all of the rest
            if not peer.is_idle:
                return False
        return True

    def commit_now(self, content: bytes, registers: LabelSet) -> Fragment:
        """Commit ``content`` and ``registers`` to the local spool, and propose the same to all peers.

        The pipeline must be idle, and the local spool must have room. Return the proposed fragment. Call
        ``when_answered`` next.
        """
        local = self.local
        fragment = local.spool.commit_now(content, registers)
        if self._peers:
            chunk, proposal = replicate_content(content, 0), local.encode(fragment, registers)
            joined = prefixed(chunk) + prefixed(proposal)
            for peer in self._peers:
                peer.send_joined(joined, chunk, proposal)
        return fragment

    # Gathering.

    def take_turn(self) -> Turn:
        """Queue for the answers to messages since the last turn. Call this while you hold the pipeline."""
        end, registers = self.gathering_to, self.gathering_registers
        if self._local is not None:
            spool = self.spool
            end, registers = spool.fragment.end, spool.registers
        turn = Turn(self, self.last_turn, end, registers)
        self.last_turn = turn.done
        return turn

    async def all_turns(self) -> None:
        """Return once every turn that was taken has passed. Cancellation: no effect."""
        if self.last_turn is not None and not self.last_turn.done():
            await await_shared(self.last_turn)

    async def gather_sync(self) -> tuple[tuple[PeerAnswer, ...], GazetteError | None]:
        """Return the answers of peers to a ``sync``, and the first error: of a peer that did not answer, or
        of a lease that may have ended; None for no error. Call this in the turn of the append.

        Cancellation: the pipeline is broken.
        """
        answers: list[PeerAnswer] = []
        failure: GazetteError | None = self._failure
        for peer in self._peers:
            try:
                answers.append(_answer(peer, await peer.receive()))
            except GazetteError as error:
                failure = failure or error
        if failure is None and all(answer.status is Status.OK for answer in answers):
            try:
                self._on_acknowledged(self.gathering_to, self.gathering_registers)
            except GazetteError as error:
                failure = error
        return tuple(answers), failure

    async def gather_acks(self) -> tuple[PeerAnswer, ...]:
        """Return the answers of peers to a proposal, up to the first refusal. Call this in the append's turn.

        Raise the failure of a broken pipeline, or of the first peer that gave no answer. Raise
        ``Unavailable`` if the broker's lease may not hold. Unless all agree, the pipeline is broken: all
        later messages were built on that proposal.
        """
        # Ignore a peer's failure here: the answers for this turn may have arrived before the failure.
        if self._failure is not None:
            raise self._failure
        answers = []
        for peer in self._peers:
            answers.append(_answer(peer, await peer.receive()))
            if answers[-1].status is not Status.OK:
                self.fail(unexpected_answer(answers[-1]))
                break
        else:
            self._on_acknowledged(self.gathering_to, self.gathering_registers)
        return tuple(answers)

    def when_answered(self, on_answered: OnAnswered) -> None:
        """Take a turn to gather the answers to the last `commit_now`, without a task.

        ``gather_now`` calls ``on_answered`` when all peers have answered, with the registers at the end of
        that commit. If the commit may not be acknowledged, ``on_answered`` gets the reason instead: a peer
        that refused or failed, a broken pipeline, a lease that may not hold, or a ``Bug``. Then the pipeline
        is broken.
        """
        turn = self.take_turn()
        if not turn.has_come:
            turn.when_come(self.gather_now)
        self._unanswered.append((turn, on_answered))
        for peer in self._peers:
            peer.expect()

    def gather_now(self) -> None:
        """Gather the answers of `commit_now` that have arrived, in order."""
        if self._gathering:
            return  # A callback of the loop below has called this method. The loop goes on after it.
        self._gathering = True
        try:
            while self._unanswered and (turn := self._unanswered[0][0]).has_come:
                failure: GazetteError | None = None
                turn.enter()
                try:
                    if not self._take_acks():
                        return
                except GazetteError as error:
                    failure = error
                except Exception as error:  # noqa: BLE001 - given to `on_answered`
                    failure = Bug(f"an append could not be acknowledged: {error!r}")
                    failure.__cause__ = error
                _, on_answered = self._unanswered.popleft()
                registers = self.gathering_registers
                turn.leave(failure)
                on_answered(failure or registers)
        finally:
            self._gathering = False

    def _take_acks(self) -> bool:
        """Take the next answer of each peer, as ``gather_acks`` does. If an answer is missing, take none, and
        return False. Raise the error of a peer that failed or refused, or of ``on_acknowledged``."""
        if self._failure is not None:
            raise self._failure
        for peer in self._peers:
            response = peer.answer
            if response is None:
                if peer.failure is not None:
                    raise peer.failure
                return False
            if response.status:
                raise unexpected_answer(_answer(peer, response))
        for peer in self._peers:
            peer.drop_answer()
        self._on_acknowledged(self.gathering_to, self.gathering_registers)
        return True

    # Ending.

    def fail(self, failure: GazetteError) -> None:
        """Break the pipeline: peers give up uncommitted content, and all pending turns fail."""
        if self._failure is None:
            self._failure = failure
            for peer in self._peers:
                peer.cancel(failure)
            self.gather_now()

    async def release_spool(self) -> Spool:
        """Give up the local spool, in which content may be pending. Call this before ``close``.

        Cancellation: the spool is given up, and nothing writes to it any more.
        """
        local, self._local = self.local, None
        await local.settle()
        return local.spool

    async def close(self) -> None:
        """End all requests. Once all turns have passed, wait for peers to end their streams. Cut others off.

        Cancellation: streams are cut off at once.
        """
        assert self._local is None, "the spool is released before the pipeline is closed"
        turn = self.take_turn()
        for peer in self._peers:
            peer.close_send()
        closed = Closed("the pipeline was closed")
        try:
            async with turn:
                for peer in self._peers:
                    await peer.wait_end()
        finally:
            for peer in self._peers:
                peer.cancel(closed)


def _behind(answer: PeerAnswer, ours: Fragment) -> Offset | None:
    """Return the end of a peer's fragment if ``ours`` begins with that fragment and is longer; else None."""
    if answer.status is Status.OK:  # The peer has an empty spool at the beginning of ``ours``.
        return ours.begin
    fragment = answer.fragment
    if answer.status is not Status.PROPOSAL_MISMATCH or fragment is None:
        return None
    return fragment.end if fragment.begin == ours.begin and fragment.end < ours.end else None


async def roll_back(spool: Spool, *, primary: bool) -> None:
    """Roll back the pending content of a spool, if there is any."""
    if spool.delta:
        await spool.apply(Proposal(spool.fragment, spool.registers), primary=primary)


def open_pipeline(
    context: ReplicaContext,
    header: Header,
    journal: str,
    spool: Spool,
    *,
    on_acknowledged: Callable[[Offset, LabelSet], None],
) -> Pipeline:
    """Start a stream to each peer of the route, of which this broker is the primary. Do not wait for peers.

    If a peer cannot be reached, gathering its answer fails. ``spool`` must have nothing pending. The spool
    belongs to the pipeline, unless this function raises. Raise ``Unavailable`` if etcd has no endpoint of
    some peer, ``Closed`` if the broker's channels are closed.
    """
    peer_ids = [member for member in header.route.members if member != header.process_id]
    endpoints = [_endpoint(context, header, member) for member in peer_ids]
    claims = Claims.of_journal(Capability.REPLICATE, journal)
    metadata = context.peers.credentials.metadata(claims, _TOKEN_LIFETIME_S)
    peers = []
    for member, endpoint in zip(peer_ids, endpoints, strict=True):
        call = context.peers.byte_path(endpoint).replicate(metadata=metadata)
        peers.append(
            PeerStream(member, call, context.scope, timeout_s=context.settings.peer_timeout_s)
        )
    local = SpoolWriter(spool, context.scope, context.pools.spools, primary=True)
    expires_at = context.clock.monotonic() + _AGE_MAX_S
    return Pipeline(header, local, peers, expires_at=expires_at, on_acknowledged=on_acknowledged)


def _endpoint(context: ReplicaContext, header: Header, member: ProcessId) -> str:
    endpoint = context.peers.pick(header.route, process_id=member)
    if endpoint is None:
        raise Unavailable("etcd has no endpoint of a peer", peer=member)
    return endpoint


def _proposal(
    proposal: Fragment, registers: LabelSet, *, acknowledge: bool
) -> broker_pb2.ReplicateRequest:
    return broker_pb2.ReplicateRequest(
        proposal=proposal.to_pb(), registers=registers.to_pb(), acknowledge=acknowledge
    )


def _answer(peer: PeerStream, response: broker_pb2.ReplicateResponse) -> PeerAnswer:
    if not response.status:
        return PeerAnswer(peer.peer, Status.OK)
    try:
        validate_replicate_response(response)
        status = Status.from_pb(response.status)
        header = Header.from_pb(response.header) if response.HasField("header") else None
        fragment = Fragment.from_pb(response.fragment) if response.HasField("fragment") else None
    except Invalid as error:
        raise Broken(f"recv from {peer.peer}: invalid answer: {error}") from error
    return PeerAnswer(
        peer=peer.peer,
        status=status,
        route=None if header is None else header.route,
        revision=0 if header is None else header.etcd.revision,
        fragment=fragment,
        registers=LabelSet.from_pb(response.registers),
    )


def _failure_of(error: BaseException) -> GazetteError:
    if isinstance(error, GazetteError):
        return error
    return Broken("an append which uses this pipeline was cut short")
