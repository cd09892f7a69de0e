"""The stages in which a member leaves."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gazette.cluster.process.cluster_member import end_all, leave
from gazette.cluster.process.membership import release
from gazette.errors import Closed, GazetteError, Unavailable
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope


async def test_a_stage_that_fails_does_not_hold_up_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first error is given to the caller of leave, and all are in the log."""
    performed: list[str] = []
    phases: list[str] = []

    async def drains() -> None:
        performed.append("drains")

    async def finishes() -> None:
        performed.append("finishes")
        raise Unavailable("a call does not end")

    async def releases() -> None:
        performed.append("releases")
        raise GazetteError("no lease")

    stages = {"draining": drains, "finishing": finishes, "releasing": releases}
    with caplog.at_level(logging.INFO):
        first = await leave("a/1", stages, phases.append)
    assert isinstance(first, Unavailable)
    assert performed == ["drains", "finishes", "releases"]
    assert phases == list(stages)
    errors = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert errors == [
        "a/1, while finishing: a call does not end",
        "a/1, while releasing: no lease",
    ]
    assert await leave("a/1", {"draining": drains}, phases.append) is None


async def test_a_defect_is_no_error_of_a_stage() -> None:
    async def broken() -> None:
        raise KeyError("defect")

    with pytest.raises(KeyError):
        await leave("a/1", {"draining": broken}, lambda _: None)


async def test_an_ending_that_fails_keeps_no_other() -> None:
    ended: list[str] = []

    async def ending(name: str, error: Exception | None = None) -> None:
        ended.append(name)
        if error is not None:
            raise error

    await end_all()
    with pytest.raises(Unavailable) as raised:
        await end_all(
            ending("a"),
            ending("b", Unavailable("first")),
            ending("c", Closed("second")),
            ending("d"),
        )
    assert raised.value.message == "first"
    assert ended == ["a", "b", "c", "d"]


async def test_a_membership_is_released_once_nothing_watches_it() -> None:
    class Membership:
        closed = False

        async def close(self) -> None:
            assert watching.cancelled()
            self.closed = True

    async def end() -> None:
        pass

    membership = Membership()
    async with TaskScope("members") as scope:
        watching = scope.daemon(SystemClock().sleep(3600.0), name="watch")
        done = scope.spawn(end(), name="done")
        await asyncio.wait({done})
        await release(membership, watching, done, None)
    assert membership.closed
