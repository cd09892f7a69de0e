"""Choice of the fragments of recovery logs that no shard needs. Pure.

In doubt, each rule keeps a fragment:

1. A fragment is kept if any hints of any shard need it: the primary's, or a backup.
2. Everything after the last segment of hints is kept, since play-back reads up to the write head.
   A forked shard that has written no files yet has its last segment in another log. Then the
   whole log that it writes is kept.
3. A log is skipped if a shard that writes it lacks hints in a slot, or has hints without files there.
4. Nothing is removed of any log if the listed fragments of one log end before the offsets that hints need.
   The listing is incomplete, or the hints are wrong.
5. A log is skipped if it has an unpersisted fragment that no hints need. Either the fragment will
   be persisted soon, or the hints are not of this log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gazette.client.shards import ShardHints
from gazette.errors import Corrupt
from gazette.protocol.fragment import Fragment
from gazette.protocol.hints import FSMHints
from gazette.protocol.ids import JournalName, Offset
from gazette.protocol.shard import ShardSpec
from gazette.recoverylog.log.segment import fold_hinted_segments


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a log that a recovery reads: ``[begin, end)``, or everything from ``begin`` on."""

    log: JournalName
    begin: Offset
    end: Offset | None

    def overlaps(self, fragment: Fragment) -> bool:
        return fragment.end > self.begin and (self.end is None or fragment.begin < self.end)


@dataclass(slots=True)
class Needs:
    """The parts of logs that all shards of a consumer need, by log, and reasons to skip logs."""

    spans: dict[JournalName, list[Span]] = field(default_factory=dict)
    blocked: dict[JournalName, str] = field(default_factory=dict)

    def add_shard(self, spec: ShardSpec, stored: ShardHints) -> None:
        """Add the needs of one shard. Raise ``Invalid`` for hints whose segments contradict each other."""
        for name, hints in hints_by_slot(spec, stored).items():
            if hints is None:
                self.blocked.setdefault(
                    spec.recovery_log, f"shard {spec.id} has no hints yet in slot {name}"
                )
            elif not any(node.segments for node in hints.live_nodes):
                self.blocked.setdefault(
                    spec.recovery_log, f"shard {spec.id} has hints without files in slot {name}"
                )
            else:
                self.add_hints(hints)

    def add_hints(self, hints: FSMHints) -> None:
        """Add the spans that a recovery with these hints reads."""
        for span in spans_of(hints):
            self.spans.setdefault(span.log, []).append(span)

    def unneeded(self, log: JournalName, fragments: Sequence[Fragment]) -> list[Fragment]:
        """Return the fragments that no hints need. Raise ``Corrupt`` if the list is incomplete (rule 4)."""
        spans = self.spans.get(log, [])
        end = max((fragment.end for fragment in fragments), default=0)
        for span in spans:
            if span.end is None and span.begin and span.begin >= end:
                raise Corrupt(
                    "fragments of the log end before what hints need",
                    log=log,
                    end=end,
                    needed=span.begin,
                    hint="Check the log's fragment stores, and that brokers have listed them.",
                )
        return [
            fragment for fragment in fragments if not any(span.overlaps(fragment) for span in spans)
        ]


def hints_by_slot(spec: ShardSpec, stored: ShardHints) -> dict[str, FSMHints | None]:
    """Return the hints of a shard by slot. If backups are missing, the first missing one is None."""
    slots = {"primary": stored.primary}
    slots |= {f"backup {index}": hints for index, hints in enumerate(stored.backups)}
    if len(stored.backups) < spec.hint_backups:
        slots |= {f"backup {len(stored.backups)}": None}
    return slots


def spans_of(hints: FSMHints) -> Iterator[Span]:
    """Yield the spans that a recovery with some hints reads. If the last segment is in another log, the own
    log of the hints is read as a whole. Raise ``Invalid`` if segments of the hints contradict each other."""
    segments = list(fold_hinted_segments((node.segments for node in hints.live_nodes), hints.log))
    for segment in segments[:-1]:
        yield Span(segment.log, segment.first_offset, segment.last_offset or None)
    for last in segments[-1:]:  # The last segment, if there is one.
        yield Span(last.log, last.first_offset, None)
    if not segments or segments[-1].log != hints.log:
        yield Span(hints.log, 0, None)


def unpersisted(fragments: Sequence[Fragment]) -> list[Fragment]:
    """Return the fragments that no store has yet, as far as brokers know."""
    return [
        fragment for fragment in fragments if not (fragment.mod_time and fragment.backing_store)
    ]


def references(hints: ShardHints) -> set[JournalName]:
    """Return the logs in the hints of a shard."""
    slots = [slot for slot in (hints.primary, *hints.backups) if slot is not None]
    return {slot.log for slot in slots} | {
        segment.log
        for slot in slots
        for node in slot.live_nodes
        for segment in node.segments
        if segment.log
    }
