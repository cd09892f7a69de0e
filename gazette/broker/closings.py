"""The closings of one journal, as its replica finds them in stores: see `gazette.fragment.closing`.

A primary that finds the known head open looks for the closing of the last primary that etcd names. If stores
have all bytes before the closing's end, the primary writes this end and its registers to etcd. Then the head
is closed, as if the last primary had closed it itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from gazette.errors import Corrupt, GazetteError, NotFound
from gazette.fragment.closing import Closing, ClosingName
from gazette.runtime.timeouts import timeout

if TYPE_CHECKING:
    from gazette.broker.known_head import KnownHead
    from gazette.broker.replica_context import ReplicaContext
    from gazette.fragment.index import Index
    from gazette.protocol.ids import Revision
    from gazette.protocol.journal import JournalSpec

log = logging.getLogger(__name__)

_READ_S: Final = 10.0
_REMOVE_S: Final = 10.0
_AGAIN_S: Final = 1.0
"""Seconds before stores that lacked the awaited closing are asked for it again."""


class Closings:
    """Reads, adopts and removes the closings of one replica's journal. Loop-bound.

    ``reason`` says why the last look did not close the head: empty if it did, or no closing is awaited.
    """

    def __init__(self, context: ReplicaContext, head: KnownHead, index: Index) -> None:
        self._context = context
        self._head = head
        self._index = index
        self._found: Closing | None = None  # The closing that was found last.
        self._missed: ClosingName | None = None  # The closing that no store had at `_missed_at`.
        self._missed_at = 0.0
        self.reason = ""

    async def adopt(self, spec: JournalSpec, tenure: Revision) -> None:
        """Close the known head as the closing of its last primary says, if stores have all acknowledged
        bytes. Else set ``reason``.

        ``tenure`` is this primary's tenure. Raise ``Conflict`` if a later primary has begun, ``Unavailable``
        if etcd does not answer. After a cancellation, etcd may have the closed head.
        """
        name = self._head.awaited
        if name is None:
            self.reason = ""
            return
        closing = await self._find(name, spec)
        if closing is None:
            return
        self.reason = self._missing(closing)
        if self.reason:
            return
        await self._head.adopt(closing, tenure)
        log.info(
            "%(journal)s goes on at %(end)d without an operator: its last primary left %(path)s, and "
            "stores have all bytes before",
            {"journal": name.journal, "end": closing.end, "path": name.path},
        )

    async def _find(self, name: ClosingName, spec: JournalSpec) -> Closing | None:
        """Return the closing from the first store that has it. Set ``reason`` if none could be read.

        After such a miss, ask no store for `_AGAIN_S`, and return None.
        """
        if self._found is not None and self._found.name == name:
            return self._found
        now = self._context.clock.monotonic()
        if self._missed == name and now < self._missed_at + _AGAIN_S:
            return None
        self.reason = f"its last primary left no {name.path} in a store"
        for url in spec.fragment.stores:
            try:
                self._found = await self._read(name, url)
            except NotFound:
                continue
            except (GazetteError, TimeoutError) as error:
                self._note_unread(name, url, error)
            else:
                return self._found
        self._missed, self._missed_at = name, now
        return None

    async def _read(self, name: ClosingName, url: str) -> Closing:
        active = self._context.blob_stores.get(url)
        async with timeout(_READ_S):
            return await active.calls.run(Closing.read, name, active.store)

    def _note_unread(self, name: ClosingName, url: str, error: Exception) -> None:
        text = str(error) or f"the store did not answer within {_READ_S:g} s"
        self.reason = f"{name.path} could not be read: {text}"
        log.log(
            logging.ERROR if isinstance(error, Corrupt) else logging.WARNING,
            "%(path)s in %(store)s, by which its last primary has closed %(journal)s, could not be read: "
            "%(error)s",
            {"path": name.path, "store": url, "journal": name.journal, "error": text},
            extra={"cause": f"closing {name.journal}"},
        )

    def _missing(self, closing: Closing) -> str:
        """Return why a closing cannot close the head; empty if it can.

        The closing may end before the head, or stores may lack bytes before the end of the closing.
        """
        path, end, known_offset = closing.name.path, closing.end, self._head.offset
        if end < known_offset:
            return f"{path} says that it ended at {end}, before the known head {known_offset}"
        gaps = self._index.lacks(closing.begin, end)
        if self._index.end_offset < end and not gaps:
            gaps = [(self._index.end_offset, end)]
        if not gaps:
            return ""
        gap_begin, gap_end = gaps[0]
        return f"{path} says that it ended at {end}, and stores lack [{gap_begin}, {gap_end})"

    async def remove_passed(self, listed: Iterable[tuple[str, ClosingName]]) -> None:
        """Remove closings that are not needed any more. ``listed`` has all listed closings, by store.

        If a store fails, its closings stay: the next listing finds them again.
        """
        for url, name in listed:
            if not self._head.has_passed(name):
                continue
            active = self._context.blob_stores.get(url)
            try:
                async with timeout(_REMOVE_S):
                    await active.calls.run(active.store.remove, name.path)
            except (GazetteError, TimeoutError) as error:
                log.info(
                    "cannot remove %(path)s, which no broker needs any more, from %(store)s: %(error)s",
                    {"path": name.path, "store": url, "error": str(error) or "no answer in time"},
                )
