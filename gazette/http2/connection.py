"""One HTTP/2 connection, of a server or of a client, without its socket (RFC 9113).

The caller passes received bytes to ``receive``; the function ``write`` gets bytes to send. A stream's parts
go to its listener. No method waits: if a stream cannot send now, ``on_room`` of its listener is called later.

Bounds: on a stream, the peer may send at most `STREAM_BYTES` beyond the bytes that the listener has consumed.
The more streams are open, the lower is this bound: see `SHARED_BYTES`. The connection's window opens as bytes
arrive, so that a stream without a reader delays no other stream. `headers` and `flood_credit` bound header
blocks, open streams and frames without content. ``receive`` does as much work as its caller permits, and
leaves the rest for a later call: see `gazette.net.grpc.turns`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

from gazette.errors import Broken, Closed, GazetteError, Unavailable, printable
from gazette.http2 import frames as fr
from gazette.http2.flood_credit import FloodCredit
from gazette.http2.frames import ConnectionFault, FaultCode, StreamFault
from gazette.http2.headers import (
    BLOCK_BYTES_MAX,
    BLOCK_FRAMES_MAX,
    LIST_BYTES_MAX,
    Fields,
    HeaderDecoder,
    RequestHead,
    check_trailers,
)
from gazette.http2.peer import UNKNOWN

STREAM_BYTES: Final = 1 << 22
"""Bytes that a peer may send on a stream beyond the consumed bytes. A stream carries at most 4 GB/s with a
round trip of 1 ms, and 40 MB/s with 100 ms."""
FIRST_BYTES: Final = 1 << 19
"""Bytes that a peer may send on a stream before the listener has consumed any."""
CONNECTION_BYTES: Final = 1 << 23
"""Greatest window of a connection, in bytes."""
SHARED_BYTES: Final = 1 << 25
"""Bytes that a peer may send beyond the consumed bytes, shared by the open streams. Each stream has at least
`FIRST_BYTES`."""
_GRANT_BYTES_MIN: Final = CONNECTION_BYTES // 4
"""Least number of bytes by which the window of the connection is opened at a time."""
_GRANT_S: Final = 5.0
"""Seconds after which the window of the connection is opened by fewer bytes. On a slow link, only these
updates tell a peer that this side lives: a PING of the peer waits behind all content that is on its way."""
STREAMS_MAX: Final = 2_000
"""Greatest number of streams of a connection whose handlers run, unless a server has another limit."""
BEGIN_WORK: Final = 4
"""Units of work to begin a stream, beyond the one unit of each frame. A unit takes about 10 µs."""
_BLOCK_BYTES: Final = 64
"""Bytes of a header block for one unit of work."""
_SETTINGS_BYTES: Final = 64
"""Bytes of settings for one unit of credit."""
_LOOKS: Final = 100
"""Number of waiting streams that a change of windows examines for one unit of credit."""
ALL_WORK: Final = 1 << 60
"""More units of work than any call of ``receive`` can do."""
_JOINED_BYTES: Final = 1 << 11
"""Greatest length of content that is copied after the head of its frame, for one write."""
_RESETS_KEPT: Final = 1_000
"""Greatest number of remembered streams that this side has reset. Frames for them may still arrive."""

BytesLike: TypeAlias = bytes | memoryview


class StreamListener(Protocol):
    """The receiver of one stream's parts, in order. The connection calls it, and it must not block."""

    def on_fields(self, fields: Fields, *, ended: bool) -> None:
        """Take the head of an answer, or trailers. (The head of a request creates the listener.)"""
        ...

    def on_data(self, content: BytesLike, *, ended: bool) -> None:
        """Take content. Call ``Http2Stream.consume`` once the content is not held any more."""
        ...

    def on_fault(self, error: GazetteError) -> None:
        """Handle a stream that was cut off: a reset, a fault, or a lost connection."""
        ...

    def on_room(self) -> None:
        """Send more, within this call. Called once after a ``send`` that did not take everything.

        Do not leave this to a task. The connection calls the next listener if room is left after this call:
        with tasks, it would call all listeners, although the first listener takes the room.
        """
        ...


Accept: TypeAlias = Callable[["Http2Stream", RequestHead, bool], StreamListener]
"""Returns the listener of a stream that the peer begins. The last argument is True if no content follows."""


