"""Stage 13 of the byte path: takes chunks from a shard's inbox, and gives commits to its store.

Runs on the shard's thread, from promotion to the end. Module `transaction` decides the steps. This module
performs them: it decodes, sequences, calls the application, commits and acknowledges.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from gazette.client.append.appender import AppendParams
from gazette.client.append.service import AppendService
from gazette.consumer import metrics
from gazette.consumer.application import MessageProducer
from gazette.consumer.contract.array_pass import MessageRows
from gazette.consumer.contract.callbacks import ApplicationFailed, require_none
from gazette.consumer.contract.error_cause import wrap_error
from gazette.consumer.contract.poison import PoisonPolicy
from gazette.consumer.inbox import (
    Call,
    Chunk,
    Event,
    Feed,
    Inbox,
    InputEnded,
    Jump,
    Messages,
    SourceFailed,
)
from gazette.consumer.transaction.dispatch import Deferred, Dispatcher, TimersDue
from gazette.consumer.transaction.poison_handler import PoisonSkipper
from gazette.consumer.transaction.shard_callbacks import ShardCallbacks
from gazette.consumer.transaction.shard_io import FinishedTransaction, ShardIO
from gazette.consumer.transaction.shard_timers import ShardTimers
from gazette.consumer.transaction.transaction import NANOS, Phases, Policy, Prior, Step, Transaction
from gazette.errors import Bug, Fenced, GazetteError
from gazette.message.envelope import Envelope, EnvelopeDecoder
from gazette.message.framing.frames import MalformedMessage
from gazette.message.sequencer.sequencer import PRUNE_HORIZON_NS, ReplayRange, Sequencer
from gazette.message.uuid import flags_text
from gazette.protocol.checkpoint import Checkpoint
from gazette.runtime import failpoints
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import OpFuture, as_plain_error, failed, first_failure, resolved

log = logging.getLogger(__name__)

CONSUME_MAX: Final = 1024
"""Greatest number of messages, or of timers, between two looks at the clock and the inbox."""
CONSUME_S: Final = 0.02
"""Seconds that messages or timers between two looks should take, to keep to the maximum duration."""
FIRED_MAX: Final = 16_384
"""Greatest number of timers that fire in one transaction."""


@dataclass(slots=True)
class _Backlog:
    """Decoded messages that are not queued in the sequencer yet, and the decoder that may have more."""

    batch: Sequence[Envelope[Any]] = ()
    index: int = 0
    decoder: EnvelopeDecoder[Any] | None = None

    @property
    def waiting(self) -> bool:
        return self.index < len(self.batch) or self.decoder is not None

    def refill(self) -> None:
        """Decode more if all messages were queued. Raise ``MalformedMessage`` if the next does not decode."""
        if self.index < len(self.batch) or self.decoder is None:
            return
        self.batch, self.index = self.decoder.decode(), 0
        if not self.batch:
            self.decoder = None


@dataclass(slots=True)
class PriorTransaction:
    """The last transaction whose commit was started; before the first commit, the restored checkpoint."""

    checkpoint: Checkpoint
    read_through: dict[str, int]
    commit: OpFuture[Any]
    acks: dict[str, OpFuture[Any]] = field(default_factory=dict)
    recovered: bool = False
    """True for a restored checkpoint: its commit has succeeded, and its acknowledgements may be missing."""
    transaction: Transaction | None = None
    """The transaction; None for a restored checkpoint."""
    bytes: int = 0
    """Bytes of the messages that the transaction has consumed."""

    def watch(self, wake: Callable[[object], None]) -> None:
        """Call ``wake`` when the commit or an acknowledgement is done."""
        self.commit.add_done_callback(wake)
        for future in self.acks.values():
            future.add_done_callback(wake)

    def require_committed(self) -> None:
        """Raise the error of the store's commit, wrapped by `wrap_error`, if the commit failed."""
        if (error := first_failure((self.commit,))) is not None:
            raise wrap_error("the store's commit failed", error)

    def is_acknowledged(self) -> bool:
        """Return True if all acknowledgements are appended. If an append has failed, raise its error, wrapped
        by `wrap_error`."""
        if (error := first_failure(self.acks.values())) is not None:
            subject = "a recovered acknowledgement" if self.recovered else "an acknowledgement"
            raise wrap_error(f"{subject} could not be appended", error)
        return all(future.done() for future in self.acks.values())


