"""One connection of HTTP/1.1: its requests are answered one after the other, by an ASGI application.

h11 knows the protocol. This module moves its bytes, and bounds the cost of a client. Each wait for the client
has a limit of time, and a body is read no further than the application takes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, cast
from urllib.parse import unquote

import h11
from starlette.types import ASGIApp, Message, Scope

from gazette.net.alarm import Alarm
from gazette.net.strict_lines import refuse_bare_lf
from gazette.runtime.tasks import TaskScope

log = logging.getLogger(__name__)

HEAD_S: Final = 10.0
"""Seconds for the head of a request, from the connection, or from the first byte of a later request."""
IDLE_S: Final = 5.0
"""Seconds from an answer to the first byte of the next request."""
BODY_S: Final = 30.0
"""Seconds without a byte of a request's body. Then the connection is closed."""
LINGER_S: Final = 2.0
"""Seconds for the rest of a body after the answer. Then the connection is closed."""
HALF_CLOSED_S: Final = 10.0
"""Seconds without a byte of an answer, after which a client that has ended its side counts as gone."""
STALL_S: Final = 60.0
"""Seconds in which a client must take at least 48 KiB of an answer; otherwise it is cut off."""
_HEAD_MAX: Final = 65_536
"""Upper bound in bytes of a request's head, or of the trailers of a body."""
_UNREAD_MAX: Final = 65_536
"""Upper bound of the bytes of a body that wait for the application. At the bound, the client is not read."""
_UNSENT_MAX: Final = 65_536
"""Upper bound of the bytes of an answer that wait for the client, before the application has to wait."""
_TOO_LATE: Final = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_CLOSE: Final = (b"connection", b"close")
_NO_REQUEST: Final = "this is no request of HTTP/1.1"
_REFUSALS: Final = {
    431: f"the head of a request may have {_HEAD_MAX:,} bytes at most",
    501: "a body must be sent with a Content-Length, or with Transfer-Encoding: chunked",
    505: "only HTTP/1.1 and HTTP/1.0 are served here",
}
_BYTES: Final = re.compile(r"[:'\"]| b['\"]| bytearray")
"""Marks the bytes of a request in an error text of h11. The log omits these bytes: they may hold a token."""
_RESET: Final = struct.pack("ii", 1, 0)
"""Value of SO_LINGER with which a close resets the connection."""
_TEXT: Final = (b"content-type", b"text/plain; charset=utf-8")


