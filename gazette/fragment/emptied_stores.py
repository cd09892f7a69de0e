"""Stage 9 of the byte path: takes a listing of a journal's stores, and the listing before it.

It keeps the fragments of a store that suddenly lists none of them. A file system that is not mounted looks
like an empty directory. Meanwhile brokers may store a fragment there. Without this check, readers of old
offsets would jump to that fragment, over acknowledged bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from gazette.fragment.conflicts import FragmentCover
from gazette.fragment.index import JUMP_AGE_S
from gazette.protocol.fragment import Fragment
from gazette.runtime.clock import Clock

_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class EmptiedStore:
    """A store that listed ``fragments`` before, and lists none of them now."""

    url: str
    fragments: int


class EmptiedStores:
    """The fragments of one journal that each of its stores listed last. Loop-bound.

    It remembers what this broker has listed. A broker that lists a store for the first time while it is
    not mounted cannot know what is missing.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._listed: dict[str, list[Fragment]] = {}
        self._stored: dict[str, list[Fragment]] = {}
        """Fragments that this broker stored since the last listing."""
        self._emptied: dict[str, tuple[float, list[Fragment]]] = {}
        """By store: the time since which it lists none of its fragments, and these fragments."""

    def note(self, fragment: Fragment) -> None:
        """Expect a fragment that this broker has stored since the last listing."""
        self._stored.setdefault(fragment.backing_store, []).append(fragment)

    def restore(
        self,
        cover: FragmentCover,
        stores: Iterable[str],
        retention_ns: int,
        refuted: Collection[Fragment] = (),
    ) -> list[EmptiedStore]:
        """Add the former fragments of each emptied store to ``cover``, and return these stores.

        A store is emptied if ``cover`` has the offsets of none of its former fragments. Not counted are:

        - fragments older than the retention (nanoseconds, 0: without end), as they may have been pruned;
        - fragments of ``refuted``, which the caller has taken out of ``cover``;
        - stores that the journal has no longer.

        After `JUMP_AGE_S` the listing is accepted as it is.
        """
        names = {one.content_path() for one in refuted}
        now = self._clock.now()
        listed: dict[str, list[Fragment]] = defaultdict(list)
        for one in cover:
            listed[one.backing_store].append(one)
        emptied: dict[str, tuple[float, list[Fragment]]] = {}
        for url in dict.fromkeys(stores):
            last = self._listed.get(url) or self._stored.get(url, [])
            since, former = self._emptied.get(url, (now, last))
            expected = [
                one
                for one in former
                if one.content_path() not in names
                and (not retention_ns or one.mod_time + retention_ns / _NS > now)
            ]
            gone = expected and not any(cover.covers(one.begin, one.end) for one in expected)
            if gone and now - since < JUMP_AGE_S:
                # Keep only the former fragments: the listing has those that were stored since.
                emptied[url] = since, expected
        for _, fragments in emptied.values():
            for one in fragments:
                cover.add(one)
        self._listed, self._stored, self._emptied = listed, {}, emptied
        return [EmptiedStore(url, len(fragments)) for url, (_, fragments) in emptied.items()]