class Transactor:
    """Transactions of one shard. Use it on the shard's thread, except the constructor, `add_wait` and
    `commit`."""

    def __init__(
        self,
        callbacks: ShardCallbacks,
        appends: AppendService,
        inbox: Inbox,
        shard_io: ShardIO,
        clock: Clock,
        decoders: dict[str, EnvelopeDecoder[Any]],
        *,
        recovery_log: str,
        poison_policy: PoisonPolicy | None = None,
        application_name: str = "",
        timers: ShardTimers | None = None,
    ) -> None:
        """Make the transactor. ``application_name`` goes into each checkpoint. ``timers`` is None for an
        application without ``on_timer``."""
        self._callbacks = callbacks
        self._shard = shard = callbacks.shard
        self._id = shard.id
        self._publisher = publisher = callbacks.publisher
        self._appends = appends
        self._inbox = inbox
        self._io = shard_io
        self._clock = clock
        self._decoders = decoders
        self._recovery_log = recovery_log
        self._application_name = application_name
        self._brings_messages = isinstance(callbacks.application, MessageProducer)
        # Journals of a `MessageProducer` need not exist, and no broker has the bytes of its messages.
        read_again = _no_bytes if self._brings_messages else shard_io.read_again
        self._poison = (
            None
            if poison_policy is None
            else PoisonSkipper(
                poison_policy, shard.id, publisher, clock, read_again, shard_io.skipped
            )
        )
        self._timers = timers
        places = {decoder.journal: decoder.clock_place for decoder in decoders.values()}
        clock_places = {name: place for name, place in places.items() if place is not None}
        self._dispatcher = Dispatcher(callbacks, inbox, self._poison, timers, clock_places)
        self._backlog = _Backlog()
        self._consume_limit = 1
        """Greatest number of messages to consume between two looks at the clock: see `_next_limit`."""
        self._chunk_bytes = 0
        """Bytes of a source to decode together, if they wait in the inbox. 0 for one chunk at a time."""
        self._fire_limit = 1
        """Greatest number of timers to fire between two looks at the clock."""
        self._begun = False
        """True between the callbacks ``begin_transaction`` and ``finished_transaction``."""
        self._input_ended = False
        self._consumed_bytes = 0
        """Bytes of the messages that the running transaction has consumed so far."""
        self._extra_waits: deque[OpFuture[Any]] = deque()
        self._stall_reported = False
        self._prior = PriorTransaction(Checkpoint(), {}, commit=resolved(None), recovered=True)
        self._sequencer: Sequencer[Any]

    def add_wait(self, future: OpFuture[Any]) -> None:
        """Make the commit of the running transaction wait for ``future``, too."""
        self._extra_waits.append(future)

    @property
    def commit(self) -> OpFuture[Any]:
        """The last commit that was started. Before the first, and after a restored checkpoint, a future that
        is done. For any thread."""
        return self._prior.commit

    def run(self, checkpoint: Checkpoint) -> None:
        """Run transactions without end, from a restored checkpoint on.

        If a `MessageProducer` ends its input, restore the checkpoint and begin again. Raise ``Closed``
        if the inbox was stopped, and the error that makes the shard fail.
        """
        # The former owner may not have appended these acknowledgements. They commit its publishes, and roll
        # back its later publishes. So no transaction commits before they are appended.
        owed: Mapping[str, bytes] = checkpoint.ack_intents
        while True:
            if self._brings_messages:
                feed = Feed(self._inbox, self._shard.spec.read_channel_size or 8192)
                self._callbacks.start_reading(checkpoint, feed)
            self._run(checkpoint, owed)
            checkpoint, owed = self._restore_again(), {}

    def _restore_again(self) -> Checkpoint:
        """Restore the checkpoint after the input ended. Do not append its acknowledgements again.

        The input ends when everything is committed and acknowledged, so no acknowledgement is owed. A
        repeated acknowledgement would bypass the append service: it could arrive late, and roll back the next
        messages of this publisher. Raise ``Fenced`` if the checkpoint has acknowledgements of another owner.
        """
        self._io.require_assigned()
        checkpoint = self._callbacks.restore_checkpoint()
        acknowledged = self._prior.checkpoint.ack_intents
        for journal, intent in checkpoint.ack_intents.items():
            if acknowledged.get(journal) != intent:
                raise Fenced(
                    "the restored checkpoint owes an acknowledgement that this owner never "
                    "made: another owner has committed to the store since",
                    shard=self._id,
                    journal=journal,
                )
        return checkpoint

    def _run(self, checkpoint: Checkpoint, owed: Mapping[str, bytes]) -> None:
        """Run transactions until the input ends. Append the acknowledgements ``owed`` first."""
        self._input_ended = False
        spec = self._shard.spec
        self._lives = checkpoint.lives
        array_pass = self._callbacks.application.array_pass(self._shard)
        self._chunk_bytes = 0 if array_pass is None else array_pass.chunk_bytes
        new_sequencer = Sequencer if array_pass is None else array_pass.new_sequencer
        self._sequencer = new_sequencer(checkpoint.sources, spec.ring_buffer_size or 8192)
        self._prior = PriorTransaction(
            checkpoint=checkpoint,
            read_through={name: source.read_through for name, source in checkpoint.sources.items()},
            commit=resolved(None),
            recovered=True,
        )
        for journal, intent in owed.items():
            self._prior.acks[journal] = self._io.append_recovered(journal, intent)
        self._prior.watch(self._inbox.wake)
        if self._timers is not None:
            self._timers.reload()
        while self._run_transaction():
            pass

    def _run_transaction(self) -> bool:
        """Run one transaction up to the start of its commit. Return False when the input has ended."""
        transaction = Transaction(self._policy(), self._clock.monotonic(), prior=Prior.COMMITTING)
        self._stall_reported = False
        if self._input_ended:
            transaction.end_input()
        try:
            return self._run_to_commit(transaction)
        except BaseException as error:
            if self._begun:
                # Call `finished_transaction` even now: the application may hold a semaphore, for example.
                self._finish_failed(error)
            raise

    def _finish_failed(self, error: BaseException) -> None:
        """Call `finished_transaction` with a future that failed. Log an error of the callback."""
        try:
            self._call_finished_transaction(failed(error))
        except GazetteError as later_error:
            log.warning(
                "shard %(shard)s, after it failed: %(error)s",
                {"shard": self._id, "error": later_error},
            )

    def _run_to_commit(self, transaction: Transaction) -> bool:
        """Perform steps until the commit is started. Return False if the input ends before the first message
        or timer."""
        while True:
            self._poll_prior(transaction)
            ready = self._ready
            decision = transaction.decide(
                self._clock.monotonic(),
                ready=ready,
                pending=self._sequencer.has_pending,
                due=self._timers is not None and self._timers.is_due(ready=ready),
            )
            match decision.step:
                case Step.CONSUME:
                    if self._timers is not None:
                        self._timers.take_turns()
                    self._advance(transaction)
                case Step.FIRE:
                    self._fire(transaction)
                case Step.WAIT:
                    self._wait(transaction, decision.until)
                case Step.COMMIT:
                    self._commit(transaction)
                    return True
                case Step.END:
                    return False

    def _policy(self) -> Policy:
        spec = self._shard.spec
        return Policy(
            min_duration_s=spec.min_txn_duration_ns / NANOS,
            max_duration_s=spec.max_txn_duration_ns / NANOS,
            wait_for_ack=not spec.disable_wait_for_ack,
        )

    def _poll_prior(self, transaction: Transaction) -> None:
        """Note whether the prior transaction has committed, and is acknowledged. If it failed, raise its
        error. Report it once it is acknowledged. If this transaction stalls behind the prior commit, report
        that once."""
        prior = self._prior
        if transaction.prior is Prior.COMMITTING and prior.commit.done():
            prior.require_committed()
            transaction.prior_committed()
            if prior.transaction is not None:
                prior.transaction.committed_at = self._clock.monotonic()
        if transaction.prior is Prior.ACKNOWLEDGING:
            if prior.is_acknowledged():
                transaction.prior_acknowledged()
                if failpoints.armed_points:
                    failpoints.hit("transaction.acknowledged", self._id)
                self._report(prior)
        elif transaction.stalled_at is not None and not self._stall_reported:
            self._stall_reported = True
            self._io.stalled("the store's commit is slower than max_txn_duration")

    def _report(self, prior: PriorTransaction) -> None:
        """Report an acknowledged transaction, for queries that wait for its offsets, and for metrics."""
        publish_at: dict[str, int] = {}
        phases: Phases | None = None
        messages = timers = 0
        if not prior.recovered:
            publish_at = {name: ack.result().commit.end for name, ack in prior.acks.items()}
        if prior.transaction is not None:
            prior.transaction.acknowledged_at = self._clock.monotonic()
            phases = prior.transaction.phases()
            messages, timers = prior.transaction.consumed, prior.transaction.fired
        self._count_queued()
        self._io.finished(
            FinishedTransaction(
                prior.read_through, publish_at, messages, prior.bytes, phases, timers
            )
        )

    def _count_queued(self) -> None:
        """Add the counts of the sequencer to the metric, and clear them."""
        outcomes = self._sequencer.outcomes
        for (journal, flags, outcome), count in outcomes.items():
            metrics.SEQUENCER_QUEUED.inc(journal, flags_text(flags), outcome.label, by=count)
        outcomes.clear()

    @property
    def _ready(self) -> bool:
        return self._sequencer.drain is not None or self._backlog.waiting or self._inbox.inputs > 0

    def _wait(self, transaction: Transaction, until: float | None) -> None:
        """Wait for an event, a future or a timer, at most until ``until``. Handle an event that comes."""
        if transaction.prior is not Prior.DONE and self._publisher.buffered_bytes:
            # While the prior transaction commits, append the messages published so far. They share an append
            # with the waiting prior acknowledgement, and are in place before our own commit.
            self._publisher.flush()
        timeout_s = None if until is None else max(0.0, until - self._clock.monotonic())
        if self._timers is not None and not transaction.closed:
            waits = (timeout_s, self._timers.wait_s())
            timeout_s = min((wait for wait in waits if wait is not None), default=None)
        # A closed transaction takes no more input: handle only calls and futures.
        get: Callable[[float | None], Event | None]
        get = self._inbox.get_call if transaction.closed else self._inbox.get
        if (event := get(timeout_s)) is not None:
            self._handle(event, transaction)

    def _advance(self, transaction: Transaction) -> None:
        """Consume some messages, or decode some input."""
        if self._sequencer.drain is not None:
            self._consume(transaction)
        elif self._backlog.waiting:
            self._sequence_backlog(transaction)
        elif (event := self._inbox.get(0)) is not None:
            self._handle(event, transaction)

    def _handle(self, event: Event, transaction: Transaction) -> None:
        """Queue the messages of an event, note the end of the input, or run a call. Raise the error of a
        source that failed."""
        # Input is taken only while the backlog is empty. So `Chunk` and `Messages`, which replace parts of
        # the backlog, drop no messages.
        match event:
            case Chunk():
                self._feed(event)
                self._sequence_backlog(transaction)
            case Jump(journal=journal, offset=offset):
                self._jump(transaction, journal, offset)
            case Messages(batch=batch):
                self._backlog = _Backlog(batch)
                self._sequence_backlog(transaction)
            case InputEnded():
                self._input_ended = True
                transaction.end_input()
            case SourceFailed(journal=journal, error=error):
                raise wrap_error(f"source {journal} cannot be read", error)
            case Call(fn=fn, future=future):
                _perform(fn, future)

    def _feed(self, chunk: Chunk) -> None:
        """Feed a chunk to the decoder of its source. For an array pass, add the waiting chunks after it."""
        decoder = self._decoders[chunk.journal]
        self._backlog.decoder = decoder
        size, next_chunk = 0, self._inbox.take_continuation
        event: Chunk | None = chunk
        while event is not None:
            if event.offset != decoder.end:
                raise Bug(
                    "chunk is not the next",
                    journal=event.journal,
                    offset=event.offset,
                    at=decoder.end,
                )
            decoder.feed(event.data)
            size += len(event.data)
            event = next_chunk(event) if size < self._chunk_bytes else None

    def _sequence_backlog(self, transaction: Transaction) -> None:
        """Sequence decoded messages until some have committed. If a message is malformed, skip it if there is
        a policy, otherwise raise its error."""
        backlog, sequencer = self._backlog, self._sequencer
        try:
            backlog.refill()
        except MalformedMessage as error:
            decoder = backlog.decoder
            if self._poison is None or decoder is None:
                raise
            decoder.skip(error)
            if error.is_whole:  # Otherwise its end is not known yet: a fail-over reads it again.
                self._skip_malformed(transaction, error)
                sequencer.skip(error.journal, error.end)
            return
        if backlog.index < len(backlog.batch):
            backlog.index = sequencer.queue_batch(backlog.batch, backlog.index)
            if sequencer.replay_range is not None:
                sequencer.start_replay(self._replay(sequencer.replay_range))
        if sequencer.drain is None and transaction.is_empty:
            self._report_read_through(transaction)

    def _replay(self, wanted: ReplayRange) -> Iterator[Sequence[Envelope[Any]]]:
        source = self._callbacks if self._brings_messages else self._io
        yield from source.replay(wanted)

    def _jump(self, transaction: Transaction, journal: str, offset: int) -> None:
        """Continue a source at ``offset``, because the bytes before it were deleted. If the deletion cut a
        message, skip it if there is a policy, otherwise raise its error."""
        try:
            self._decoders[journal].jump(offset)
        except MalformedMessage as error:
            if self._poison is None:
                raise
            self._skip_malformed(transaction, error)
        self._sequencer.skip(journal, offset)
        if transaction.is_empty:
            self._report_read_through(transaction)

    def _skip_malformed(self, transaction: Transaction, error: MalformedMessage) -> None:
        """Publish a dead letter in the transaction that commits the offset after the message."""
        assert self._poison is not None
        if transaction.began_at is None:
            self._begin(transaction)
        self._poison.skip_malformed(error)
        self._consumed_bytes += error.end - error.begin
        transaction.note_consumed(1)

    def _report_read_through(self, transaction: Transaction) -> None:
        """Report offsets of messages without effect: queries wait for them, and no commit reports them."""
        offsets = dict(self._sequencer.offsets)
        if offsets == self._prior.read_through:
            return
        self._prior.read_through = offsets
        # If the prior transaction is not done, `_report` reports the offsets later.
        if transaction.prior is Prior.DONE:
            self._io.progress(offsets)

    def _consume(self, transaction: Transaction) -> None:
        """Have the application consume some committed messages. If it defers one, close the transaction.

        Raise ``ApplicationFailed`` if it defers the first message of the transaction. For other errors see
        `Dispatcher.deliver`.
        """
        limit = self._consume_limit
        batch: Sequence[Envelope[Any]] = self._sequencer.dequeue(limit)
        if not batch:
            if transaction.is_empty:
                self._report_read_through(transaction)
            return
        if transaction.began_at is None:
            self._begin(transaction)
        began_at = self._clock.monotonic()
        if self._timers is not None:
            self._timers.begin_pass()
        done, deferred = len(batch), False
        try:
            self._dispatcher.deliver(batch)
        except Deferred as deferral:
            done, deferred = deferral.done, True
            if transaction.is_empty and done == 0:
                raise ApplicationFailed(
                    "the first message of a transaction was deferred to the next", shard=self._id
                ) from deferral
        except TimersDue as due:
            done = due.done
        # Messages that are not done come again, after the timers or in the next transaction, and count then.
        if isinstance(batch, MessageRows):
            self._consumed_bytes += batch.size_of(done)
        elif done:
            self._consumed_bytes += batch[done - 1].end - batch[0].begin
        transaction.note_consumed(done)
        self._sequencer.consumed(done)
        if deferred:
            transaction.defer()
        if failpoints.armed_points:
            failpoints.hit("transaction.consumed", self._id)
        self._consume_limit = _next_limit(limit, len(batch), self._clock.monotonic() - began_at)

    def _fire(self, transaction: Transaction) -> None:
        """Handle some timers that are due. Do nothing if all timers that seemed due were cancelled."""
        timers = self._timers
        assert timers is not None
        if not timers.confirm_due():
            return
        if transaction.began_at is None:
            self._begin(transaction)
        limit, count = min(self._fire_limit, FIRED_MAX - transaction.fired), 0
        began_at = self._clock.monotonic()
        for timer in timers.fire(limit):
            self._dispatcher.fire(timer)
            count += 1
        transaction.note_fired(count)
        if transaction.fired >= FIRED_MAX:
            transaction.close()
        if failpoints.armed_points:
            failpoints.hit("timers.fired", self._id)
        self._fire_limit = _next_limit(limit, count, self._clock.monotonic() - began_at)

    def _begin(self, transaction: Transaction) -> None:
        """Begin the transaction, before its first message or timer."""
        if failpoints.armed_points:
            failpoints.hit("transaction.begun", self._id)
        if self._timers is not None:
            self._timers.begin()
        result = self._callbacks.begin_transaction()
        self._begun = True
        if result is not None:
            require_none("begin_transaction", result)
        # Read the clock once for each transaction: the messages that it publishes share one time.
        self._publisher.clock.update(int(self._clock.now() * NANOS))
        transaction.begin(self._clock.monotonic())

    def _commit(self, transaction: Transaction) -> None:
        """Finalize the transaction, start the store's commit, and queue the acknowledgements after it."""
        transaction.prepared_at = self._clock.monotonic()
        self._callbacks.finalize_transaction()
        if self._timers is not None:
            self._timers.finish()
        checkpoint = Checkpoint(
            sources=self._sequencer.checkpoint(PRUNE_HORIZON_NS, int(self._clock.now() * NANOS)),
            ack_intents=self._publisher.build_ack_intents(),
            application=self._application_name,
            lives=self._lives,
        )
        if failpoints.armed_points:
            failpoints.hit("commit.finalized", self._id)
        commit = self._start_commit(checkpoint)
        if failpoints.armed_points:
            failpoints.hit("commit.started", self._id)
        transaction.start_commit(self._clock.monotonic())
        acks: dict[str, OpFuture[Any]] = {}
        # Queue the acknowledgements before the next transaction consumes a message. Its publishes to the
        # same journals must come after the acknowledgements, and so wait for the commit, too.
        for journal, intent in checkpoint.ack_intents.items():
            with self._appends.start_append(AppendParams(journal), (commit,)) as txn:
                txn.write(intent)
                acks[journal] = txn.release()
            acks[journal].add_done_callback(partial(_note_appended, journal))
        if failpoints.armed_points:
            failpoints.hit("commit.enqueued", self._id)
        self._prior = PriorTransaction(
            checkpoint=checkpoint,
            read_through={name: source.read_through for name, source in checkpoint.sources.items()},
            commit=commit,
            acks=acks,
            transaction=transaction,
            bytes=self._consumed_bytes,
        )
        self._consumed_bytes = 0
        self._prior.watch(self._inbox.wake)

    def _start_commit(self, checkpoint: Checkpoint) -> OpFuture[Any]:
        """Start the store's commit, which waits for all appends of this shard to other journals than its log,
        and for the futures of `add_wait`. Raise the commit's error if it has failed already."""
        waits = [*self._appends.pending_except(self._recovery_log)]
        while self._extra_waits:  # Other threads may add futures meanwhile.
            waits.append(self._extra_waits.popleft())
        commit = self._callbacks.start_commit(checkpoint, waits)
        self._call_finished_transaction(commit)
        if (error := first_failure((commit,))) is not None:
            raise wrap_error("the store's commit failed", error)
        return commit

    def _call_finished_transaction(self, commit: OpFuture[Any]) -> None:
        self._begun = False
        self._callbacks.finished_transaction(commit)


def _next_limit(limit: int, count: int, elapsed_s: float) -> int:
    """Return the next limit of messages to consume at once, after ``count`` messages took ``elapsed_s``."""
    if elapsed_s > CONSUME_S:
        return max(1, min(limit, int(count * CONSUME_S / elapsed_s)))
    if count == limit and elapsed_s < CONSUME_S / 2:
        return min(CONSUME_MAX, 2 * limit)
    return limit


def _no_bytes(_journal: str, _begin: int, _end: int) -> bytes:
    """Return no bytes, for a message that no journal holds."""
    return b""


def _note_appended(journal: str, ack: OpFuture[Any]) -> None:
    if failpoints.armed_points and not ack.cancelled() and ack.exception() is None:
        failpoints.hit("ack.appended", journal)


def _perform(fn: Callable[[], Any], future: OpFuture[Any]) -> None:
    try:
        result = fn()
    except BaseException as error:  # noqa: BLE001 - it belongs to the caller
        future.set_exception(as_plain_error(error))
    else:
        future.set_result(result)
