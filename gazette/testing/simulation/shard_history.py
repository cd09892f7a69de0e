"""The history of an application's shards in one simulation: the steps and states of each promotion.

The history decides which transactions took effect. A promotion restores the checkpoint of one of them. All
transactions after it had no effect, whatever their owner believed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

from gazette.consumer.shard.shard import Shard
from gazette.consumer.timers.timer import Timer
from gazette.consumer.transaction.dispatch import Deferred, Dispatcher, TimersDue
from gazette.consumer.transaction.shard_callbacks import ShardCallbacks
from gazette.consumer.transaction.shard_timers import ShardTimers
from gazette.consumer.transaction.transactor import Transactor
from gazette.errors import Bug
from gazette.message.uuid import ACK_TXN
from gazette.protocol.checkpoint import Checkpoint
from gazette.runtime.tasks import OpFuture
from gazette.testing.simulation.states import Rows, left_state

_CHAINS_MAX: Final = 6
"""Greatest number of sequences of transactions that are tried for one state."""


@dataclass(frozen=True, slots=True)
class Consumed:
    """One step of a transaction: it consumed messages of one source, fired a timer, or ended."""

    now: float
    """The time that `shard.now` shows. Without timers, the wall clock."""
    wall: float
    """The wall clock of the member, which may go back."""
    watched_s: float = 0.0
    """Monotonic time of the last look for idle sources."""
    promoted_s: float = 0.0
    """Monotonic time of the promotion; zero without timers."""
    journal: str = ""
    spans: tuple[tuple[int, int], ...] = ()
    """Begin and end of each message in its journal."""
    timer: Timer | None = None
    looks: tuple[tuple[int, float], ...] = ()
    """Begin of the message, and time, whenever `shard.now` was read. Empty if all times are ``now``."""

    @property
    def is_end(self) -> bool:
        """True for the end of a transaction."""
        return not self.spans and self.timer is None


@dataclass(slots=True)
class RecordedTransaction:
    """One transaction of a promotion, whether or not it took effect."""

    steps: list[Consumed] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    """None until the commit began."""
    commit: OpFuture[Any] | None = None
    left: Rows | None = None
    """The state that queries see after the transaction; None for a store whose rows are not known."""
    durable_at: float | None = None
    """Time at which its commit was known to have succeeded."""
    log_end: int = 0
    """End of its commit in the recovery log; 0 if it is not known."""

    @property
    def has_committed(self) -> bool:
        """True if the commit is known to have succeeded."""
        commit = self.commit
        return commit is not None and commit.done() and commit.exception() is None


@dataclass(slots=True)
class Promotion:
    """One owner of a shard, from the restored checkpoint on."""

    shard_id: str
    restored: Checkpoint
    callbacks: ShardCallbacks
    timers: ShardTimers | None = None
    begun_s: float = 0.0
    """Monotonic time of its begin, from which on sources may become idle."""
    restored_state: Rows | None = None
    """The state that queries see before the first transaction."""
    transactions: list[RecordedTransaction] = field(default_factory=list)

    @property
    def running(self) -> RecordedTransaction:
        """The transaction whose commit has not begun."""
        if not self.transactions or self.transactions[-1].checkpoint is not None:
            self.transactions.append(RecordedTransaction())
        return self.transactions[-1]


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A state that a backfill was to build, from all messages below some offsets of the sources."""

    shard_id: str
    former: Checkpoint
    """Checkpoint of the state that is replaced."""
    ends: Mapping[str, int]
    spans: Mapping[str, Sequence[tuple[int, int]]]
    """By source, the messages that are committed below the offset."""
    wall: float

    def is_of(self, restored: Checkpoint) -> bool:
        """Return True if a restored checkpoint may be the one of this rebuilt state."""
        offsets = {name: source.read_through for name, source in restored.sources.items()}
        ends = {name: end for name, end in self.ends.items() if end or name in offsets}
        return not restored.ack_intents and offsets == ends

    def applied(self, chain: Sequence[RecordedTransaction]) -> list[RecordedTransaction]:
        """Return the transactions with only messages of `spans`, and one more with the other messages."""
        left = {(journal, span) for journal, spans in self.spans.items() for span in spans}
        transactions = []
        for transaction in chain:
            steps = []
            for step in transaction.steps:
                spans = tuple(span for span in step.spans if (step.journal, span) in left)
                left -= {(step.journal, span) for span in spans}
                if spans == step.spans:
                    steps.append(step)
                elif spans:
                    steps.append(replace(step, spans=spans))
            same = len(steps) == len(transaction.steps) and all(map(_is, steps, transaction.steps))
            transactions.append(transaction if same else replace(transaction, steps=steps))
        rest = [
            Consumed(self.wall, self.wall, journal=journal, spans=(span,))
            for journal, span in sorted(left)
        ]
        if rest:
            transactions.append(RecordedTransaction(rest, self.former))
        return transactions


