"""Publishing messages: `Publisher`. Where messages enter the byte path, before its stage 1.

What readers rely on is that the clocks of a producer ascend in each journal, whatever threads and
transactions do: a message behind one with a greater clock would be taken for a duplicate. So a clock
is given out only to a message whose place in its journal is settled. For committed messages that is
within the append to the journal, of which there is one at a time; uncommitted ones are put in line
first, and every later message of this publisher to the same journal goes behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from gazette.client.appender import AppendParams, AppendResult
from gazette.clock import Clock
from gazette.errors import Bug, Invalid, NotAllowed
from gazette.message.frames import FRAME_BYTES_MAX, Framing
from gazette.message.framing import framing_of
from gazette.message.mapping import Mapping, Partition
from gazette.message.message_codec import has_validate, no_uuid
from gazette.message.message_uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    Entropy,
    ProducerId,
    UuidMint,
    new_producer_id,
)
from gazette.message.message_uuid import Clock as MessageClock
from gazette.protocol.ids import JournalName, split_journal_meta
from gazette.tasks import OpFuture

M = TypeVar("M")

JOURNAL_BUFFER_BYTES: Final = 256 << 10
"""How much uncommitted content of one journal is gathered before it is appended."""
BUFFER_BYTES_MAX: Final = 8 << 20
"""How much of all journals."""
HELD_BYTES_MAX: Final = 32 << 20
"""How much is kept back by a `Publisher.hold` that is not strict. Beyond, it cannot be undone any more."""


class AppendTxn(Protocol):
    """An append in the making, as of `gazette.client.append_service`."""

    def write(self, content: bytes | bytearray, /) -> None: ...
    def release(self) -> OpFuture[AppendResult]: ...
    def roll_back(self) -> None: ...


class Appends(Protocol):
    """The part of `gazette.client.append_service.AppendService` that publishing needs."""

    def start_append(
        self, params: AppendParams, dependencies: Collection[OpFuture[Any]] = (), /
    ) -> AppendTxn: ...

    async def begin_append(
        self, params: AppendParams, dependencies: Collection[OpFuture[Any]] = (), /
    ) -> AppendTxn: ...


class _Line:
    """What is put in line for one journal: frames with their UUIDs, and not appended yet."""

    __slots__ = ("acknowledgement", "buffer", "params")

    def __init__(self, journal: JournalName) -> None:
        self.params = AppendParams(journal)
        self.buffer = bytearray()
        self.acknowledgement: Callable[[bytes], bytes] | None = None
        """From a UUID to the frame that ends the running transaction, if it published here."""


class _Route(NamedTuple):
    """Where messages of a type go that are mapped to a partition."""

    framing: Framing[Any]
    line: _Line


class Publisher:
    """Publishes messages as one producer. A shard has one for each time that it becomes primary.

    ``clock`` is the producer's; with a ``wall_clock`` it is moved to the time of each message, and
    without one its owner does that. Methods may be called from any thread, but those for
    uncommitted messages are those of one transaction: call them from the thread that runs it.

    The ``uuid`` of a published message is set (a frozen message is left as it was). The type of a
    message, and the content type of the journal it is mapped to, decide how it is framed. A journal
    is always written to by the spelling, as to metadata, that was first used for it.
    """

    def __init__(
        self,
        appends: Appends,
        *,
        producer: ProducerId,
        clock: MessageClock,
        wall_clock: Clock | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> None:
        self.producer = producer
        self.clock = clock
        self._appends = appends
        self._mint = UuidMint(producer, clock)
        self._wall_clock = wall_clock
        self._frame_bytes_max = frame_bytes_max
        self._lock = clock.lock
        """Guards everything below, and the order of clocks. Innermost: nothing is waited for while it
        is held."""
        self._routes: dict[tuple[type, Partition], _Route] = {}
        self._framings: dict[tuple[type, str], Framing[Any]] = {}
        self._validates: dict[type, bool] = {}
        self._lines: dict[JournalName, _Line] = {}
        self._buffered = 0
        self._transaction: list[_Line] = []
        """Those of the journals that the running transaction published to."""
        self._held: dict[_Line, tuple[int, bool]] | None = None
        """While nothing is appended: of each line that got something since, how long it was, and
        whether the transaction had not published to it."""
        self._strict = True
        self._passed = ""
        """Why what was published since a hold that is not strict cannot be undone any more."""

    @classmethod
    def standalone(cls, appends: Appends, wall_clock: Clock, entropy: Entropy) -> Publisher:
        """A publisher that belongs to no shard: a new producer, on the time of day.

        ``entropy`` should be a ``random.SystemRandom``: producers must not meet by chance.
        """
        return cls(
            appends,
            producer=new_producer_id(entropy),
            clock=MessageClock(),
            wall_clock=wall_clock,
        )

    # Outside of transactions.

    def publish_committed(self, mapping: Mapping[M], message: M) -> OpFuture[AppendResult]:
        """Publish a message that is committed by itself. Its future: when it is in the journal.

        A retry inside of the append service may write it twice; readers drop the second.
        Raises `NotFound` (no partition), `Invalid` (content type, or a message that does not fit its
        type), what ``validate()`` of the message raises, and what ``start_append`` does. Then
        nothing was published.
        """
        framing, line = self._route(mapping, message)
        self._observe_time()
        txn = self._appends.start_append(line.params)
        return self._append_committed(txn, framing, line, (message,))

    def publish_committed_batch(
        self, mapping: Mapping[M], messages: Iterable[M]
    ) -> dict[JournalName, OpFuture[AppendResult]]:
        """Publish many messages that are each committed by themselves, in order per journal.

        Several times faster than one by one. Returns a future for each journal. Messages are
        validated and mapped before any is published; if one then turns out not to fit its type,
        `Invalid` is raised, those of its journal are not published, and others may be.
        """
        futures = {}
        for framing, line, group in self._groups(mapping, messages):
            txn = self._appends.start_append(line.params)
            futures[line.params.journal] = self._append_committed(txn, framing, line, group)
        return futures

    async def publish_from_loop(
        self, mapping: Mapping[M], messages: Iterable[M]
    ) -> dict[JournalName, OpFuture[AppendResult]]:
        """`publish_committed_batch` for tasks, which must not wait for another thread's append.

        Cancellation: what was mapped to some of the journals may have been published.
        """
        futures = {}
        for framing, line, group in self._groups(mapping, messages):
            txn = await self._appends.begin_append(line.params)
            futures[line.params.journal] = self._append_committed(txn, framing, line, group)
        return futures

    def _groups(
        self, mapping: Mapping[M], messages: Iterable[M]
    ) -> list[tuple[Framing[Any], _Line, list[M]]]:
        groups: dict[tuple[int, int], tuple[Framing[Any], _Line, list[M]]] = {}
        for message in messages:
            framing, line = self._route(mapping, message)
            group = groups.get((id(line), id(framing)))
            if group is None:
                group = groups[id(line), id(framing)] = (framing, line, [])
            group[2].append(message)
        self._observe_time()
        return list(groups.values())

    def _append_committed(
        self, txn: AppendTxn, framing: Framing[Any], line: _Line, messages: Collection[M]
    ) -> OpFuture[AppendResult]:
        """Write messages to an open append, behind what is in line for its journal."""
        buffer = bytearray()
        taken = b""
        try:
            with self._lock:
                if self._held and line in self._held:
                    if self._strict:
                        raise NotAllowed(
                            "a committed message cannot follow uncommitted ones that may have to be"
                            " undone",
                            journal=line.params.journal,
                            hint="Publish to this journal either committed or uncommitted.",
                        )
                    self._passed = (
                        f"a committed message followed it in journal {line.params.journal}"
                    )
                for message in messages:
                    self._encode(framing, message, OUTSIDE_TXN, buffer)
                taken = self._take(line)
            if taken:
                txn.write(taken)
            txn.write(buffer)
        except BaseException:
            self._restore(line, taken)
            txn.roll_back()
            raise
        return txn.release()

    # Within a transaction.

    def publish_uncommitted(self, mapping: Mapping[M], message: M) -> None:
        """Publish a message that is pending until the acknowledgement of `build_ack_intents` is
        appended to its journal.

        It is appended some time before `build_ack_intents` returns: content is gathered for a while.
        Raises what `publish_committed` does, also for a type without a UUID; then nothing was
        published.
        """
        framing, line = self._route(mapping, message)
        if self._wall_clock is not None:
            self._observe_time()
        with self._lock:
            if self._held is not None and line not in self._held:
                self._held[line] = (len(line.buffer), line.acknowledgement is None)
            if line.acknowledgement is None:
                line.acknowledgement = self._acknowledgement(framing, line, message)
                self._transaction.append(line)
            elif framing.codec.form is None:
                raise no_uuid(type(message))
            self._buffered += self._encode(framing, message, CONTINUE_TXN, line.buffer)
            full = len(line.buffer) >= JOURNAL_BUFFER_BYTES
            overfull = self._buffered >= BUFFER_BYTES_MAX
            if self._held is not None and not self._passed:
                if self._strict or self._buffered < HELD_BYTES_MAX:
                    return
                self._passed = f"it was more than {HELD_BYTES_MAX >> 20} MiB"
        if overfull:
            self.flush()
        elif full:
            self._flush_line(line)

    @staticmethod
    def _acknowledgement(
        framing: Framing[Any], line: _Line, message: Any
    ) -> Callable[[bytes], bytes]:
        encode = framing.codec.acknowledgement(message, line.params.journal)
        return lambda uuid: framing.frame(encode(uuid))

    @property
    def buffered_bytes(self) -> int:
        """How much was published uncommitted and is not enqueued, as of just now."""
        return self._buffered

    def flush(self) -> None:
        """Enqueue the appends of all that was published so far.

        Raises what ``start_append`` does; what was not enqueued is kept. Between `hold` and `release`
        this does nothing, as long as what was published can be undone.
        """
        with self._lock:
            keeps = self._held is not None and not self._passed
            lines = [] if keeps else list(self._transaction)
        for line in lines:
            self._flush_line(line)

    def hold(self, *, strict: bool = True) -> None:
        """Keep back what is published uncommitted from here on, until `release` or `roll_back`.

        For what may have to be undone. Meanwhile nothing can be published *committed* to a journal that
        something is kept back for (``NotAllowed``). Without ``strict`` that is allowed, and so are more
        than `HELD_BYTES_MAX` bytes: `roll_back` raises afterwards.
        """
        with self._lock:
            if self._held is not None:
                raise Bug("a publisher is held already")
            self._held = {}
            self._strict, self._passed = strict, ""

    def release(self) -> None:
        """End a `hold`; what was kept back is published like anything else. Raises what `flush` does."""
        with self._lock:
            held, self._held = self._held, None
            overfull = self._buffered >= BUFFER_BYTES_MAX
            full = [line for line in held or () if len(line.buffer) >= JOURNAL_BUFFER_BYTES]
        if overfull:
            self.flush()
            return
        for line in full:
            self._flush_line(line)

    def roll_back(self) -> None:
        """End a `hold`; what was kept back was never published.

        Raises ``NotAllowed`` if some of it was not kept back, which a strict hold rules out.
        """
        with self._lock:
            held, self._held = self._held, None
            if self._passed:
                raise NotAllowed(
                    f"what was published cannot be undone: {self._passed}",
                    hint="Raise DeferToNextTransaction before publishing, or consume smaller batches.",
                )
            for line, (length, is_new) in (held or {}).items():
                self._buffered -= len(line.buffer) - length
                del line.buffer[length:]
                if is_new:
                    line.acknowledgement = None
                    self._transaction.remove(line)

    def build_ack_intents(self) -> dict[JournalName, bytes]:
        """End the transaction: by journal, in the order of first use, the content that commits it.

        The caller makes these durable with the transaction's checkpoint, and *then* appends them.
        All messages published before have been enqueued when this returns, so that the append
        service's ``pending_except`` covers them. Raises what `flush` does; may then be repeated.
        """
        self.flush()
        intents: dict[JournalName, bytes] = {}
        with self._lock:
            for line in self._transaction:
                assert line.acknowledgement is not None
                intents[line.params.journal] = line.acknowledgement(self._mint.raw(ACK_TXN))
                line.acknowledgement = None
            self._transaction.clear()
        return intents

    def _flush_line(self, line: _Line) -> None:
        # Even if nothing is in line: another thread may have taken it, and not enqueued it yet.
        txn = self._appends.start_append(line.params)
        taken = b""
        try:
            with self._lock:
                taken = self._take(line)
            if taken:
                txn.write(taken)
        except BaseException:
            self._restore(line, taken)
            txn.roll_back()
            raise
        if taken:
            txn.release()
        else:
            txn.roll_back()

    # Common to both. The lock is held for _encode and _take.

    def _route(self, mapping: Mapping[M], message: M) -> _Route:
        """Validate and map a message."""
        kind = type(message)
        if self._validates.get(kind, True):
            self._validate(message)
        partition = mapping(message)
        route = self._routes.get((kind, partition))
        return self._new_route(kind, partition) if route is None else route

    def _validate(self, message: Any) -> None:
        kind = type(message)
        if kind not in self._validates:
            self._validates[kind] = has_validate(kind)
        if self._validates[kind]:
            message.validate()

    def _new_route(self, kind: type, partition: Partition) -> _Route:
        journal, content_type = partition
        framing = self._framings.get((kind, content_type))
        if framing is None:
            framing = framing_of(content_type, kind, frame_bytes_max=self._frame_bytes_max)
        # Whichever thread comes first: the lines of a journal must be one.
        framing = self._framings.setdefault((kind, content_type), framing)
        # By its name alone: with metadata it is the same journal, in which clocks must ascend.
        line = self._lines.setdefault(split_journal_meta(journal)[0], _Line(journal))
        return self._routes.setdefault((kind, partition), _Route(framing, line))

    def _observe_time(self) -> None:
        if self._wall_clock is not None:
            self.clock.update(int(self._wall_clock.now() * 1e9))

    def _encode(self, framing: Framing[Any], message: Any, flags: int, buffer: bytearray) -> int:
        """Append the frame of a message with a new UUID, or nothing; returns its length."""
        begin = len(buffer)
        try:
            framing.encode_into(framing.codec.stamp(message, self._mint, flags), buffer)
            if len(buffer) - begin > self._frame_bytes_max:
                raise Invalid(
                    "message is too long",
                    length=len(buffer) - begin,
                    length_max=self._frame_bytes_max,
                )
        except BaseException:
            del buffer[begin:]
            raise
        return len(buffer) - begin

    def _take(self, line: _Line) -> bytes:
        taken = bytes(line.buffer)
        line.buffer.clear()
        self._buffered -= len(taken)
        return taken

    def _restore(self, line: _Line, taken: bytes) -> None:
        """Put what could not be appended before what came since. The append is still open."""
        if taken:
            with self._lock:
                line.buffer[:0] = taken
                self._buffered += len(taken)
