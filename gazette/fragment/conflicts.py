"""Fragments of the same offsets with different bytes.

A conflict is proven if two fragments have the same begin and end, and a different SHA-1. One of the two has
bytes that were not acknowledged at these offsets, or was written by hand. Only the fragment that is listed
later is read.

Two fragments that overlap in part, or of which one contains the other, prove no conflict and are not
reported. Replicas close their fragments at different offsets as they join and leave. So such overlaps are
common and mostly harmless. The names of such fragments do not prove a conflict: compare the bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from gazette.fragment.closing import ClosingName
from gazette.fragment.cover_set import CoverSet, Span
from gazette.fragment.local_file import LocalFragment
from gazette.fragment.set_aside import SetAside
from gazette.protocol.fragment import Fragment


@dataclass(frozen=True, slots=True)
class FragmentConflict:
    """Two fragments of the same begin and end, with different bytes: ``kept`` is read, ``hidden`` is not."""

    kept: Fragment
    hidden: Fragment

    def __str__(self) -> str:
        return f"{_place(self.kept)} is read, {_place(self.hidden)} is hidden"


class FragmentCover(CoverSet[Fragment]):
    """The cover of a journal's stored fragments, and other results of the listing: conflicts, objects stored
    aside (see `set_aside`), unexplained fragments (see `unexplained`) and closings (see `closing`)."""

    __slots__ = ("closings", "conflicts", "listed", "set_aside", "unexplained")

    def __init__(self, spans: Iterable[Fragment] = ()) -> None:
        self.conflicts: list[FragmentConflict] = []
        self.listed: list[Fragment] = []
        """All fragments, including those that others cover."""
        self.set_aside: list[SetAside] = []
        self.unexplained: list[Fragment] = []
        self.closings: list[tuple[str, ClosingName]] = []
        """Names of closings, each with the URL of its store."""
        super().__init__(spans)

    def add(self, span: Fragment) -> bool:
        """Add as `CoverSet.add` does. Of two fragments in conflict, keep the one that is added later."""
        self.listed.append(span)
        former = self.equal(span.begin, span.end)
        if former is not None and former.sum != span.sum:
            self.conflicts.append(FragmentConflict(kept=span, hidden=former))
        return super().add(span)

    def without(
        self, refuted: Collection[Fragment], local: Iterable[LocalFragment]
    ) -> FragmentCover:
        """Return a cover without the fragments of ``refuted``, if others have bytes at their offsets.

        A broker stored a refuted fragment, and could not confirm it. A later primary has given its offsets
        out again. If neither the stores nor ``local`` have other fragments at these offsets, that primary may
        have relied on the same bytes. So the fragment stays.
        """
        hidden = self.doubted(refuted, local)
        cover = FragmentCover(fragment for fragment in self.listed if fragment not in hidden)
        cover.set_aside, cover.unexplained = self.set_aside, self.unexplained
        cover.closings = self.closings
        return cover

    def doubted(
        self, refuted: Collection[Fragment], local: Iterable[LocalFragment] = ()
    ) -> list[Fragment]:
        """Return the listed fragments of ``refuted`` at whose offsets other fragments have bytes.

        Other fragments are listed fragments that are not refuted, and the fragments of ``local``.
        """
        refuted_paths = {fragment.content_path() for fragment in refuted}
        spans: CoverSet[Span] = CoverSet(local)
        for fragment in self.listed:
            if fragment.content_path() not in refuted_paths:
                spans.add(fragment)
        return [
            fragment
            for fragment in self.listed
            if fragment.content_path() in refuted_paths
            and spans.overlaps(fragment.begin, fragment.end)
        ]


def conflicts_with(
    remote: CoverSet[Fragment], local: Iterable[LocalFragment]
) -> list[FragmentConflict]:
    """Return the conflicts of stored fragments, which are read, with this broker's own spools."""
    conflicts = []
    for local_fragment in local:
        stored = remote.equal(local_fragment.begin, local_fragment.end)
        if stored is not None and stored.sum != local_fragment.fragment.sum:
            conflicts.append(FragmentConflict(kept=stored, hidden=local_fragment.fragment))
    return conflicts


def _place(fragment: Fragment) -> str:
    store = fragment.backing_store or "this broker's spools"
    return f"{fragment.content_path()} in {store}"
