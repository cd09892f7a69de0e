"""Stages in which a member leaves its cluster. A stage runs even if an earlier one failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from gazette.errors import GazetteError

log = logging.getLogger(__name__)


class Leased(Protocol):
    """The method of `gazette.cluster.allocator.session.MemberSession` that gives the lease back."""

    async def close(self) -> None: ...


async def leave(
    member: object,
    stages: Mapping[str, Callable[[], Awaitable[None]]],
    entering: Callable[[str], None],
) -> GazetteError | None:
    """Run the stages in order. Return the first error of a stage, or None.

    Keys of ``stages`` are phrases for the log. Call ``entering`` with each key. Each stage limits its own
    time. Raise any error that is not a ``GazetteError``: after such a defect nothing is known. Cancellation
    cancels the present stage.
    """
    first: GazetteError | None = None
    for name, stage in stages.items():
        entering(name)
        log.info("%(member)s is %(phase)s", {"member": member, "phase": name})
        try:
            await stage()
        except GazetteError as error:
            log.error(  # noqa: TRY400 - expected, and said in full
                "%(member)s, while %(phase)s: %(error)s",
                {"member": member, "phase": name, "error": error},
            )
            first = first or error
    return first


async def release(leased: Leased, *watchers: asyncio.Task[Any] | None) -> None:
    """End the tasks that watch a membership, then give its lease back. Raise as ``close``.

    For the watchers, the end of the membership would be a failure. Cancellation: the lease may remain.
    """
    for task in watchers:
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})
    await leased.close()


async def end_all(*endings: Awaitable[None]) -> None:
    """Await all in order, even if one fails with a ``GazetteError``. Raise the first such error. Each limits
    its own time."""
    first: GazetteError | None = None
    for ending in endings:
        try:
            await ending
        except GazetteError as error:
            first = first or error
    if first is not None:
        raise first
