"""Driver that runs an application without any service: publish messages, check the store, crash,
restore.

    driver = AppDriver(WordCount(), tmp_path, sources=["words"])
    driver.publish("words", Word(word="hello"), Word(word="hello"))
    driver.run()
    assert driver.store.query("SELECT n FROM counts") == [(2,)]

    driver.crash()                    # the process is gone; its recovery log is not
    driver.run()                      # restores the store from the log, and continues
    assert driver.store.query("SELECT n FROM counts") == [(2,)]

The driver runs real code: the runtime's transactions, sequencing and barriers, the application and
its store, and the recovery log. Journals are in memory. Time stands still except in ``advance``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ulp
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from gazette.consumer.application import Application, MessageProducer, Store, checked_store
from gazette.consumer.application_name import Owner, name_of, require_own_state
from gazette.consumer.contract.callbacks import initialized, require_callbacks
from gazette.consumer.contract.poison import PoisonPolicy
from gazette.consumer.inbox import Chunk
from gazette.consumer.shard.thread import ShardThread
from gazette.consumer.transaction.poison_handler import checked_policy, decoded
from gazette.consumer.transaction.shard_callbacks import ShardCallbacks, application_code
from gazette.consumer.transaction.shard_io import FinishedTransaction
from gazette.consumer.transaction.shard_timers import (
    ShardTimers,
    WithTimers,
    defines_timers,
    no_timers,
    open_timers,
    times_of,
)
from gazette.consumer.transaction.transactor import Transactor
from gazette.errors import Unavailable
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.envelope import Envelope, EnvelopeDecoder
from gazette.message.framing.frames import Framing
from gazette.message.framing.framing import framing_of
from gazette.message.mapping import Partition, fixed_mapping
from gazette.message.publisher import Publisher
from gazette.message.sequencer.sequencer import ReplayRange, Sequencer
from gazette.message.uuid import Clock as MessageClock
from gazette.message.uuid import new_producer_id
from gazette.protocol.hints import FSMHints
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import EMPTY_LABELS, LabelSet, union
from gazette.protocol.shard import ShardSource, ShardSpec
from gazette.protocol.text import duration
from gazette.recoverylog.log.recorder import Recorder
from gazette.runtime.tasks import LoopThread, OpFuture
from gazette.testing.clock import ManualClock
from gazette.testing.driven_service import DrivenService
from gazette.testing.memory_journals import JournalLog, MemoryAppends, MemoryJournals
from gazette.testing.recovery import LOG, take_over
from gazette.testing.stepped_inbox import SteppedInbox

StoreT = TypeVar("StoreT", bound=Store)

STEP_TIMEOUT_S: Final = 60.0
_TICK_S: Final = 1e-6
BLOCKED_S: Final = 0.5
"""Seconds after which a busy thread counts as waiting for the commit, while a commit is held."""


class DrivenShard(WithTimers):
    """The shard that callbacks receive."""

    def __init__(self, application: Application[Any], spec: ShardSpec) -> None:
        self._application = application
        self._spec = spec
        self.timers: ShardTimers | None = None
        self.add_wait: Callable[[OpFuture[Any]], None] = lambda future: None
        """Makes the next commit wait for a future. Set once the transactor exists."""
        self.published: list[OpFuture[Any]] = []
        """Futures of the application; most of them are not done."""

    @property
    def id(self) -> str:
        return self._spec.id

    @property
    def fqn(self) -> str:
        return f"/driver/items/{self._spec.id}"

    @property
    def spec(self) -> ShardSpec:
        return self._spec

    def publish_future(self, future: OpFuture[Any]) -> None:
        self.add_wait(future)
        self.published = [other for other in self.published if not other.done()] + [future]

    def _open_timers(self) -> ShardTimers:
        if self.timers is None:
            raise no_timers(self._application, self.id)
        return self.timers


@dataclass(frozen=True, slots=True)
class _Recovered:
    """An acknowledgement from a checkpoint, on its way to its journal."""

    journal: str
    intent: bytes
    future: OpFuture[Any]


@dataclass(slots=True)
class _Life:
    """One promotion of the shard, until its crash or failure."""

    shard: DrivenShard
    store: Any
    appends: MemoryAppends
    inbox: SteppedInbox
    thread: ShardThread
    transactor: Transactor
    offsets: dict[str, int]
    running: OpFuture[None]
    loop: LoopThread | None
    recovered: list[_Recovered]
    """Acknowledgements of the restored checkpoint that are on their way. The thread appends to the list."""


class AppDriver(Generic[StoreT]):
    """Drives one shard of an application from a test, synchronously.

    ``sources`` are the journals that the shard reads. ``content_types`` has the content types of
    journals that are not JSON lines. ``journal_labels`` adds labels to journals, as an operator would:
    to sources, and to journals that ``service.partitions`` is to find.

    Each promotion begins with ``Application.initialize``, on an event loop of its own and with a
    `DrivenService`. ``config`` has the settings of the application by group. ``initialize=False``
    skips the call.

    ``log=False`` is for stores that are durable without a log. ``fields`` are further fields of the
    ``ShardSpec``. Some stores commit on a thread of their own: ``run`` waits for them up to
    ``commit_wait_s`` seconds of the real clock, then returns. Two drivers on the same ``journals``
    are two members that both believe to be primary.

    Acknowledgements from a restored checkpoint do not wait for other appends to their journals.
    ``run`` appends them as late as possible: when the shard has nothing else to do. While
    ``hold_recovered`` is true, ``run`` appends none.

    The application's callbacks run on the shard's thread while ``run`` and other methods wait.
    """

    def __init__(
        self,
        application: Application[StoreT],
        directory: Path,
        sources: Sequence[str],
        *,
        journals: MemoryJournals | None = None,
        content_types: Mapping[str, str] | None = None,
        log: bool = True,
        clock: ManualClock | None = None,
        seed: int = 1,
        chunk_bytes: int = 1 << 20,
        commit_wait_s: float = 10.0,
        hints: FSMHints | None = None,
        journal_labels: Mapping[str, Mapping[str, str] | LabelSet] | None = None,
        config: Mapping[str, Any] | None = None,
        initialize: bool = True,
        **fields: Any,
    ) -> None:
        self.hints = hints
        """Hints by which the next promotion plays the recovery log. None: play from the log's first byte."""
        require_callbacks(application)
        self.application = application
        self._owner = Owner(name_of(application))
        self.journals = MemoryJournals() if journals is None else journals
        """All journals, in memory."""
        self.clock = ManualClock() if clock is None else clock
        """Clock of the shard. It stands still except in `advance`."""
        self.transactions: list[FinishedTransaction] = []
        """All transactions so far that were committed and acknowledged."""
        self.read_through: dict[str, int] = {}
        """By journal, the offset up to which the shard has read."""
        self._policy: PoisonPolicy | None = None
        self.skipped: list[tuple[str, str]] = []
        """(journal, reason) of each message that the shard's poison policy skipped."""
        self.hold_recovered = False
        """True to keep acknowledgements of the restored checkpoint on their way. A crash drops them."""
        self._directory = directory
        self._content_types = dict(content_types or {})
        self._journal_labels = dict(journal_labels or {})
        self._config = config
        self._initializes = initialize
        self._log = log
        self._rng = self.journals.random_of(seed)
        self._chunk_bytes = chunk_bytes
        self._commit_wait_s = commit_wait_s
        self._lives = 0
        self._life: _Life | None = None
        shard_sources = tuple(ShardSource(journal) for journal in sorted(sources))
        defaults: dict[str, Any] = {
            "max_txn_duration_ns": duration.SECOND,
            "sources": shard_sources,
        }
        self.spec = ShardSpec("driven-shard", **{**defaults, **fields})
        appends = MemoryAppends(self.journals)
        self._producer = Publisher(
            appends,
            producer=new_producer_id(self._rng),
            clock=MessageClock(),
            wall_clock=self.clock,
        )

    # -- messages

    def publish(self, journal: str, *messages: Any) -> None:
        """Publish committed messages to a journal, by the driver's own producer.

        A message may lack the time that its source declares, since a test may check how the
        application handles such messages. ``feed`` appends any other bytes.
        """
        mapping = self._mapping(journal)
        for message in messages:
            self._producer.publish_committed(mapping, message).result()

    def publish_pending(self, journal: str, *messages: Any) -> None:
        """Publish messages that take effect with ``acknowledge``."""
        mapping = self._mapping(journal)
        for message in messages:
            self._producer.publish_uncommitted(mapping, message)
        self._producer.flush()

    def acknowledge(self) -> None:
        """Commit the messages of `publish_pending`, in all journals."""
        for journal, intent in self._producer.build_ack_intents().items():
            self.journals.append(journal, intent)

    def feed(self, journal: str, content: bytes) -> None:
        """Append raw bytes to a journal, such as a source."""
        self.journals.append(journal, content)

    def committed(self, journal: str, message_type: type[Any]) -> list[Any]:
        """Return the committed messages of a journal, in order, without acknowledgements."""
        framing = self._framing(journal, message_type)
        decoder: EnvelopeDecoder[Any] = EnvelopeDecoder(journal, framing, 0)
        decoder.feed(self.journals.content(journal))
        sequencer: Sequencer[Any] = Sequencer({}, 1 << 16)
        messages: list[Any] = []
        while batch := decoder.decode():
            index = 0
            while index < len(batch):
                index = sequencer.queue_batch(batch, index)
                while dequeued := sequencer.dequeue(1 << 16):
                    messages += [envelope.message for envelope in dequeued if not envelope.is_ack]
        return messages

    # -- running

    @property
    def store(self) -> StoreT:
        """The open store. After a crash, this restores it first."""
        life = self._alive()
        self._settle(life)
        store: StoreT = life.store
        return store

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the shard, or None."""
        life = self._life
        if life is None or not life.running.done():
            return None
        return life.running.exception()

    def run(self) -> int:
        """Consume the sources' messages, as far as possible. Return the number of finished transactions.

        Promote the shard first, if it does not run. Messages that wait for their acknowledgement or for a
        held append continue to wait. Raise the error that makes the shard fail. The shard stays failed until
        ``crash``: a later call raises the same error. Raise ``Unavailable`` if a callback does not return
        within 60 s.
        """
        count_before = len(self.transactions)
        life = self._alive()
        for source in self.spec.sources if life.offsets else ():  # A `MessageProducer` has none.
            content = self.journals.content(source.journal)
            while (begin := life.offsets[source.journal]) < len(content):
                chunk = content[begin : begin + self._chunk_bytes]
                life.inbox.put(Chunk(source.journal, begin, chunk))
                life.offsets[source.journal] = begin + len(chunk)
        self._settle(life)
        return len(self.transactions) - count_before

    def advance(self, seconds: float) -> int:
        """Advance the clock by ``seconds``, then call ``run``. Return the number of finished transactions.

        With timers, call ``run`` before, too. The clock stops at each timer's time, which is ``shard.now``.
        """
        count_before = len(self.transactions)
        if defines_timers(self.application):
            self.run()
            seconds = self._advance_by_timers(seconds)
        self.clock.advance(seconds)
        if self._life is not None:
            self._life.inbox.wake()
        self.run()
        return len(self.transactions) - count_before

    def _advance_by_timers(self, seconds: float) -> float:
        """Advance the clock from timer to timer. Return the seconds that are left."""
        until = self.clock.monotonic() + seconds
        while True:
            life = self._alive()
            assert life.shard.timers is not None
            wait_s = life.shard.timers.next_s()
            left_s = until - self.clock.monotonic()
            if wait_s is None or wait_s >= left_s:
                return max(0.0, left_s)
            # A timer that is due, and has not fired, waits for a held commit.
            if wait_s <= 0:
                return left_s
            # In a far year, floats of seconds are too coarse for microseconds: a step must move the clock.
            self.clock.advance(max(wait_s, _TICK_S, ulp(self.clock.now())))
            life.inbox.wake()
            self.run()

    def crash(self) -> None:
        """End like a killed process: appends that have not taken place yet never take place."""
        life, self._life = self._life, None
        if life is None:
            return
        life.appends.closed = True
        life.inbox.stop()
        self.journals.drop(life.appends)
        # Wait for the end of the store. Its error does not matter: a killed process reports none.
        life.thread.submit(life.store.destroy).exception(STEP_TIMEOUT_S)
        life.thread.close()
        if life.loop is not None:
            life.loop.close()

    close = crash

    def __enter__(self) -> AppDriver[StoreT]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self, life: _Life) -> None:
        """Wait until the shard waits for messages, a held append or a time. Raise the error that ended it."""
        while True:
            if not self._await_idle(life):
                return
            if life.running.done():
                if (error := life.running.exception()) is not None:
                    raise error
                return
            commit = life.transactor.commit
            if commit.done() and self._deliver_recovered(life):
                continue
            if commit.done() or self._is_held(life):
                return
            # The store commits on a thread of its own, and callbacks of ``commit`` finish the work, in
            # order. Add one more callback, the last one, and wait until it is called.
            called = threading.Event()
            commit.add_done_callback(lambda _, called=called: called.set())  # type: ignore[misc]
            if not called.wait(self._commit_wait_s):
                return

    def _deliver_recovered(self, life: _Life) -> bool:
        """Append acknowledgements that are on their way. Return True if there were any."""
        if self.hold_recovered or not life.recovered:
            return False
        recovered, life.recovered[:] = list(life.recovered), ()
        for acknowledgement in recovered:
            self.journals.append(acknowledgement.journal, acknowledgement.intent)
            acknowledgement.future.set_result(None)
        return True

    def _await_idle(self, life: _Life) -> bool:
        """Wait until the thread waits for input or has ended, and return True. Return False if the
        thread waits for a commit that is held.
        """
        waited_s = 0.0
        while not life.inbox.await_idle(life.running.done, BLOCKED_S):
            waited_s += BLOCKED_S
            if self._is_held(life):
                return False
            if waited_s >= STEP_TIMEOUT_S:
                raise Unavailable(
                    "a callback of the application did not return in time", timeout_s=STEP_TIMEOUT_S
                )
        return True

    def _is_held(self, life: _Life) -> bool:
        """Return True if the present commit waits for held appends, or for the application."""
        if life.transactor.commit.done():
            return False
        waits = [*life.appends.commit_waits, *life.shard.published]
        return self.journals.is_waiting(life.appends, LOG) or not all(wait.done() for wait in waits)

    def _alive(self) -> _Life:
        """Return the life of the shard. After a crash, promote the shard first."""
        if self._life is None:
            self._life = self._promote()
            self._await_idle(self._life)
        return self._life

    def _promote(self) -> _Life:
        """Promote the shard: recover, hand over, open, restore."""
        self._lives += 1
        appends, thread = MemoryAppends(self.journals), ShardThread("driven")
        initializes = type(self.application).initialize is not Application.initialize
        loop = LoopThread("driven loop") if initializes and self._initializes else None
        try:
            if loop is not None:
                loop.run(self._initialize(appends))
            return self._open(appends, thread, loop)
        except BaseException:
            thread.close()
            if loop is not None:
                loop.close()
            raise

    def _open(self, appends: MemoryAppends, thread: ShardThread, loop: LoopThread | None) -> _Life:
        """Play the log back, open the store on the shard's thread, and begin to run transactions there."""
        shard, inbox = DrivenShard(self.application, self.spec), SteppedInbox()
        if (array_pass := self.application.array_pass(shard)) is not None:
            array_pass.prepare()
        recorder: Recorder | None = None
        if self._log:
            log = JournalLog(appends)
            recorder = take_over(
                log, self._directory / f"life-{self._lives}", self._rng, hints=self.hints
            )

        def open_store() -> tuple[Any, Any, PoisonPolicy | None]:
            with application_code("new_store"):
                store = checked_store(self.application.new_store(shard, recorder))
            checkpoint = store.restore_checkpoint(shard)
            require_own_state(checkpoint, self._owner, shard.id)
            policy = checked_policy(self.application.poison_policy(shard), store)
            with application_code("Store.timer_table"):
                shard.timers = open_timers(self.application, shard, store, self.clock)
            return store, checkpoint, policy

        store, checkpoint, self._policy = thread.submit(open_store).result(STEP_TIMEOUT_S)
        is_producer = isinstance(self.application, MessageProducer)
        sources = () if is_producer else self.spec.sources
        offsets = {source.journal: source.min_offset for source in sources}
        for journal, source in checkpoint.sources.items():
            if journal in offsets:
                offsets[journal] = max(source.read_through, offsets[journal])
        publisher = Publisher(
            appends, producer=new_producer_id(self._rng), clock=MessageClock(), wall_clock=None
        )
        recovered: list[_Recovered] = []
        transactor = Transactor(
            ShardCallbacks(self.application, shard, store, publisher),
            appends,  # type: ignore[arg-type]
            inbox,
            _DrivenIO(self, recovered),
            self.clock,
            {journal: self._decoder(journal, offset) for journal, offset in offsets.items()},
            recovery_log=LOG if self._log else "",
            poison_policy=self._policy,
            application_name=self._owner.name,
            timers=shard.timers,
        )
        shard.add_wait = transactor.add_wait
        running = thread.submit(partial(transactor.run, checkpoint))
        running.add_done_callback(lambda _: inbox.note_end())
        return _Life(
            shard, store, appends, inbox, thread, transactor, offsets, running, loop, recovered
        )

    def _content_type(self, journal: str) -> str:
        labelled = self._labels(journal).value_of(CONTENT_TYPE)
        return self._content_types.get(journal, labelled or CONTENT_JSON_LINES)

    def _labels(self, journal: str) -> LabelSet:
        labels = self._journal_labels.get(journal, EMPTY_LABELS)
        return labels if isinstance(labels, LabelSet) else LabelSet.of(*labels.items())

    def _decoder(self, journal: str, offset: int) -> EnvelopeDecoder[Any]:
        spec = self._journal_spec(journal)
        message_type = self.application.message_type_of(spec)
        framing = self._framing(journal, message_type)
        shard = DrivenShard(self.application, self.spec)
        if (array_pass := self.application.array_pass(shard)) is not None:
            return array_pass.new_decoder(journal, framing, offset)
        return EnvelopeDecoder(
            journal, framing, offset, times_of(self.application, spec, self.clock)
        )

    def _framing(self, journal: str, message_type: Any) -> Framing[Any]:
        place = self.application.uuid_place_of(self._journal_spec(journal))
        return framing_of(self._content_type(journal), message_type, place=place)

    def _mapping(self, journal: str) -> Callable[[Any], Partition]:
        place = self.application.uuid_place_of(self._journal_spec(journal))
        return fixed_mapping(journal, self._content_type(journal), uuid=place)

    def _journal_spec(self, journal: str) -> JournalSpec:
        labels = union(
            LabelSet.of((CONTENT_TYPE, self._content_type(journal))), self._labels(journal)
        )
        return JournalSpec(journal, 1, labels, FragmentSpec(length=1 << 20))

    async def _initialize(self, appends: MemoryAppends) -> None:
        """Call ``Application.initialize``, as each process does before it serves any shard."""
        names = {source.journal for source in self.spec.sources}
        names |= self._content_types.keys() | self._journal_labels.keys()
        specs = [self._journal_spec(name) for name in sorted(names)]
        service = DrivenService(self.application, self.clock, specs, appends, self._config)
        await initialized(self.application, service)
        service.add_routes(self.application)


