"""Stage 9 of the byte path: unexplained fragments that `listing` found below a journal's directory.

Such an object has the name of a fragment, and may be the journal's: see `protocol/fragment_owner`. An offset
that only unexplained fragments have is neither given out again nor passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gazette.errors import Unavailable
from gazette.fragment.cover_set import CoverSet, S
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import JournalName, Offset

COMMAND: Final = "gazctl journals decide-fragments"
PAGE: Final = "docs/stores.md#unexplained-fragments"
_END: Final = 1 << 63
_SHOWN_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class Unexplained:
    """Unexplained fragments. ``cover`` has the fewest fragments that together have all their offsets."""

    cover: CoverSet[Fragment]

    @classmethod
    def of(cls, fragments: Iterable[Fragment]) -> Unexplained:
        # In this order, each fragment is added at the end of the set: that is fast. There may be very many.
        return cls(CoverSet(sorted(fragments, key=lambda span: (span.begin, -span.end))))

    @classmethod
    def beside(cls, own: CoverSet[S], fragments: Iterable[Fragment]) -> Unexplained:
        """Return the fragments with offsets that ``own``, the journal's fragments, do not cover."""
        return cls.of(cls.of(fragments).outside(own))

    @property
    def end(self) -> Offset:
        """End of the last fragment; zero if there are no fragments."""
        return self.cover.end

    def outside(self, own: CoverSet[S]) -> list[Fragment]:
        """Return the fragments with offsets that ``own``, the journal's fragments, do not cover."""
        return [fragment for fragment in self.cover if not own.covers(fragment.begin, fragment.end)]

    def check(self, journal: JournalName, begin: Offset, end: Offset | None = None) -> None:
        """Raise ``Unavailable`` if an unexplained fragment has any offset from ``begin`` to ``end`` (None:
        without end)."""
        if begin >= self.cover.end or not self.cover.overlaps(begin, _END if end is None else end):
            return
        index, _ = self.cover.longest_overlapping(begin)
        raise undecided(journal, self.cover[index:])


NONE: Final = Unexplained(CoverSet())


def undecided(journal: JournalName, fragments: Sequence[Fragment]) -> Unavailable:
    """Return the error of a journal that waits for a decision about ``fragments``."""
    return Unavailable(
        f"{problem_of(fragments)}: decide it by `{COMMAND}`",
        hint=f"Say whose they are, or remove them: {PAGE}.",
        journal=journal,
        **facts_of(fragments),
    )


def problem_of(fragments: Sequence[Fragment]) -> str:
    """Return the problem with unexplained fragments, in words."""
    directories = list(dict.fromkeys(fragment.path_postfix for fragment in fragments))
    shown = ", ".join(directories[:_SHOWN_MAX])
    more = len(directories) - _SHOWN_MAX
    return (
        f"{len(fragments)} objects below the journal's directory may be its fragments, in {shown}"
        f"{f' and {more} more directories' if more > 0 else ''}, and nothing says whose they are"
    )


def facts_of(fragments: Sequence[Fragment]) -> dict[str, Any]:
    """Return where unexplained fragments are, for an error."""
    first = fragments[0]
    return {"store": first.backing_store, "begin": first.begin, "end": fragments[-1].end}
