"""The event loop's side of a transactor: its `ShardIO`, and the `Progress` for which queries wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from gazette.client.append.appender import AppendParams
from gazette.client.read.reader import OffsetJump, ReadParams
from gazette.client.read.retry_reader import RetryReader
from gazette.client.rpc.errors import status_of
from gazette.client.waits import RepeatedCall
from gazette.consumer import metrics
from gazette.consumer.application import Shard
from gazette.consumer.contract.poison import PoisonPolicy
from gazette.consumer.inbox import Inbox
from gazette.consumer.shard.context import ShardContext
from gazette.consumer.shard.ownership import Ownership
from gazette.consumer.shard.source_lives import in_words_of_shard
from gazette.consumer.transaction.poison_handler import decoded
from gazette.consumer.transaction.shard_io import FinishedTransaction
from gazette.consumer.transaction.transaction import Phases
from gazette.errors import Closed, Corrupt, NotAllowed, NotFound, NotYet
from gazette.message.envelope import Envelope, EnvelopeDecoder
from gazette.message.envelope_reader import cannot_replay
from gazette.message.sequencer.sequencer import ReplayRange
from gazette.protocol.ids import JournalName
from gazette.protocol.journal_life import JournalLife
from gazette.protocol.status import Status
from gazette.recoverylog.log.broker_logs import append_repeatable
from gazette.runtime import tracing
from gazette.runtime.tasks import OpFuture, TaskScope, Waiter, as_plain_error

log = logging.getLogger(__name__)

T = TypeVar("T")

READ_BYTES: Final = 1 << 20
_POLL_S: Final = 1.0
NOT_YET_S: Final = 2.0
"""Seconds between two reads of bytes that no broker has now."""


class Progress:
    """Offsets up to which the shard's transactions have read, and offsets at which they have published.

    The offsets of reads never go back during the life of one primary.
    """

    def __init__(self) -> None:
        self.read_through: dict[str, int] = {}
        self.publish_at: dict[str, int] = {}
        self.missing: dict[str, tuple[int, int]] = {}
        """By source, the next range of offsets whose bytes no broker has now."""
        self._changed = asyncio.Event()

    def update(self, read_through: Mapping[str, int], publish_at: Mapping[str, int]) -> None:
        """Note offsets of an acknowledged transaction, or of bytes that were read without effect."""
        for journal, offset in read_through.items():
            self.read_through[journal] = max(offset, self.read_through.get(journal, 0))
        self.publish_at.update(publish_at)
        self._changed.set()
        self._changed = asyncio.Event()

    def has(self, offsets: Mapping[str, int]) -> bool:
        """Return True if every journal of ``offsets`` was read up to its offset."""
        return all(self.read_through.get(name, 0) >= offset for name, offset in offsets.items())

    def describe(self, offsets: Mapping[str, int]) -> str:
        """Return a text with those of ``offsets`` that are not read yet, and the reason if it is known. The
        text is empty if all are read."""
        sentences = []
        for journal, wanted in offsets.items():
            read_to = self.read_through.get(journal, 0)
            if read_to >= wanted:
                continue
            sentences.append(f"it has read {journal} up to {read_to}, and {wanted} is asked for")
            if journal in self.missing:
                begin, end = self.missing[journal]
                sentences.append(
                    f"no broker has the bytes {begin} to {end} of {journal}: they were pruned, or their"
                    " store is not mounted"
                )
        return "; ".join(sentences)

    async def wait(self, offsets: Mapping[str, int]) -> None:
        """Return once ``has`` returns True. The caller bounds the wait."""
        while not self.has(offsets):
            await self._changed.wait()


@dataclass(frozen=True, slots=True)
class ShardParts:
    """Objects that the parts of one shard share."""

    shard: Shard
    """The shard as callbacks see it."""
    progress: Progress
    ownership: Ownership
    scope: TaskScope
    """Scope of the shard's tasks."""
    ended: asyncio.Event
    """Set when the shard has ended."""


