"""Publisher of messages. Messages enter the byte path here, before its stage 1.

In each journal, the clocks of a producer must ascend: readers drop a message as a duplicate if a message
before it has a greater clock. So a message gets its clock and its place in its journal in one step, under one
lock that all threads and transactions share. That step also enqueues a committed message. An uncommitted
message waits in a line. Every later message of this publisher to the same journal goes after it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, ParamSpec, Protocol, TypeVar

from gazette.client.append.appender import AppendParams, AppendResult
from gazette.errors import Bug, Invalid, NotAllowed
from gazette.message.codec import has_validate, no_uuid
from gazette.message.framing.frames import FRAME_BYTES_MAX, Framing, Stamper
from gazette.message.framing.framing import framing_of
from gazette.message.mapping import Mapping, Partition
from gazette.message.message_time import MessageTime
from gazette.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    Entropy,
    ProducerId,
    UuidMint,
    build_uuid,
    clock_unix_ns,
    new_producer_id,
    other_producer,
)
from gazette.message.uuid import Clock as MessageClock
from gazette.protocol.ids import JournalName, split_journal_meta
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import OpFuture

M = TypeVar("M")
P = ParamSpec("P")
T = TypeVar("T")

JOURNAL_BUFFER_BYTES: Final = 256 << 10
"""Bytes of uncommitted content of one journal that wait in memory before an append."""
BUFFER_BYTES_MAX: Final = 8 << 20
"""Bytes of uncommitted content of all journals that wait in memory before an append."""
OBSERVE_S: Final = 0.0005
"""Seconds by which the clock of a publisher may be behind the wall clock."""
HELD_BYTES_MAX: Final = 32 << 20
"""Bytes that a `Publisher.hold` without ``strict`` keeps back. Beyond them, `Publisher.roll_back` raises."""


class JournalAppends(Protocol):
    """The members of `gazette.client.append.backlog.JournalAppends` that publishing uses."""

    must_wait: bool

    def enqueue(self, content: bytearray, /) -> OpFuture[AppendResult]: ...
    def in_place(
        self, write: Stamper[Any], item: Any, flags: int, length_max: int, /
    ) -> OpFuture[AppendResult] | None: ...
    def await_room(self) -> None: ...


class Appends(Protocol):
    """The method of `gazette.client.append.service.AppendService` that publishing uses."""

    def journal(self, params: AppendParams, /) -> JournalAppends: ...


class _Line:
    """Frames, with their UUIDs, that wait for an append to one journal."""

    __slots__ = ("acknowledgement", "appends", "buffer", "has_transactions", "journal")

    def __init__(self, journal: JournalName, appends: JournalAppends) -> None:
        self.journal = journal
        self.appends = appends
        self.buffer = bytearray()
        self.acknowledgement: Callable[[bytes], bytes] | None = None
        """Encoder of the acknowledgement's frame, if the running transaction has published to the journal."""
        self.has_transactions = False
        """True once a transaction has published to the journal. Then committed messages have the second
        producer: readers drop a producer's pending messages at its next message outside of transactions."""


class _Hold:
    """Uncommitted messages that may be undone: see `Publisher.hold`."""

    __slots__ = ("lines", "no_undo_reason", "strict")

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.lines: dict[_Line, tuple[int, bool]] = {}
        """The lines that grew since the hold began. Each has its former length in bytes, and True if the
        transaction had not published to the line before the hold."""
        self.no_undo_reason = ""
        """Why the messages cannot be undone; empty if they can."""

    def keeps_back(self, buffered_bytes: int) -> bool:
        """Return True if messages must stay in their lines. All lines have ``buffered_bytes``."""
        if self.no_undo_reason:
            return False
        if self.strict or buffered_bytes < HELD_BYTES_MAX:
            return True
        self.no_undo_reason = f"more than {HELD_BYTES_MAX >> 20} MiB were published"
        return False


class _Form(NamedTuple):
    """Framing of messages of one type, and the functions that stamp and frame a message."""

    framing: Framing[Any]
    stamp: Stamper[Any]
    stamp_beside: Stamper[Any]
    """Function for the second producer. It stamps committed messages in a journal with transactions."""


