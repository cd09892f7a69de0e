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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from gazette.allocator.model import DecodedKV
from gazette.client.append_service import AppendService, MemoryBudget
from gazette.client.client import Client
from gazette.client.reader import OffsetJump, ReadParams
from gazette.client.retry_reader import RetryReader
from gazette.client.rpc_errors import status_of
from gazette.clock import Clock
from gazette.consumer import metrics
from gazette.consumer.application import (
    Application,
    MessageProducer,
    Store,
    shard_directory_prefix,
)
from gazette.consumer.delivery import ApplicationFailed, application_code
from gazette.consumer.hints_store import (
    read_hints,
    store_recorded_hints,
    store_recovered_hints,
    usable_hints,
)
from gazette.consumer.inbox import Call, Chunk, Inbox, Jump, SourceFailed
from gazette.consumer.outside import READ_BYTES, ShardOutside
from gazette.consumer.poison import PoisonPolicy
from gazette.consumer.poison_control import checked_policy
from gazette.consumer.progress import Progress
from gazette.consumer.replica_status import error_text, update_status
from gazette.consumer.restarts import Restarts, Verdict
from gazette.consumer.shard_thread import ShardThread
from gazette.consumer.standby_lag import journal_head, watch_lag
from gazette.consumer.standby_reads import StandbyReads
from gazette.consumer.transactor import Transactor
from gazette.errors import (
    Broken,
    Closed,
    Corrupt,
    GazetteError,
    Invalid,
    NotAllowed,
    NotFound,
    Retryable,
    Unavailable,
)
from gazette.etcd import Etcd
from gazette.etcd_values import Compare, Op
from gazette.failpoints import hit, reach
from gazette.keyspace.key_space import KeySpace
from gazette.labels import CONTENT_JSON_LINES, CONTENT_RECOVERY_LOG, CONTENT_TYPE
from gazette.message.envelope_decoder import EnvelopeDecoder
from gazette.message.framing import framing_of
from gazette.message.publisher import Publisher
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.hints import FSMHints
from gazette.protocol.ids import split_journal_meta
from gazette.protocol.journal import JournalSpec
from gazette.protocol.shard import ReplicaCode, ReplicaStatus, ShardSource, ShardSpec
from gazette.protocol.status import Status
from gazette.recoverylog.player import Player, PlayProgress, RecoveredState
from gazette.recoverylog.recorder import Recorder
from gazette.tasks import BlockingPool, OpFuture, TaskScope, settled

log = logging.getLogger(__name__)

T = TypeVar("T")

_NOT_FOUND_MAX: Final = 5
"""How often a journal may be unknown before it is taken not to exist: the broker that was asked may
not have heard of it yet."""
INBOX_BYTES: Final = 4 << 20
STOP_TIMEOUT_S: Final = 10.0
"""How long a shard that is stopped waits for a callback that runs; after that it ends by itself."""


