"""Time limits also hold in tasks that clean up after they were cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from gazette.runtime.tasks import TaskScope
from gazette.runtime.timeouts import _Timeout, timeout

ROOT = Path(__file__).parents[1]
LIMITS = pytest.mark.parametrize("limit", [timeout, _Timeout])


async def _cancelled(work: Coroutine[Any, Any, None], begun: asyncio.Event) -> None:
    """Cancel a task once it has begun to wait. It must end as cancelled."""
    async with TaskScope("test") as scope:
        task = scope.spawn(work, name="waits")
        await begun.wait()
        task.cancel()
        await asyncio.wait({task})
    assert task.cancelled()


@LIMITS
async def test_a_limit_holds_in_a_task_that_was_cancelled(limit: type[_Timeout]) -> None:
    """As of `gazette run` that waits for its processes, and kills those that stay."""
    seen: list[object] = []
    begun = asyncio.Event()

    async def clean_up() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            try:
                async with limit(0.01) as deadline:
                    await asyncio.Event().wait()
            except TimeoutError:
                seen.append(deadline.expired())

    await _cancelled(clean_up(), begun)
    assert seen == [True]


@LIMITS
async def test_a_cancellation_within_a_limit_is_one(limit: type[_Timeout]) -> None:
    begun = asyncio.Event()

    async def wait() -> None:
        async with limit(60):
            begun.set()
            await asyncio.Event().wait()

    await _cancelled(wait(), begun)


@LIMITS
async def test_a_cancellation_beside_the_end_of_a_limit_wins(limit: type[_Timeout]) -> None:
    """Otherwise a task that has to end would continue as after a slow answer."""
    begun = asyncio.Event()

    async def wait() -> None:
        async with limit(None) as deadline:
            deadline.reschedule(asyncio.get_running_loop().time())
            begun.set()
            await asyncio.Event().wait()

    await _cancelled(wait(), begun)


@LIMITS
async def test_an_error_of_the_block_is_raised(limit: type[_Timeout]) -> None:
    with pytest.raises(ValueError, match="its own"):
        async with limit(60) as deadline:
            assert deadline.when() is not None
            raise ValueError("its own")
    assert not deadline.expired()


def test_no_other_limit_is_used() -> None:
    ours = (ROOT / "gazette").rglob("*.py")
    used = [one for one in ours if "asyncio.timeout(" in one.read_text()]
    names = {str(one.relative_to(ROOT / "gazette")) for one in used}
    assert {one for one in names if not one.startswith("testing/")} == {"runtime/timeouts.py"}
