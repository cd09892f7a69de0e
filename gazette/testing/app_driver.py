"""Runs an application without any service: feed it messages, look at its store, crash it, restore it.

::

    driver = AppDriver(WordCount(), tmp_path, sources=["words"])
    driver.publish("words", Word(word="hello"), Word(word="hello"))
    driver.run()
    assert driver.store.query("SELECT n FROM counts") == [(2,)]
    driver.crash()                    # the process is gone; its recovery log is not
    driver.run()                      # restores the store from the log, and goes on
    assert driver.store.query("SELECT n FROM counts") == [(2,)]

What runs is the real thing: the runtime's transactions, sequencing and barriers, the application and
its store, and the recovery log. Journals are in memory, and time stands still but for ``advance``.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, Self, TypeVar

from gazette.client.appender import AppendParams, AppendResult
from gazette.consumer.application import Application, MessageProducer, Store
from gazette.consumer.delivery import application_code
from gazette.consumer.host import FinishedTransaction
from gazette.consumer.inbox import Call, Chunk, Event, Inbox
from gazette.consumer.poison import PoisonPolicy
from gazette.consumer.poison_control import checked_policy, decoded
from gazette.consumer.shard_thread import ShardThread
from gazette.consumer.transactor import Transactor
from gazette.errors import Bug, Closed, Fenced, GazetteError, Unavailable
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.envelope import Envelope
from gazette.message.envelope_decoder import EnvelopeDecoder
from gazette.message.framing import framing_of
from gazette.message.mapping import fixed_mapping
from gazette.message.message_uuid import Clock as MessageClock
from gazette.message.message_uuid import new_producer_id
from gazette.message.publisher import Publisher
from gazette.message.sequencer import ReplayRange, Sequencer
from gazette.protocol import duration
from gazette.protocol.fragment import Fragment
from gazette.protocol.hints import FSMHints
from gazette.protocol.ids import ProcessId
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import EMPTY_LABELS, LabelSet, subtract, union
from gazette.protocol.route import EMPTY_ROUTE, EtcdHeader, Header
from gazette.protocol.shard import ShardSource, ShardSpec
from gazette.recoverylog.recorder import Recorder
from gazette.tasks import OpFuture, first_failure
from gazette.testing.clock import ManualClock
from gazette.testing.recovery import LOG, MemoryLog, take_over

StoreT = TypeVar("StoreT", bound=Store)

STEP_TIMEOUT_S: Final = 60.0
BLOCKED_S: Final = 0.5
"""How long the thread may do nothing while a commit is held, before it is taken to wait for that."""
_HEADER: Final = Header(ProcessId("local", "test-member"), EMPTY_ROUTE, EtcdHeader(1, 1, 1, 1))


@dataclass(slots=True)
class _Append:
    params: AppendParams
    content: bytes
    waits: tuple[OpFuture[Any], ...]
    future: OpFuture[AppendResult]
    owner: object


@dataclass(slots=True)
class _Journal:
    data: bytearray = field(default_factory=bytearray)
    registers: LabelSet = EMPTY_LABELS
    queue: list[_Append] = field(default_factory=list)
    held: bool = False


class MemoryJournals:
    """Journals in memory, with registers, and appends in the order of their release. Any thread.

    ``holds(journal, content)`` may answer True for an append, which then waits, and what follows in
    its journal with it, until ``release`` or the crash of whoever made it. ``doubles`` may have an
    append take place twice, as the retry of one whose answer was lost does.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._journals: dict[str, _Journal] = {}
        self.holds: Callable[[str, bytes], bool] = lambda journal, content: False
        self.doubles: Callable[[str, bytes], bool] = lambda journal, content: False

    def _of(self, journal: str) -> _Journal:
        return self._journals.setdefault(journal, _Journal())

    def content(self, journal: str) -> bytes:
        """All of a journal's bytes."""
        with self._lock:
            return bytes(self._of(journal).data)

    def append(self, journal: str, content: bytes) -> int:
        """Append at once, whatever waits. Returns the new end."""
        with self._lock:
            data = self._of(journal).data
            data += content
            return len(data)

    def release(self) -> None:
        """Hold nothing any more."""
        with self._lock:
            self.holds = lambda journal, content: False
            for journal in self._journals.values():
                journal.held = False
        self._pump_all()

    def drop(self, owner: object) -> None:
        """Forget what ``owner`` has enqueued, as its death would."""
        with self._lock:
            dropped: list[_Append] = []
            for journal in self._journals.values():
                dropped += [one for one in journal.queue if one.owner is owner]
                journal.queue = [one for one in journal.queue if one.owner is not owner]
                journal.held = journal.held and bool(journal.queue)
        for one in dropped:
            one.future.set_exception(Closed("the process has crashed"))

    def enqueue(self, append: _Append) -> None:
        with self._lock:
            self._of(append.params.journal).queue.append(append)
        for future in append.waits:
            future.add_done_callback(lambda _: self._pump(append.params.journal))
        self._pump(append.params.journal)

    def is_waiting(self, owner: object, journal: str) -> bool:
        """Whether an append of ``owner`` to a journal has not taken place yet."""
        with self._lock:
            return any(one.owner is owner for one in self._of(journal).queue)

    def waiting(self, journal: str) -> list[bytes]:
        """What was enqueued to a journal and has not taken place yet, in order."""
        with self._lock:
            return [one.content for one in self._of(journal).queue]

    def pending_except(self, owner: object, journal: str) -> frozenset[OpFuture[Any]]:
        with self._lock:
            return frozenset(
                one.future
                for name, other in self._journals.items()
                for one in other.queue
                if name != journal and one.owner is owner
            )

    def _pump_all(self) -> None:
        for name in list(self._journals):
            self._pump(name)

    def _pump(self, name: str) -> None:
        """Apply what is first in a journal's queue, as long as nothing holds it."""
        while True:
            with self._lock:
                journal = self._of(name)
                if not journal.queue or journal.held:
                    return
                first = journal.queue[0]
                if not all(future.done() for future in first.waits):
                    return
                error = first_failure(first.waits)
                if error is None and self.holds(name, first.content):
                    journal.held = True
                    return
                del journal.queue[0]
                result = None if error is not None else self._apply(journal, first)
            if isinstance(result, AppendResult):
                first.future.set_result(result)
            else:
                first.future.set_exception(error or result or Bug("append without a result"))

    def _apply(self, journal: _Journal, append: _Append) -> AppendResult | GazetteError:
        params = append.params
        check = params.check_registers
        if check is not None and journal.registers.labels and not check.matches(journal.registers):
            return Fenced("another author owns the journal", journal=params.journal)
        begin = len(journal.data)
        journal.data += append.content
        if append.content:
            if params.subtract_registers is not None:
                journal.registers = subtract(journal.registers, params.subtract_registers)
            if params.union_registers is not None:
                journal.registers = union(params.union_registers, journal.registers)
            if self.doubles(params.journal, append.content):
                journal.data += append.content
        commit = Fragment(params.journal, begin, len(journal.data))
        return AppendResult(commit, journal.registers, _HEADER)