class ShardHistory:
    """All promotions of one simulation."""

    def __init__(
        self,
        clock: Callable[[], float],
        now: Callable[[], float],
        ignore: Collection[str],
        on_failure: Callable[[Any, Any], None],
    ) -> None:
        """Create a history. ``clock`` is the wall clock of the process that runs; ``now`` is virtual time.
        ``ignore`` names the parts that states leave out: see `states.state_of`.
        """
        self._clock = clock
        self._now = now
        self._ignore = ignore
        self._on_failure = on_failure
        self.promotions: list[Promotion] = []
        self._rebuilt: list[tuple[int, Rebuilt]] = []
        """Rebuilt states, each with the number of promotions before it."""
        self._by_callbacks: dict[int, Promotion] = {}
        self._looks: dict[int, list[tuple[int, float]]] = {}
        """By the id of a shard's timers: the times that the running step has seen (see `Consumed.looks`)."""

    def last(self, shard_id: str) -> Promotion | None:
        """Return the latest promotion of a shard."""
        of_shard = [each for each in self.promotions if each.shard_id == shard_id]
        return of_shard[-1] if of_shard else None

    def steps(self) -> Iterator[Consumed]:
        """Yield all steps of all transactions, even of transactions without effect."""
        for promotion in self.promotions:
            for transaction in promotion.transactions:
                yield from transaction.steps

    def effective(self, promotion: Promotion) -> list[list[RecordedTransaction]]:
        """Return the sequences of transactions that may have led to a promotion's state, likelier ones first.

        There are several if transactions changed no offset, such as those of timers: then all of these have
        the restored checkpoint. The list is empty if no earlier promotion had committed that checkpoint.
        """
        own = [each for each in promotion.transactions if each.checkpoint is not None]
        return [[*before, *own] for before in self.leading_to(promotion)]

    def leading_to(self, promotion: Promotion) -> list[list[RecordedTransaction]]:
        """Return the sequences that may have led to the state that a promotion restored: see `effective`."""
        return list(islice(self._leading_to(promotion), _CHAINS_MAX))

    def note_rebuilt(self, rebuilt: Rebuilt) -> None:
        """Note that a backfill is about to replace a state."""
        self._rebuilt.append((len(self.promotions), rebuilt))

    def since_rebuilt(self, shard_id: str) -> list[RecordedTransaction] | None:
        """Return the transactions since the last backfill of a shard began; None without a backfill."""
        begins = [before for before, rebuilt in self._rebuilt if rebuilt.shard_id == shard_id]
        if not begins:
            return None
        promotions = [each for each in self.promotions[begins[-1] :] if each.shard_id == shard_id]
        return [transaction for each in promotions for transaction in each.transactions]

    def _leading_to(self, promotion: Promotion) -> Iterator[list[RecordedTransaction]]:
        index = self.promotions.index(promotion)
        number = sum(before <= index for before, _ in self._rebuilt)
        yield from self._leading_to_restored(promotion.shard_id, promotion.restored, index, number)

    def _leading_to_restored(
        self, shard_id: str, restored: Checkpoint, index: int, number: int
    ) -> Iterator[list[RecordedTransaction]]:
        """Yield the sequences of transactions that may have led to a checkpoint, of the first promotions."""
        if not restored.sources and not restored.ack_intents:
            yield []
        for position in reversed(range(number)):
            before_it, rebuilt = self._rebuilt[position]
            if rebuilt.shard_id == shard_id and rebuilt.is_of(restored):
                former = rebuilt.former
                for chain in self._leading_to_restored(shard_id, former, before_it, position):
                    yield rebuilt.applied(chain)
        for earlier in reversed(self.promotions[:index]):
            if earlier.shard_id != shard_id:
                continue
            transactions = earlier.transactions
            ends = [
                end
                for end, each in enumerate(transactions, 1)
                if each.checkpoint is not None and _are_same(each.checkpoint, restored)
            ]
            # First the transactions that are known to have committed, the last one first; then the others.
            ends.sort(key=lambda end: (not transactions[end - 1].has_committed, -end))
            if _are_same(earlier.restored, restored):
                ends.append(0)
            for end in ends:
                for before in self._leading_to(earlier):
                    yield [*before, *transactions[:end]]

    # Recording.

    def _of(self, callbacks: ShardCallbacks) -> Promotion:
        promotion = self._by_callbacks.get(id(callbacks))
        if promotion is None or promotion.callbacks is not callbacks:
            raise Bug("a shard's callbacks are called before its checkpoint is restored")
        return promotion

    def _step(self, callbacks: ShardCallbacks) -> Consumed:
        """Return a step with the present times, and without messages or a timer."""
        wall, promotion = self._clock(), self._of(callbacks)
        timers = promotion.timers
        if timers is None:
            return Consumed(wall, wall)
        watermark = timers._watermark
        watched_s = promotion.begun_s if watermark is None else watermark._now
        step = Consumed(timers.now.timestamp(), wall, watched_s, promotion.begun_s)
        self._looks[id(timers)] = []
        return step

    def _note_look(self, timers: ShardTimers, now: float) -> None:
        for promotion in reversed(self.promotions):
            if promotion.timers is timers:
                looks = self._looks.setdefault(id(timers), [])
                looks.append((begin_of_call(promotion.callbacks), now))
                return

    def _add(self, callbacks: ShardCallbacks, step: Consumed) -> None:
        """Add a step that has been performed. If time passed meanwhile, add the times of callbacks."""
        promotion = self._of(callbacks)
        looks = self._looks.get(id(promotion.timers), ())
        if any(now != step.now for _, now in looks):
            step = replace(step, looks=tuple(looks))
        promotion.running.steps.append(step)

    def _restored(
        self, callbacks: ShardCallbacks, checkpoint: Checkpoint, timers: ShardTimers | None
    ) -> None:
        begun_s = 0.0 if timers is None else timers._clock_s()
        promotion = Promotion(callbacks.shard.id, checkpoint, callbacks, timers, begun_s)
        promotion.restored_state = left_state(callbacks.store, self._ignore)
        self.promotions.append(promotion)
        self._by_callbacks[id(callbacks)] = promotion

    def _note_durable(self, transaction: RecordedTransaction) -> None:
        if transaction.has_committed:
            assert transaction.commit is not None
            appended = getattr(transaction.commit.result(), "commit", None)
            transaction.durable_at = self._now()
            transaction.log_end = 0 if appended is None else appended.end

    def _consumed(self, callbacks: ShardCallbacks, step: Consumed, batch: Sequence[Any]) -> None:
        takes_acks = callbacks.application.deliver_acks
        spans = tuple(
            (envelope.begin, envelope.end)
            for envelope in batch
            if takes_acks or envelope.flags != ACK_TXN
        )
        if spans:
            self._add(callbacks, replace(step, journal=batch[0].journal, spans=spans))

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Record the steps of this process's shards within the block."""
        history = self
        dispatchers: dict[int, ShardCallbacks] = {}

        def new(call: Any, self: Any, callbacks: Any, *args: Any) -> None:
            dispatchers[id(self)] = callbacks
            call(self, callbacks, *args)

        def deliver(call: Any, self: Any, batch: Any) -> None:
            callbacks, done = dispatchers[id(self)], 0
            step = history._step(callbacks)
            try:
                call(self, batch)
                done = len(batch)
            except (Deferred, TimersDue) as partial:
                done = partial.done
                raise
            finally:
                history._consumed(callbacks, step, batch[:done])

        def fire(call: Any, self: Any, timer: Timer) -> None:
            callbacks = dispatchers[id(self)]
            step = replace(history._step(callbacks), timer=timer)
            call(self, timer)
            history._add(callbacks, step)

        def run(call: Any, self: Any, checkpoint: Checkpoint) -> Any:
            history._restored(self._callbacks, checkpoint, self._timers)
            return call(self, checkpoint)

        def start_commit(call: Any, self: Any, checkpoint: Any, waits: Any) -> Any:
            transaction = history._of(self).running
            transaction.steps.append(history._step(self))
            transaction.checkpoint = checkpoint
            commit = transaction.commit = call(self, checkpoint, waits)
            transaction.left = left_state(self.store, history._ignore)
            commit.add_done_callback(lambda _: history._note_durable(transaction))
            return commit

        def now(call: Any, self: Any) -> Any:
            shown = call(self)
            history._note_look(self, shown.timestamp())
            return shown

        def fail(call: Any, self: Any, error: Any) -> None:
            if self.failure is None:
                history._on_failure(self, error)
            call(self, error)

        with contextlib.ExitStack() as stack:
            for owner, name, around in (
                (Dispatcher, "__init__", new),
                (Dispatcher, "deliver", deliver),
                (Dispatcher, "fire", fire),
                (Transactor, "run", run),
                (ShardCallbacks, "start_commit", start_commit),
                (Shard, "_fail", fail),
                (ShardTimers, "now", now),
            ):
                stack.enter_context(wrapped(owner, name, around))
            yield


def begin_of_call(callbacks: ShardCallbacks) -> int:
    """Return the begin of the message that a shard's callback handles; -1 for other callbacks."""
    call = callbacks.running_callback.call
    if isinstance(call, (list, tuple)) and not hasattr(call, "begin"):
        call = call[0]
    return int(getattr(call, "begin", -1))


def _is(value: object, other: object) -> bool:
    return value is other


def _are_same(checkpoint: Checkpoint, other: Checkpoint) -> bool:
    """Compare only the parts that transactions change: in other parts, a restored checkpoint differs."""
    return (checkpoint.sources, checkpoint.ack_intents) == (other.sources, other.ack_intents)


@contextlib.contextmanager
def wrapped(owner: type, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Call ``around`` in place of a method within the block, with the method as its first argument. Replace
    a property likewise: each read of it is a call."""
    original = vars(owner)[name]
    is_property = isinstance(original, property)
    function: Any = original.fget if is_property else original

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs)

    setattr(owner, name, property(call) if is_property else call)
    try:
        yield
    finally:
        setattr(owner, name, original)