SUSPENDED_POLL_S: Final = 2.0
"""How often a reader looks whether a fully suspended source was resumed."""
SHORT_SOURCE_LOOKS: Final = 5
SHORT_SOURCE_PAUSE_S: Final = 2.0
READS_PATIENCE_S: Final = 60.0
"""How long queries of a standby may go on when it was promoted: they read what is their own."""


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
    lag_interval_s: float = 5.0
    append_budget: MemoryBudget = field(default_factory=lambda: MemoryBudget(128 << 20))
    """Memory of what waits to be appended, by all shards."""
    restarts: Restarts = field(default_factory=lambda: Restarts(0))


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
        self.verdict: Verdict | None = None
        """What becomes of it, once it failed."""
        self.lag: tuple[int, float] | None = None
        """(bytes, seconds) that a standby was behind when it last looked."""
        self._spec: ShardSpec = item.decoded.value.spec
        """As of the creation: the log and its hints stay what they are until the shard is made anew."""
        self._scope = TaskScope(f"shard {self.id}", on_failure=self._fail)
        self._reports = TaskScope(f"status of shard {self.id}")
        self._thread: ShardThread | None = None
        self._inbox: Inbox | None = None
        self._appends: AppendService | None = None
        self._player: Player | None = None
        self._reads: StandbyReads | None = None
        self._recovered: asyncio.Future[RecoveredState]
        self._recorder: Recorder | None = None
        self._transactor: Transactor | None = None
        self._specs: dict[str, JournalSpec] = {}
        self._poison_policy: PoisonPolicy | None = None
        self._directory: Path | None = None
        self._loop = asyncio.get_running_loop()
        self._recovered = self._loop.create_future()
        self._playing = asyncio.Event()
        self._started_primary = False
        self._stopping = False
        self._uses = 0
        self._unused = asyncio.Event()
        self._unused.set()

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
        if self.failure is None and not self._started_primary:
            self._started_primary = True
            self._scope.spawn(self._guard(self._primary()), name="primary")

    @property
    def reads(self) -> StandbyReads | None:
        """What answers queries while this is a standby; None for one that does not tail its log."""
        player = self._player
        if self._started_primary or self.ended.is_set() or player is None:
            return None
        return self._reads if player.tailing.is_set() else None

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
        if self._reads is not None:
            await self._quietly(self._reads.close(STOP_TIMEOUT_S), "closing its view")
        await self._quietly(self._reports.stop(STOP_TIMEOUT_S), "stopping its reports")
        if self._appends is not None:
            await self._quietly(self._appends.close(), "closing its appends")
        await self._quietly(self._scope.stop(STOP_TIMEOUT_S), "stopping its tasks")
        await self._quietly(self._release(), "releasing its store")

    async def _release(self) -> None:
        thread, self._thread = self._thread, None
        directory = self._directory
        if thread is None:
            if directory is not None:
                await self._context.player_pool.run(shutil.rmtree, directory, ignore_errors=True)
            return

        def destroy() -> None:
            # Looked up only now: the store may have been in the making when the stop was asked for.
            try:
                if self.store is not None:
                    self.store.destroy()
            finally:
                if directory is not None:
                    shutil.rmtree(directory, ignore_errors=True)

        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._unused.wait()
        except TimeoutError:
            log.warning(
                "the store of shard %(shard)s is released although a query uses it",
                {"shard": self.id},
            )
        done = thread.submit(destroy)
        thread.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await settled(done)
        except TimeoutError:
            log.warning(
                "a callback of shard %(shard)s still runs; its store is released later",
                {"shard": self.id},
            )

    def awaited(self, read_through: Mapping[str, int]) -> dict[str, int]:
        """Of offsets that a query asks for, those that this shard reads at all: to be waited for.

        Of an application that brings its messages itself, what that says. Needs the open store.
        """
        application = self._context.application
        if isinstance(application, MessageProducer):
            with application_code("read_through"):
                read_through = application.read_through(self, self.store, read_through)
            sources = set(read_through)
        else:
            sources = {source.journal for source in self.spec.sources}
        return {name: at for name, at in read_through.items() if at and name in sources}

    def begin_use(self) -> None:
        """Keep the store from being released; pair it with ``end_use``."""
        self._uses += 1
        self._unused.clear()

    def end_use(self) -> None:
        self._uses -= 1
        if self._uses == 0:
            self._unused.set()

    async def _quietly(self, work: Awaitable[None], what: str) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - what follows releases more
            log.warning(
                "%(what)s, of shard %(shard)s: %(error)s",
                {"what": what, "shard": self.id, "error": error},
            )

    async def _guard(self, work: Awaitable[None]) -> None:
        """Run a part of the life cycle; its error makes the shard FAILED, whatever it is."""
        task = asyncio.current_task()
        try:
            await work
        except GeneratorExit:
            raise
        except asyncio.CancelledError as error:
            if task is None or task.cancelling():
                raise
            # Nobody cancelled us: something that we waited for was cancelled, and must not pass for it.
            self._fail(Broken(f"something was cancelled unasked: {error!r}"))
        except BaseException as error:  # noqa: BLE001 - a silent shard would be worse
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """The shard is FAILED, for the first reason that there is."""
        if self.failure is not None or self._stopping:
            return
        self.failure = error
        self._playing.set()
        if not self._recovered.done():
            self._recovered.cancel()
        log.error(
            "shard %(shard)s failed: %(error)s",
            {"shard": self.id, "error": error_text(error)},
            exc_info=error,
        )
        self.ended.set()
        self.store_ready.set()
        if self._inbox is not None:
            self._inbox.stop()
        # Appends go on: a transaction that is committed is acknowledged, too.
        self._scope.cancel()
        context = self._context
        self.verdict = context.restarts.failed(self.spec, context.clock.monotonic())
        text = "\n".join(filter(None, (error_text(error), self.verdict.text)))
        status = ReplicaStatus(ReplicaCode.FAILED, (text,))
        self._reports.spawn(
            self._quietly(self._report_failure(status), "its status"), name="failed"
        )

    async def _report_failure(self, status: ReplicaStatus) -> None:
        await self._update_status(status)
        if self.verdict is None or self.verdict.delay_s is None:
            return
        await self._context.clock.sleep(self.verdict.delay_s)
        await self._retried(self._restart, "its restart")

    async def _restart(self) -> None:
        """Give the assignment up that has failed: the allocator makes it anew, or promotes a standby."""
        context = self._context
        kv: DecodedKV | None = context.key_space.get(self.assignment.key)
        if kv is None or kv.decoded.value.code is not ReplicaCode.FAILED:
            return
        result = await context.etcd.txn(
            (Compare.mod_revision(kv.key, "=", kv.raw.mod_revision),), (Op.delete(kv.key),)
        )
        if result.succeeded:
            log.info("shard %(shard)s is started again after it failed", {"shard": self.id})
            metrics.RESTARTS.labels(self.fqn).inc()

    async def _update_status(self, status: ReplicaStatus) -> None:
        context = self._context
        await update_status(
            context.etcd, context.key_space, context.clock, lambda: self.assignment.key, status
        )

    # -- standby

    async def _standby(self) -> None:
        spec = self._spec
        if not spec.recovery_log:
            await self._update_status(ReplicaStatus(ReplicaCode.STANDBY, ()))
            return
        await self._update_status(ReplicaStatus(ReplicaCode.BACKFILL, ()))
        context = self._context
        stored = await self._retried(lambda: read_hints(context.etcd, spec), "reading hints")
        hints, *older_hints = usable_hints(stored, spec)
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
            older_hints=older_hints,
            stall_timeout_s=context.stall_timeout_s,
        )
        self._reads = StandbyReads(
            lambda directory: context.application.new_view(self, directory),
            self._directory.with_name(self._directory.name + ".view"),
            self._player,
            context.clock,
            context.player_pool,
        )
        self._scope.spawn(self._guard(self._announce_standby(self._player)), name="tailing")
        self._playing.set()
        recovered = await self._player.play()
        if not self._recovered.done():
            self._recovered.set_result(recovered)

    async def _announce_standby(self, player: Player) -> None:
        await player.tailing.wait()
        await self._update_status(ReplicaStatus(ReplicaCode.STANDBY, ()))

        def note(lag: tuple[int, float] | None) -> None:
            self.lag = lag

        context = self._context
        await watch_lag(
            self.fqn,
            player,
            context.client,
            context.clock,
            context.lag_interval_s,
            lambda: not self._started_primary,
            note,
        )

    async def _check_recovery_log(self, spec: ShardSpec) -> None:
        journal = await self._journal(
            spec.recovery_log,
            "recovery log",
            f"Create the journal, with the label {CONTENT_TYPE}={CONTENT_RECOVERY_LOG}.",
        )
        actual = journal.labels.value_of(CONTENT_TYPE)
        if actual != CONTENT_RECOVERY_LOG:
            raise Invalid(
                f"expected label {CONTENT_TYPE} value {CONTENT_RECOVERY_LOG} (got {actual})",
                journal=spec.recovery_log,
            )

    async def _journal(self, name: str, what: str, hint: str) -> JournalSpec:
        """The specification of a journal that the shard needs. Raises ``NotFound`` with that hint."""
        unknown = 0
        client = self._context.client
        while True:
            try:
                found = await self._retried(lambda: client.get_journal(name), f"looking up {name}")
                return found.spec
            except NotFound as error:
                unknown += 1
                if unknown == _NOT_FOUND_MAX:
                    raise NotFound(
                        f"{what} {name} does not exist",
                        hint=f"{hint} Then: gazctl shards unassign --failed.",
                    ) from error
            await self._context.clock.sleep(0.025 * 2**unknown)

    async def _retried(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        """Call until somebody answers; our lease ends the process if etcd does not for long."""
        attempt = 0
        while True:
            try:
                return await call()
            except Retryable as error:
                log.warning(
                    "%(what)s, for shard %(shard)s, is tried again: %(error)s",
                    {"what": what, "shard": self.id, "error": error},
                )
            attempt += 1
            await self._context.clock.sleep(min(5.0, 0.05 * 2 ** min(attempt, 10)))

    # -- primary

    async def _primary(self) -> None:
        context = self._context
        began = context.clock.monotonic()
        recovered = await self._take_over()
        played = context.clock.monotonic()
        self._appends = AppendService(context.client, budget=context.append_budget)
        self._scope.daemon(self._appends.run(), name="appends")
        self._thread = ShardThread(f"shard {self.id}")
        recovered_hints = None if recovered is None else recovered.fsm.build_hints(recovered.log)
        brings = isinstance(context.application, MessageProducer)
        sources = () if brings else self.spec.sources
        async with TaskScope(f"open shard {self.id}") as scope:
            # While the store opens: queries wait for all of this.
            scope.spawn(self._find_sources(sources), name="sources")
            checkpoint = await self._thread.run(lambda: self._open_store(recovered))
            await self._check_dead_letters()
            if recovered_hints is not None:
                await store_recovered_hints(
                    context.etcd,
                    context.clock,
                    self._spec,
                    recovered_hints,
                    self.assignment.key,
                    self.assignment.raw.create_revision,
                )
                await reach("promotion.hinted", self.id, context.clock)
        self.progress.update(
            {journal: source.read_through for journal, source in checkpoint.sources.items()}, {}
        )
        self._inbox = Inbox(INBOX_BYTES, self._loop)
        decoders = self._open_sources(sources, checkpoint)
        # Of a source that has a minimum, nothing before it is going to be read.
        self.progress.update({decoder.journal: decoder.begin for decoder in decoders.values()}, {})
        self._transactor = self._new_transactor(decoders)
        self.store_ready.set()
        ready = context.clock.monotonic()
        log.info(
            "shard %(shard)s is served: its log was taken over in %(log_seconds).3f s, its store opened "
            "in %(store_seconds).3f s",
            {"shard": self.id, "log_seconds": played - began, "store_seconds": ready - played},
        )
        self._scope.spawn(
            self._guard(self._update_status(ReplicaStatus(ReplicaCode.PRIMARY, ()))), name="status"
        )
        for decoder in decoders.values():
            journal, begin = decoder.journal, decoder.begin
            self._scope.spawn(self._read_source(journal, begin), name=f"read {journal}")
            if begin:
                self._scope.spawn(self._check_source(journal, begin), name=f"check {journal}")
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
        if not self._spec.recovery_log:
            return None
        await self._playing.wait()
        if self._player is None or self.failure is not None:
            raise Closed("the shard failed before it could be promoted")
        self._player.hand_off(self._context.rng.randrange(1, (1 << 32) - 1))
        recovered = await self._recovered
        if self._reads is not None:
            closing = self._quietly(self._reads.close(READS_PATIENCE_S), "closing a standby's view")
            self._reports.spawn(closing, name="view")
        return recovered

    def _open_store(self, recovered: RecoveredState | None) -> Checkpoint:
        """On the shard's thread: everything that may block."""
        assert self._appends is not None
        if recovered is not None:
            assert recovered.author is not None
            self._recorder = Recorder.open(
                self._spec.recovery_log,
                recovered.fsm,
                recovered.author,
                recovered.directory,
                self._appends,
                clock=self._context.clock,
            )
        application = self._context.application
        with application_code("new_store"):
            self.store = application.new_store(self, self._recorder)
        if not isinstance(self.store, Store):
            kind, self.store = type(self.store).__name__, None
            raise ApplicationFailed(f"new_store returned {kind}, which is no Store")
        with application_code("Store.restore_checkpoint"):
            checkpoint = self.store.restore_checkpoint(self)
        if not isinstance(checkpoint, Checkpoint):
            raise ApplicationFailed("Store.restore_checkpoint did not return a Checkpoint")
        with application_code("poison_policy"):
            self._poison_policy = checked_policy(application.poison_policy(self), self.store)
        hit("promotion.opened", self.id)
        return checkpoint

    async def _find_sources(self, sources: Sequence[ShardSource]) -> None:
        hint = "Create the journal, or remove it from the shard's sources."
        for source in sources:
            name = split_journal_meta(source.journal)[0]
            self._specs[source.journal] = await self._journal(name, "source journal", hint)

    def _open_sources(
        self, sources: Sequence[ShardSource], checkpoint: Checkpoint
    ) -> dict[str, EnvelopeDecoder[Any]]:
        decoders: dict[str, EnvelopeDecoder[Any]] = {}
        for source in sources:
            state = checkpoint.sources.get(source.journal)
            offset = max(source.min_offset, 0 if state is None else state.read_through)
            decoders[source.journal] = self._new_decoder(source.journal, offset)
        return decoders

    async def _check_dead_letters(self) -> None:
        if self._poison_policy is None:
            return
        name = self._poison_policy.dead_letters
        hint = f"Create the journal, with the label {CONTENT_TYPE}={CONTENT_JSON_LINES}."
        journal = await self._journal(name, "dead-letter journal", hint)
        actual = journal.labels.value_of(CONTENT_TYPE)
        if actual != CONTENT_JSON_LINES:
            raise Invalid(
                f"dead letters are lines of JSON, and the journal is labelled {actual}",
                journal=name,
                hint=hint,
            )

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
            ShardOutside(
                self,
                self._inbox,
                self.progress,
                self._new_decoder,
                self._scope,
                self.ended,
                self._context.client,
                self._context.clock,
                self._poison_policy,
            ),
            self._context.clock,
            decoders,
            spec_of=lambda: self.spec,
            recovery_log=self._spec.recovery_log,
            poison_policy=self._poison_policy,
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
                    log.warning(
                        "source %(journal)s of shard %(shard)s: %(reason)s",
                        {"journal": journal, "shard": self.id, "reason": jump},
                    )
                    inbox.put(Jump(journal, jump.offset))
                    continue
                except NotAllowed as error:
                    if status_of(error) != Status.SUSPENDED.name:
                        raise
                    # No broker serves it; whoever appends to it resumes it.
                    await self._context.clock.sleep(SUSPENDED_POLL_S)
                    continue
                if data:
                    await inbox.put_chunk(Chunk(journal, begin, data))
        except Closed:
            return
        except GazetteError as error:
            inbox.put(SourceFailed(journal, error))
        finally:
            reader.close()

    async def _check_source(self, journal: str, offset: int) -> None:
        """Fail if a source ends before what was read of it: it would be waited for without a word, and
        read on from the middle of something else."""
        context, inbox = self._context, self._inbox
        assert inbox is not None
        head: int | None = 0
        for _ in range(SHORT_SOURCE_LOOKS):
            head = await journal_head(context.client, split_journal_meta(journal)[0])
            if head is None or head >= offset:
                return
            # Brokers that have just started may not know all of it yet.
            await context.clock.sleep(SHORT_SOURCE_PAUSE_S)
        error = Corrupt(
            "it ends before what the shard has read of it: it was created anew, or data was lost",
            hint="If it was created anew, begin the shard anew as well, under another id, or with"
            " recovery log and hints of its own.",
            journal=journal,
            write_head=head,
            offset=offset,
        )
        inbox.put(SourceFailed(journal, error))

    async def _keep_hints(self) -> None:
        """Store hints from time to time, so that a recovery need not read more than it must."""
        context = self._context
        recorder = self._recorder
        assert recorder is not None
        stored: FSMHints | None = None
        while True:
            await context.clock.sleep(context.hints_interval_s)
            hints, flushed = await self.call(recorder.snapshot_hints)
            if hints == stored:
                continue  # An idle shard writes nothing to etcd.
            await settled(flushed)
            await reach("hints.storing", self.id, context.clock)
            try:
                if await store_recorded_hints(
                    context.etcd,
                    self._spec,
                    hints,
                    self.assignment.key,
                    self.assignment.raw.create_revision,
                ):
                    stored = hints
            except Unavailable as error:
                log.warning(
                    "hints of shard %(shard)s are stored next time: %(error)s",
                    {"shard": self.id, "error": error},
                )

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
    def append_backlog_bytes(self) -> int:
        return 0 if self._appends is None else self._appends.backlog_bytes

    @property
    def horizon_bytes(self) -> int | None:
        """How much of its log a recovery of the shard reads, from hints that are taken now; None without a
        log, or on a standby. Any thread."""
        recorder = self._recorder
        return None if recorder is None else recorder.known_horizon_bytes

    @property
    def play_back(self) -> PlayProgress | None:
        """How far play-back is, on a standby."""
        return None if self._player is None or self._started_primary else self._player.progress

    @property
    def play_lag_bytes(self) -> int | None:
        """How far play-back is behind the head of the log; None once it ended."""
        player = self._player
        if player is None or self._started_primary:
            return None
        return player.progress.lag_bytes
