"""The addresses of a host, found without blocking other work: `HostResolver`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

from gazette.runtime.tasks import await_shared

_NUMERIC: Final = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV


class HostResolver:
    """The addresses of one host, from the resolver of the machine. Loop-bound.

    A resolver that does not answer blocks the thread that asks it. So a thread of this object asks, at most
    one at a time. Neither other work nor the end of the process waits for this thread.
    """

    def __init__(
        self, host: str, getaddrinfo: Callable[..., list[Any]] = socket.getaddrinfo
    ) -> None:
        self._host = host
        self._getaddrinfo = getaddrinfo
        self._answer: asyncio.Future[list[str]] | None = None  # None: no thread asks now.

    async def find(self) -> list[str]:
        """Return the numeric addresses of the host, in the order in which to try them.

        Raise ``OSError`` if the host has no address. Cancellation: the thread goes on, for the next caller.
        """
        # A host that is an address already needs no resolver, and no thread.
        with contextlib.suppress(OSError, UnicodeError):
            return _addresses(self._getaddrinfo(self._host, None, flags=_NUMERIC))
        if self._answer is None:
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[list[str]] = loop.create_future()
            name = f"resolve {self._host}"
            threading.Thread(target=self._ask, args=(loop, answer), name=name, daemon=True).start()
            self._answer = answer
            answer.add_done_callback(self._forget)
        return await await_shared(self._answer)

    def _ask(self, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[list[str]]) -> None:
        """Run in a thread. Set ``answer``, in its ``loop``, to the addresses or to an ``OSError``."""
        tell: Callable[[], None]
        try:
            addresses = _addresses(self._getaddrinfo(self._host, None, type=socket.SOCK_STREAM))
            tell = lambda: answer.set_result(addresses)  # noqa: E731
        except Exception as error:  # noqa: BLE001 - a caller would wait for ever
            failure = OSError(str(getattr(error, "strerror", None) or error))
            tell = lambda: answer.set_exception(failure)  # noqa: E731
        with contextlib.suppress(RuntimeError):  # The loop is closed, so no caller waits.
            loop.call_soon_threadsafe(tell)

    def _forget(self, answer: asyncio.Future[list[str]]) -> None:
        self._answer = None
        answer.exception()  # Without this, asyncio logs an error for which no caller waits.


def _addresses(found: list[Any]) -> list[str]:
    # The fifth part of an entry is the socket address, which begins with the host.
    return list(dict.fromkeys(str(info[4][0]) for info in found))
