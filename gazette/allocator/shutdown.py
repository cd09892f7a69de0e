"""Stages in which a member leaves its cluster. A stage runs even if an earlier one failed."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from gazette.errors import GazetteError

log = logging.getLogger(__name__)


async def leave(
    member: object,
    stages: Mapping[str, Callable[[], Awaitable[None]]],
    entering: Callable[[str], None],
) -> GazetteError | None:
    """Run the stages in order. Return the first error of a stage, or None.

    Keys of ``stages`` are phrases for the log. Call ``entering`` with each key. Each stage bounds
    its own time. Raise any error that is not a ``GazetteError``: it is a defect, after which
    nothing is known. Cancellation cancels the present stage.
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