class _Txn:
    def __init__(self, appends: _Appends, append: _Append) -> None:
        self._appends = appends
        self._append = append
        self._content = bytearray()

    def write(self, content: bytes | bytearray | memoryview) -> None:
        self._content += content

    def release(self) -> OpFuture[AppendResult]:
        self._append.content = bytes(self._content)
        self._appends.journals.enqueue(self._append)
        return self._append.future

    def roll_back(self) -> None:
        self._content.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _Appends:
    """The part of an append service that publishers, recorders and transactions use."""

    def __init__(self, journals: MemoryJournals) -> None:
        self.journals = journals
        self.closed = False
        self.commit_waits: set[OpFuture[Any]] = set()
        """What the last commit waits for, as far as we know."""

    def start_append(
        self, params: AppendParams, dependencies: Collection[OpFuture[Any]] = ()
    ) -> _Txn:
        if self.closed:
            raise Closed("the process has crashed")
        return _Txn(self, _Append(params, b"", tuple(dependencies), OpFuture(), self))

    async def begin_append(
        self, params: AppendParams, dependencies: Collection[OpFuture[Any]] = ()
    ) -> _Txn:
        return self.start_append(params, dependencies)

    def pending_except(self, journal: str) -> frozenset[OpFuture[Any]]:
        """Asked for when a transaction commits: what its commit has to wait for."""
        self.commit_waits = set(self.journals.pending_except(self, journal))
        return frozenset(self.commit_waits)


