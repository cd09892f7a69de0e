"""Folds the input of a shard, without any fault: one owner, no crash, and other ends of transactions."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from gazette.client.append.appender import AppendParams
from gazette.config.schema import Schema
from gazette.consumer.application import Application, checked_store
from gazette.consumer.application_name import name_of
from gazette.consumer.contract.callbacks import initialized
from gazette.consumer.contract.poison import DeadLetter
from gazette.consumer.timers.timer import TimerTable, unix_us
from gazette.consumer.transaction.dispatch import Deferred, Dispatcher, TimersDue
from gazette.consumer.transaction.poison_handler import PoisonSkipper, checked_policy
from gazette.consumer.transaction.shard_callbacks import ShardCallbacks
from gazette.consumer.transaction.shard_timers import (
    ShardTimers,
    open_timers,
    times_of,
)
from gazette.errors import Bug
from gazette.labels import CONTENT_TYPE
from gazette.message.envelope import Envelope, EnvelopeDecoder
from gazette.message.framing.framing import framing_of
from gazette.message.publisher import Publisher
from gazette.message.sequencer.sequencer import Sequencer
from gazette.message.uuid import Clock as MessageClock
from gazette.message.uuid import new_producer_id
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.journal import JournalSpec
from gazette.protocol.shard import ShardSpec
from gazette.testing.app_driver import DrivenShard
from gazette.testing.clock import ManualClock
from gazette.testing.driven_service import DrivenService
from gazette.testing.memory_journals import JournalLog, MemoryAppends, MemoryJournals
from gazette.testing.recovery import LOG, take_over
from gazette.testing.simulation.shard_history import Consumed, begin_of_call, wrapped
from gazette.testing.simulation.states import Rows, state_of, text_of
from gazette.testing.simulation.table_cuts import cut_elsewhere, takes_tables
from gazette.testing.stepped_inbox import SteppedInbox

ROOT: Final = "/gazette/consumers/simulated"
"""Prefix of the cluster's keys in etcd."""
_COMMIT_S: Final = 30.0
_CUT_CHANCE: Final = 0.3


@dataclass(frozen=True, slots=True)
class Input:
    """All that a fold needs. ``content`` has the bytes of each source."""

    shard: ShardSpec
    journals: Sequence[JournalSpec]
    content: Mapping[str, bytes]
    transactions: Sequence[Sequence[Consumed]]
    source_names: Collection[str] = ()
    """Journals whose messages are no outputs: a shard reads them."""


@dataclass(frozen=True, slots=True)
class FoldResult:
    """The result of a fold: rows of the state, and published messages by directory of their journals."""

    state: Rows | None
    outputs: dict[str, Counter[str]]


class _StepClock(ManualClock):
    """A clock that shows the time of a step."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.wall = 0.0
        """The wall clock, as the user's code sees it."""
        self.promoted_s = 0.0
        self.looks: list[tuple[int, float]] = []
        """Times that callbacks of the step saw, and the fold must still show: begin of a message, time."""

    def show(self, step: Consumed) -> None:
        """Show the time of a step."""
        self._now, self._monotonic, self.wall = step.now, step.watched_s, step.wall

    def show_now(self, now: float) -> None:
        """Show a time that a callback saw later in the step."""
        self._now = now


class _Shard(DrivenShard):
    """A shard with the name that it has in the run, since rows of a shared database may contain the name."""

    @property
    def fqn(self) -> str:
        return f"{ROOT}/items/{self.id}"


class LostTimer(Exception):
    """A timer has fired that was not in the state: it had fired before, or was cancelled."""