class Http2Stream:
    """One stream. Its owner calls ``release`` when no task works for it any more."""

    __slots__ = (
        "_expected",
        "_granted",
        "_held",
        "_released",
        "_taken",
        "connection",
        "id",
        "listener",
        "local_ended",
        "remote_ended",
    )

    def __init__(self, connection: Http2Connection, id: int) -> None:
        self.id = id
        self.listener: StreamListener = _NO_LISTENER
        self.local_ended = False
        self.remote_ended = False
        self.connection = connection
        self._granted = FIRST_BYTES
        """Bytes that the peer may still send."""
        self._held = 0
        """Bytes that the listener has received and not consumed."""
        self._expected: int | None = None
        """Bytes of content that the head has announced and that have not arrived yet; None: not announced."""
        self._released = False
        self._taken = 0
        """The stream's window minus ``connection.first_window``, whose changes change all windows."""

    @property
    def window(self) -> int:
        """Bytes that the peer takes now on this stream."""
        return self._taken + self.connection.first_window

    @property
    def over(self) -> bool:
        """True once the stream has ended on both sides, or was reset."""
        return self.local_ended and self.remote_ended

    def send_fields(self, block: bytes, *, ended: bool) -> None:
        """Send a header block. Do nothing if this side has ended."""
        if self.local_ended:
            return
        connection, frame_type = self.connection, fr.HEADERS
        flags, limit = fr.END_STREAM if ended else 0, connection._frame_bytes
        while len(block) > limit:
            connection._write(fr.frame(frame_type, flags, self.id, block[:limit]))
            block, flags, frame_type = block[limit:], 0, fr.CONTINUATION
        connection._write(fr.frame(frame_type, flags | fr.END_HEADERS, self.id, block))
        if ended:
            connection._end_local(self)

    def send(self, content: memoryview, *, ended: bool) -> int:
        """Send as many bytes as may be sent now. Return their number. ``ended``: the last byte ends the
        stream. If less than all was sent, ``on_room`` follows. Raise ``Closed`` if this side has ended."""
        if self.local_ended:
            raise Closed("the stream has ended")
        connection, length, sent, window = self.connection, content.nbytes, 0, self.window
        room = max(0, min(length, window, connection._window))
        # A write may fill the socket, and so set ``_paused``.
        while sent < room and not connection._paused:
            end = min(sent + connection._frame_bytes, room)
            flags = fr.END_STREAM if ended and end == length else 0
            head = fr.head(end - sent, fr.DATA, flags, self.id)
            connection._write_content(content[sent:end], head)
            sent = end
        self._taken -= sent
        connection._window -= sent
        if sent < length:
            # Wait for the window of the connection or for the socket, or else for the stream's own window.
            (connection._waiting if sent < window else connection._shut)[self] = None
        elif ended:
            if not length:
                connection._write(fr.frame(fr.DATA, fr.END_STREAM, self.id))
            connection._end_local(self)
        return sent

    def send_whole(self, content: bytes) -> bool:
        """Send all content now. Send nothing and return False if the peer or the socket has no room, or if
        this side has ended."""
        connection = self.connection
        length, limit = len(content), connection._frame_bytes
        window = min(self.window, connection._window)
        if length > window or connection._paused or self.local_ended:
            return False
        self._taken -= length
        connection._window -= length
        # Do not stop if a write fills the socket: the content must be sent as a whole.
        if length <= limit:
            connection._write_content(content, fr.head(length, fr.DATA, 0, self.id))
            return True
        view = memoryview(content)
        for begin in range(0, length, limit):
            part = view[begin : begin + limit]
            connection._write_content(part, fr.head(len(part), fr.DATA, 0, self.id))
        return True

    def answer(self, head: bytes, content: bytes, trailers: bytes) -> bool:
        """Send a whole answer: head, content and trailers.

        Send nothing and return False if the answer must wait, has no content, or needs several frames for a
        part, or if this side has ended.
        """
        connection, length, id = self.connection, len(content), self.id
        limit = min(connection._frame_bytes, self.window, connection._window)
        largest = max(length, len(head), len(trailers))
        if largest > limit or connection._paused or self.local_ended or not length:
            return False
        connection._write(
            b"".join(
                (
                    fr.head(len(head), fr.HEADERS, fr.END_HEADERS, id),
                    head,
                    fr.head(length, fr.DATA, 0, id),
                    content,
                    fr.head(len(trailers), fr.HEADERS, fr.END_HEADERS | fr.END_STREAM, id),
                    trailers,
                )
            )
        )
        connection._credit.earn(length)
        self._taken -= length
        connection._window -= length
        connection._end_local(self)
        return True

    def charge(self, work: int) -> None:
        """Count units of work beyond those of frames. ``receive`` stops when its units are used up."""
        self.connection.work -= work

    def consume(self, length: int) -> None:
        """Count ``length`` bytes that the listener has consumed. Let the peer send more, once that is enough
        for an update of the window."""
        self._held -= min(length, self._held)  # A released stream holds nothing.
        if self.remote_ended:
            return
        connection = self.connection
        share = SHARED_BYTES // max(1, len(connection._streams))
        ahead = min(connection.ahead_bytes, max(FIRST_BYTES, share))
        increment = ahead - self._held - self._granted
        if increment >= ahead // 4:
            self._granted += increment
            connection._write(fr.window_update(self.id, increment))

    def reset(self, code: FaultCode) -> None:
        """End the stream at once on both sides. Do nothing if it has ended."""
        if self.over:
            return
        self.local_ended = self.remote_ended = True
        self.connection.note_reset(self, code)

    def release(self) -> None:
        """Give up the stream's place among running streams, and the bytes that it holds. Calls may repeat."""
        if self._released:
            return
        self._released = True
        connection = self.connection
        connection.running -= 1
        self.consume(self._held)
        connection._changed()
        if self.over:  # Break reference cycles of a stream that has ended.
            self.listener = _NO_LISTENER


