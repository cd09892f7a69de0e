"""Left-overs below the name of a new journal: fragments of journals with this name, or one above or below it.

The answer to Apply reports them. Otherwise a user would be surprised that a new journal goes on after old
bytes, or waits for a decision.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from gazette.client.journals import APPLY_NOTE_KEY
from gazette.errors import GazetteError, Invalid
from gazette.protocol.fragment import Fragment
from gazette.runtime.tasks import TaskScope
from gazette.runtime.timeouts import timeout

if TYPE_CHECKING:
    from gazette.blobs.blob_store import BlobStore
    from gazette.blobs.registry import BlobStores
    from gazette.protocol.ids import JournalName

log = logging.getLogger(__name__)

_LOOK_S: Final = 2.0
"""Seconds for which an Apply waits for the stores of its new journals. Later answers are not reported."""
_LOOKED_MAX: Final = 32
"""Greatest number of new journals of one Apply whose stores are listed, and of objects of one listing."""
_UNQUOTED: Final = " !\"#$&'()*+,-./:;<=>?@[]^_`{|}~"
"""Characters that metadata of gRPC may have unquoted."""


async def left_overs(
    blob_stores: BlobStores, new: Sequence[tuple[JournalName, Sequence[str]]]
) -> tuple[tuple[str, str], ...]:
    """Return trailing metadata with a note for each store that has fragments below a new journal's name.

    ``new`` are the journals with their stores. Look at the first `_LOOKED_MAX` journals only. A store that
    fails, or takes longer than `_LOOK_S`, causes no error: replicas find the fragments later.
    """
    notes: list[tuple[str, str]] = []

    async def look(journal: JournalName, url: str) -> None:
        try:
            active = blob_stores.get(url)
            path = await active.calls.run(_first_fragment, active.store, journal)
        except GazetteError as error:
            log.info(
                "cannot look for fragments of the new journal %(journal)s: %(error)s",
                {"journal": journal, "error": error},
            )
            return
        if path:
            text = f"new journal {journal}: {url} has fragments below its name, such as {path}"
            notes.append((APPLY_NOTE_KEY, quote(text, safe=_UNQUOTED)))

    async with TaskScope("left-over fragments") as scope:
        look_tasks = [
            scope.spawn(look(journal, url), name=journal)
            for journal, stores in new[:_LOOKED_MAX]
            for url in stores
        ]
        try:
            async with timeout(_LOOK_S):
                await asyncio.gather(*look_tasks)
        except TimeoutError:
            scope.cancel()
    notes.sort()
    if notes and len(new) > _LOOKED_MAX:
        text = f"{len(new) - _LOOKED_MAX} more new journals were not looked at"
        notes.append((APPLY_NOTE_KEY, quote(text, safe=_UNQUOTED)))
    return tuple(notes)


def _first_fragment(store: BlobStore, journal: JournalName) -> str:
    """Return the path of a fragment among the first `_LOOKED_MAX` objects; empty if none of them is a
    fragment."""
    listing = store.list(f"{journal}/")
    for _, info in zip(range(_LOOKED_MAX), listing, strict=False):
        try:
            Fragment.parse(journal, info.path.rpartition("/")[2])
        except Invalid:
            continue
        return info.path
    return ""