class Fold:
    """One run of an application over an `Input`. If ``recorded``, transactions end as the shard's did."""

    def __init__(
        self,
        application: Application[Any],
        folded: Input,
        directory: Path,
        *,
        recorded: bool,
        seed: int = 1,
    ) -> None:
        self._application = application
        self._input = folded
        self._directory = directory
        self._recorded = recorded
        self._rng = random.Random(seed)
        self._clock = _StepClock()
        self._appends = MemoryAppends(MemoryJournals())
        self._source_forms: dict[str, tuple[Any, Any]] = {}
        """By source, its framing and the reader of its times."""

    def now(self) -> float:
        """Return the wall clock of the step that runs."""
        return self._clock.wall

    def run(self, ignore: Iterable[str] = ()) -> FoldResult:
        """Fold, and return the state and the outputs. An error of the application reaches the caller."""
        groups = [list(group) for group in self._groups()]
        if groups and groups[0]:
            first = groups[0][0]
            self._clock.promoted_s = first.promoted_s
            self._clock.show(replace(first, watched_s=first.promoted_s))
        self._open()
        try:
            with noted_forms() as forms, wrapped(ShardTimers, "now", self._look):
                for steps in groups:
                    while steps:
                        steps = self._transaction(steps)
            state = state_of(self._callbacks.store, tuple(ignore))
        finally:
            self._callbacks.store.destroy()
        outputs: dict[str, Counter[str]] = {}
        for journal, form in forms.items():
            if journal not in self._input.source_names:
                add_outputs(outputs, journal, form, self._appends.journals.content(journal))
        return FoldResult(state, outputs)

    def _groups(self) -> Iterator[list[Consumed]]:
        """Yield the steps of each transaction: of the recorded ones, or of random ones."""
        if self._recorded:
            yield from (list(steps) for steps in self._input.transactions)
            return
        group: list[Consumed] = []
        steps = (step for steps in self._input.transactions for step in steps if not step.is_end)
        for step in self._cut(steps):
            group.append(step)
            if self._rng.random() < _CUT_CHANCE:
                yield group
                group = []
        if group:
            yield group

    def _cut(self, steps: Iterable[Consumed]) -> Iterator[Consumed]:
        """Yield a step for each timer, and for each message or table."""
        if takes_tables(self._application):
            yield from cut_elsewhere(self._application, steps, self._rng)
            return
        for step in steps:
            for span in step.spans or (None,):
                yield step if span is None else replace(step, spans=(span,))

    def _open(self) -> None:
        application, spec = self._application, self._input.shard
        initialize(application, self._clock, self._input.journals, self._appends)
        shard = _Shard(application, spec)
        recorder = None
        if spec.recovery_log:
            recorder = take_over(JournalLog(self._appends), self._directory, self._rng)
        store = checked_store(application.new_store(shard, recorder))
        store.restore_checkpoint(shard)
        policy = checked_policy(application.poison_policy(shard), store)
        self._timers: ShardTimers | None = open_timers(application, shard, store, self._clock)
        shard.timers = self._timers
        producer = new_producer_id(self._rng)
        publisher = Publisher(
            self._appends, producer=producer, clock=MessageClock(), wall_clock=None
        )
        self._callbacks = ShardCallbacks(application, shard, store, publisher)
        decoders = {
            source.journal: self._decoder(source.journal, source.min_offset)
            for source in spec.sources
        }
        places = {
            name: decoder.clock_place
            for name, decoder in decoders.items()
            if decoder.clock_place is not None
        }
        poison = None
        if policy is not None:
            poison = PoisonSkipper(
                policy, shard.id, publisher, self._clock, self._read, lambda journal, reason: None
            )
        inbox: Any = SteppedInbox()
        self._dispatcher = Dispatcher(self._callbacks, inbox, poison, self._timers, places)

    def _read(self, journal: str, begin: int, end: int) -> bytes:
        return self._input.content[journal][begin:end]

    def _decoder(self, journal: str, offset: int) -> EnvelopeDecoder[Any]:
        form = self._source_forms.get(journal)
        if form is None:
            spec = next(spec for spec in self._input.journals if spec.name == journal)
            application = self._application
            framing = source_framing(application, spec)
            form = framing, times_of(application, spec, self._clock)
            self._source_forms[journal] = form
        framing, times = form
        return EnvelopeDecoder(journal, framing, offset, times)

    def _transaction(self, steps: list[Consumed]) -> list[Consumed]:
        """Run one transaction. Return the steps that the application deferred to the next one."""
        callbacks, timers = self._callbacks, self._timers
        self._set_clock(steps[0])
        if timers is not None:
            timers.begin()
        callbacks.begin_transaction()
        callbacks.publisher.clock.update(int(self._clock.now() * 1e9))
        left: list[Consumed] = []
        for index, step in enumerate(steps):
            self._set_clock(step)
            done = self._perform(step)
            if done < len(step.spans):
                left = [replace(step, spans=step.spans[done:]), *steps[index + 1 :]]
                if index == 0 and done == 0:
                    raise Bug("the application deferred the first message of a transaction")
                break
        callbacks.finalize_transaction()
        if timers is not None:
            timers.finish()
        intents = callbacks.publisher.build_ack_intents()
        checkpoint = Checkpoint(ack_intents=intents, application=name_of(self._application))
        commit = callbacks.start_commit(checkpoint, self._appends.pending_except(LOG))
        callbacks.finished_transaction(commit)
        commit.result(_COMMIT_S)
        for journal, intent in intents.items():
            with self._appends.start_append(AppendParams(journal)) as txn:
                txn.write(intent)
                txn.release()
        return left

    def _set_clock(self, step: Consumed) -> None:
        """Set the time of a step. It may go back, since another member's clock may be behind."""
        clock, timers = self._clock, self._timers
        clock.show(step)
        if timers is not None and step.promoted_s != clock.promoted_s:
            clock.promoted_s, timers._now_us = step.promoted_s, 0
            if (watermark := timers._watermark) is not None:
                watermark._seen = dict.fromkeys(watermark._seen, step.promoted_s)

    def _look(self, call: Callable[[ShardTimers], Any], timers: ShardTimers) -> Any:
        """Return the time that the callback saw in the run."""
        begin = begin_of_call(self._callbacks) if self._clock.looks else -1
        for index, (of_call, now) in enumerate(self._clock.looks):
            if of_call == begin:
                del self._clock.looks[index]
                self._clock.show_now(now)
                break
        return call(timers)

    def _perform(self, step: Consumed) -> int:
        """Deliver messages, or fire a timer. Return the number of messages that were consumed."""
        self._clock.looks = list(step.looks)
        timers = self._timers
        if timers is not None:
            timers.is_due(ready=True)  # Let timers note which sources are idle by now.
        if step.timer is not None:
            self._fire(step)
        if not step.spans:
            return 0
        batch: list[Envelope[Any]] = []
        for begin, end in step.spans:
            decoder = self._decoder(step.journal, begin)
            decoder.feed(self._read(step.journal, begin, end))
            batch += decoder.decode()
        done = 0
        while done < len(batch):
            if timers is not None:
                timers.begin_pass()
            try:
                self._dispatcher.deliver(batch[done:])
            except Deferred as deferral:
                return done + deferral.done
            except TimersDue as due:
                done += due.done
            else:
                break
        return len(batch)

    def _fire(self, step: Consumed) -> None:
        timer, timers = step.timer, self._timers
        assert timer is not None
        assert timers is not None
        table: TimerTable = self._callbacks.store.timer_table(self._callbacks.shard)
        at_us = unix_us(timer.at)
        rows = table.take(timer.domain, (at_us, ""), at_us, 1 << 20)
        for row in rows:
            if row.key != timer.key:
                table.put(timer.domain, row)
        if timer.payload not in [row.payload for row in rows if row.key == timer.key]:
            raise LostTimer(f"timer {timer.key!r} of {timer.at.isoformat()}")
        self._dispatcher.fire(timer)


