"""A shard as the primary: its store, readers and transactions, from the hand-off of its log to the end.

Primary.open ──► store opened, checkpoint restored ──► start ──► sources are read
                                                        └──► run: transactions, on the shard's thread
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from gazette.client.append.service import AppendService
from gazette.client.journals import ListedJournal
from gazette.client.read.reader import ReadParams
from gazette.cluster.allocator.model import DecodedKV
from gazette.consumer.application import MessageProducer, Store, checked_store
from gazette.consumer.application_name import require_own_state
from gazette.consumer.contract.callbacks import require_instance
from gazette.consumer.contract.poison import PoisonPolicy
from gazette.consumer.inbox import Call, Inbox
from gazette.consumer.shard.context import ShardContext
from gazette.consumer.shard.hints_store import (
    HintsSize,
    store_recorded_hints,
    store_recovered_hints,
)
from gazette.consumer.shard.journals import ShardJournals
from gazette.consumer.shard.loop_shard_io import LoopShardIO, ShardParts
from gazette.consumer.shard.source_lives import in_present_lives, without_earlier_spans
from gazette.consumer.shard.source_reader import read_source
from gazette.consumer.transaction.poison_handler import checked_policy
from gazette.consumer.transaction.shard_callbacks import (
    RunningCallback,
    ShardCallbacks,
    application_code,
)
from gazette.consumer.transaction.shard_timers import ShardTimers, open_timers, times_of
from gazette.consumer.transaction.transactor import Transactor
from gazette.errors import Closed, GazetteError, Invalid, Unavailable
from gazette.labels import CONTENT_TYPE
from gazette.message.envelope import EnvelopeDecoder
from gazette.message.framing.framing import framing_of
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.hints import FSMHints
from gazette.protocol.shard import ShardSource, ShardSpec
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.playback.player import RecoveredState
from gazette.runtime.failpoints import hit, reach
from gazette.runtime.tasks import OpFuture, TaskScope, await_future

log = logging.getLogger(__name__)

T = TypeVar("T")

INBOX_BYTES: Final = 4 << 20


class Primary:
    """The parts of a shard while it is primary. Loop-bound. For a shard with a log, made once the shard owns
    the log.

    ``spec`` is the specification when the shard was created. ``assignment_of`` returns its assignment.
    """

    def __init__(
        self,
        context: ShardContext,
        parts: ShardParts,
        spec: ShardSpec,
        assignment_of: Callable[[], DecodedKV],
    ) -> None:
        shard = parts.shard
        self.store: Store | None = None
        """The store, which the shard's thread sets; None before it is made."""
        self.timers: ShardTimers | None = None
        """The timers. None before the checkpoint is restored, and for an application without ``on_timer``."""
        self.running_callback = RunningCallback(shard.id)
        self.appends = AppendService(context.client, budget=context.append_budget)
        self.thread = context.new_worker(f"shard {shard.id}")
        self._context = context
        self._parts = parts
        self._shard = shard
        self._spec = spec
        self._assignment_of = assignment_of
        brings_messages = isinstance(context.application, MessageProducer)
        self._sources: tuple[ShardSource, ...] = () if brings_messages else shard.spec.sources
        self._journals: dict[str, ListedJournal] = {}
        """The sources, as they were listed before the store was opened."""
        self._recorder: Recorder | None = None
        """The recorder, made with the store. None for a shard without a log."""
        self._recovered_hints: FSMHints | None = None
        self._poison_policy: PoisonPolicy | None = None
        # Make the inbox now: a stop during the opening of the store must also stop the transactions.
        self._inbox = Inbox(INBOX_BYTES, asyncio.get_running_loop(), self.thread.condition())
        self._transactor: Transactor | None = None
        self._decoders: dict[str, EnvelopeDecoder[Any]] = {}
        parts.scope.daemon(self.appends.run(), name="appends")
        context.callback_watch.add(self.running_callback)

    async def open(self, recovered: RecoveredState | None) -> Checkpoint:
        """Open the store over the recovered files, and prepare transactions. Return the checkpoint.

        Errors of the application reach the caller. Raise ``NotFound`` or ``Invalid`` if a journal that the
        shard needs is absent or of a wrong kind. Raise ``Corrupt`` for a source that was created again. Raise
        ``Closed`` if the shard has ended or belongs to another member. After a cancellation the thread may
        still open the store: `destroy_store` waits for that.
        """
        context, shard = self._context, self._shard
        journals = ShardJournals(context.client, context.clock, shard.id)
        if recovered is not None:
            self._recovered_hints = recovered.fsm.build_hints(recovered.log)
        async with TaskScope(f"open shard {shard.id}") as scope:
            # Queries wait until all these steps are done. So look up the sources during the opening.
            scope.spawn(self._find_sources(journals), name="sources")
            if recovered is not None and recovered.fsm.last_log != self._spec.recovery_log:
                # The state is from another log, so the recorder will fence the specification's log.
                await self._parts.ownership.require()
            store = await self.thread.run(lambda: self._open_store(recovered))
            # Ask right before `restore_checkpoint`, which may set a fence, since `new_store` may take long.
            await self._parts.ownership.require()
            checkpoint = await self.thread.run(lambda: self._restore(store))
            if self._poison_policy is not None:
                await journals.check_dead_letters(self._poison_policy.dead_letters)
        lives = {journal: listed.life for journal, listed in self._journals.items()}
        checkpoint = in_present_lives(checkpoint, lives, shard.spec)
        checkpoint = without_earlier_spans(checkpoint, self._sources)
        read_through = {name: source.read_through for name, source in checkpoint.sources.items()}
        self._parts.progress.update(read_through, {})
        for source in self._sources:
            offset = max(source.min_offset, read_through.get(source.journal, 0))
            self._decoders[source.journal] = self._new_decoder(source.journal, offset)
        # Bytes before a source's minimum offset are never read: let no query wait for them.
        self._parts.progress.update({d.journal: d.begin for d in self._decoders.values()}, {})
        self._transactor = self._new_transactor()
        return checkpoint

    async def _find_sources(self, journals: ShardJournals) -> None:
        for source in self._sources:
            self._journals[source.journal] = await journals.source(source)

    def _open_store(self, recovered: RecoveredState | None) -> Store:
        """Make the store, on the shard's thread. May block. Set a fence only for a state from another log:
        see `Recorder.open`."""
        self._parts.ownership.require_running()
        shard, application = self._shard, self._context.application
        if recovered is not None:
            assert recovered.author is not None
            self._recorder = Recorder.open(
                self._spec.recovery_log,
                recovered.fsm,
                recovered.author,
                recovered.directory,
                self.appends,
                clock=self._context.clock,
                write_head=recovered.write_head,
                wait=self.thread.wait,
            )
        if (array_pass := application.array_pass(shard)) is not None:
            array_pass.prepare()
        with application_code("new_store", self.running_callback):
            store = application.new_store(shard, self._recorder)
        self.store = checked_store(store)
        return self.store

    def _restore(self, store: Store) -> Checkpoint:
        """Restore the checkpoint, on the shard's thread. The store may set its fence here."""
        shard, application = self._shard, self._context.application
        hit("promotion.fencing", shard.id)
        # This step may have waited behind a callback. If the shard has ended, its fence would be late.
        self._parts.ownership.require_running()
        with application_code("Store.restore_checkpoint", self.running_callback):
            checkpoint = store.restore_checkpoint(shard)
        require_instance("Store.restore_checkpoint", checkpoint, Checkpoint)
        require_own_state(checkpoint, self._context.owner, shard.id)
        with application_code("poison_policy", self.running_callback):
            self._poison_policy = checked_policy(application.poison_policy(shard), store)
        with application_code("Store.timer_table", self.running_callback):
            self.timers = open_timers(application, shard, store, self._context.clock)
        hit("promotion.opened", shard.id)
        return checkpoint

    def _new_decoder(self, journal: str, offset: int) -> EnvelopeDecoder[Any]:
        spec = self._journals[journal].spec
        message_type = self._context.application.message_type_of(spec)
        content_type = spec.labels.value_of(CONTENT_TYPE) or ""
        place = self._context.application.uuid_place_of(spec)
        framing = framing_of(content_type, message_type, place=place)
        if (array_pass := self._context.application.array_pass(self._shard)) is not None:
            return array_pass.new_decoder(journal, framing, offset)
        times = times_of(self._context.application, spec, self._context.clock)
        return EnvelopeDecoder(journal, framing, offset, times)

    def _new_transactor(self) -> Transactor:
        context, shard, inbox = self._context, self._shard, self._inbox
        assert self.store is not None
        shard_io = LoopShardIO(
            context,
            self._parts,
            inbox,
            self._new_decoder,
            self._poison_policy,
            self.thread.wait,
            {journal: listed.life for journal, listed in self._journals.items()},
        )
        return Transactor(
            ShardCallbacks(
                context.application,
                shard,
                self.store,
                context.new_publisher(self.appends),
                self.running_callback,
            ),
            self.appends,
            inbox,
            shard_io,
            context.clock,
            self._decoders,
            recovery_log=self._spec.recovery_log,
            poison_policy=self._poison_policy,
            application_name=context.owner.name,
            timers=self.timers,
        )

    def start(self) -> None:
        """Begin to read sources. Call this after `open`."""
        context, inbox = self._context, self._inbox
        client, clock = context.client, context.clock
        for decoder in self._decoders.values():
            journal, missing = decoder.journal, self._parts.progress.missing
            life = self._journals[journal].life
            params = ReadParams(journal, decoder.begin, block=True, life=life)
            reading = read_source(params, inbox, client, clock, self._shard.id, missing)
            self._parts.scope.spawn(reading, name=f"read {journal}")

    def awaited(self, read_through: Mapping[str, int]) -> dict[str, int]:
        """Return those of the offsets for which a query must wait: the offsets of this shard's sources.

        A `MessageProducer` chooses the offsets: see its `read_through`. Call this after `open`. Raise
        ``Unavailable`` for a new source, which the shard reads only after its next promotion.
        """
        application, shard = self._context.application, self._shard
        if isinstance(application, MessageProducer):
            with application_code("read_through"):
                read_through = application.read_through(shard, self.store, read_through)
            require_instance("read_through", read_through, Mapping)
            return {name: offset for name, offset in read_through.items() if offset}
        sources = {source.journal for source in self._sources}
        for source in shard.spec.sources:
            if read_through.get(source.journal) and source.journal not in sources:
                raise Unavailable(
                    f"it does not read its new source {source.journal} before it is unassigned",
                    hint=f"Run: gazctl shards unassign -l id={shard.id}",
                    shard=shard.id,
                )
        return {name: offset for name, offset in read_through.items() if offset and name in sources}

    async def run(self, checkpoint: Checkpoint) -> None:
        """Run transactions on the shard's thread until the shard ends. Raise the error that makes it fail."""
        transactor = self._transactor
        assert transactor is not None

        def run() -> None:
            try:
                transactor.run(checkpoint)
            except Closed:
                if not self._parts.ended.is_set():  # At the end of the shard, it is no error.
                    raise

        await self.thread.run(run)

    @property
    def horizon_bytes(self) -> int | None:
        """Bytes of the log that a recovery by present hints would read; None without a log. Any thread."""
        recorder = self._recorder
        return None if recorder is None else recorder.known_horizon_bytes

    def add_wait(self, future: OpFuture[Any]) -> None:
        """Make the commit of the running transaction wait for ``future``, too."""
        if self._transactor is not None:
            self._transactor.add_wait(future)

    async def call(self, fn: Callable[[], T]) -> T:
        """Run a function on the shard's thread, between two steps of a transaction. Wait for transactions.

        Raise ``Closed`` if the shard has ended, or the error of ``fn``. After a cancellation ``fn`` may still
        run.
        """
        future: OpFuture[T] = OpFuture()
        self._inbox.put(Call(fn, future))
        return await await_future(future)

    async def keep_backup_hints(self) -> None:
        """Store the hints of this recovery as a backup. Return at once for a shard without a log, and for a
        prefix of hints that is not permitted.

        The shard serves meanwhile, since the former hints recover the same state; they only read more of the
        log. Raise ``GazetteError`` if the assignment ends first.
        """
        context = self._context
        if self._recovered_hints is None or not context.hint_keys.allows(self._spec.hint_prefix):
            return
        assignment = self._assignment_of()
        try:
            await store_recovered_hints(
                context.etcd,
                context.clock,
                self._spec,
                self._recovered_hints,
                assignment.key,
                assignment.raw.create_revision,
            )
        except Invalid as error:
            log.warning(
                "recovered hints of shard %(shard)s are not stored, and its log cannot be "
                "pruned: %(error)s. %(hint)s",
                {"shard": self._shard.id, "error": error, "hint": error.hint},
            )
        await reach("promotion.hinted", self._shard.id, context.clock)

    async def keep_hints(self) -> None:
        """Store new hints from time to time, so that a recovery reads little of the log.

        Run without end. Return at once for a shard without a log and, with a warning, for a prefix of hints
        that is not permitted. Do not wait for `keep_backup_hints`. Raise ``Closed`` if the shard has ended,
        or the error of its log.
        """
        context, recorder = self._context, self._recorder
        if recorder is None:
            return
        try:
            context.hint_keys.require(self._spec)
        except Invalid as error:
            log.warning(
                "hints of shard %(shard)s are not stored: recoveries read ever more of its "
                "log, and it cannot be pruned. %(error)s. %(hint)s",
                {"shard": self._shard.id, "error": error, "hint": error.hint},
            )
            return
        size = HintsSize()
        last_stored: FSMHints | None = None
        while True:
            await context.clock.sleep(context.settings.hints_interval_s)
            hints, flushed = await self.call(recorder.snapshot_hints)
            if hints == last_stored:
                continue  # An idle shard does not write to etcd.
            # The hints name operations. Store the hints only once the log has these operations.
            await await_future(flushed)
            await reach("hints.storing", self._shard.id, context.clock)
            assignment = self._assignment_of()
            try:
                if await store_recorded_hints(
                    context.etcd,
                    self._spec,
                    hints,
                    assignment.key,
                    assignment.raw.create_revision,
                    size,
                ):
                    last_stored = hints
            except GazetteError as error:
                # Continue after any error of etcd: without new hints, a recovery only reads more.
                log.warning(
                    "hints of shard %(shard)s are stored next time: %(error)s. %(hint)s",
                    {"shard": self._shard.id, "error": error, "hint": error.hint},
                )

    def stop(self) -> None:
        """End transactions: take no more messages, timers or events. A commit may still begin. May be
        repeated."""
        self._inbox.stop()

    def destroy_store(self, afterwards: Callable[[], None]) -> OpFuture[None]:
        """Release the store on its thread, once a running callback has returned, and end the thread.

        Call ``afterwards`` on the thread, even if the store raises.
        """

        def destroy() -> None:
            # Read `store` here, on the thread: the thread may open it after the call of `destroy_store`.
            try:
                if self.store is not None:
                    self.store.destroy()
            finally:
                self._context.callback_watch.remove(self.running_callback)
                afterwards()

        destroyed = self.thread.submit(destroy)
        self.thread.close()
        return destroyed