class _Route:
    """How messages of one type reach one partition."""

    __slots__ = (
        "_appends",
        "_buffer",
        "_is_plain",
        "_length_max",
        "_lock",
        "_publisher",
        "_stamp",
        "form",
        "line",
        "time",
    )

    def __init__(
        self, publisher: Publisher, form: _Form, line: _Line, time: MessageTime | None
    ) -> None:
        self.form = form
        self.line = line
        self.time = time
        # Copies for `commit`, since a look-up through other objects takes time.
        self._appends = line.appends
        self._buffer = line.buffer
        # Code of the application may take any time, and must not run under the lock of appends.
        self._is_plain = form.framing.codec.plain_encode_into is not None
        self._length_max = publisher._frame_bytes_max
        self._lock = publisher._lock
        self._publisher = publisher
        self._stamp = form.stamp

    def commit(self, message: Any) -> OpFuture[AppendResult]:
        """Publish one message, as `Publisher.publish_committed_batch` publishes many.

        This is most of the cost of publishing one by one. So take the lock without a `with`, at half the
        cost, and encode the message into the buffer in which it waits. `Publisher._enqueue_committed` handles
        unusual cases.
        """
        publisher, lock = self._publisher, self._lock
        future: OpFuture[AppendResult] | None = None
        lock.acquire()
        try:
            if (
                self._is_plain
                and not self._buffer
                and publisher._hold is None
                and not self.line.has_transactions
            ):
                publisher._observe_time()
                future = self._appends.in_place(self._stamp, message, OUTSIDE_TXN, self._length_max)
            if future is None:
                future = publisher._enqueue_committed(self.form, self.line, (message,))
        finally:
            lock.release()
        if self._appends.must_wait:
            self._appends.await_room()
        return future


class _TypeRoutes:
    """A type of messages, and the routes of its messages by partition."""

    __slots__ = ("routes", "type", "validates")

    def __init__(self, message_type: type) -> None:
        self.type = message_type
        self.validates = has_validate(message_type)
        self.routes: dict[Partition, _Route] = {}