def initialize(
    application: Application[Any],
    clock: ManualClock,
    journals: Sequence[JournalSpec],
    appends: MemoryAppends,
) -> None:
    """Initialize an application with journals in memory. Its errors reach the caller."""
    if type(application).initialize is not Application.initialize:
        config = Schema("simulation", application.config_groups).load([], {}).groups
        service: Any = DrivenService(application, clock, journals, appends, config)
        asyncio.run(initialized(application, service))


@dataclass(frozen=True, slots=True)
class OutputForm:
    """How a journal's messages were published."""

    message_type: Any
    content_type: str
    uuid: str


@contextlib.contextmanager
def noted_forms() -> Iterator[dict[str, OutputForm]]:
    """Note how messages are published within the block, by journal."""
    forms: dict[str, OutputForm] = {}

    def new_route(call: Callable[..., Any], self: Any, of_type: Any, partition: Any) -> Any:
        forms[partition.journal] = OutputForm(of_type.type, partition.content_type, partition.uuid)
        return call(self, of_type, partition)

    with wrapped(Publisher, "_new_route", new_route):
        yield forms


def add_outputs(
    outputs: dict[str, Counter[str]], journal: str, form: OutputForm, content: bytes
) -> None:
    """Count the committed messages of a journal, below its directory and without their UUIDs."""
    if form.message_type is DeadLetter:
        return  # Dead letters contain a time, which differs.
    framing = framing_of(form.content_type, form.message_type, place=form.uuid)
    counted = outputs.setdefault(journal.rpartition("/")[0] or journal, Counter())
    place = framing.codec.place
    for envelope in committed(journal, framing, content):
        message = envelope.message
        if place is not None:
            message = place.put(message, type(place.get(message))())
        counted[text_of(message)] += 1


def source_framing(application: Application[Any], spec: JournalSpec) -> Any:
    """Return how messages of a source are framed."""
    return framing_of(
        spec.labels.value_of(CONTENT_TYPE) or "",
        application.message_type_of(spec),
        place=application.uuid_place_of(spec),
    )


def committed(journal: str, framing: Any, content: bytes) -> Iterator[Envelope[Any]]:
    """Yield the committed messages of a journal's bytes, in order, without acknowledgements."""
    decoder: EnvelopeDecoder[Any] = EnvelopeDecoder(journal, framing, 0)
    decoder.feed(content)
    sequencer: Sequencer[Any] = Sequencer({}, 1 << 16)
    while batch := decoder.decode():
        index = 0
        while index < len(batch):
            index = sequencer.queue_batch(batch, index)
            while dequeued := sequencer.dequeue(1 << 16):
                yield from (envelope for envelope in dequeued if not envelope.is_ack)


def committed_spans(journal: str, framing: Any, content: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each committed message of a journal."""
    for envelope in committed(journal, framing, content):
        yield envelope.begin, envelope.end
