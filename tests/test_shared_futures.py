"""A caller that is cancelled leaves a future of another owner as it is. Later errors are for the owner."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from gazette.runtime.tasks import OpFuture, await_future, await_shared


async def turns() -> None:
    """Let the callbacks of futures run, and theirs."""
    for _ in range(3):
        turn = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(turn.set_result, None)
        await turn


async def cancelled_caller(future: asyncio.Future[int]) -> None:
    caller = asyncio.get_running_loop().create_task(await_shared(future))
    await asyncio.wait({caller}, timeout=0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


@pytest.mark.parametrize("callers", [1, 3])
async def test_a_later_error_is_its_owners_alone(callers: int) -> None:
    """Python 3.14 reports it after a cancelled `asyncio.shield`."""
    reports: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reports.append(context))
    future: asyncio.Future[int] = loop.create_future()
    for _ in range(callers):
        await cancelled_caller(future)
    assert not future.done()
    future.set_exception(OSError("later"))
    with pytest.raises(OSError, match="later"):
        await await_shared(future)
    del future
    await turns()
    gc.collect()
    assert reports == []


async def test_an_error_without_a_waiter_left_is_not_reported() -> None:
    reports: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reports.append(context))
    operation: OpFuture[int] = OpFuture()
    caller = loop.create_task(await_future(operation))
    await asyncio.wait({caller}, timeout=0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    operation.set_exception(OSError("later"))
    await turns()
    del caller, operation
    gc.collect()
    assert reports == []


async def test_a_future_that_is_cancelled_cancels_its_callers() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    caller = asyncio.get_running_loop().create_task(await_shared(future))
    await asyncio.wait({caller}, timeout=0)
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_all_callers_get_the_result() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    callers = [asyncio.get_running_loop().create_task(await_shared(future)) for _ in range(3)]
    await asyncio.wait(callers, timeout=0)
    future.set_result(7)
    assert [await caller for caller in callers] == [7, 7, 7]
    assert await await_shared(future) == 7
