"""The fragments of a journal as bars on a time axis. No IO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gazette.client.journals import StoredFragment
from gazette.gazctl.journals.fragments import holes

BARS_MAX: Final = 160


def timeline(stored: Sequence[StoredFragment], head: int) -> dict[str, Any]:
    """Return the bars, at most `BARS_MAX`, and sums. Join neighbours if there are more."""
    ordered = sorted(stored, key=lambda listed: (listed.fragment.begin, listed.fragment.end))
    size = max(1, -(-len(ordered) // BARS_MAX))
    groups = [ordered[at : at + size] for at in range(0, len(ordered), size)]
    return {
        "bars": [_bar(group) for group in groups],
        "count": len(ordered),
        "bytes": sum(listed.fragment.length for listed in ordered),
        "stored": sum(listed.fragment.mod_time > 0 for listed in ordered),
        "conflicts": [
            f"{listed.fragment.content_name()} hides {', '.join(listed.conflicts_with)}"
            for listed in ordered
            if listed.conflicts_with
        ][:20],
        "holes": [
            {"begin": begin, "end": end}
            for begin, end in holes((listed.fragment for listed in ordered), head)
        ][:20],
    }


def _bar(group: Sequence[StoredFragment]) -> dict[str, Any]:
    first, last = group[0].fragment, group[-1].fragment
    return {
        "begin": first.begin,
        "end": max(listed.fragment.end for listed in group),
        "fragments": len(group),
        "mod_time": last.mod_time,
        "store": last.backing_store,
        "codec": last.codec.name,
        "in_spool": sum(not listed.fragment.mod_time for listed in group),
        "conflict": any(listed.conflicts_with for listed in group),
    }