class _DrivenIO:
    """Implementation, in memory, of the functions that the transactor needs beyond its thread."""

    def __init__(self, driver: AppDriver[Any], recovered: list[_Recovered]) -> None:
        self._driver = driver
        self._recovered = recovered

    def append_recovered(self, journal: str, intent: bytes) -> OpFuture[Any]:
        future: OpFuture[Any] = OpFuture()
        self._recovered.append(_Recovered(journal, intent, future))
        return future

    def replay(self, wanted: ReplayRange) -> Iterator[Sequence[Envelope[Any]]]:
        decoder = self._driver._decoder(wanted.journal, wanted.begin)
        decoder.feed(self._driver.journals.content(wanted.journal)[wanted.begin : wanted.end])
        yield from decoded(decoder, self._driver._policy)

    def require_assigned(self) -> None:
        return None  # There are no other members.

    def progress(self, read_through: dict[str, int]) -> None:
        self._driver.read_through.update(read_through)

    def read_again(self, journal: str, begin: int, end: int) -> bytes:
        return self._driver.journals.content(journal)[begin:end]

    def skipped(self, journal: str, reason: str) -> None:
        self._driver.skipped.append((journal, reason))

    def finished(self, transaction: FinishedTransaction) -> None:
        self._driver.read_through.update(transaction.read_through)
        if transaction.phases is not None:
            self._driver.transactions.append(transaction)

    def stalled(self, reason: str) -> None:
        return None


__all__ = ["AppDriver", "MemoryJournals"]
