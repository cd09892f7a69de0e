"""A member leaves its cluster stage by stage: whatever one stage meets with, the next one follows."""

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
    """Perform stages, by what the member does in them, in their order. The first error of them, if any.

    ``entering`` is called with the name of each. Each bounds itself. Raises what is no ``GazetteError``:
    a defect, after which nothing is known. Cancellation: that of the stage.
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
