"""Calls that arrive as a whole at a simulated server, as `gazette.net.grpc.whole_call` has them.

A call is whole if its end arrives within `GATHER_S` of its beginning. The server offers calls that become
whole at nearly the same time together: a real loop may be busy for a while, and then reads all of a socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import grpc

from gazette.net.grpc.whole_call import GATHER_S, WHOLE_BYTES_MAX, TakeWhole
from gazette.testing.simulation.loop import Handle

Metadata = tuple[tuple[str, str], ...]

_Code: Final = grpc.StatusCode
_BUSY_S: Final = (0.0, 0.002, 0.01)
"""Seconds for which a loop may be busy before it reads the arrived bytes."""


class SimWholeCall:
    """The view of a whole call that a function takes."""

    def __init__(self, calls: WholeCalls, context: Any) -> None:
        self.context = context
        self.received = 0
        self.on_gone: Callable[[], None] | None = None
        self.is_open = True
        self.path = context.call.path
        self._calls = calls
        assert context.call.up is not None
        self._requests = context.call.up
        self._requests.on_arrival = self._arrived

    def _arrived(self) -> None:
        """Note that a request, or the end of them, has arrived."""
        if self._requests.held > WHOLE_BYTES_MAX:
            self.hand_back()
        elif self._requests.ended:
            self._calls.complete(self)

    def messages(self) -> list[bytes] | None:
        """Return the encoded requests. A task can still read them after `hand_back`."""
        requests: list[bytes] = self._requests.waiting()
        self.received = len(requests)
        return requests

    def invocation_metadata(self) -> Metadata:
        metadata: Metadata = self.context.invocation_metadata()
        return metadata

    def answer(self, response: bytes) -> None:
        if self.is_open:
            self.context.put(response)
            self._end(_Code.OK, "")

    def refuse(self, code: grpc.StatusCode, details: str, trailing: Metadata = ()) -> None:
        if self.is_open:
            self.context.set_trailing_metadata(trailing)
            self._end(code, details)

    def hand_back(self) -> None:
        """Leave the call to a task, as if it had just arrived."""
        if self.is_open:
            self.is_open = False
            self._requests.on_arrival = None
            self._calls.forget(self)
            self.context.whole = None
            self.context.connection.server.serve(self.context)

    def gone(self, code: grpc.StatusCode = _Code.CANCELLED, details: str = "") -> None:
        """End the call before its function has: the caller has gone, or the server stops."""
        if self.is_open:
            self._end(code, details)
            if self.on_gone is not None:
                self.on_gone()

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        self.is_open = False
        self._requests.on_arrival = None
        self._calls.forget(self)
        self.context.finish(code, details)


class WholeCalls:
    """The whole calls of one server, until they are answered."""

    def __init__(self, server: Any, on_end: Callable[[], None]) -> None:
        self._server = server
        self._on_end = on_end
        self._takers: dict[str, TakeWhole] = {}
        self._open: dict[SimWholeCall, Handle] = {}
        self._complete: list[SimWholeCall] = []

    def add(self, path: str, take: TakeWhole) -> None:
        """Offer calls of a method to ``take``."""
        self._takers[path] = take

    def begin(self, context: Any) -> bool:
        """Wait until a call is whole. Return False if no function takes calls of its method."""
        if context.call.path not in self._takers:
            return False
        whole = context.whole = SimWholeCall(self, context)
        loop, node = self._server.network.loop, self._server.node
        self._open[whole] = loop.call_later(GATHER_S, whole.hand_back, context=node.context)
        return True

    def complete(self, whole: SimWholeCall) -> None:
        """Offer a call, soon."""
        self._open[whole].cancel()
        if not self._complete:
            network, node = self._server.network, self._server.node
            delay_s = network.rng.choice(_BUSY_S)
            network.loop.call_later(delay_s, self._offer, context=node.context)
        self._complete.append(whole)

    def forget(self, whole: SimWholeCall) -> None:
        """Forget a call that has ended, or is served by a task."""
        timer = self._open.pop(whole, None)
        if timer is not None:
            timer.cancel()
            self._on_end()

    def give_up(self) -> None:
        """End all calls: the server stops."""
        for whole in list(self._open):
            whole.gone(_Code.UNAVAILABLE, "the server stops")

    def __len__(self) -> int:
        return len(self._open)

    def _offer(self) -> None:
        offered: dict[str, list[SimWholeCall]] = {}
        for whole in self._complete:
            if whole.is_open:
                offered.setdefault(whole.path, []).append(whole)
        self._complete = []
        for path, calls in offered.items():
            take: Any = self._takers[path]
            for whole in take(calls):
                whole.hand_back()
