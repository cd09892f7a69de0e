"""Progress of a shard, and the callers that wait for it. Loop-bound."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping


class Progress:
    """Offsets that the shard's transactions have read through, and at which they published.

    Offsets never go back during the life of one primary.
    """

    def __init__(self) -> None:
        self.read_through: dict[str, int] = {}
        self.publish_at: dict[str, int] = {}
        self.missing: dict[str, tuple[int, int]] = {}
        """By source: the next range of offsets, while no broker has its bytes."""
        self._changed = asyncio.Event()

    def update(self, read_through: Mapping[str, int], publish_at: Mapping[str, int]) -> None:
        """Note offsets of an acknowledged transaction, or of bytes that were read without effect."""
        for journal, offset in read_through.items():
            self.read_through[journal] = max(offset, self.read_through.get(journal, 0))
        self.publish_at.update(publish_at)
        self._changed.set()
        self._changed = asyncio.Event()

    def has(self, offsets: Mapping[str, int]) -> bool:
        """Return True if every journal of ``offsets`` was read up to its offset."""
        return all(self.read_through.get(journal, 0) >= at for journal, at in offsets.items())

    def describe(self, offsets: Mapping[str, int]) -> str:
        """Return which of ``offsets`` are not read through yet, and why if known; empty if all are."""
        sentences = []
        for journal, wanted in offsets.items():
            at = self.read_through.get(journal, 0)
            if at >= wanted:
                continue
            sentences.append(f"it has read {journal} up to {at}, and {wanted} is asked for")
            if journal in self.missing:
                begin, end = self.missing[journal]
                sentences.append(
                    f"no broker has the bytes {begin} to {end} of {journal}: they were pruned, or their"
                    " store is not mounted"
                )
        return "; ".join(sentences)

    async def wait(self, offsets: Mapping[str, int]) -> None:
        """Return once ``has`` returns True. The caller bounds the wait."""
        while not self.has(offsets):
            await self._changed.wait()