class LoopShardIO:
    """Runs work on the event loop for the transactor, which runs on the shard's thread."""

    def __init__(
        self,
        context: ShardContext,
        parts: ShardParts,
        inbox: Inbox,
        new_decoder: Callable[[str, int], EnvelopeDecoder[Any]],
        poison_policy: PoisonPolicy | None,
        wait: Waiter,
        lives: Mapping[JournalName, JournalLife],
    ) -> None:
        """Call this on the event loop. ``wait`` blocks the transactor's thread until a future is done.
        ``lives`` are the lives of the sources that the shard reads."""
        self._parts = parts
        self._id, self._fqn = parts.shard.id, parts.shard.fqn
        self._inbox = inbox
        self._new_decoder = new_decoder
        self._poison_policy = poison_policy
        self._wait = wait
        self._lives = lives
        self._client = context.client
        self._clock = context.clock
        self._loop = asyncio.get_running_loop()

    def _on_loop(self, fn: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon_threadsafe(fn, *args)

    def append_recovered(self, journal: str, intent: bytes) -> OpFuture[Any]:
        client = self._client

        async def append() -> Any:
            try:
                params = AppendParams(journal)
                return await append_repeatable(client, params, intent, is_owner=True)
            except NotFound:
                log.warning(
                    "journal %(journal)s of a recovered acknowledgement is gone",
                    {"journal": journal},
                )
                return None

        return self._start(append, f"acknowledge {journal}")

    def _start(self, work: Callable[[], Awaitable[T]], name: str) -> OpFuture[T]:
        """Start a task of the shard. If the shard ends before the task, the future fails with ``Closed``."""
        future: OpFuture[T] = OpFuture()

        async def run() -> None:
            try:
                result = await work()
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 - it belongs to the caller
                future.set_exception(as_plain_error(error))
            else:
                future.set_result(result)

        def closed(_: object = None) -> None:
            if not future.done():
                future.set_exception(Closed("the shard has ended"))

        def start() -> None:
            if self._parts.ended.is_set():
                closed()
            else:
                # The callback also runs if the task is cancelled before it begins.
                self._parts.scope.spawn(run(), name=name).add_done_callback(closed)

        self._loop.call_soon_threadsafe(start)
        return future

    def replay(self, wanted: ReplayRange) -> Iterator[Sequence[Envelope[Any]]]:
        decoder = self._new_decoder(wanted.journal, wanted.begin)
        try:
            for data in self._read_range(wanted):
                decoder.feed(data)
                for batch in decoded(decoder, self._poison_policy):
                    metrics.SEQUENCER_REPLAY.inc(wanted.journal, by=len(batch))
                    yield batch
        except OffsetJump as jump:
            raise cannot_replay(wanted, jump) from jump

    def read_again(self, journal: str, begin: int, end: int) -> bytes:
        try:
            return b"".join(self._read_range(ReplayRange(journal, begin, end)))
        except OffsetJump as jump:
            log.warning("bytes of a skipped message cannot be read: %(reason)s", {"reason": jump})
            return b""

    def _read_range(self, wanted: ReplayRange) -> Iterator[bytes]:
        """Yield the bytes of a range of a source. Block. Raise `OffsetJump` if some have been deleted, and
        ``Corrupt`` if the source was created again.

        The shard has read these bytes before, so they exist. Do not let the broker wait for them: it would
        not report the journal's life.
        """
        journal = wanted.journal
        life = self._lives.get(journal)
        params = ReadParams(journal, wanted.begin, end_offset=wanted.end, life=life)

        async def open_reader() -> RetryReader:
            return RetryReader(self._client, params, clock=self._clock)

        def wait(work: Callable[[], Awaitable[T]]) -> T:
            return self._await(work, f"replay {journal}")

        async def read() -> bytes:
            waits, question, waits_already = self._client.waits, RepeatedCall(), False
            while True:
                try:
                    data = await reader.read(READ_BYTES)
                    waits.end(question)
                    return data
                except (NotAllowed, NotYet) as error:
                    # The next append resumes a suspended journal. A broker that has just started may not
                    # know all bytes.
                    if isinstance(error, NotAllowed) and status_of(error) != Status.SUSPENDED.name:
                        raise
                    if not waits_already:
                        log.warning(
                            "shard %(shard)s reads again, and waits for bytes: %(reason)s",
                            {"shard": self._id, "reason": error},
                        )
                    waits_already = True
                    waits.note(question, journal, error)  # For the shard's status.
                    await self._clock.sleep(NOT_YET_S)

        reader = wait(open_reader)
        try:
            while data := wait(read):
                yield data
        except Corrupt as error:
            raise in_words_of_shard(error, journal, life, self._id, reader.offset) from error
        finally:
            self._on_loop(reader.close)

    def _await(self, work: Callable[[], Awaitable[T]], name: str) -> T:
        """Run work on the loop, and block until it is done. Raise ``Closed`` if the inbox is stopped."""
        future = self._start(work, name)
        while not self._wait(future, _POLL_S):
            self._inbox.require_running()
        self._inbox.require_running()
        return future.result()

    def require_assigned(self) -> None:
        self._await(self._parts.ownership.require, "still assigned")

    def progress(self, read_through: dict[str, int]) -> None:
        self._on_loop(self._parts.progress.update, read_through, {})

    def finished(self, transaction: FinishedTransaction) -> None:
        self._on_loop(self._note_finished, transaction)

    def skipped(self, journal: str, reason: str) -> None:
        metrics.POISON_MESSAGES.labels(self._fqn, journal, reason).inc()

    def stalled(self, reason: str) -> None:
        log.info("shard %(shard)s stalls: %(reason)s", {"shard": self._id, "reason": reason})

    def _trace(self, transaction: FinishedTransaction, phases: Phases) -> None:
        """Record a tracing span from a transaction's first message or timer to its last acknowledgement."""
        seconds = {name: max(0.0, getattr(phases, name)) for _, _, name in metrics.PHASES[1:]}
        tracing.ended_now(
            "transaction",
            seconds,
            shard=self._id,
            messages=transaction.messages,
            timers=transaction.timers,
            read_through=[f"{name}={end}" for name, end in transaction.read_through.items()],
            published=[f"{name}={end}" for name, end in transaction.publish_at.items()],
        )

    def _note_finished(self, transaction: FinishedTransaction) -> None:
        self._parts.progress.update(transaction.read_through, transaction.publish_at)
        fqn = self._fqn
        for journal, offset in transaction.read_through.items():
            metrics.READ_HEAD.labels(fqn, journal).set(offset)
            metrics.CONSUMER_READ_HEAD.labels(journal).set(offset)
        if transaction.timers:
            metrics.TIMERS.labels(fqn).inc(transaction.timers)
        phases = transaction.phases
        if phases is None:
            return
        if tracing.active():
            self._trace(transaction, phases)
        metrics.TRANSACTIONS.labels(fqn).inc()
        metrics.READ_MESSAGES.labels(fqn).inc(transaction.messages)
        metrics.READ_BYTES.labels(fqn).inc(transaction.bytes)
        metrics.TX_COUNT.inc()
        metrics.TX_MESSAGES.inc(transaction.messages)
        metrics.CONSUMED_BYTES.inc(transaction.bytes)
        for phase, phase_type, name in metrics.PHASES:
            seconds = max(0.0, getattr(phases, name))
            metrics.PHASE_SECONDS.labels(fqn, phase, phase_type).inc(seconds)
            if (deprecated := metrics.TX_PHASES.get(name)) is not None:
                deprecated.inc(seconds)
                metrics.TX_SECONDS.inc(seconds)
