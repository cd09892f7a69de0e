"""Waits for calls in threads, with a time limit."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

from gazette.runtime.timeouts import timeout


async def ended(call: concurrent.futures.Future[Any], timeout_s: float | None = None) -> bool:
    """Return True if ``call`` ended within ``timeout_s`` seconds (None: no limit). Its result stays in
    ``call``.

    A thread cannot be interrupted. After a time-out, keep ``call``: until it has ended, do not repeat
    ``call``, and do not touch its objects. Cancellation: the call goes on.
    """
    if call.done():
        return True
    call_ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wake(_: concurrent.futures.Future[Any]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(call_ended.set)

    call.add_done_callback(wake)
    try:
        async with timeout(timeout_s):
            await call_ended.wait()
    except TimeoutError:
        return call.done()
    return True
