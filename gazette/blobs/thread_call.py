"""Waiting for a call in a thread, no longer than one has patience for."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any


async def ended(call: concurrent.futures.Future[Any], timeout_s: float | None = None) -> bool:
    """Whether ``call`` ended within ``timeout_s`` seconds; its outcome stays in ``call``.

    A thread cannot be interrupted. Who gives up on a call must keep it in sight, so that what it
    works on is not touched, and the call is not repeated, before it has ended.
    Cancellation: the call goes on.
    """
    if call.done():
        return True
    over = asyncio.Event()
    loop = asyncio.get_running_loop()

    def tell(_: concurrent.futures.Future[Any]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(over.set)

    call.add_done_callback(tell)
    try:
        async with asyncio.timeout(timeout_s):
            await over.wait()
    except TimeoutError:
        return call.done()
    return True