class _Log(MemoryLog):
    """A recovery log that is one of `MemoryJournals`."""

    def __init__(self, appends: _Appends) -> None:
        super().__init__(appends.journals.content(LOG))
        self._appends = appends

    def start_append(
        self, params: AppendParams, dependencies: Collection[OpFuture[Any]] = ()
    ) -> Any:
        return self._appends.start_append(params, dependencies)

    def enqueue(self, content: bytes) -> OpFuture[AppendResult]:
        """The hand-off: it fences the former author, whatever that has in line."""
        future = super().enqueue(content)
        self._appends.journals.append(LOG, content)
        return future


class _DirectLoop:
    """Takes the part of an event loop's ``call_soon_threadsafe``."""

    def call_soon_threadsafe(self, fn: Callable[..., Any], *args: Any) -> None:
        fn(*args)


class _SteppedInbox(Inbox):
    """An inbox that tells when its thread has nothing to do, and knows no time."""

    def __init__(self) -> None:
        super().__init__(1 << 40, _DirectLoop())  # type: ignore[arg-type]
        self._idle = False

    def get(self, timeout_s: float | None) -> Event | None:
        if timeout_s == 0:
            return super().get(0)
        self._await_work(lambda: bool(self._events))
        return super().get(0)

    def get_call(self, timeout_s: float | None) -> Call | None:
        self._await_work(lambda: any(isinstance(one, Call) for one in self._events))
        return super().get_call(0)

    def _await_work(self, has_work: Callable[[], bool]) -> None:
        with self._changed:
            while not (has_work() or self._woken or self.stopped):
                self._idle = True
                self._changed.notify_all()
                self._changed.wait()
            self._idle = False

    def put(self, event: Event) -> None:
        with self._changed:
            self._idle = False
            super().put(event)
            self._changed.notify_all()

    def put_messages(self, batch: Sequence[Envelope[Any]], messages_max: int) -> None:
        with self._changed:
            self._idle = False
            super().put_messages(batch, messages_max)

    def wake(self, _: object = None) -> None:
        with self._changed:
            self._idle = False
            super().wake()
            self._changed.notify_all()

    def await_idle(self, ended: Callable[[], bool], timeout_s: float) -> bool:
        """Return once the thread waits or has ended; False if it does neither for that long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle or ended(), timeout_s)

    def note_end(self) -> None:
        with self._changed:
            self._changed.notify_all()


class _DrivenShard:
    """What callbacks see."""

    def __init__(self, spec: ShardSpec) -> None:
        self._spec = spec
        self.waits: Callable[[OpFuture[Any]], None] = lambda future: None
        self.published: list[OpFuture[Any]] = []

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
        self.waits(future)
        self.published = [one for one in self.published if not one.done()] + [future]


@dataclass(slots=True)
class _Life:
    """One promotion of the shard, until its crash or failure."""

    shard: _DrivenShard
    store: Any
    appends: _Appends
    inbox: _SteppedInbox
    thread: ShardThread
    transactor: Transactor
    offsets: dict[str, int]
    running: OpFuture[None]


class AppDriver(Generic[StoreT]):
    """Drives one shard of an application from a test, synchronously.

    ``sources`` are the journals it reads, ``content_types`` those of journals that are not JSON lines.
    ``log=False`` is for stores that are durable by themselves. ``fields`` are further ones of the
    ``ShardSpec``. ``commit_wait_s`` is how long ``run`` waits for a store that commits on a thread of
    its own, in seconds of the real clock; after that it returns without. Two drivers on the same
    ``journals`` are two members that both believe to be primary.

    The application's callbacks run on the shard's thread, as ever, while ``run`` and others wait.
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
        **fields: Any,
    ) -> None:
        self.hints = hints
        """By which the next promotion plays the recovery log; None: from its first byte."""
        self.application = application
        self.journals = MemoryJournals() if journals is None else journals
        self.clock = ManualClock() if clock is None else clock
        self.transactions: list[FinishedTransaction] = []
        """Those that were committed and acknowledged, since the beginning."""
        self.read_through: dict[str, int] = {}
        self._policy: PoisonPolicy | None = None
        self.skipped: list[tuple[str, str]] = []
        """(journal, reason) of each message that the shard's poison policy skipped."""
        self._directory = directory
        self._content_types = dict(content_types or {})
        self._log = log
        self._rng = random.Random(seed)
        self._chunk_bytes = chunk_bytes
        self._commit_wait_s = commit_wait_s
        self._lives = 0
        self._life: _Life | None = None
        read = tuple(ShardSource(journal) for journal in sorted(sources))
        defaults: dict[str, Any] = {"max_txn_duration_ns": duration.SECOND, "sources": read}
        self.spec = ShardSpec("driven-shard", **{**defaults, **fields})
        appends = _Appends(self.journals)
        self._producer = Publisher(
            appends,
            producer=new_producer_id(self._rng),
            clock=MessageClock(),
            wall_clock=self.clock,
        )

    # -- messages

    def publish(self, journal: str, *messages: Any) -> None:
        """Publish committed messages to a journal, as one outside producer."""
        mapping = fixed_mapping(journal, self._content_type(journal))
        for message in messages:
            self._producer.publish_committed(mapping, message).result()

    def publish_pending(self, journal: str, *messages: Any) -> None:
        """Publish messages that take effect with ``acknowledge``."""
        mapping = fixed_mapping(journal, self._content_type(journal))
        for message in messages:
            self._producer.publish_uncommitted(mapping, message)
        self._producer.flush()

    def acknowledge(self) -> None:
        """Commit what was published as pending."""
        for journal, intent in self._producer.build_ack_intents().items():
            self.journals.append(journal, intent)

    def feed(self, journal: str, content: bytes) -> None:
        """Append bytes as they are, to a source for instance."""
        self.journals.append(journal, content)

    def committed(self, journal: str, message_type: type[Any]) -> list[Any]:
        """The messages of a journal that have committed, in order, without acknowledgements."""
        framing = framing_of(self._content_type(journal), message_type)
        decoder: EnvelopeDecoder[Any] = EnvelopeDecoder(journal, framing, 0)
        decoder.feed(self.journals.content(journal))
        sequencer: Sequencer[Any] = Sequencer({}, 1 << 16)
        messages: list[Any] = []
        while batch := decoder.decode():
            index = 0
            while index < len(batch):
                index = sequencer.queue_batch(batch, index)
                while found := sequencer.dequeue(1 << 16):
                    messages += [one.message for one in found if not one.is_ack]
        return messages

    # -- running

    @property
    def store(self) -> StoreT:
        """The open store; restores it first after a crash."""
        store: StoreT = self._alive().store
        return store

    @property
    def failure(self) -> BaseException | None:
        """What ended the shard, if something did."""
        life = self._life
        if life is None or not life.running.done():
            return None
        return life.running.exception()

    def run(self) -> int:
        """Have all that the sources hold consumed, as far as it can be now.

        Returns how many transactions finished. Raises what makes the shard fail; it stays failed until
        ``crash``. Messages that wait, for their acknowledgement or a held append, wait on.
        """
        before = len(self.transactions)
        life = self._alive()
        for source in self.spec.sources if life.offsets else ():
            content = self.journals.content(source.journal)
            while (at := life.offsets[source.journal]) < len(content):
                data = content[at : at + self._chunk_bytes]
                life.inbox.put(Chunk(source.journal, at, data))
                life.offsets[source.journal] = at + len(data)
        self._settle(life)
        return len(self.transactions) - before

    def advance(self, seconds: float) -> int:
        """Let time pass, then as ``run``."""
        self.clock.advance(seconds)
        if self._life is not None:
            self._life.inbox.wake()
        return self.run()

    def crash(self) -> None:
        """End as a killed process does: appends that had not taken place do not any more."""
        life, self._life = self._life, None
        if life is None:
            return
        life.appends.closed = True
        life.inbox.stop()
        self.journals.drop(life.appends)
        life.thread.submit(life.store.destroy).exception(STEP_TIMEOUT_S)
        life.thread.close()

    close = crash

    def __enter__(self) -> AppDriver[StoreT]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self, life: _Life) -> None:
        """Return when nothing goes on any more, but what waits for held appends or for time."""
        while True:
            if not self._await_idle(life):
                return
            if life.running.done():
                if (error := life.running.exception()) is not None:
                    raise error
                return
            commit = life.transactor.commit
            if commit.done() or self._is_held(life):
                return
            # The store commits on a thread of its own. What happens then is done by callbacks, of which
            # ours is the last.
            called = threading.Event()
            commit.add_done_callback(lambda _, called=called: called.set())  # type: ignore[misc]
            if not called.wait(self._commit_wait_s):
                return

    def _await_idle(self, life: _Life) -> bool:
        """Whether the thread waits for input or has ended: it may also wait for a commit that is held."""
        waited_s = 0.0
        while not life.inbox.await_idle(life.running.done, BLOCKED_S):
            waited_s += BLOCKED_S
            if self._is_held(life):
                return False
            if waited_s >= STEP_TIMEOUT_S:
                raise Unavailable(
                    "a callback of the application did not return", timeout_s=STEP_TIMEOUT_S
                )
        return True

    def _is_held(self, life: _Life) -> bool:
        """Whether the commit that goes on waits for appends that are held, or for the application."""
        if life.transactor.commit.done():
            return False
        waits = [*life.appends.commit_waits, *life.shard.published]
        return self.journals.is_waiting(life.appends, LOG) or not all(one.done() for one in waits)

    def _alive(self) -> _Life:
        if self._life is None:
            self._life = self._promote()
            self._settle(self._life)
        return self._life

    def _promote(self) -> _Life:
        """What a promotion does: recover, hand over, open, restore."""
        self._lives += 1
        shard = _DrivenShard(self.spec)
        appends, inbox, thread = _Appends(self.journals), _SteppedInbox(), ShardThread("driven")
        recorder: Recorder | None = None
        if self._log:
            log = _Log(appends)
            recorder = take_over(
                log, self._directory / f"life-{self._lives}", self._rng, hints=self.hints
            )
            with self.journals._lock:
                self.journals._of(LOG).registers = recorder._params.check_registers.include  # type: ignore[union-attr]

        def open_store() -> tuple[Any, Any, PoisonPolicy | None]:
            with application_code("new_store"):
                store = self.application.new_store(shard, recorder)
            checkpoint = store.restore_checkpoint(shard)
            policy = checked_policy(self.application.poison_policy(shard), store)
            return store, checkpoint, policy

        store, checkpoint, self._policy = thread.submit(open_store).result(STEP_TIMEOUT_S)
        brings = isinstance(self.application, MessageProducer)
        sources = () if brings else self.spec.sources
        offsets = {one.journal: one.min_offset for one in sources}
        for journal, source in checkpoint.sources.items():
            if journal in offsets:
                offsets[journal] = max(source.read_through, offsets[journal])
        publisher = Publisher(
            appends, producer=new_producer_id(self._rng), clock=MessageClock(), wall_clock=None
        )
        transactor = Transactor(
            self.application,
            shard,
            store,
            publisher,
            appends,  # type: ignore[arg-type]
            inbox,
            _Outside(self),
            self.clock,
            {journal: self._decoder(journal, at) for journal, at in offsets.items()},
            spec_of=lambda: self.spec,
            recovery_log=LOG if self._log else "",
            poison_policy=self._policy,
        )
        shard.waits = transactor.add_wait
        running = thread.submit(partial(transactor.run, checkpoint))
        running.add_done_callback(lambda _: inbox.note_end())
        return _Life(shard, store, appends, inbox, thread, transactor, offsets, running)

    def _content_type(self, journal: str) -> str:
        return self._content_types.get(journal, CONTENT_JSON_LINES)

    def _decoder(self, journal: str, offset: int) -> EnvelopeDecoder[Any]:
        content_type = self._content_type(journal)
        spec = JournalSpec(
            journal, 1, LabelSet.of((CONTENT_TYPE, content_type)), FragmentSpec(length=1 << 20)
        )
        message_type = self.application.message_type_of(spec)
        return EnvelopeDecoder(journal, framing_of(content_type, message_type), offset)


class _Outside:
    """What the transactor needs beyond its thread, all of it at hand."""

    def __init__(self, driver: AppDriver[Any]) -> None:
        self._driver = driver

    def append_recovered(self, journal: str, intent: bytes) -> OpFuture[Any]:
        future: OpFuture[Any] = OpFuture()
        self._driver.journals.append(journal, intent)
        future.set_result(None)
        return future

    def replay(self, wanted: ReplayRange) -> Iterator[Sequence[Envelope[Any]]]:
        decoder = self._driver._decoder(wanted.journal, wanted.begin)
        decoder.feed(self._driver.journals.content(wanted.journal)[wanted.begin : wanted.end])
        yield from decoded(decoder, self._driver._policy)

    def require_assigned(self) -> None:
        return None  # There is nobody else.

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
