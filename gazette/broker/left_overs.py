"""Left-overs at the name of a new journal: fragments of journals with that name, or with one above or below.

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
_LOOKED_MAX: Final = 8
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
    by_store: dict[str, list[JournalName]] = {}
    for journal, stores in new[:_LOOKED_MAX]:
        for url in stores:
            by_store.setdefault(url, []).append(journal)
    notes: list[tuple[str, str]] = []

    async def look(url: str, journals: Sequence[JournalName]) -> None:
        try:
            active = blob_stores.get(url)
            first = await active.calls.run(_first_fragments, active.store, journals)
        except GazetteError as error:
            log.info(
                "cannot look for fragments of new journals in %(store)s: %(error)s",
                {"store": url, "error": error},
            )
            return
        for journal, path in first.items():
            text = f"new journal {journal}: {url} has fragments below its name, such as {path}"
            notes.append((APPLY_NOTE_KEY, quote(text, safe=_UNQUOTED)))

    async with TaskScope("left-over fragments") as scope:
        look_tasks = [
            scope.spawn(look(url, journals), name=url) for url, journals in by_store.items()
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


def _first_fragments(store: BlobStore, journals: Sequence[JournalName]) -> dict[JournalName, str]:
    """Return the path of a fragment for each journal with a fragment among its first objects."""
    paths = {journal: _first_fragment(store, journal) for journal in journals}
    return {journal: path for journal, path in paths.items() if path}


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
