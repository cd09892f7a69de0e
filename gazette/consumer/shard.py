"""One shard that is assigned to this member: from play-back to promotion to the end.

::

    start ──► BACKFILL ──head──► STANDBY ──slot 0──► (hand-off, store opened) ──► PRIMARY
                 └──────────────────┴──── any error ────────────────────────────► FAILED

The loop side owns the life cycle, reads sources and talks to etcd. Everything of the application and
of the store runs on the shard's own thread.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from gazette.allocator.model import DecodedKV
from gazette.client.append_service import AppendService
from gazette.client.appender import AppendParams
from gazette.client.client import Client
from gazette.client.reader import OffsetJump, ReadParams
from gazette.client.retry_reader import RetryReader
from gazette.clock import Clock
from gazette.consumer import metrics
from gazette.consumer.application import Application, Store, shard_directory_prefix
from gazette.consumer.hints_store import (
    pick_hints,
    read_hints,
    store_recorded_hints,
    store_recovered_hints,
)
from gazette.consumer.inbox import Call, Chunk, Inbox, Jump, SourceFailed
from gazette.consumer.progress import Progress
from gazette.consumer.replica_status import error_text, update_status
from gazette.consumer.shard_thread import ShardThread
from gazette.consumer.transactor import FinishedTransaction, Transactor
from gazette.errors import Closed, GazetteError, Invalid, NotFound, Unavailable
from gazette.etcd import Etcd
from gazette.keyspace.key_space import KeySpace
from gazette.labels import CONTENT_RECOVERY_LOG, CONTENT_TYPE
from gazette.message.envelope import Envelope
from gazette.message.envelope_decoder import EnvelopeDecoder
from gazette.message.framing import framing_of
from gazette.message.publisher import Publisher
from gazette.message.sequencer import ReplayRange
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.ids import split_journal_meta
from gazette.protocol.journal import JournalSpec
from gazette.protocol.shard import ReplicaCode, ReplicaStatus, ShardSpec
from gazette.recoverylog.player import Player, RecoveredState
from gazette.recoverylog.recorder import Recorder
from gazette.tasks import BlockingPool, OpFuture, TaskScope, settled

log = logging.getLogger(__name__)

T = TypeVar("T")

READ_BYTES: Final = 1 << 20
INBOX_BYTES: Final = 4 << 20
STOP_TIMEOUT_S: Final = 10.0
"""How long a shard that is stopped waits for a callback that runs; after that it ends by itself."""


@dataclass(frozen=True, slots=True)
class ShardContext:
    """What all shards of a member share."""

    application: Application[Any]
    etcd: Etcd
    key_space: KeySpace
    client: Client
    clock: Clock
    rng: random.Random
    player_pool: BlockingPool
    new_publisher: Callable[[AppendService], Publisher]
    scratch_directory: Path | None = None
    hints_interval_s: float = 300.0
    stall_timeout_s: float = 60.0


class Shard:
    """A shard of this member. Made by the resolver, for one assignment; loop-bound.

    Callbacks see it as `application.Shard`.
    """

    def __init__(self, context: ShardContext, item: DecodedKV, assignment: DecodedKV) -> None:
        self._context = context
        self._item = item
        self.assignment = assignment
        self.progress = Progress()
        self.store: Store | None = None
        self.store_ready = asyncio.Event()
        """Set once the store was opened, in which case ``store`` is there, or the primary has ended."""
        self.ended = asyncio.Event()
        """Set when the shard failed, or was stopped."""
        self.failure: BaseException | None = None
        self._scope = TaskScope(f"shard {self.id}", on_failure=self._on_failure)
        self._thread: ShardThread | None = None
        self._inbox: Inbox | None = None
        self._appends: AppendService | None = None
        self._player: Player | None = None
        self._recovered: asyncio.Future[RecoveredState]
        self._recorder: Recorder | None = None
        self._transactor: Transactor | None = None
        self._specs: dict[str, JournalSpec] = {}
        self._directory: Path | None = None
        self._loop = asyncio.get_running_loop()
        self._recovered = self._loop.create_future()
        self._playing = asyncio.Event()
        self._started_primary = False
        self._stopping = False

    # -- what callbacks see

    @property
    def id(self) -> str:
        return str(self._item.decoded.id)

    @property
    def fqn(self) -> str:
        return self._item.key

    @property
    def spec(self) -> ShardSpec:
        """As it is in etcd now; once it was deleted, as it was last."""
        item = self._context.key_space.get(self._item.key)
        if item is not None:
            self._item = item
        spec: ShardSpec = self._item.decoded.value.spec
        return spec

    def publish_future(self, future: OpFuture[Any]) -> None:
        if self._transactor is not None:
            self._transactor.add_wait(future)

    # -- life cycle

    def start(self, *, primary: bool) -> None:
        """Begin to recover, and to serve if ``primary``. Does not block."""
        self._scope.spawn(self._guard(self._standby()), name="standby")
        if primary:
            self.promote(self.assignment)

    def promote(self, assignment: DecodedKV) -> None:
        """The shard's assignment is now that of the primary."""
        self.assignment = assignment
        if not self._started_primary:
            self._started_primary = True
            self._scope.spawn(self._guard(self._primary()), name="primary")

    @property
    def is_primary(self) -> bool:
        return self._started_primary

    async def stop(self) -> None:
        """End everything: nothing is committed after this began. Never raises.

        A callback that still runs after `STOP_TIMEOUT_S` is left to its thread, which releases the
        store when the callback returns; nothing that it does takes effect any more.
        """
        self._stopping = True
        self.ended.set()
        self.store_ready.set()
        if self._inbox is not None:
            self._inbox.stop()
        if self._appends is not None:
            await self._quietly(self._appends.close(), "closing its appends")
        await self._quietly(self._scope.stop(STOP_TIMEOUT_S), "stopping its tasks")
        await self._release()

    async def _release(self) -> None:
        thread, self._thread = self._thread, None
        directory, store = self._directory, self.store

        def destroy() -> None:
            if store is not None:
                store.destroy()
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)

        if thread is None:
            if directory is not None:
                await self._context.player_pool.run(destroy)
            return
        done = thread.submit(destroy)
        thread.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await settled(done)
        except TimeoutError:
            log.warning("a callback of shard %s still runs; its store is released later", self.id)
        except Exception as error:  # noqa: BLE001 - stores are the application's
            log.warning("store of shard %s was not released: %s", self.id, error)

    async def _quietly(self, work: Any, what: str) -> None:
        try:
            await work
        except GazetteError as error:
            log.warning("%s of shard %s: %s", what, self.id, error)

    async def _guard(self, work: Any) -> None:
        """Run a part of the life cycle; its error makes the shard FAILED, once."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if self._stopping or isinstance(error, Closed):
                return
            await self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _on_failure(self, error: BaseException) -> None:
        """A task failed that nothing guards: a defect, which must not leave the shard silent."""
        if not self._stopping:
            self._scope.spawn(self._fail(error), name="fail")

    async def _fail(self, error: BaseException) -> None:
        if self.failure is not None:
            return
        self.failure = error
        self._playing.set()
        if not self._recovered.done():
            self._recovered.cancel()
        log.error("shard %s failed: %s", self.id, error, exc_info=error)
        self.ended.set()
        self.store_ready.set()
        if self._inbox is not None:
            self._inbox.stop()
        status = ReplicaStatus(ReplicaCode.FAILED, (error_text(error),))
        await self._update_status(status)

    async def _update_status(self, status: ReplicaStatus) -> None:
        context = self._context
        await update_status(
            context.etcd, context.key_space, context.clock, self.assignment.key, status
        )

    # -- standby

    async def _standby(self) -> None:
        spec = self.spec
        if not spec.recovery_log:
            await self._update_status(ReplicaStatus(ReplicaCode.STANDBY, ()))
            return
        await self._update_status(ReplicaStatus(ReplicaCode.BACKFILL, ()))
        context = self._context
        stored = await self._retried(lambda: read_hints(context.etcd, spec), "reading hints")
        hints = pick_hints(stored, spec)
        await self._check_recovery_log(spec)
        self._directory = Path(
            tempfile.mkdtemp(prefix=shard_directory_prefix(self.id), dir=context.scratch_directory)
        )
        self._player = Player(
            hints,
            self._directory,
            context.client,
            context.clock,
            context.player_pool,
            stall_timeout_s=context.stall_timeout_s,
        )
        self._scope.spawn(self._guard(self._announce_standby(self._player)), name="tailing")
        self._playing.set()
        recovered = await self._player.play()
        if not self._recovered.done():
            self._recovered.set_result(recovered)

    async def _announce_standby(self, player: Player) -> None:
        await player.tailing.wait()
        await self._update_status(ReplicaStatus(ReplicaCode.STANDBY, ()))

    async def _check_recovery_log(self, spec: ShardSpec) -> None:
        try:
            journal = (await self._context.client.get_journal(spec.recovery_log)).spec
        except NotFound as error:
            raise NotFound(
                f"recovery log {spec.recovery_log} does not exist",
                hint=f"Create the journal, with the label {CONTENT_TYPE}={CONTENT_RECOVERY_LOG}.",
            ) from error
        actual = journal.labels.value_of(CONTENT_TYPE)
        if actual != CONTENT_RECOVERY_LOG:
            raise Invalid(
                f"expected label {CONTENT_TYPE} value {CONTENT_RECOVERY_LOG} (got {actual})",
                journal=spec.recovery_log,
            )

    async def _retried(self, call: Callable[[], Any], what: str) -> Any:
        """Call until etcd answers; our lease ends the process if it does not for long."""
        while True:
            try:
                return await call()
            except Unavailable as error:
                log.warning("%s of shard %s is tried again: %s", what, self.id, error)
                await self._context.clock.sleep(1.0)

    # -- primary

    async def _primary(self) -> None:
        context = self._context
        recovered = await self._take_over()
        self._appends = AppendService(context.client)
        self._scope.daemon(self._appends.run(), name="appends")
        self._thread = ShardThread(f"shard {self.id}")
        recovered_hints = None if recovered is None else recovered.fsm.build_hints(recovered.log)
        checkpoint = await self._thread.run(lambda: self._open_store(recovered))
        if recovered_hints is not None:
            await store_recovered_hints(
                context.etcd,
                context.clock,
                self.spec,
                recovered_hints,
                self.assignment.key,
                self.assignment.raw.create_revision,
            )
        self.progress.update(
            {journal: source.read_through for journal, source in checkpoint.sources.items()}, {}
        )
        self._inbox = Inbox(INBOX_BYTES, self._loop)
        decoders = await self._open_sources(checkpoint)
        self._transactor = self._new_transactor(decoders)
        self.store_ready.set()
        self._scope.spawn(
            self._guard(self._update_status(ReplicaStatus(ReplicaCode.PRIMARY, ()))), name="status"
        )
        for decoder in decoders.values():
            self._scope.spawn(
                self._read_source(decoder.journal, decoder.begin), name=f"read {decoder.journal}"
            )
        if self._recorder is not None:
            self._scope.spawn(self._guard(self._keep_hints()), name="hints")
        transactor = self._transactor

        def run() -> None:
            try:
                transactor.run(checkpoint)
            except Closed:
                if not self.ended.is_set():
                    raise

        await self._thread.run(run)

    async def _take_over(self) -> RecoveredState | None:
        """Finish play-back as the log's new owner; None for a shard without a log."""
        if not self.spec.recovery_log:
            return None
        await self._playing.wait()
        if self._player is None:
            raise Closed("the shard failed before it could be promoted")
        self._player.hand_off(self._context.rng.randrange(1, (1 << 32) - 1))
        return await self._recovered

    def _open_store(self, recovered: RecoveredState | None) -> Checkpoint:
        """On the shard's thread: everything that may block."""
        assert self._appends is not None
        if recovered is not None:
            assert recovered.author is not None
            self._recorder = Recorder.open(
                self.spec.recovery_log,
                recovered.fsm,
                recovered.author,
                recovered.directory,
                self._appends,
            )
        application = self._context.application
        self.store = application.new_store(self, self._recorder)
        return self.store.restore_checkpoint(self)

    async def _open_sources(self, checkpoint: Checkpoint) -> dict[str, EnvelopeDecoder[Any]]:
        decoders: dict[str, EnvelopeDecoder[Any]] = {}
        for source in self.spec.sources:
            name = split_journal_meta(source.journal)[0]
            self._specs[source.journal] = (await self._context.client.get_journal(name)).spec
            state = checkpoint.sources.get(source.journal)
            offset = max(source.min_offset, 0 if state is None else state.read_through)
            decoders[source.journal] = self._new_decoder(source.journal, offset)
        return decoders

    def _new_decoder(self, journal: str, offset: int) -> EnvelopeDecoder[Any]:
        spec = self._specs[journal]
        message_type = self._context.application.message_type_of(spec)
        content_type = spec.labels.value_of(CONTENT_TYPE) or ""
        return EnvelopeDecoder(journal, framing_of(content_type, message_type), offset)

    def _new_transactor(self, decoders: dict[str, EnvelopeDecoder[Any]]) -> Transactor:
        assert self._appends is not None
        assert self._inbox is not None
        assert self.store is not None
        return Transactor(
            self._context.application,
            self,
            self.store,
            self._context.new_publisher(self._appends),
            self._appends,
            self._inbox,
            _Outside(self),
            self._context.clock,
            decoders,
            spec_of=lambda: self.spec,
            recovery_log=self.spec.recovery_log,
        )

    async def _read_source(self, journal: str, offset: int) -> None:
        """Read a source into the inbox until it fails or the shard ends."""
        inbox = self._inbox
        assert inbox is not None
        reader = RetryReader(
            self._context.client,
            ReadParams(journal, offset, block=True),
            clock=self._context.clock,
        )
        try:
            while True:
                begin = reader.offset
                try:
                    data = await reader.read(READ_BYTES)
                except OffsetJump as jump:
                    log.warning("source %s of shard %s: %s", journal, self.id, jump)
                    inbox.put(Jump(journal, jump.offset))
                    continue
                if data:
                    await inbox.put_chunk(Chunk(journal, begin, data))
        except Closed:
            return
        except GazetteError as error:
            inbox.put(SourceFailed(journal, error))
        finally:
            reader.close()

    async def _keep_hints(self) -> None:
        """Store hints from time to time, so that a recovery need not read more than it must."""
        context = self._context
        recorder = self._recorder
        assert recorder is not None
        while True:
            await context.clock.sleep(context.hints_interval_s)
            hints, flushed = await self.call(recorder.snapshot_hints)
            await settled(flushed)
            metrics.HORIZON_BYTES.labels(self.fqn).set(recorder.horizon_bytes)
            try:
                await store_recorded_hints(
                    context.etcd,
                    self.spec,
                    hints,
                    self.assignment.key,
                    self.assignment.raw.create_revision,
                )
            except Unavailable as error:
                log.warning("hints of shard %s are stored next time: %s", self.id, error)

    async def call(self, fn: Callable[[], T]) -> T:
        """Run a function on the shard's thread, between two steps of its transaction.

        Raises ``Closed`` when the shard ended, and what ``fn`` raises. Cancellation: it may still run.
        """
        if self._inbox is None:
            raise Closed("the shard is not primary", shard=self.id)
        future: OpFuture[T] = OpFuture()
        self._inbox.put(Call(fn, future))
        return await settled(future)

    @property
    def play_lag_bytes(self) -> int | None:
        """How far play-back is behind the head of the log; None once it ended."""
        player = self._player
        if player is None or self._started_primary:
            return None
        return player.progress.lag_bytes