class _NoListener:
    """The listener of a stream that has none yet."""

    def on_fields(self, fields: Fields, *, ended: bool) -> None:
        pass

    def on_data(self, content: BytesLike, *, ended: bool) -> None:
        pass

    def on_fault(self, error: GazetteError) -> None:
        pass

    def on_room(self) -> None:
        pass


_NO_LISTENER: Final = _NoListener()


class Http2Connection:
    """The state of one connection. Loop-bound.

    ``write`` takes bytes for the peer, in order. With ``accept``, this side is a server of at most
    ``streams_max`` streams; without ``accept``, a client. Call ``begin`` first. Close the connection when
    ``receive`` raises: the reason is on its way to the peer.
    """

    def __init__(
        self,
        write: Callable[[BytesLike], None],
        monotonic: Callable[[], float],
        accept: Accept | None = None,
        streams_max: int = STREAMS_MAX,
    ) -> None:
        self._write = write
        self._accept = accept
        """Makes the listener of each stream that a client begins. None: this side is the client."""
        self._streams_max = streams_max
        self._decoder = HeaderDecoder()
        self._credit = FloodCredit(monotonic)
        self._monotonic = monotonic
        self._streams: dict[int, Http2Stream] = {}
        self._reset: dict[int, None] = {}  # Numbers of streams that this side has reset, in order.
        self._rest = b""
        """Bytes that have arrived. The bytes from ``_at`` on are not handled yet."""
        self._at = 0
        self.work = 0
        """Units of work that ``receive`` may still do."""
        self.has_backlog = False
        """True if ``receive`` has left something for a later call."""
        self._preface = fr.PREFACE if accept is not None else b""
        self._data_left = 0
        """Bytes of the current DATA frame that have not arrived yet."""
        self._data_flags = 0
        self._data_of: Http2Stream | None = None  # None if the content of this frame is dropped.
        self._block: list[bytes] = []  # Parts of an incomplete header block.
        self._block_of = 0
        """Number of the stream whose header block is incomplete; 0 if no block is."""
        self._block_flags = 0
        self._window = fr.WINDOW_DEFAULT
        """Bytes that the peer takes on all streams together."""
        self._granted = fr.WINDOW_DEFAULT  # Bytes that the peer may still send, on all streams.
        self._granted_at = monotonic()
        self.received_bytes = 0
        """Bytes of content that have arrived, on all streams."""
        self.first_window = fr.WINDOW_DEFAULT
        """Bytes that the peer takes on a new stream. A change applies to all streams."""
        self._taken_most = 0
        """An upper bound of ``Http2Stream._taken`` over all streams, made exact only when it matters."""
        self._frame_bytes = fr.FRAME_BYTES_MIN  # Largest payload that the peer accepts.
        self._last = 0
        """Number of the peer's last stream."""
        self._fields: Fields = []
        self._request = RequestHead(b"", b"", b"", [])
        """The parsed form of ``_fields``, the header list of the last request."""
        self._next = 1
        """Number of the next stream that a client begins."""
        self._waiting: OrderedDict[Http2Stream, None] = OrderedDict()
        """Streams that wait for the window of the connection, or for the socket, in order."""
        self._shut: dict[Http2Stream, None] = {}
        """Streams that wait for their own windows to open."""
        self._paused = False  # True while the socket is full.
        self.ahead_bytes = STREAM_BYTES
        """Bytes that the peer may send on a stream beyond the consumed bytes; at least `FIRST_BYTES`."""
        self.is_known = False
        """True once the peer of a server has sent the first message of a call, or got an answer."""
        self.peer = UNKNOWN
        """The other end of the connection, as far as it is known."""
        self.running = 0
        """Streams that were begun and not released."""
        self.peer_streams_max = 1 << 31
        """Greatest number of streams that a client may have open at a time."""
        self.peer_list_bytes_max = 1 << 32
        """Greatest size of a header list that the peer takes: see `headers.fits`."""
        self.settled = False
        """True once the peer's settings have arrived."""
        self.draining = False
        """True once the peer, or this side, may begin no more streams."""
        self.on_change: Callable[[], None] | None = None
        """Called when streams have ended or were released, and when the peer's settings or ``draining``
        change."""

    # -- this side

    def begin(self) -> None:
        """Send the opening frames of a connection."""
        if self._accept is None:
            self._write(fr.PREFACE)
        settings = {
            fr.INITIAL_WINDOW_SIZE: FIRST_BYTES,
            fr.MAX_HEADER_LIST_SIZE: LIST_BYTES_MAX,
        }
        if self._accept is None:
            settings[fr.ENABLE_PUSH] = 0
        else:
            settings[fr.MAX_CONCURRENT_STREAMS] = self._streams_max
        self._write(fr.settings(settings))
        self._grant()

    @property
    def streams(self) -> int:
        """Number of streams that are open."""
        return len(self._streams)

    def ping(self, payload: bytes) -> None:
        """Send a PING, which the peer answers with the same eight bytes."""
        self._write(fr.ping(payload))

    def drain(self, *, last: bool = False) -> None:
        """Ask the peer to begin no more streams. With ``last``, refuse streams that begin from now on.

        The peer may begin streams until this request reaches it, and may repeat refused streams elsewhere.
        """
        self.draining = self.draining or last
        self._write(fr.goaway(self._last if last else fr.WINDOW_MAX, FaultCode.NO_ERROR))

    def open(self, block: bytes, listener: StreamListener, *, ended: bool) -> Http2Stream:
        """Begin a stream of a client. Raise ``Unavailable`` if the connection takes no more streams."""
        if self.draining:
            raise Unavailable("the connection takes no more calls")
        stream = self._streams[self._next] = Http2Stream(self, self._next)
        stream.listener = listener
        self._next += 2
        self.running += 1
        stream.send_fields(block, ended=ended)
        if self._next > fr.WINDOW_MAX:  # All numbers of streams are used.
            self.draining = True
            self._changed()
        return stream

    def _write_content(self, content: BytesLike, head: bytes) -> None:
        if len(content) <= _JOINED_BYTES:
            self._write(head + content)
        else:
            self._write(head)
            self._write(content)
        self._credit.earn(len(content))

    def note_reset(self, stream: Http2Stream, code: FaultCode) -> None:
        """Send a reset of a stream, and remember the stream for frames that still arrive."""
        self._write(fr.rst_stream(stream.id, code))
        self._reset[stream.id] = None
        if len(self._reset) > _RESETS_KEPT:
            del self._reset[next(iter(self._reset))]
        self._forget(stream)

    def pause(self) -> None:
        """Send no more content, because the socket is full."""
        self._paused = True

    def resume(self) -> None:
        """Send content again."""
        self._paused = False
        self._give_room()

    def lose(self, error: GazetteError) -> None:
        """End all streams with ``error``: the socket is gone."""
        self.draining = True
        streams, self._streams = list(self._streams.values()), {}
        self._waiting.clear()
        self._shut.clear()
        self._rest, self._at, self.has_backlog = b"", 0, False
        for stream in streams:
            stream.local_ended = stream.remote_ended = True
            stream.listener.on_fault(error)
        self._changed()

    # -- the peer

    def receive(self, data: bytes, work: int = ALL_WORK) -> None:
        """Take bytes that have arrived, and handle frames until ``work`` units are used up. The rest is a
        backlog.

        Raise ``ConnectionFault`` if the peer broke a rule of the connection.
        """
        if self._rest:
            self.keep(data)
        elif data:
            self._rest, self._at = data, 0
        self.work = work
        try:
            self._receive()
        except ConnectionFault as fault:
            self._rest, self._at, self.has_backlog = b"", 0, False
            self._write(fr.goaway(self._last, fault.code, fault.message))
            raise

    def keep(self, data: bytes) -> None:
        """Take bytes that have arrived, and leave them to the next ``receive``."""
        if data:
            if self._rest:
                data = self._rest[self._at :] + data
            self._rest, self._at, self.has_backlog = data, 0, True

    def _receive(self) -> None:
        """Handle frames until the data or the work runs out. Pass on content before its frame is complete."""
        data, position = self._rest, self._at
        end = len(data)
        if self._preface and position < end:
            preface = self._preface
            if not preface.startswith(data[: len(preface)]):
                raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "the client does not speak HTTP/2")
            if end < len(preface):
                self.has_backlog = False
                return
            position, self._preface = len(preface), b""
        while position < end and self.work > 0:
            if not self._data_left:
                if end - position < fr.HEAD_BYTES:
                    break
                self.work -= 1
                length, frame_type, flags, number = fr.read_head(data, position)
                if length > fr.FRAME_BYTES_MIN or self._block_of or not self.settled:
                    self._check_head(length, frame_type, number)
                begin = position + fr.HEAD_BYTES
                if frame_type != fr.DATA or not length or flags & fr.PADDED:
                    if end - begin < length:
                        break
                    position = begin + length
                    try:
                        self._on_frame(frame_type, flags, number, data[begin:position])
                    except StreamFault as fault:
                        self._on_stream_fault(fault)
                    continue
                self._begin_data(length, flags, number)
                self._data_left, position = length, begin
            available = min(self._data_left, end - position)
            self._data_left -= available
            self._on_content(memoryview(data)[position : position + available])
            position += available
        self.has_backlog = position < end and self.work <= 0
        if self.has_backlog:
            self._rest, self._at = data, position
        else:
            self._rest, self._at = data[position:], 0

    def _check_head(self, length: int, kind: int, stream: int) -> None:
        """Raise ``ConnectionFault`` for a frame that is too large or not permitted now."""
        if length > fr.FRAME_BYTES_MIN:
            raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, "a frame is too large")
        if self._block_of and (kind != fr.CONTINUATION or stream != self._block_of):
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "a header block was interrupted")
        if not self.settled and kind != fr.SETTINGS:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        match kind:
            case fr.DATA:
                self._on_whole_data(flags, stream, payload)
            case fr.HEADERS:
                self._on_headers(flags, stream, payload)
            case fr.CONTINUATION:
                self._on_continuation(flags, stream, payload)
            case fr.WINDOW_UPDATE:
                self._on_window_update(stream, payload)
            case fr.SETTINGS:
                self._on_settings(flags, stream, payload)
            case fr.PING:
                self._on_ping(flags, stream, payload)
            case fr.RST_STREAM:
                self._on_rst_stream(stream, payload)
            case fr.GOAWAY:
                self._on_goaway(stream, payload)
            case fr.PRIORITY:
                self._on_priority(stream, payload)
            case fr.PUSH_PROMISE:
                raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "PUSH_PROMISE is not accepted")
            case _:
                self._credit.spend()  # Frames of an unknown kind are ignored (RFC 9113, 5.5).

    def _on_stream_fault(self, fault: StreamFault) -> None:
        """Reset the stream of a fault, and report the fault to its listener, if the stream is open."""
        self._credit.spend()
        stream = self._streams.get(fault.stream)
        if stream is None:
            self._write(fr.rst_stream(fault.stream, fault.code))
            return
        stream.reset(fault.code)
        stream.listener.on_fault(fault)

    # Content.

    def _begin_data(self, length: int, flags: int, number: int) -> None:
        """Check a DATA frame by its head, and charge its length to both windows. Reset a stream at fault.
        Raise ``ConnectionFault`` beyond the connection's window."""
        self._data_of, self._data_flags = None, flags
        # Before the checks of the stream: a frame of an ended stream uses the connection's window, too.
        self._granted -= length
        self.received_bytes += length
        if self._granted < 0:
            raise ConnectionFault(
                FaultCode.FLOW_CONTROL_ERROR, "the connection's window is exceeded"
            )
        self._grant()
        stream = self._stream_of(number, "DATA")
        try:
            if stream is None:
                if number in self._reset or self._accept is None:
                    return  # Late after a reset. A client does not check that it has reset the stream.
                raise StreamFault(
                    number, FaultCode.STREAM_CLOSED, "DATA for a stream that has ended"
                )
            if stream.remote_ended:
                raise StreamFault(
                    number, FaultCode.STREAM_CLOSED, "DATA behind the end of a stream"
                )
            stream._granted -= length
            if stream._granted < 0:
                text = "the stream's window is exceeded"
                raise StreamFault(number, FaultCode.FLOW_CONTROL_ERROR, text)
        except StreamFault as fault:
            self._on_stream_fault(fault)
            return
        self._data_of = stream
        self._credit.earn(length)

    def _on_content(self, content: memoryview) -> None:
        """Pass on a part of a DATA frame that is not padded. ``_data_left`` counts the bytes after it."""
        stream = self._data_of
        if not content:
            return
        if stream is None or stream.remote_ended:  # A reset may have come between two parts.
            return
        ended = bool(self._data_flags & fr.END_STREAM) and not self._data_left
        try:
            self._deliver(stream, content, ended=ended)
        except StreamFault as fault:
            self._on_stream_fault(fault)

    def _on_whole_data(self, flags: int, number: int, payload: bytes) -> None:
        """Take a DATA frame that is empty or padded."""
        content = fr.without_padding(payload, flags)
        if not content and not flags & fr.END_STREAM:
            self._credit.spend()
        self._begin_data(len(payload), flags, number)
        stream = self._data_of
        if stream is None:
            return
        padding = len(payload) - len(content)
        stream._held += padding
        self._deliver(stream, memoryview(content), ended=bool(flags & fr.END_STREAM))
        if padding:
            stream.consume(padding)

    def _deliver(self, stream: Http2Stream, content: memoryview, *, ended: bool) -> None:
        """Pass content to the listener. Raise ``StreamFault`` if its length is not as announced."""
        length = content.nbytes
        if stream._expected is not None:
            stream._expected -= length
            if stream._expected < 0 or (ended and stream._expected):
                text = "the content is not as long as its head says"
                raise StreamFault(stream.id, FaultCode.PROTOCOL_ERROR, text)
        stream._held += length
        if ended:
            stream.remote_ended = True
        stream.listener.on_data(content, ended=ended)
        if ended:
            self._end_remote(stream)

    def _grant(self) -> None:
        """Let the peer send more on the connection, once that is enough for an update of the window."""
        increment = CONNECTION_BYTES - self._granted
        if increment < fr.FRAME_BYTES_MIN:
            return
        now = self._monotonic()
        if increment >= _GRANT_BYTES_MIN or now - self._granted_at >= _GRANT_S:
            self._granted_at = now
            self._granted += increment
            self._write(fr.window_update(0, increment))

    # Headers.

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        """Begin a header block, and handle a complete one. Raise ``ConnectionFault`` or ``StreamFault``."""
        if not number:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "HEADERS has no stream")
        block = fr.without_padding(payload, flags)
        depends_on_itself = False
        if flags & fr.PRIORITIZED:
            if len(block) < 5:
                raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, "HEADERS has no whole priority")
            depends_on_itself = fr.read_long(block[:4], "HEADERS") & fr.WINDOW_MAX == number
            block = block[5:]
        self._block, self._block_of, self._block_flags = [block], number, flags
        if flags & fr.END_HEADERS:
            self._end_block(depends_on_itself=depends_on_itself)
        elif depends_on_itself:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "a stream depends on itself")

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> None:
        if not self._block_of:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "CONTINUATION continues nothing")
        self._block.append(payload)
        if len(self._block) > BLOCK_FRAMES_MAX or sum(map(len, self._block)) > BLOCK_BYTES_MAX:
            raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, "a header block is too large")
        if flags & fr.END_HEADERS:
            self._end_block()

    def _end_block(self, *, depends_on_itself: bool = False) -> None:
        """Handle a header block of which all frames have arrived. Raise ``ConnectionFault`` or
        ``StreamFault``."""
        number, flags = self._block_of, self._block_flags
        block = self._block[0] if len(self._block) == 1 else b"".join(self._block)
        self._block, self._block_of = [], 0
        self.work -= len(block) // _BLOCK_BYTES
        # Decode the block of a refused stream, too: it may change the table.
        fields = self._decoder.decode(block)
        ended = bool(flags & fr.END_STREAM)
        stream = self._streams.get(number)
        if depends_on_itself:
            if stream is None:  # The number is used up: later streams have greater numbers.
                self._last = max(self._last, number)
            raise StreamFault(number, FaultCode.PROTOCOL_ERROR, "a stream depends on itself")
        if stream is not None:
            self._on_later_fields(stream, fields, ended=ended)
        elif self._accept is not None:
            self._begin_stream(number, fields, ended=ended)
        # No branch for late HEADERS of a stream that this client began, and that has ended: ignore them.
        elif number not in self._reset and (not number % 2 or number >= self._next):
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "HEADERS for a stream that is not ours")

    def _begin_stream(self, number: int, fields: Fields, *, ended: bool) -> None:
        """Begin a stream of a server's client, or refuse it with a fault."""
        assert self._accept is not None
        if number in self._reset:
            return  # These are trailers of a stream that this side has reset.
        if not number % 2:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "a client begins an even stream")
        if number <= self._last:
            raise ConnectionFault(FaultCode.STREAM_CLOSED, "HEADERS for a stream that has ended")
        self._last = number
        self._credit.spend()
        self.work -= BEGIN_WORK
        if self.draining or self.running >= self._streams_max:
            raise StreamFault(number, FaultCode.REFUSED_STREAM, "no more streams are taken")
        # The decoder returns the same list for a block that it has kept. Then reuse the parsed request.
        request = self._request if fields is self._fields else RequestHead.of(number, fields)
        self._fields, self._request = fields, request
        if ended and request.content_length:
            text = "the content is not as long as its head says"
            raise StreamFault(number, FaultCode.PROTOCOL_ERROR, text)
        stream = self._streams[number] = Http2Stream(self, number)
        stream._expected = request.content_length
        stream.remote_ended = ended
        self.running += 1
        stream.listener = self._accept(stream, request, ended)

    def _on_later_fields(self, stream: Http2Stream, fields: Fields, *, ended: bool) -> None:
        """Handle trailers of a request, or the head or trailers of an answer. Raise ``StreamFault`` if they
        are out of place."""
        number = stream.id
        if stream.remote_ended:
            raise StreamFault(number, FaultCode.STREAM_CLOSED, "HEADERS behind the end of a stream")
        if self._accept is not None:
            if not ended:
                raise StreamFault(
                    number, FaultCode.PROTOCOL_ERROR, "trailers do not end the stream"
                )
            check_trailers(number, fields)
        if ended and stream._expected:
            text = "the content is not as long as its head says"
            raise StreamFault(number, FaultCode.PROTOCOL_ERROR, text)
        stream.remote_ended = ended
        stream.listener.on_fields(fields, ended=ended)
        if ended:
            self._end_remote(stream)

    # Other frames.

    def _on_window_update(self, number: int, payload: bytes) -> None:
        """Open the window of the connection (number 0) or of a stream. Let waiting streams send."""
        self._credit.spend()
        increment = fr.read_long(payload, "WINDOW_UPDATE") & fr.WINDOW_MAX
        if not number:
            if not increment:
                raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "a window grows by nothing")
            self._window += increment
            if self._window > fr.WINDOW_MAX:
                raise ConnectionFault(FaultCode.FLOW_CONTROL_ERROR, "a window is too large")
            self._give_room()
            return
        stream = self._stream_of(number, "WINDOW_UPDATE")
        if not increment:
            raise StreamFault(number, FaultCode.PROTOCOL_ERROR, "a window grows by nothing")
        if stream is None:
            return
        relative = stream._taken = stream._taken + increment
        self._taken_most = max(self._taken_most, relative)
        window = relative + self.first_window
        if window > fr.WINDOW_MAX:
            raise StreamFault(number, FaultCode.FLOW_CONTROL_ERROR, "a window is too large")
        if window > 0 and stream in self._shut:
            del self._shut[stream]
            self._waiting[stream] = None
            self._give_room()

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        """Adopt and answer the peer's settings. Do nothing for an answer to our own settings."""
        self._credit.spend()
        if number:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "SETTINGS has a stream")
        if flags & fr.ACK:
            if payload:
                raise ConnectionFault(
                    FaultCode.FRAME_SIZE_ERROR, "an answer to SETTINGS has payload"
                )
            if not self.settled:
                raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            return
        values = fr.read_settings(payload)
        self._credit.spend(len(payload) // _SETTINGS_BYTES)
        self._change_windows(values.get(fr.INITIAL_WINDOW_SIZE, self.first_window))
        self._frame_bytes = values.get(fr.MAX_FRAME_SIZE, self._frame_bytes)
        self.peer_streams_max = values.get(fr.MAX_CONCURRENT_STREAMS, self.peer_streams_max)
        self.peer_list_bytes_max = values.get(fr.MAX_HEADER_LIST_SIZE, self.peer_list_bytes_max)
        self.settled = True
        self._write(fr.frame(fr.SETTINGS, fr.ACK, 0))
        self._give_room()
        self._changed()

    def _change_windows(self, size: int) -> None:
        """Adopt the peer's initial window, which changes the windows of all streams. Raise
        ``ConnectionFault`` if a window gets too large."""
        grown, self.first_window = size > self.first_window, size
        if size + self._taken_most > fr.WINDOW_MAX:
            self._taken_most = max((stream._taken for stream in self._streams.values()), default=0)
            if size + self._taken_most > fr.WINDOW_MAX:
                raise ConnectionFault(FaultCode.FLOW_CONTROL_ERROR, "a window is too large")
        if grown and self._shut:
            self._credit.spend(len(self._shut) // _LOOKS)
            open_now = [stream for stream in self._shut if stream.window > 0]
            for stream in open_now:
                del self._shut[stream]
            self._waiting.update(dict.fromkeys(open_now))

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "PING has a stream")
        if len(payload) != 8:
            raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, "PING does not have 8 bytes")
        if flags & fr.ACK:
            return  # Any bytes from the peer show that it is alive.
        self._credit.spend()
        self._write(fr.ping(payload, ack=True))

    def _on_rst_stream(self, number: int, payload: bytes) -> None:
        self._credit.spend()
        code = fr.read_long(payload, "RST_STREAM")
        stream = self._stream_of(number, "RST_STREAM")
        if stream is None:
            return
        stream.local_ended = stream.remote_ended = True
        self._forget(stream)
        stream.listener.on_fault(_reset_by_peer(number, code))

    def _on_goaway(self, number: int, payload: bytes) -> None:
        """Begin no more streams. Fail, as refused, those streams of a client that the server did not take.

        Raise ``ConnectionFault`` if the server has given the connection up because of a fault.
        """
        self._credit.spend()
        if number:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "GOAWAY has a stream")
        if len(payload) < 8:
            raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, "GOAWAY is cut short")
        self.draining = True
        last_number = fr.read_long(payload[:4], "GOAWAY") & fr.WINDOW_MAX
        code = fr.read_long(payload[4:8], "GOAWAY")
        if self._accept is None:  # Only streams of a client can be refused by a GOAWAY.
            for stream in [stream for stream in self._streams.values() if stream.id > last_number]:
                stream.local_ended = stream.remote_ended = True
                self._forget(stream)
                stream.listener.on_fault(_reset_by_peer(stream.id, FaultCode.REFUSED_STREAM))
            if code != FaultCode.NO_ERROR:
                reason = payload[8 : 8 + fr.GOAWAY_TEXT_BYTES].decode(errors="replace")
                text = printable(f"{_name_of(code)} {reason}".rstrip(), one_line=True)
                raise ConnectionFault(  # Our own GOAWAY has no error: the peer has found the fault.
                    FaultCode.NO_ERROR, f"the peer gave the connection up: {text}"
                )
        self._changed()

    def _on_priority(self, number: int, payload: bytes) -> None:
        self._credit.spend()
        if not number:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "PRIORITY has no stream")
        if len(payload) != 5:
            raise StreamFault(number, FaultCode.FRAME_SIZE_ERROR, "PRIORITY does not have 5 bytes")
        if fr.read_long(payload[:4], "PRIORITY") & fr.WINDOW_MAX == number:
            raise StreamFault(number, FaultCode.PROTOCOL_ERROR, "a stream depends on itself")

    # Streams.

    def _stream_of(self, number: int, name: str) -> Http2Stream | None:
        """Return the stream of a frame; None if the stream has ended. Raise ``ConnectionFault`` for a stream
        that never began."""
        stream = self._streams.get(number)
        if stream is None:
            next_number = self._next if self._accept is None else self._last + 1
            if not number or number >= next_number or not number % 2:
                text = f"{name} for a stream that never began"
                raise ConnectionFault(FaultCode.PROTOCOL_ERROR, text)
        return stream

    def _end_local(self, stream: Http2Stream) -> None:
        stream.local_ended = True
        self._credit.refund()
        if stream.remote_ended:
            self._forget(stream)

    def _end_remote(self, stream: Http2Stream) -> None:
        stream.remote_ended = True
        if stream.local_ended:
            self._forget(stream)

    def _forget(self, stream: Http2Stream) -> None:
        if self._waiting or self._shut:
            self._waiting.pop(stream, None)
            self._shut.pop(stream, None)
        if self._streams.pop(stream.id, None) is not None:
            self._changed()

    def _give_room(self) -> None:
        """Call the listeners of waiting streams, in order, for as long as there is room."""
        waiting = self._waiting
        while waiting and self._window > 0 and not self._paused:
            stream, _ = waiting.popitem(last=False)
            self.work -= 1
            stream.listener.on_room()

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()


def _name_of(code: int) -> str:
    """Return the name of a code that the peer has sent; the number of an unknown code."""
    try:
        return FaultCode(code).name
    except ValueError:
        return str(code)


def _reset_by_peer(number: int, code: int) -> GazetteError:
    name = _name_of(code)
    if code == FaultCode.REFUSED_STREAM:
        return Unavailable("the peer took no more calls", code=name, stream=number)
    return Broken("the peer has reset the stream", code=name, stream=number)
