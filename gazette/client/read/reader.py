"""Stage 10 of the byte path: takes bytes from `broker/api/read` or blob stores, gives them to
`message/framing/framing`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

from gazette.auth import Capability
from gazette.client.read.fragment_reader import FragmentStream
from gazette.client.rpc.credentials import journal_claims
from gazette.client.rpc.errors import CALL_ERRORS, END_OF_STREAM, raise_mapped, status_error
from gazette.errors import Broken, Closed, GazetteError, Invalid, Retryable, Unavailable
from gazette.protocol.content import Content
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import Offset, split_journal_meta, validate_journal_name
from gazette.protocol.journal_life import JournalLife, created_again
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Header
from gazette.protocol.rpc import validate_read_response
from gazette.protocol.status import Status
from gazette.protocol.text.validation import require_fit, within
from gazette.runtime.metrics import READ_BYTES

if TYPE_CHECKING:
    from gazette.client.access import BrokerAccess

WRITE_HEAD: Final = -1
"""Value of ``offset`` in `ReadParams` for the end of the journal at the begin of the read."""


class OffsetJump(Retryable):
    """The journal has no byte at the offset ``expected``, and continues at a greater ``offset``. A repeated
    read continues there."""

    default_hint = (
        "Read on, unless the missing bytes matter: they were pruned, or lost with all brokers."
    )

    def __init__(self, journal: str, expected: int, offset: int) -> None:
        super().__init__(
            "the journal has no content at the offset",
            journal=journal,
            expected=expected,
            offset=offset,
        )
        self.expected = expected
        self.offset = offset


@dataclass(frozen=True, slots=True)
class ReadParams:
    """The bytes to read.

    ``offset`` may be `WRITE_HEAD`. ``end_offset`` zero means: read without end. With ``block``, wait at
    the head for more bytes; without, raise ``NotYet`` there. ``begin_mod_time`` (Unix seconds) skips older
    stored fragments. With ``metadata_only``, the read ends before content. With ``do_not_proxy``, the broker
    passes the read to no other broker, and reads no store for it: it refuses or ends the read instead.
    """

    journal: str
    offset: int = 0
    block: bool = False
    end_offset: int = 0
    begin_mod_time: int = 0
    metadata_only: bool = False
    do_not_proxy: bool = False
    min_etcd_revision: int = 0
    life: JournalLife | None = None
    """The life of the journal to which ``offset`` belongs. A read of another life raises ``Corrupt``."""

    def validate(self) -> None:
        with within("Journal"):
            validate_journal_name(self.journal)
        if self.offset < WRITE_HEAD:
            raise Invalid(f"invalid Offset ({self.offset}; expected -1 <= Offset <= MaxInt64)")
        if self.end_offset < 0 or 0 < self.end_offset < self.offset:
            raise Invalid(
                f"invalid EndOffset ({self.end_offset}; expected 0 or Offset <= EndOffset)"
            )
        require_fit("Offset", self.offset)
        require_fit("EndOffset", self.end_offset)
        require_fit("BeginModTime", self.begin_mod_time)
        require_fit("MinEtcdRevision", self.min_etcd_revision)

    def to_pb(self) -> broker_pb2.ReadRequest:
        return broker_pb2.ReadRequest(
            journal=self.journal,
            offset=self.offset,
            block=self.block,
            end_offset=self.end_offset,
            begin_mod_time=self.begin_mod_time,
            metadata_only=self.metadata_only,
            do_not_proxy=self.do_not_proxy,
            min_etcd_revision=self.min_etcd_revision,
        )


class Reader:
    """One Read RPC, or the rest of one stored fragment, as a stream of bytes. Loop-bound.

    With ``direct=False``, never open fragments at their store. Use `RetryReader` to read on when a broker
    leaves, a fragment ends, or a token expires.
    """

    def __init__(self, client: BrokerAccess, params: ReadParams, *, direct: bool = True) -> None:
        params.validate()
        self.params = params
        self.offset = params.offset
        """Offset of the next byte. Stays `WRITE_HEAD` until the head is known."""
        self.write_head = 0
        """End of the journal in the broker's last answer."""
        self.fragment: Fragment | None = None
        """The fragment that is being read."""
        self.fragment_url = ""
        """URL of the fragment in its store; empty before the fragment is stored. A signed URL is valid for a
        minute by default."""
        self.header: Header | None = None
        """Header of the broker that served the read."""
        self.life: JournalLife | None = None
        """The life of the journal, once it is known."""
        self.lost: tuple[tuple[Offset, Offset], ...] = ()
        """Offsets whose loss an operator has confirmed. Brokers of the original do not report losses."""
        self.direct: FragmentStream | None = None
        """Set while the fragment is read at its store."""
        self.direct_failed = False
        """True if the read at the store failed, and not the broker."""
        self._client = client
        self._may_open = direct
        self._endpoint = ""
        self._call: Any = None
        self._opening = asyncio.Lock()
        self._opened = False
        self._ended = False
        self._jump: OffsetJump | None = None  # The jump that `read` must raise.
        self._held = memoryview(b"")  # The rest of a piece that was longer than `max_bytes`.
        self._counter = READ_BYTES.labels(split_journal_meta(params.journal)[0])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """True if the reader or its client was closed."""
        return self._ended or self._client.channels.closed

    async def open(self) -> None:
        """Make the call and wait for the values before content: offset, head, fragment, header.

        With ``block``, wait until the offset exists. Raise ``NotYet``, ``NotFound``, ``NotAllowed``,
        ``Moved``, ``Unavailable``, ``Broken``, ``Corrupt`` for another life of the journal, or ``Closed``
        after `close`. May be repeated. After a cancellation the reader has ended; create another reader.
        """
        async with self._opening:
            await self._open()

    async def _open(self) -> None:
        if self._opened:
            return
        self._require_open()
        params = self.params
        self._endpoint, path = self._client.byte_path(params.journal)
        claims = journal_claims(Capability.READ, params.journal)
        metadata = self._client.credentials.metadata(claims)
        try:
            self._call = path.read(params.to_pb(), metadata=metadata)
        except CALL_ERRORS as error:
            self._fail(error)
        message = await self._receive()
        if message is None:
            # A broker ends a read without a message when it gives up the replica.
            self._client.forget_route(params.journal)
            raise Unavailable(
                "the broker ended the read before it answered",
                hint="It stops, or does not serve the journal any more. A RetryReader goes on.",
                journal=params.journal,
                endpoint=self._endpoint,
            )
        if isinstance(message, Content):
            raise self._misbehaved("it sent no metadata")
        self._on_metadata(message)
        self._opened = True

    async def open_ahead(self) -> None:
        """Call ``open``, and open the fragment at its store if it will be read from there.

        A ``read`` during this call waits for it. If this call fails, ``read`` opens the reader again.
        """
        async with self._opening:
            await self._open()
            if self._should_open():
                try:
                    await self._open_direct()
                finally:
                    # This failure does not count: `read` opens the fragment again.
                    self.direct_failed = False

    async def read(self, max_bytes: int = 0) -> bytes:
        """Return the next bytes: as many as came in one piece, at most ``max_bytes`` unless that is zero.

        Return empty bytes at ``end_offset``, and at the end of a fragment that is read at its store. Return
        empty bytes also when the broker ends the stream, because it stops or the token expired. Raise the
        errors of ``open`` and of `FragmentStream.next`. Raise ``OffsetJump`` once where bytes are missing.
        After a cancellation the reader has ended; create another reader at ``offset``.
        """
        unread = self._held
        if not unread:
            self._client.channels.require_loop()
            chunk = await self._next()
            if not max_bytes or len(chunk) <= max_bytes:
                self._advance(len(chunk))
                return chunk
            unread = memoryview(chunk)
        part = unread[: max_bytes or len(unread)]
        self._held = unread[len(part) :]
        self._advance(len(part))
        return bytes(part)

    def close(self) -> None:
        """Cancel the call. A ``read`` that waits raises ``Closed``. May be repeated."""
        self._ended = True
        self._held = memoryview(b"")
        if self._call is not None and not self._call.done():
            self._call.cancel()
        if self.direct is not None:
            self.direct.close()
            self.direct = None

    def _advance(self, length: int) -> None:
        self.offset += length
        self._counter.inc(length)

    async def _next(self) -> bytes:
        """Return the next piece up to ``end_offset``; empty there. Raise each ``OffsetJump`` once."""
        if not self._opened or self._opening.locked():
            await self.open()
        while True:
            if (jump := self._jump) is not None:
                self._jump = None
                raise jump
            end = self.params.end_offset
            if self._ended or (end and self.offset >= end):
                self.close()
                return b""
            piece = await (self._next_direct() if self.direct else self._next_received())
            if piece is not None:
                excess = self.offset + len(piece) - end if end else 0
                return piece[:-excess] if excess > 0 else piece

    async def _next_direct(self) -> bytes | None:
        """Return a piece from the store; None at the end of the fragment."""
        assert self.direct is not None
        try:
            piece = await self.direct.next()
        except GazetteError:
            self.direct_failed = True
            raise
        if not piece:
            self._ended = True
            return None
        return piece

    async def _next_received(self) -> bytes | None:
        """Return a piece from the broker; None at the end of the stream, for a message without content, and
        after a switch to the store. Raise ``Broken`` if the piece is not at `offset`."""
        if self._should_open():
            # `open_ahead` may also want the lock: the caller that gets the lock first opens the fragment.
            async with self._opening:
                self._require_open()
                if self._should_open():
                    await self._open_direct()
            return None
        message = await self._receive()
        if message is None:
            self._ended = True
            return None
        if isinstance(message, broker_pb2.ReadResponse):
            if not message.content:
                self._on_metadata(message)
                return None
            self._checked(message)
            message = Content(message.offset, message.content)
        if message.offset != self.offset:
            raise self._misbehaved(f"content of offset {message.offset} came at {self.offset}")
        return message.content

    def _should_open(self) -> bool:
        """Return True if the rest of the fragment should be read from its store."""
        return (
            self._may_open
            and not self._ended
            and self.direct is None
            and self.fragment is not None
            and self.fragment_url != ""
            and not self.params.metadata_only
            and self._client.fragments.can_open(self.fragment_url)
        )

    async def _open_direct(self) -> None:
        """Open the fragment at its store, and cancel the call to the broker. Raise the error of the store, or
        ``Closed`` if `close` was called meanwhile."""
        assert self.fragment is not None
        if not self._call.done():
            self._call.cancel()
        try:
            stream = await self._client.fragments.open(
                self.fragment, self.fragment_url, self.offset
            )
        except GazetteError:
            self.direct_failed = True
            raise
        if self._ended:
            stream.close()
        self._require_open()
        self.direct = stream

    def _require_open(self) -> None:
        """Raise ``Closed`` if `close` was called while this call waited."""
        if self._ended:
            raise Closed("the reader was closed", journal=self.params.journal)

    async def _receive(self) -> Content | broker_pb2.ReadResponse | None:
        """Return the next message; None at the end of the stream. Forget the route if the call fails."""
        try:
            try:
                message: Any = await self._call.read()
            except CALL_ERRORS as error:
                self._fail(error)
        except (Unavailable, Broken):
            self._client.forget_route(self.params.journal)
            raise
        return None if message is END_OF_STREAM else message

    def _on_metadata(self, message: Content | broker_pb2.ReadResponse) -> None:
        """Take header, head, offset and fragment of a message without content.

        Raise the error of its status, ``Broken`` if it is invalid or its offset goes back, and ``Corrupt``
        for another life of the journal. If the offset jumps ahead, the next `read` raises ``OffsetJump``.
        """
        assert isinstance(message, broker_pb2.ReadResponse)
        self._checked(message)
        params = self.params
        if message.HasField("header"):
            self.header = Header.from_pb(message.header)
            self._client.observe_route(params.journal, self.header.route)
            self._note_life(JournalLife(self.header.etcd.cluster_id, message.created))
            self.lost = tuple((span.begin, span.end) for span in message.lost)
        self.write_head = message.write_head
        if message.status:  # 0 is OK.
            status = Status.from_pb(message.status)
            if self.offset == WRITE_HEAD and status is Status.OFFSET_NOT_YET_AVAILABLE:
                # The message gives the offset of the head: a repeated read begins there.
                self.offset = message.offset
            raise status_error(
                status,
                journal=params.journal,
                offset=self.offset,
                write_head=message.write_head,
                endpoint=self._endpoint,
            )
        if message.offset < self.offset:
            raise self._misbehaved(f"offset {message.offset} came for {self.offset}")
        if self.offset != WRITE_HEAD and message.offset > self.offset:
            self._jump = OffsetJump(params.journal, self.offset, message.offset)
        self.offset = message.offset
        if message.HasField("fragment"):
            self.fragment = Fragment.from_pb(message.fragment)
            self.fragment_url = message.fragment_url

    def _note_life(self, life: JournalLife) -> None:
        """Note the journal's life, if the broker reports it. Raise ``Corrupt`` for another life."""
        if not life.created:
            return
        expected = self.params.life
        if expected is not None and life.is_other(expected):
            raise created_again(
                self.params.journal, expected.created, life.created, offset=self.offset
            )
        self.life = life

    def _checked(self, message: broker_pb2.ReadResponse) -> None:
        try:
            validate_read_response(message)
        except Invalid as error:
            raise self._misbehaved(str(error)) from error

    def _misbehaved(self, what: str) -> Broken:
        return Broken(
            f"the broker answered a read wrongly: {what}",
            journal=self.params.journal,
            endpoint=self._endpoint,
        )

    def _fail(self, error: BaseException) -> NoReturn:
        raise_mapped(error, "Read", self, journal=self.params.journal, endpoint=self._endpoint)


async def read_all(reader: Reader) -> bytes:
    """Return all bytes until the reader's end, which must fit in memory. Raise the errors of ``read``."""
    pieces: list[bytes] = []
    async with reader:
        while piece := await reader.read():
            pieces.append(piece)
    return b"".join(pieces)