class Publisher:
    """Publishes messages as one producer. A shard has a new publisher after each promotion. In a journal to
    which its transactions publish, a publisher's committed messages have a second producer.

    ``clock`` is the clock of the producer. With a ``wall_clock``, publishing moves ``clock`` to the
    present time, whenever it is `OBSERVE_S` behind. Without a ``wall_clock``, the owner of ``clock`` does so.

    Any thread may call the methods for committed messages. The methods for uncommitted messages
    serve one transaction: call them from the thread that runs it.

    Publishing sets the ``uuid`` of a message, but leaves a frozen message as it was. The message's
    type and the journal's content type determine the framing. All appends to a journal use the metadata
    segment of the name that was used first.
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
        self._mint_beside = UuidMint(other_producer(producer), clock)
        self._wall_now = None if wall_clock is None else wall_clock.now
        self._stale_at = -math.inf
        """Wall time in seconds at which publishing moves the clock next. It never goes back."""
        self._frame_bytes_max = frame_bytes_max
        self._lock = clock.lock
        """Lock that guards all fields below, and the order of clocks. Its holder waits for nothing, and takes
        no other lock but the append service's."""
        self._user_code_thread = 0
        """Thread in which code of the application runs under the lock; 0 if no such code runs."""
        self._type_routes: dict[type, _TypeRoutes] = {}
        self._forms: dict[tuple[type, str, str], _Form] = {}
        """The forms by message type, content type, and place of the UUID."""
        self._lines: dict[JournalName, _Line] = {}
        """The lines by name of the journal without metadata."""
        self.buffered_bytes = 0
        """Bytes of uncommitted messages that are not enqueued yet."""
        self._transaction: list[_Line] = []
        """Lines of the journals that the running transaction published to."""
        self._hold: _Hold | None = None

    @classmethod
    def standalone(cls, appends: Appends, wall_clock: Clock, entropy: Entropy) -> Publisher:
        """Return a publisher that belongs to no shard, with a new producer and the wall clock.

        ``entropy`` should be a ``random.SystemRandom``, so that producers are unique.
        """
        return cls(
            appends, producer=new_producer_id(entropy), clock=MessageClock(), wall_clock=wall_clock
        )

    # Outside of transactions.

    def publish_committed(self, mapping: Mapping[M], message: M) -> OpFuture[AppendResult]:
        """Publish a message that is committed at once. Return a future of its append.

        A retry of the append service may write the message twice. Readers drop the second copy if it has a
        UUID.

        Raise `NotFound` if there is no partition. Raise `Invalid` if the content type is unknown, if the
        message does not fit its type, if a declaration gives the journal another type, or if the message's
        declared time cannot be used. Raise ``NotAllowed`` for a journal with messages of a strict `hold`.
        Raise ``Closed`` once the append service is closed. Errors of ``validate()`` reach the caller.
        After an error nothing is published.

        A thread may wait for brokers that are behind; the event loop never waits.
        """
        return self._route(mapping, message).commit(message)

    def publish_committed_batch(
        self, mapping: Mapping[M], messages: Iterable[M]
    ) -> dict[JournalName, OpFuture[AppendResult]]:
        """Publish many messages that are each committed at once, in order per journal.

        This is several times faster than one by one. Return a future for each journal. Validate and map all
        messages before publishing any. Raise `Invalid` for a message that cannot be mapped, and publish
        nothing. Raise `Invalid` also for a message that does not fit its type. Then all messages of that type
        and journal are unpublished, but others may be published.
        """
        futures = {}
        for form, line, group in self._groups(mapping, messages):
            with self._lock:
                futures[line.journal] = self._enqueue_committed(form, line, group)
            if line.appends.must_wait:
                line.appends.await_room()
        return futures

    async def publish_from_loop(
        self, mapping: Mapping[M], messages: Iterable[M]
    ) -> dict[JournalName, OpFuture[AppendResult]]:
        """Publish as `publish_committed_batch` does, from a task of the event loop, without waiting."""
        return self.publish_committed_batch(mapping, messages)

    def _groups(
        self, mapping: Mapping[M], messages: Iterable[M]
    ) -> list[tuple[_Form, _Line, list[M]]]:
        """Validate and map messages. Return groups of messages with the same form and line, each in order."""
        groups: dict[tuple[int, int], tuple[_Form, _Line, list[M]]] = {}
        for message in messages:
            route = self._route(mapping, message)
            key = id(route.line), id(route.form)
            group = groups.get(key)  # (form, line, messages)
            if group is None:
                group = groups[key] = (route.form, route.line, [])
            group[2].append(message)
        return list(groups.values())

    def _enqueue_committed(
        self, form: _Form, line: _Line, messages: Iterable[M]
    ) -> OpFuture[AppendResult]:
        """Enqueue messages, after the uncommitted messages in line for their journal. The caller holds the
        lock. Raise ``Invalid`` for a message that is too long."""
        buffer, stamp = line.buffer, form.stamp_beside if line.has_transactions else form.stamp
        hold = None if self._hold is None or line not in self._hold.lines else self._hold
        if hold is not None and hold.strict:
            raise NotAllowed(
                "a committed message cannot follow uncommitted ones of the same journal while"
                " these may still be undone",
                journal=line.journal,
                hint="Publish to this journal only committed messages, or only uncommitted ones.",
            )
        begin = end = len(buffer)
        try:
            self._observe_time()
            for message in messages:
                stamp(message, OUTSIDE_TXN, buffer)
                length, end = len(buffer) - end, len(buffer)  # `end` was the message's begin.
                if length > self._frame_bytes_max:
                    raise self._too_long(length)
            future = line.appends.enqueue(buffer)
        except BaseException:
            del buffer[begin:]
            raise
        buffer.clear()
        self.buffered_bytes -= begin  # The uncommitted bytes are before `begin`.
        if hold is not None:
            hold.no_undo_reason = f"a committed message followed it in journal {line.journal}"
        return future

    # Within a transaction.

    def publish_uncommitted(self, mapping: Mapping[M], message: M) -> None:
        """Publish a message that is pending until the acknowledgement of `build_ack_intents` is appended.

        Content waits in memory; `build_ack_intents` enqueues the last of it. Raise `Invalid` for a type
        without a UUID. Other errors are those of `publish_committed`. After an error other than ``Closed``,
        the message is not published.
        """
        route = self._route(mapping, message)
        (framing, stamp, _), line = route.form, route.line
        with self._lock:
            self._observe_time()
            begin, is_new = len(line.buffer), line.acknowledgement is None
            if is_new:
                acknowledgement = self._acknowledgement(framing, line, message)
            elif framing.codec.form is None:
                raise no_uuid(type(message))
            try:
                stamp(message, CONTINUE_TXN, line.buffer)
                length = len(line.buffer) - begin
                if length > self._frame_bytes_max:
                    raise self._too_long(length)
            except BaseException:
                del line.buffer[begin:]
                raise
            self.buffered_bytes += length
            # Set this only after the encoding: if that fails, the transaction must stay as it was.
            if is_new:
                line.acknowledgement = acknowledgement
                line.has_transactions = True
                self._transaction.append(line)
            hold = self._hold
            if hold is not None:
                hold.lines.setdefault(line, (begin, is_new))
                if hold.keeps_back(self.buffered_bytes):
                    return
            full = len(line.buffer) >= JOURNAL_BUFFER_BYTES
            overfull = self.buffered_bytes >= BUFFER_BYTES_MAX
        if overfull:
            self.flush()
        elif full:
            self._flush_line(line)

    def _acknowledgement(
        self, framing: Framing[Any], line: _Line, message: Any
    ) -> Callable[[bytes], bytes]:
        """Return the encoder of the acknowledgement's frame, for the transaction that has ``message``."""
        encode = self._noting_thread(framing.codec.acknowledgement)(message, line.journal)
        return self._noting_thread(lambda uuid: framing.frame(encode(uuid)))

    def flush(self) -> None:
        """Enqueue the appends of all uncommitted messages that were published so far.

        Raise ``Closed`` if the append service is closed, and keep the messages that were not enqueued. Do
        nothing between `hold` and `release` while the messages can be undone.
        """
        with self._lock:
            keeps = self._hold is not None and not self._hold.no_undo_reason
            lines = [] if keeps else list(self._transaction)
        for line in lines:
            self._flush_line(line)

    def hold(self, *, strict: bool = True) -> None:
        """Keep back uncommitted messages from here on, until `release` or `roll_back`.

        Use this for messages that may have to be undone. With ``strict``, publishing a *committed* message to
        a journal with held messages raises ``NotAllowed``. Without ``strict``, this is allowed, and held
        messages are enqueued once they have `HELD_BYTES_MAX` bytes. In both cases, `roll_back` then raises
        ``NotAllowed``.
        """
        with self._lock:
            if self._hold is not None:
                raise Bug("hold() was called twice without release() or roll_back() in between")
            self._hold = _Hold(strict=strict)

    def release(self) -> None:
        """End a `hold`. The held messages cannot be undone any more, and wait for an append like later ones.

        Raise ``Closed`` if there is enough content for an append, and the append service is closed.
        """
        with self._lock:
            lines = () if self._hold is None else self._hold.lines
            self._hold = None
            overfull = self.buffered_bytes >= BUFFER_BYTES_MAX
            full = [line for line in lines if len(line.buffer) >= JOURNAL_BUFFER_BYTES]
        if overfull:
            self.flush()
            return
        for line in full:
            self._flush_line(line)

    def roll_back(self) -> None:
        """End a `hold`, and discard the held messages. If some were enqueued during the hold, discard nothing
        and raise ``NotAllowed``: a strict hold enqueues none. Without a hold, do nothing.
        """
        with self._lock:
            hold, self._hold = self._hold, None
            if hold is None:
                return
            if hold.no_undo_reason:
                raise NotAllowed(
                    f"cannot undo published messages: {hold.no_undo_reason}",
                    hint="Raise DeferToNextTransaction before publishing, or consume smaller batches.",
                )
            for line, (length, is_new) in hold.lines.items():
                self.buffered_bytes -= len(line.buffer) - length
                del line.buffer[length:]
                if is_new:
                    line.acknowledgement = None
                    self._transaction.remove(line)

    def build_ack_intents(self) -> dict[JournalName, bytes]:
        """End the transaction. Return the content that commits it, by journal, in the order of first use.

        The caller makes the content durable with the transaction's checkpoint, and *then* appends it. When
        this call returns, all messages of the transaction are enqueued: ``pending_except`` of the append
        service covers them. Raise ``Closed`` if that service is closed; the caller may repeat the call.
        """
        self.flush()
        intents: dict[JournalName, bytes] = {}
        with self._lock:
            for line in self._transaction:
                assert line.acknowledgement is not None
                intents[line.journal] = line.acknowledgement(self._mint.raw(ACK_TXN))
                line.acknowledgement = None
            self._transaction.clear()
        return intents

    def build_rollbacks(self, clock: int) -> dict[JournalName, bytes]:
        """Return the content that rolls the running transaction back, by journal: an acknowledgement each.

        ``clock`` becomes the clock of the acknowledgements. It must be less than the clocks of all messages
        of the transaction.
        """
        uuid = build_uuid(self.producer, clock, ACK_TXN)
        with self._lock:
            return {
                line.journal: line.acknowledgement(uuid)
                for line in self._transaction
                if line.acknowledgement is not None
            }

    def _flush_line(self, line: _Line) -> None:
        """Enqueue the frames of a line. Off the event loop, wait if brokers are behind."""
        with self._lock:
            if not line.buffer:
                return
            line.appends.enqueue(line.buffer)
            self.buffered_bytes -= len(line.buffer)
            line.buffer.clear()
        if line.appends.must_wait:
            line.appends.await_room()

    # Parts of committed and of uncommitted publishes.

    def _route(self, mapping: Mapping[M], message: M) -> _Route:
        """Validate and map a message. Return how messages of its type reach its partition."""
        if self._user_code_thread:
            self._require_outside()
        message_kind = self._type_routes.get(type(message))
        if message_kind is None:
            message_kind = self._type_routes.setdefault(type(message), _TypeRoutes(type(message)))
        if message_kind.validates:
            message.validate()  # type: ignore[attr-defined]
        partition = mapping(message)
        route = message_kind.routes.get(partition) or self._new_route(message_kind, partition)
        if route.time is not None:
            self._require_time(route.time, message, partition.journal)
        return route

    def _require_time(self, time: MessageTime, message: Any, journal: JournalName) -> None:
        """Raise ``Invalid`` for a message whose time its readers could not use."""
        published_us = clock_unix_ns(self.clock.value) // 1000
        if self._wall_now is not None:
            published_us = max(published_us, int(self._wall_now() * 1e6))
        time.require(message, journal, published_us)

    def _require_outside(self) -> None:
        """Raise ``Invalid`` in code that runs under the lock, where publishing would wait for ever."""
        if self._user_code_thread == threading.get_ident():
            raise Invalid(
                "publishing is not possible while another message is being encoded",
                hint="Publish before or after, not in a setter, an encoder or new_acknowledgement().",
            )

    def _noting_thread(self, function: Callable[P, T]) -> Callable[P, T]:
        """Wrap a function of the application: note the thread in which it runs under the lock."""

        def marked(*args: P.args, **kwargs: P.kwargs) -> T:
            self._user_code_thread = threading.get_ident()
            try:
                return function(*args, **kwargs)
            finally:
                self._user_code_thread = 0

        return marked

    def _new_route(self, kind: _TypeRoutes, partition: Partition) -> _Route:
        """Return the route of a type to a partition. Threads that call this at once get the same route. Raise
        ``Invalid`` if the partition is for other types, or its content type cannot hold the type."""
        partition.require_type(kind.type)
        journal, encoding = partition.journal, (kind.type, partition.content_type, partition.uuid)
        form = self._forms.get(encoding)
        if form is None:
            framing = framing_of(
                partition.content_type,
                kind.type,
                place=partition.uuid,
                frame_bytes_max=self._frame_bytes_max,
            )
            stamps = [framing.stamper(mint) for mint in (self._mint, self._mint_beside)]
            if framing.codec.plain_encode_into is None:
                stamps = [self._noting_thread(stamp) for stamp in stamps]
            form = _Form(framing, *stamps)
        # `setdefault` lets the first thread win: a journal must have exactly one line.
        form = self._forms.setdefault(encoding, form)
        # Look up the line by the name without metadata: clocks must ascend in a journal under all names.
        name = split_journal_meta(journal)[0]
        line = self._lines.get(name)
        if line is None:
            line = _Line(journal, self._appends.journal(AppendParams(journal)))
            line = self._lines.setdefault(name, line)
        return kind.routes.setdefault(partition, _Route(self, form, line, partition.message_time))

    def _observe_time(self) -> None:
        """Move the clock to the wall time, if the clock is too far behind. The caller holds the lock."""
        if self._wall_now is not None and (now := self._wall_now()) >= self._stale_at:
            self._mint.observe(now)
            self._stale_at = now + OBSERVE_S

    def _too_long(self, length: int) -> Invalid:
        return Invalid("message is too long", length=length, length_max=self._frame_bytes_max)
