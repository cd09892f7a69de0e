"""Fragments that cannot both be right.

Proven: two fragments of the same begin and end whose SHA-1 differ. One of them holds other bytes than were
acknowledged at these offsets, or was written by hand. Only one of them is read, as the later one wins.

Not proven, and not reported: fragments that overlap in part, or of which one contains the other. Replicas
close their fragments at different offsets as they join and leave, so that is common and mostly right.
Names alone cannot tell: compare the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gazette.fragment.cover_set import CoverSet
from gazette.fragment.local_file import LocalFragment
from gazette.fragment.set_aside import SetAside
from gazette.protocol.fragment import Fragment


@dataclass(frozen=True, slots=True)
class FragmentConflict:
    """``kept`` is read, ``hidden`` is not. Both have the same begin and end, and other bytes."""

    kept: Fragment
    hidden: Fragment

    def __str__(self) -> str:
        return f"{_place(self.kept)} is read, {_place(self.hidden)} is hidden"


class FragmentCover(CoverSet[Fragment]):
    """The cover of a journal's stored fragments, with the conflicts and the objects that brokers have set
    aside (see `set_aside`), which were found on the way."""

    __slots__ = ("conflicts", "set_aside")

    def __init__(self, spans: Iterable[Fragment] = ()) -> None:
        self.conflicts: list[FragmentConflict] = []
        self.set_aside: list[SetAside] = []
        super().__init__(spans)

    def add(self, span: Fragment) -> bool:
        """See ``CoverSet.add``. The later one of a conflict is kept."""
        former = self.equal(span.begin, span.end)
        if former is not None and former.sum != span.sum:
            self.conflicts.append(FragmentConflict(kept=span, hidden=former))
        return super().add(span)


def conflicts_with(
    remote: CoverSet[Fragment], local: Iterable[LocalFragment]
) -> list[FragmentConflict]:
    """Return the conflicts of what stores hold, which is read, with what this broker has spooled."""
    found = []
    for one in local:
        stored = remote.equal(one.begin, one.end)
        if stored is not None and stored.sum != one.fragment.sum:
            found.append(FragmentConflict(kept=stored, hidden=one.fragment))
    return found


def _place(fragment: Fragment) -> str:
    where = fragment.backing_store or "this broker's spools"
    return f"{fragment.content_path()} in {where}"
