"""The report of a run, for people. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from tools.chaos.checker import Verdict
from tools.chaos.history import FaultEvent

_TIMELINE_MAX = 120
_SHOWN_MAX = 4


@dataclass(slots=True)
class Outages:
    """Seconds without an acknowledgement of some journal, for each fault of one kind."""

    seconds: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{len(self.seconds):4d}   {median(self.seconds):7.1f} s {max(self.seconds):7.1f} s"


def outages(
    faults: Iterable[FaultEvent], acknowledged: Mapping[str, Sequence[float]]
) -> dict[str, Outages]:
    """Return, for the faults of each kind, the longest times without an acknowledgement of some journal.

    Such a time began before the fault ended, and ended after the fault began. Faults at the same time may
    count the same time without an acknowledgement.
    """
    by_kind: dict[str, Outages] = defaultdict(Outages)
    begun: dict[tuple[str, str], float] = {}
    for fault in faults:
        key = (fault.kind, fault.target)
        if fault.phase == "begun":
            begun[key] = fault.time
        elif key in begun:
            begin = begun.pop(key)
            gaps = [_longest_gap(times, begin, fault.time) for times in acknowledged.values()]
            by_kind[fault.kind].seconds.append(max(gaps, default=0.0))
    return dict(by_kind)


def _longest_gap(times: Sequence[float], begin: float, end: float) -> float:
    first = max(bisect_left(times, begin) - 1, 0)
    last = min(bisect_right(times, end) + 1, len(times))
    within = times[first:last]
    return max((after - before for before, after in pairwise(within)), default=0.0)


def table(verdict: Verdict, found: Mapping[str, Outages], seconds: float) -> str:
    """Format the figures of a run that took ``seconds``."""
    ops = verdict.appends
    refusals = ", ".join(f"{n:,} {status}" for status, n in verdict.refusals.most_common())
    lines = [
        f"appends   {ops.total():,}: {ops['ok']:,} acknowledged, {ops['fail']:,} refused",
        f"          {ops['unknown']:,} of unknown outcome, {verdict.unknown_there:,} of these there",
        f"refusals  {refusals or 'none'}",
        f"reads     {verdict.reads:,} of {verdict.read_bytes / 1e6:,.0f} MB",
        f"journals  {verdict.content_bytes / 1e6:,.0f} MB in {seconds:.0f} s",
        "",
        f"{'journal':24} acknowledged refused unknown lost as declared  bytes lives",
        *(
            f"{journal:24} {of.acknowledged:12,d} {of.refused:7,d} {of.unknown:7,d}"
            f" {of.excused:16,d} {of.content_bytes:6,d} {of.lives:5d}"
            for journal, of in sorted(verdict.journals.items())
        ),
        "",
        f"{'fault':32} times  unavailable: median, most",
        *(f"{kind:32} {of}" for kind, of in sorted(found.items())),
        "",
    ]
    if verdict.ok:
        lines.append("verdict   no violation")
    else:
        lines.append(f"verdict   {len(verdict.violations)} VIOLATIONS")
        lines += _violations(verdict)
    return "\n".join(lines)


def _violations(verdict: Verdict) -> Iterator[str]:
    """Yield the first violation of each kind and journal, and how many others there are."""
    counts = Counter((one.kind, one.journal) for one in verdict.violations)
    shown: Counter[tuple[str, str]] = Counter()
    for violation in verdict.violations:
        key = (violation.kind, violation.journal)
        shown[key] += 1
        if shown[key] <= _SHOWN_MAX:
            yield f"  {violation}"
        if shown[key] == counts[key] > _SHOWN_MAX:
            more = counts[key] - _SHOWN_MAX
            yield f"  {violation.kind}: {violation.journal}: and {more:,} more"


def timeline(faults: Sequence[FaultEvent]) -> str:
    """Return when each fault began and ended, one line for each; of a long run, the last faults only."""
    begun: dict[tuple[str, str], float] = {}
    lines = []
    for fault in faults:
        key = (fault.kind, fault.target)
        if fault.phase == "begun":
            begun[key] = fault.time
        elif key in begun:
            begin = begun.pop(key)
            lines.append(
                (begin, f"  {begin:7.1f} to {fault.time:7.1f} s  {fault.kind} ({fault.target})")
            )
    return "\n".join(["faults", *(line for _, line in sorted(lines)[-_TIMELINE_MAX:])])
