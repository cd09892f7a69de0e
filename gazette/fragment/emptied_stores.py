"""Stage 9 of the byte path: takes a listing of a journal's stores, and adds the former fragments of stores
that look emptied, before `index` gets the listing.

A store that suddenly lists none of its fragments may be a file system that is not mounted: it looks like an
empty directory. Brokers may store a new fragment there. Readers of old offsets would then jump to the new
fragment, over acknowledged bytes. So the index keeps the former fragments of such a store.
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

    Only listings of this broker count. If the store was not mounted from the first listing on, the broker
    cannot know the missing fragments.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._listed: dict[str, list[Fragment]] = {}
        self._stored: dict[str, list[Fragment]] = {}
        """Fragments that this broker stored since the last listing."""
        self._emptied: dict[str, tuple[float, list[Fragment]]] = {}
        """By store: the time since which it lists none of its fragments, and these fragments."""

    def note(self, fragment: Fragment) -> None:
        """Record a fragment that this broker has stored. If the last listing of its store had no fragments,
        the next listing must have this one."""
        self._stored.setdefault(fragment.backing_store, []).append(fragment)

    def restore(
        self,
        cover: FragmentCover,
        stores: Iterable[str],
        retention_ns: int,
        refuted: Collection[Fragment] = (),
    ) -> list[EmptiedStore]:
        """Add the former fragments of each emptied store to ``cover``, and return these stores.

        A store is emptied if ``cover`` has the offsets of none of its former fragments. Do not count

        - fragments older than the retention (nanoseconds, 0: without end), as they may have been pruned;
        - fragments of ``refuted``, which the caller has taken out of ``cover``;
        - stores that the journal has no longer.

        A store that looks emptied for longer than `JUMP_AGE_S` is accepted as it is.
        """
        refuted_paths = {fragment.content_path() for fragment in refuted}
        now = self._clock.now()
        listed: dict[str, list[Fragment]] = defaultdict(list)
        for fragment in cover:
            listed[fragment.backing_store].append(fragment)
        emptied: dict[str, tuple[float, list[Fragment]]] = {}
        for url in dict.fromkeys(stores):
            last_listed = self._listed.get(url) or self._stored.get(url, [])
            since, former = self._emptied.get(url, (now, last_listed))
            expected = [
                fragment
                for fragment in former
                if fragment.content_path() not in refuted_paths
                and (not retention_ns or fragment.mod_time + retention_ns / _NS > now)
            ]
            is_emptied = expected and not any(
                cover.covers(fragment.begin, fragment.end) for fragment in expected
            )
            if is_emptied and now - since < JUMP_AGE_S:
                # Keep only the former fragments: the listing has the fragments that were stored since.
                emptied[url] = since, expected
        for _, fragments in emptied.values():
            for fragment in fragments:
                cover.add(fragment)
        self._listed, self._stored, self._emptied = listed, {}, emptied
        return [EmptiedStore(url, len(fragments)) for url, (_, fragments) in emptied.items()]
