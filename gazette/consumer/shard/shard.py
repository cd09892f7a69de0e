"""One shard that is assigned to this member: from play-back over promotion to its end.

    start ──► BACKFILL ──head──► STANDBY ──slot 0──► (hand-off, store opened) ──► PRIMARY
                 └──────────────────┴──── any error ────────────────────────────► FAILED

Code on the event loop owns the life cycle, reads sources and calls etcd. All code of the application and of
the store runs on the shard's own thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Final, TypeAlias, TypeVar

from gazette.cluster.allocator.model import DecodedKV
from gazette.cluster.etcd.values import Compare, Op
from gazette.consumer import metrics
from gazette.consumer.application import Store, checked_view
from gazette.consumer.contract.callbacks import ApplicationFailed
from gazette.consumer.contract.error_cause import error_text
from gazette.consumer.shard.context import ShardContext
from gazette.consumer.shard.hints_store import read_hints, usable_hints
from gazette.consumer.shard.journals import ShardJournals, retried
from gazette.consumer.shard.loop_shard_io import Progress, ShardParts
from gazette.consumer.shard.ownership import Ownership
from gazette.consumer.shard.primary import Primary
from gazette.consumer.shard.restarts import RestartDecision, reason_of
from gazette.consumer.shard.shard_waits import ShardWaits
from gazette.consumer.shard.standby_lag import watch_lag
from gazette.consumer.shard.standby_reads import StandbyReads
from gazette.consumer.shard.status import update_status
from gazette.consumer.transaction.shard_timers import ShardTimers, WithTimers, no_timers
from gazette.errors import Broken, Closed, GazetteError
from gazette.message.framing.frames import MalformedMessage
from gazette.protocol.shard import ReplicaCode, ReplicaStatus, ShardSpec
from gazette.recoverylog.playback.player import Player, PlayProgress, RecoveredState
from gazette.recoverylog.scratch import Scratch, shard_prefix
from gazette.runtime.tasks import OpFuture, TaskScope, await_future
from gazette.runtime.timeouts import timeout

log = logging.getLogger(__name__)

T = TypeVar("T")
ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None]

STOP_TIMEOUT_S: Final = 10.0
"""Seconds that a stopped shard waits for a running callback. After that, it does not wait for the thread."""

_RESTART_POLL_S: Final = 0.25
_RECOVERY_REPORT_S: Final = 10.0
READS_GRACE_S: Final = 60.0
"""Seconds for which queries of a standby may go on after its promotion. They read its view, not its store."""


class Shard(WithTimers):
    """A shard of this member, which the resolver creates for one assignment. Loop-bound. Callbacks get the
    shard as an `application.Shard`."""

    def __init__(self, context: ShardContext, item: DecodedKV, assignment: DecodedKV) -> None:
        self._context = context
        self._item = item
        self.assignment = assignment
        self.progress = Progress()
        self.store_ready = asyncio.Event()
        """Set once the store is open and its checkpoint restored, or once the shard has ended."""
        self.ended = asyncio.Event()
        """Set when the shard failed, or was stopped."""
        self.failure: BaseException | None = None
        """The error that has made the shard FAILED; None before."""
        self.verdict: RestartDecision | None = None
        """The decision about a restart, once the shard has failed."""
        self.lag: tuple[int, float] | None = None
        """The lag of a standby, in (bytes, seconds), at its last measurement."""
        self.spec: ShardSpec = item.decoded.value.spec
        """The present specification in etcd; after its deletion, the last version. The resolver sets it."""
        self._spec = self.spec
        """The specification when the shard was created: its log and hint keys apply until the next start."""
        self._scope = TaskScope(f"shard {self.id}", on_failure=self._fail)
        self._reports = TaskScope(f"status of shard {self.id}")
        self._ownership = Ownership(
            context.etcd, context.clock, self.id, lambda: self.assignment, self.ended
        )
        self._primary: Primary | None = None
        self._waits = ShardWaits(
            context.client, context.clock, lambda: self._spec, self._pending_appends
        )
        self._player: Player | None = None
        self._reads: StandbyReads | None = None
        self._recovered: asyncio.Future[RecoveredState]
        self._recovered = asyncio.get_running_loop().create_future()
        """The result of play-back, for which `_take_over` waits."""
        self._scratch: Scratch | None = None
        self._player_ready = asyncio.Event()
        """Set once the player is made, or the shard has failed."""
        self._started_primary = False
        """True from the promotion on."""
        self._stopping = False
        """True from `stop` on: later errors do not make the shard FAILED."""
        self._uses = 0
        """Number of queries that use the store."""
        self._unused = asyncio.Event()
        self._unused.set()

    @property
    def id(self) -> str:
        return str(self._item.decoded.id)

    @property
    def fqn(self) -> str:
        return self._item.key

    def publish_future(self, future: OpFuture[Any]) -> None:
        if self._primary is not None:
            self._primary.add_wait(future)

    def _open_timers(self) -> ShardTimers:
        primary = self._primary
        if primary is None or primary.timers is None:
            raise no_timers(self._context.application, self.id)
        return primary.timers

    @property
    def store(self) -> Store | None:
        """The store; None before it is made. Use it only once ``store_ready`` is set."""
        return None if self._primary is None else self._primary.store

    def start(self, *, primary: bool) -> None:
        """Begin to recover and, with ``primary``, to serve after that. Do not block."""
        self._spawn(self._follow_log(), "standby")
        if primary:
            self.promote(self.assignment)

    def promote(self, assignment: DecodedKV) -> None:
        """Begin to serve as primary, which ``assignment``, the shard's new assignment, demands."""
        self.assignment = assignment
        if self.failure is None and not self._started_primary:
            self._started_primary = True
            self._spawn(self._serve(), "primary")

    @property
    def reads(self) -> StandbyReads | None:
        """Queries of a standby that has reached the head of its log. None for any other shard."""
        player = self._player
        if self._started_primary or self.ended.is_set() or player is None:
            return None
        return self._reads if player.tailing.is_set() else None

    @property
    def is_primary(self) -> bool:
        return self._started_primary

    async def stop(self) -> None:
        """End the shard. Never raise. The shard takes no message after the begin of this call. A complete
        transaction may still commit, unless the next owner has set its fence.

        If a callback runs longer than `STOP_TIMEOUT_S`, do not wait for it: its thread releases the store
        when it returns. The effects of the callback are dropped.
        """
        self._stopping = True
        self.ended.set()
        self.store_ready.set()
        if self._primary is not None:
            self._primary.stop()
        if self._reads is not None:
            await self._quietly(self._reads.close(STOP_TIMEOUT_S), "closing its view")
        await self._quietly(self._reports.stop(STOP_TIMEOUT_S), "stopping its reports")
        if self._primary is not None:
            await self._quietly(self._primary.appends.close(), "closing its appends")
        await self._quietly(self._scope.stop(STOP_TIMEOUT_S), "stopping its tasks")
        await self._quietly(self._release(), "releasing its store")

    async def _release(self) -> None:
        """Release the store and remove the files, once queries and a running callback have ended.

        Wait at most `STOP_TIMEOUT_S` seconds for queries, and as long for the callback. After that, running
        queries lose the store. A running callback keeps the store and the files until it returns.
        """
        primary, scratch = self._primary, self._scratch

        def remove() -> None:
            if scratch is not None:
                scratch.remove()

        if primary is None:
            await self._context.player_pool.run(remove)
            return
        try:
            async with timeout(STOP_TIMEOUT_S):
                await self._unused.wait()
        except TimeoutError:
            log.warning(
                "the store of shard %(shard)s is released although a query uses it",
                {"shard": self.id},
            )
        destroyed = primary.destroy_store(remove)
        try:
            async with timeout(STOP_TIMEOUT_S):
                await await_future(destroyed)
        except TimeoutError:
            log.warning(
                "a callback of shard %(shard)s still runs; its store is released later",
                {"shard": self.id},
            )

    def awaited(self, read_through: Mapping[str, int]) -> dict[str, int]:
        """Return the result of `Primary.awaited`. The store must be open."""
        assert self._primary is not None
        return self._primary.awaited(read_through)

    def begin_use(self) -> None:
        """Keep the store from being released until ``end_use``."""
        self._uses += 1
        self._unused.clear()

    def end_use(self) -> None:
        self._uses -= 1
        if self._uses == 0:
            self._unused.set()

    async def _quietly(self, work: Awaitable[None], what: str) -> None:
        """Await ``work``. Log its error, and do not raise it."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - what follows releases more
            log.warning(
                "%(what)s, of shard %(shard)s: %(error)s",
                {"what": what, "shard": self.id, "error": error},
            )

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start a part of the life cycle under `_fail_on_error`."""
        task = self._scope.spawn(self._fail_on_error(work), name=name)
        # A task that is cancelled before it begins never awaits ``work``, of which Python would warn.
        task.add_done_callback(lambda _: work.close())

    async def _fail_on_error(self, work: Awaitable[None]) -> None:
        """Run a part of the life cycle. An error makes the shard FAILED, unless `stop` was called."""
        task = asyncio.current_task()
        try:
            await work
        except GeneratorExit:
            raise
        except asyncio.CancelledError as error:
            if task is None or task.cancelling():
                raise
            # Not this task was cancelled, but a future that it awaited. Report a failure.
            self._fail(Broken(f"something was cancelled unasked: {error!r}"))
        except BaseException as error:  # noqa: BLE001 - a silent shard would be worse
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Set the shard FAILED, for the first error only. After `stop`, change nothing."""
        if self.failure is not None or self._stopping:
            return
        self.failure = error
        # End both waits of `_take_over`, since the play-back has failed.
        self._player_ready.set()
        if not self._recovered.done():
            self._recovered.cancel()
        log.error(
            "shard %(shard)s failed: %(error)s",
            {"shard": self.id, "error": _logged_text(error)},
            exc_info=_exc_info_to_log(error),
        )
        self.ended.set()
        self.store_ready.set()
        if self._primary is not None:
            self._primary.stop()
        # Do not stop appends: a committed transaction must still be acknowledged.
        self._scope.cancel()
        context = self._context
        reason = reason_of(error, None if self.store is None else self.store.classify_error)
        self.verdict = context.restarts.failed(self.spec, context.clock.monotonic(), reason)
        text = "\n".join(filter(None, (error_text(error), self.verdict.text)))
        status = ReplicaStatus(ReplicaCode.FAILED, (text,))
        self._reports.spawn(
            self._quietly(self._report_failure(status), "its status"), name="failed"
        )

    async def _report_failure(self, status: ReplicaStatus) -> None:
        """Report the failure in etcd. If the verdict is a restart, restart the shard after its delay."""
        await self._update_status(status)
        if self.verdict is None or self.verdict.delay_s is None:
            return
        await self._context.clock.sleep(self.verdict.delay_s)
        await retried(self._restart, "its restart", self.id, self._context.clock)

    async def _restart(self) -> None:
        """Delete the failed assignment: the allocator makes a new assignment, or promotes a standby.

        The status has promised a restart. So repeat if etcd differs from the key space, which may lag.
        """
        context = self._context
        while True:
            kv: DecodedKV | None = context.key_space.get(self.assignment.key)
            if kv is None or kv.decoded.value.code is not ReplicaCode.FAILED:
                return
            result = await context.etcd.txn(
                (Compare.mod_revision(kv.key, "=", kv.raw.mod_revision),), (Op.delete(kv.key),)
            )
            if result.succeeded:
                log.info("shard %(shard)s is started again after it failed", {"shard": self.id})
                metrics.RESTARTS.labels(self.fqn).inc()
                return
            await context.clock.sleep(_RESTART_POLL_S)

    async def _update_status(self, status: ReplicaStatus) -> None:
        context = self._context
        await update_status(
            context.etcd, context.key_space, context.clock, lambda: self.assignment.key, status
        )

    async def _follow_log(self) -> None:
        """Play the shard's log back, and follow the log until the hand-off that `_take_over` requests.

        For a shard without a log, report STANDBY and return.
        """
        spec = self._spec
        spec.validate()  # Another tool may have applied an invalid specification.
        if not spec.recovery_log:
            await self._update_status(ReplicaStatus(ReplicaCode.STANDBY, ()))
            return
        await self._update_status(ReplicaStatus(ReplicaCode.BACKFILL, ()))
        context = self._context
        stored_hints = await retried(
            lambda: read_hints(context.etcd, spec), "reading hints", self.id, context.clock
        )
        hints, *older_hints = usable_hints(stored_hints, spec)
        journals = ShardJournals(context.client, context.clock, self.id)
        await journals.check_recovery_log(spec.recovery_log)
        self._scratch = await Scratch.make(
            context.player_pool, shard_prefix(self.id), context.settings.scratch_directory
        )
        self._player = Player(
            hints,
            self._scratch.path / "files",
            context.client,
            context.clock,
            context.player_pool,
            older_hints=older_hints,
            stall_timeout_s=context.settings.stall_timeout_s,
        )
        self._reads = StandbyReads(
            lambda directory: checked_view(context.application.new_view(self, directory)),
            self._scratch.path / "view",
            self._player,
            context.clock,
            context.player_pool,
        )
        self._spawn(self._announce_standby(self._player), "tailing")
        self._player_ready.set()
        recovered = await self._player.play()
        if not self._recovered.done():
            self._recovered.set_result(recovered)

    async def _announce_standby(self, player: Player) -> None:
        """Report STANDBY once the head of the log is reached. Then measure the lag until the promotion."""
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
            context.settings.lag_interval_s,
            lambda: not self._started_primary,
            note,
        )

    async def _serve(self) -> None:
        """Take the log over, open the store, and run transactions until the shard ends."""
        context = self._context
        began = context.clock.monotonic()
        async with TaskScope(f"recovery of shard {self.id}") as scope:
            scope.daemon(self._report_recovery(), name="progress")
            scope.daemon(self._waits.watch(self._played_bytes), name="waits")
            recovered = await self._take_over()
            scope.cancel()
        played = context.clock.monotonic()
        if self.ended.is_set():
            raise Closed("the shard has ended")  # `stop` ran before there was a primary to stop.
        primary = self._primary = Primary(
            context,
            ShardParts(self, self.progress, self._ownership, self._scope, self.ended),
            self._spec,
            lambda: self.assignment,
        )
        checkpoint = await primary.open(recovered)
        self.store_ready.set()
        ready = context.clock.monotonic()
        log.info(
            "shard %(shard)s is served: its log was taken over in %(log_seconds).3f s, its "
            "store opened in %(store_seconds).3f s",
            {"shard": self.id, "log_seconds": played - began, "store_seconds": ready - played},
        )
        self._spawn(self._update_status(ReplicaStatus(ReplicaCode.PRIMARY, ())), "status")
        primary.start()
        self._spawn(primary.keep_hints(), "hints")
        self._spawn(primary.keep_backup_hints(), "backup hints")
        await primary.run(checkpoint)

    async def _report_recovery(self) -> None:
        """Log from time to time the reason of a wait, or the progress of the recovery."""
        while True:
            await self._context.clock.sleep(_RECOVERY_REPORT_S)
            if reason := self.waits_for:
                log.info(
                    "shard %(shard)s waits for %(reason)s", {"shard": self.id, "reason": reason}
                )
                continue
            progress = self.play_back
            log.info(
                "shard %(shard)s is being recovered: %(progress)s",
                {"shard": self.id, "progress": progress or "its hints are read"},
            )

    def _played_bytes(self) -> int:
        return 0 if self._player is None else self._player.progress.bytes_read

    def _pending_appends(self) -> Mapping[str, str]:
        return {} if self._primary is None else self._primary.appends.waiting()

    async def _take_over(self) -> RecoveredState | None:
        """Finish play-back as the log's new owner. Return None for a shard without a log. Raise ``Closed`` if
        the shard has failed."""
        if not self._spec.recovery_log:
            return None
        await self._player_ready.wait()
        if self._player is None or self.failure is not None:
            raise Closed("the shard failed before it could be promoted")
        author = self._context.rng.randrange(1, (1 << 32) - 1)
        self._player.hand_off(author, permit=self._ownership.require)
        recovered = await self._recovered
        if self._reads is not None:
            closing = self._quietly(self._reads.close(READS_GRACE_S), "closing a standby's view")
            self._reports.spawn(closing, name="view")
        return recovered

    async def call(self, fn: Callable[[], T]) -> T:
        """Run a function on the shard's thread, between two steps of a transaction.

        Raise ``Closed`` unless the shard is primary, or the error of ``fn``, which may run even if cancelled.
        """
        if self._primary is None:
            raise Closed("the shard is not primary", shard=self.id)
        return await self._primary.call(fn)

    @property
    def append_backlog_bytes(self) -> int:
        return 0 if self._primary is None else self._primary.appends.backlog_bytes

    @property
    def waits_for(self) -> str:
        """The journal that the shard waits for, and the brokers' answer; empty if the shard does not wait."""
        return "" if self.ended.is_set() else self._waits.reason

    @property
    def horizon_bytes(self) -> int | None:
        """Bytes of the log that a recovery by present hints would read. Any thread. None on standbys."""
        return None if self._primary is None else self._primary.horizon_bytes

    @property
    def play_back(self) -> PlayProgress | None:
        """Progress of play-back. None for a primary that has played its whole log."""
        has_played = self._recovered.done() if self._started_primary else False
        return None if self._player is None or has_played else self._player.progress


def _logged_text(error: BaseException) -> str:
    """Return the text of an error for the log, without its hint: `TextFormatter` adds the hint."""
    has_own = isinstance(error, GazetteError) and error.hint != error.default_hint
    return str(error) if has_own else error_text(error)


def _exc_info_to_log(error: BaseException) -> ExcInfo | None:
    """Return the traceback to log. For an application's error, return only the traceback of its cause."""
    if isinstance(error, ApplicationFailed):
        return None if error.__cause__ is None else (type(error), error, None)
    return (
        None if isinstance(error, MalformedMessage) else (type(error), error, error.__traceback__)
    )