class _Outside:
    """What the transactor, on its thread, has done on the loop."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def _on_loop(self, fn: Callable[..., None], *args: Any) -> None:
        self._shard._loop.call_soon_threadsafe(fn, *args)

    def append_recovered(self, journal: str, intent: bytes) -> OpFuture[Any]:
        client = self._shard._context.client

        async def append() -> Any:
            try:
                return await client.append(AppendParams(journal), intent)
            except NotFound:
                log.warning("journal %s of a recovered acknowledgement is gone", journal)
                return None

        return asyncio.run_coroutine_threadsafe(append(), self._shard._loop)

    def replay(self, wanted: ReplayRange) -> Iterator[Sequence[Envelope[Any]]]:
        shard = self._shard
        loop, inbox = shard._loop, shard._inbox
        assert inbox is not None
        decoder = shard._new_decoder(wanted.journal, wanted.begin)
        params = ReadParams(wanted.journal, wanted.begin, block=True, end_offset=wanted.end)

        async def open_reader() -> RetryReader:
            return RetryReader(shard._context.client, params, clock=shard._context.clock)

        def wait(coro: Any) -> Any:
            future = asyncio.run_coroutine_threadsafe(coro, loop)
            while True:
                inbox.check()
                try:
                    return future.result(timeout=1.0)
                except TimeoutError:
                    if future.done():
                        raise

        reader = wait(open_reader())
        try:
            while data := wait(reader.read(READ_BYTES)):
                decoder.feed(data)
                while batch := decoder.decode():
                    yield batch
        finally:
            loop.call_soon_threadsafe(reader.close)

    def progress(self, read_through: dict[str, int]) -> None:
        self._on_loop(self._shard.progress.update, read_through, {})

    def finished(self, transaction: FinishedTransaction) -> None:
        self._on_loop(self._note_finished, transaction)

    def stalled(self, reason: str) -> None:
        log.info("shard %s stalls: %s", self._shard.id, reason)

    def _note_finished(self, transaction: FinishedTransaction) -> None:
        shard = self._shard
        shard.progress.update(transaction.read_through, transaction.publish_at)
        fqn = shard.fqn
        for journal, offset in transaction.read_through.items():
            metrics.READ_HEAD.labels(fqn, journal).set(offset)
        if transaction.phases is None:
            return
        metrics.TRANSACTIONS.labels(fqn).inc()
        metrics.READ_MESSAGES.labels(fqn).inc(transaction.messages)
        metrics.READ_BYTES.labels(fqn).inc(transaction.bytes)
        for phase, kind, name in metrics.PHASES:
            metrics.PHASE_SECONDS.labels(fqn, phase, kind).inc(
                max(0.0, getattr(transaction.phases, name))
            )
