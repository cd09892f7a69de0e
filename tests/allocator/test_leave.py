"""The stages in which a member leaves."""

from __future__ import annotations

import logging

import pytest

from gazette.allocator.shutdown import leave
from gazette.errors import GazetteError, Unavailable


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