@dataclass(slots=True)
class Serving:
    """State that the connections of one server share."""

    app: ASGIApp
    scope: TaskScope
    """Owner of the tasks that answer requests."""
    connections: set[HttpConnection] = field(default_factory=set)
    requests: set[asyncio.Task[None]] = field(default_factory=set)
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a connection was used, or lost."""
    ends: bool = False
    """True once each answer says that its connection serves no further request."""


class HttpConnection(asyncio.Protocol):
    """A connection that ``serving`` counts from ``connection_made`` on, when ``made`` is called.

    ``since`` is the loop's time at which the connection began to wait for a request. Ignore it if ``busy``.
    """

    def __init__(self, serving: Serving, made: Callable[[], None] = lambda: None) -> None:
        self._serving = serving
        self._made = made
        self.protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_MAX)
        refuse_bare_lf(self.protocol)
        self.transport: asyncio.Transport
        self.writable = asyncio.Event()
        self.writable.set()
        self.since = self._heard_at = _time()
        self._request: AsgiCycle | None = None  # The last request; None before the first.
        self._asks_for_head = False  # True for HEAD: the answer has no body.
        self._request_alarm = Alarm(self._request_late)
        self._body_alarm = Alarm(self._body_late)
        self._stall_alarm = Alarm(self._stalled)

    @property
    def heard(self) -> bool:
        """True once the whole head of a request has arrived."""
        return self._request is not None

    @property
    def busy(self) -> bool:
        """True while a request is being answered."""
        return self._request is not None and not self._request.complete

    @property
    def idle(self) -> bool:
        """True if the connection was used before, and waits for the next request."""
        return self._request is not None and self._request.complete

    @property
    def _is_last(self) -> bool:
        """True if no request follows the present one."""
        request = self._request
        return self._serving.ends or (request is not None and request.half_closed.is_set)

    def close(self) -> None:
        """Close the connection after the bytes that were written. The client must take them in `STALL_S`."""
        if not self.transport.is_closing():
            self.transport.close()
            if self.transport.get_write_buffer_size():
                self._stall_alarm.set(STALL_S)

    def cut_off(self) -> None:
        """End the connection now. If bytes are missing, reset it: an answer that ends with its connection
        must not look whole."""
        transport = self.transport
        is_missing = not transport.is_closing() or transport.get_write_buffer_size()
        if is_missing and (sock := transport.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        transport.abort()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=_UNSENT_MAX)  # With TLS it would be 512 KiB.
        self._serving.connections.add(self)
        self._made()
        self._request_alarm.set(HEAD_S)

    def data_received(self, data: bytes) -> None:
        self._heard_at = _time()
        if self.protocol.their_state is h11.MUST_CLOSE:
            return  # Bytes after the last request have no meaning.
        if self.idle and not self.protocol.trailing_data[0]:  # The next request begins.
            self._request_alarm.unset()
        self.protocol.receive_data(data)
        self._advance()

    def eof_received(self) -> bool:
        """Finish the answer to a whole request, although the client sends no more. Otherwise close the
        connection. With TLS always close it: TLS cannot be closed by half."""
        request = self._request
        is_whole = self.protocol.their_state in (h11.DONE, h11.MUST_CLOSE)
        if request is None or request.complete or not is_whole:
            return False
        if self.transport.get_extra_info("sslcontext") is not None:
            return False
        request.half_closed.set(HALF_CLOSED_S)
        return True

    def answer_late(self) -> None:
        """Close the connection of a client that has ended its side, or look later if bytes wait for it."""
        if self.writable.is_set() or self._request is None:
            self.close()
        else:
            self._request.half_closed.set(HALF_CLOSED_S)

    def pause_writing(self) -> None:
        self.writable.clear()
        self._stall_alarm.set(STALL_S)

    def resume_writing(self) -> None:
        self.writable.set()
        if not self.transport.is_closing():
            self._stall_alarm.unset()

    def connection_lost(self, exc: Exception | None) -> None:
        self._serving.connections.discard(self)
        for alarm in (self._request_alarm, self._body_alarm, self._stall_alarm):
            alarm.unset()
        if self._request is not None:
            self._request.lose()
        self.writable.set()
        self._serving.moved.set()

    # What the client sends.

    def _advance(self) -> None:
        """Handle the events that h11 finds in the bytes that have arrived.

        Bytes after the last request of a connection have no meaning (RFC 9112, 9.6).
        """
        while not self.transport.is_closing() and self.protocol.their_state is not h11.MUST_CLOSE:
            try:
                event = self.protocol.next_event()
            except h11.RemoteProtocolError as error:
                self._refuse(error.error_status_hint, str(error))
                break
            if event is h11.PAUSED:
                self.transport.pause_reading()  # The next request waits for this answer.
                break
            if not isinstance(event, h11.Request | h11.Data | h11.EndOfMessage):
                break
            self._take(event)
        if not self.transport.is_closing():
            self._watch()

    def _take(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        """Begin a request, or give the present request a part of its body or the end."""
        request = self._request
        if isinstance(event, h11.Request):
            self._asks_for_head = event.method == b"HEAD"
            if event.http_version.startswith(b"1."):
                self._begin(event)
            else:
                self._refuse(505)
            return
        assert request is not None, "a body follows its head"
        if isinstance(event, h11.Data):
            request.feed(event.data)
        elif request.complete:  # The rest of a request that was answered early has arrived.
            self._next_cycle()
        else:
            request.end()

    def _begin(self, head: h11.Request) -> None:
        serving, self._request = self._serving, AsgiCycle(self, head)
        task = serving.scope.spawn(self._request.run(serving.app), name="http request")
        serving.requests.add(task)
        task.add_done_callback(serving.requests.discard)
        serving.moved.set()

    def _refuse(self, status: int, why: str = "") -> None:
        """Refuse bytes that are no request, and close. Send no refusal if an answer has begun."""
        reason = _REFUSALS.get(status, _NO_REQUEST)
        detail = _BYTES.split(why)[0]
        log.warning(
            "an HTTP request was refused: %(reason)s",
            {"reason": f"{reason} ({detail})" if detail else reason},
            extra={"cause": f"refused {status}"},
        )
        if self._request is not None:
            self._request.lose()
        if self.protocol.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.answer(status, f"{reason}\n")
        self.close()

    def _watch(self) -> None:
        """Limit the time in which the client must send the missing part of its request.

        The rest of a body has `BODY_S` from each byte to the next, or `LINGER_S` in total after the answer.
        """
        request = self._request
        if self.busy:
            self._request_alarm.unset()
        elif request is None or self.protocol.trailing_data[0]:  # A first or a begun head.
            self._request_alarm.set(HEAD_S)
        elif self.protocol.their_state is h11.IDLE:
            self._request_alarm.set(IDLE_S)
        if self.protocol.their_state is not h11.SEND_BODY:
            self._body_alarm.unset()
        else:
            self._body_alarm.set(BODY_S if self.busy else LINGER_S)

    def _request_late(self) -> None:
        """Close the connection. If the head of a request has begun, first answer 408."""
        if self.protocol.trailing_data[0] and not self.transport.is_closing():
            self.transport.write(_TOO_LATE)
        self.close()

    def _body_late(self) -> None:
        """Close the connection if the body is late. Give the client more time if it has sent a part since, or
        had to wait itself. Answer 408 if no answer has begun."""
        request = self._request
        assert request is not None
        if request.complete:
            self.close()
            return
        silent_s = _time() - self._heard_at
        if silent_s < BODY_S:
            self._body_alarm.set(BODY_S - silent_s)
        elif request.holds_up_client:
            self._body_alarm.set(BODY_S)
        else:
            if not request.started:
                self.transport.write(_TOO_LATE)
            self.close()

    def _stalled(self) -> None:
        log.debug("a client reads its answer too slowly: its connection is cut off")
        self.cut_off()

    # What the application answers.

    def send(self, *events: h11.Event) -> None:
        """Write events of an answer. No effect if the connection is closing."""
        parts = [part for event in events if (part := self.protocol.send(event))]
        if self._request is not None and self._request.half_closed.is_set:
            self._request.half_closed.unset()
            self._request.half_closed.set(HALF_CLOSED_S)
        if parts and not self.transport.is_closing():
            self.transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> h11.Response:
        """Return the head of an answer. The head says whether the connection serves a further request."""
        last = (_CLOSE,) if self._is_last else ()
        try:
            reason = HTTPStatus(status).phrase.encode()
        except ValueError:
            reason = b""
        return h11.Response(status_code=status, headers=[*last, *headers], reason=reason)

    def answer(self, status: int, text: str) -> None:
        """Write a whole answer, after which the connection is closed."""
        if self.transport.is_closing():
            return
        body = text.encode()
        length = (b"content-length", str(len(body)).encode())
        parts = [] if self._asks_for_head else [h11.Data(data=body)]
        # h11 refuses if there is no place for an answer any more.
        with contextlib.suppress(h11.LocalProtocolError):
            self.send(self.head(status, (_TEXT, _CLOSE, length)), *parts, h11.EndOfMessage())

    def answered(self) -> None:
        """Continue with the next request, or close the connection if the answer said so."""
        self.since = _time()
        self._serving.moved.set()
        if self._is_last or self.protocol.our_state is h11.MUST_CLOSE:
            self.close()
        if self.transport.is_closing():
            return
        self.transport.resume_reading()
        self._body_alarm.unset()
        if self.protocol.their_state is h11.DONE:
            self._next_cycle()
        self._advance()

    def _next_cycle(self) -> None:
        if self.protocol.our_state is h11.DONE:
            self.protocol.start_next_cycle()


class AsgiCycle:
    """One request and its answer, as an ASGI application sees them."""

    def __init__(self, connection: HttpConnection, head: h11.Request) -> None:
        self._connection = connection
        self._method = head.method
        self._scope = _scope_of(connection.transport, head)
        self._awaits_continue = connection.protocol.they_are_waiting_for_100_continue
        self._body = bytearray()
        # In order, each is True once: the body has ended; the application has its end; the client is gone.
        self._ended = self._end_given = self._lost = False
        self.started = False
        """True once the head of the answer was sent."""
        self.complete = False
        """True once the end of the answer was sent."""
        self.half_closed = Alarm(connection.answer_late)
        """Set once the client has ended its side, and at each part of the answer: the client may be gone."""
        self._changed = asyncio.Event()

    @property
    def holds_up_client(self) -> bool:
        """True while the client may wait for the application, and not the application for the client."""
        return self._awaits_continue or len(self._body) > _UNREAD_MAX

    def feed(self, data: bytes) -> None:
        """Take a part of the body. Drop it if the answer is complete."""
        if self.complete:
            return
        self._body += data
        self._changed.set()
        if len(self._body) > _UNREAD_MAX:
            self._connection.transport.pause_reading()

    def end(self) -> None:
        """Note the end of the body."""
        self._ended = True
        self._changed.set()

    def lose(self) -> None:
        """Record that the client is gone. Drop the rest of the application's answer."""
        self._lost = True
        self.half_closed.unset()
        self._changed.set()

    async def run(self, app: ASGIApp) -> None:
        """Have ``app`` answer. Log its error, and answer 500 if no answer has begun."""
        try:
            await app(self._scope, self.receive, self.send)
        except asyncio.CancelledError:
            self._fail()
            raise
        except Exception:
            log.exception("%(path)s could not be answered", {"path": self._scope["path"]})
            self._fail()
        else:
            if not self.complete and not self._lost:
                # The answer of a streamed body that was cut off has no end: its client must notice.
                self._fail()

    def _fail(self) -> None:
        """Answer 500 if no answer has begun. Close the connection, so that its client notices an answer that
        has no end."""
        if self.started and not self.complete and self._scope["http_version"] == "1.0":
            self._connection.cut_off()
            return
        if not self.started and not self._lost:
            self.started = self.complete = True
            self._connection.answer(500, "Internal Server Error")
        self._connection.close()

    async def receive(self) -> Message:
        """Return a part of the body; ``http.disconnect`` after the answer, or if the client is gone."""
        connection = self._connection
        if self._awaits_continue and not self.started and not self._lost:
            connection.send(
                h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            )
        self._awaits_continue = False
        while not (self._lost or self.complete):
            if self._body or (self._ended and not self._end_given):
                body, self._end_given = bytes(self._body), self._ended
                self._body.clear()
                connection.transport.resume_reading()
                return {"type": "http.request", "body": body, "more_body": not self._ended}
            self._changed.clear()
            await self._changed.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Wait for room, then send the head or a part of the body. Do nothing if the client is gone. Raise
        ``RuntimeError`` for a message out of order."""
        await self._connection.writable.wait()
        if self._lost or self._connection.transport.is_closing():
            return
        message_type = message["type"]
        if message_type == "http.response.start" and not self.started:
            head = self._connection.head(message["status"], message.get("headers", ()))
            self.started, self._awaits_continue = True, False
            self._connection.send(head)
        elif message_type == "http.response.body" and self.started and not self.complete:
            self._send_body(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"an answer has no place for {message_type} now")

    def _send_body(self, body: bytes | memoryview, *, more: bool) -> None:
        events: list[h11.Event] = []
        if body and self._method != b"HEAD":
            events.append(h11.Data(data=cast("bytes", body)))
        if not more:
            self.complete = True
            events.append(h11.EndOfMessage())
        self._connection.send(*events)
        if self.complete:
            self._changed.set()
            self._connection.answered()


def _time() -> float:
    return asyncio.get_running_loop().time()


def _scope_of(transport: asyncio.Transport, head: h11.Request) -> Scope:
    raw_path, _, query = head.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": head.http_version.decode(),
        "server": _address(transport.get_extra_info("sockname")),
        "client": _address(transport.get_extra_info("peername")),
        "scheme": "http" if transport.get_extra_info("sslcontext") is None else "https",
        "method": head.method.decode(),
        "root_path": "",
        "path": unquote(raw_path.decode("ascii")),
        "raw_path": raw_path,
        "query_string": query,
        "headers": list(head.headers),
    }


def _address(name: Any) -> tuple[str, int | None] | None:
    """Return an address in the form of ASGI: for a unix socket, its path without a port."""
    if isinstance(name, tuple):
        return str(name[0]), int(name[1])
    return (str(name), None) if name else None
