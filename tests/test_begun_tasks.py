"""Children of a scope that run up to their first wait before they have a task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gazette.errors import Broken, Bug
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope, in_task
from gazette.runtime.timeouts import timeout


async def test_a_child_that_need_not_wait_has_ended_at_once() -> None:
    said: list[object] = []

    async def child() -> None:
        said.append(asyncio.current_task())

    async with TaskScope("test") as scope:
        assert scope.begin(child(), name="child") is None
        assert said == [None]  # The task that began it is not its own.
        assert asyncio.current_task() is not None
        assert scope.children == 0


async def begun_outside(scope: TaskScope, make: Callable[[], None]) -> None:
    """Call ``make`` as a callback of the loop."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def call() -> None:
        try:
            make()
        except Exception as error:  # noqa: BLE001 - raised below
            done.set_exception(error)
        else:
            done.set_result(None)

    asyncio.get_running_loop().call_soon(call)
    await done
    del scope


async def test_a_child_that_waits_goes_on_in_a_task() -> None:
    said: list[str] = []
    first: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    second: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def child() -> None:
        assert asyncio.current_task() is None
        said.append(await first)
        assert asyncio.current_task() is not None
        async with timeout(60):
            said.append(await second)

    async with TaskScope("test") as scope:
        await begun_outside(scope, lambda: begun.append(scope.begin(child(), name="child")))
        assert isinstance(begun[0], asyncio.Task)
        assert begun[0].get_name() == "test/child"
        first.set_result("first")
        second.set_result("second")
        await begun.pop()  # type: ignore[misc]
    assert said == ["first", "second"]


begun: list[asyncio.Task[None] | None] = []


async def test_what_it_waits_for_may_fail() -> None:
    first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    caught: list[BaseException] = []

    async def child() -> None:
        try:
            await first
        except Broken as error:
            caught.append(error)

    async with TaskScope("test") as scope:
        await begun_outside(scope, lambda: begun.append(scope.begin(child(), name="child")))
        first.set_exception(Broken("late"))
        await begun.pop()  # type: ignore[misc]
    assert [str(one) for one in caught] == ["late"]


async def test_a_cancellation_right_at_the_beginning_runs_what_cleans_up() -> None:
    """The task has not made a step yet: a task of its own would not even have begun."""
    said: list[str] = []

    async def child() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            said.append("begins to clean up")
            await SystemClock().sleep(0)
            said.append("has cleaned up")

    async with TaskScope("test") as scope:

        def make() -> None:
            task = scope.begin(child(), name="child")
            assert task is not None
            task.cancel()

        await begun_outside(scope, make)
        await scope.wait()
    assert said == ["begins to clean up", "has cleaned up"]


async def test_an_error_before_the_first_wait_is_raised_and_fails_the_scope() -> None:
    failures: list[BaseException] = []
    scope = TaskScope("test", on_failure=failures.append)

    async def child() -> None:
        raise Broken("at once")

    sibling = scope.spawn(asyncio.Event().wait(), name="sibling")
    with pytest.raises(Broken, match="at once"):
        await begun_outside(scope, lambda: begun.append(scope.begin(child(), name="child")))
    assert [str(one) for one in failures] == ["at once"]
    with pytest.raises(asyncio.CancelledError):
        await sibling


async def test_a_child_may_ask_for_its_task() -> None:
    said: list[bool] = []

    async def child() -> None:
        said.append(asyncio.current_task() is None)
        await in_task()
        said.append(asyncio.current_task() is None)
        await in_task()

    async with TaskScope("test") as scope:
        await begun_outside(scope, lambda: begun.append(scope.begin(child(), name="child")))
        await begun.pop()  # type: ignore[misc]
        task = scope.begin(child(), name="another")  # By a task, which is not the child's.
        assert task is not None
        await task
    assert said == [True, False, True, False]


async def test_a_scope_that_has_stopped_begins_nothing() -> None:
    scope = TaskScope("test")
    await scope.stop()
    ran: list[int] = []

    async def child() -> None:
        ran.append(1)

    with pytest.raises(Bug):
        scope.begin(child(), name="child")
    assert ran == []
