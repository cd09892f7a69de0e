"""The recovery FSM: decides which operations of a log apply, and which files live. Pure.

The FSM gets every operation of a log, by any author, in order. All readers of the same bytes decide alike.
This fences an old author: once a hand-off has sequence number n, the old author's operation n does not apply.

With hints, the FSM follows the branch that they describe, up to their last operation. Until then, only
operations of the hinted authors apply. The FSM jumps gaps between hinted segments. It tracks only files that
lived when the hints were taken.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field, replace

from gazette.errors import Invalid
from gazette.protocol.hints import FnodeSegments, FSMHints, Property, Segment
from gazette.recoverylog.log.ops import (
    Create,
    Link,
    RecordedOp,
    SetProperty,
    Unlink,
    Write,
    next_checksum,
)
from gazette.recoverylog.log.segment import SegmentSet, fold_hinted_segments


class Outcome(enum.Enum):
    """Outcome of applying an operation. Only the first two advance the FSM."""

    APPLIED = "applied"
    NOT_TRACKED = "file is not tracked"
    NOT_HINTED_AUTHOR = "author is not the hinted one"
    WRONG_SEQ_NO = "sequence number is not the next"
    CHECKSUM_MISMATCH = "checksum does not continue the log"
    EXPECTED_HINTED_FNODE = "a hinted file was not created where the hints say"
    LINK_EXISTS = "path is in use"
    PROPERTY_EXISTS = "path is a property"
    NO_SUCH_LINK = "path does not name that file"

    @property
    def advances(self) -> bool:
        return self is Outcome.APPLIED or self is Outcome.NOT_TRACKED


@dataclass(slots=True)
class Fnode:
    """A live file: its paths, and the segments of the operations that made it.

    Invariant: ``links`` and ``segments`` are not empty. ``segments`` has one entry per contiguous (author,
    log).
    """

    links: set[str] = field(default_factory=set)
    segments: list[Segment] = field(default_factory=list)
    length: int = 0


class RecoveryFSM:
    """State machine that sequences operations: see the module.

    Invariants: ``links`` maps each path to its node, and the nodes have the same paths. A path is
    never both a link and a property (except for properties of the hints). A node's id is the
    sequence number of the operation that created it. ``nodes`` is in the order of ids.
    """

    def __init__(self, hints: FSMHints) -> None:
        """Start from hints, which may have only the log's name. Raise ``Invalid`` for a contradiction."""
        hints.validate()
        self.next_seq_no = 1
        self.next_checksum = 0
        self.last_log = hints.log
        self.properties: dict[str, str] = {prop.path: prop.content for prop in hints.properties}
        # Hints have the properties as of the time when they were taken. The operation that sets a
        # property may come after the last segment. Until then, the path may still belong to a file.
        self._properties_of_hints = set(self.properties)
        self.nodes: dict[int, Fnode] = {}
        self.links: dict[str, int] = {}
        self.hinted_fnodes: deque[int] = deque()
        """Fnodes of the hints whose creates were not read yet, in order."""
        self.hinted_segments: deque[Segment] = deque()
        """Segments of the hints that were not read to their end yet, in order."""

        last_fnode = 0
        for node in hints.live_nodes:
            if not node.segments or node.segments[0].first_seq_no != node.fnode:
                raise Invalid("a node's first segment must begin at the node", fnode=node.fnode)
            if node.fnode <= last_fnode:
                raise Invalid("nodes must be in increasing order", fnode=node.fnode)
            last_fnode = node.fnode
            self.hinted_fnodes.append(node.fnode)
        folded: SegmentSet = fold_hinted_segments(
            (node.segments for node in hints.live_nodes), hints.log
        )
        self.hinted_segments.extend(folded)
        if self.hinted_segments:
            if self.hinted_segments[-1].log != hints.log:
                raise Invalid("the last segment must be of the hinted log", log=hints.log)
            self._jump_to_hinted()

    def _jump_to_hinted(self) -> None:
        self.next_seq_no = self.hinted_segments[0].first_seq_no
        self.next_checksum = self.hinted_segments[0].first_checksum

    @property
    def has_hints(self) -> bool:
        """True while hinted operations remain to be read."""
        return bool(self.hinted_segments)

    def apply(self, op: RecordedOp, payload: bytes) -> Outcome:
        """Sequence one operation. ``payload`` is its encoding as it stands in the log. An outcome that does
        not advance leaves the FSM unchanged."""
        if self.hinted_segments and op.author != self.hinted_segments[0].author:
            return Outcome.NOT_HINTED_AUTHOR
        if op.seq_no != self.next_seq_no:
            return Outcome.WRONG_SEQ_NO
        if op.checksum != self.next_checksum:
            return Outcome.CHECKSUM_MISMATCH
        outcome = self._apply_action(op)
        if not outcome.advances:
            return outcome
        self.next_seq_no += 1
        self.next_checksum = next_checksum(self.next_checksum, payload)
        self.last_log = op.log
        if self.hinted_segments and self.hinted_segments[0].last_seq_no < self.next_seq_no:
            self.hinted_segments.popleft()
            if self.hinted_segments:
                self._jump_to_hinted()
        return outcome

    def _apply_action(self, op: RecordedOp) -> Outcome:
        action = op.action
        if isinstance(action, Create):
            return self._create(op, action)
        if self.hinted_fnodes and op.seq_no == self.hinted_fnodes[0]:
            return Outcome.EXPECTED_HINTED_FNODE
        match action:
            case Link():
                return self._link(op, action)
            case Unlink():
                return self._unlink(op, action)
            case Write():
                return self._write(op, action)
            case SetProperty():
                return self._property(action)
            case None:
                return Outcome.APPLIED

    def _path_in_use(self, path: str) -> Outcome | None:
        """Return why no file can get this path; None if a file can get it."""
        if path in self.links:
            return Outcome.LINK_EXISTS
        if path in self.properties and path not in self._properties_of_hints:
            return Outcome.PROPERTY_EXISTS
        return None

    def _create(self, op: RecordedOp, action: Create) -> Outcome:
        hinted = bool(self.hinted_fnodes) and self.hinted_fnodes[0] == op.seq_no
        # Hints name every file of their range that lived when they were taken. Any other file was deleted by
        # then, and its unlink may be in a gap that is jumped. If the FSM tracked such a file, the file would
        # come back, and no later create of its path could apply.
        if self.hinted_segments and not hinted:
            return Outcome.NOT_TRACKED
        if (conflict := self._path_in_use(action.path)) is not None:
            return conflict
        if hinted:
            self.hinted_fnodes.popleft()
        node = Fnode(links={action.path})
        self.nodes[op.seq_no] = node
        self.links[action.path] = op.seq_no
        _extend(node, op)
        return Outcome.APPLIED

    def _link(self, op: RecordedOp, action: Link) -> Outcome:
        if (conflict := self._path_in_use(action.path)) is not None:
            return conflict
        node = self.nodes.get(action.fnode)
        if node is None:
            return Outcome.NOT_TRACKED
        node.links.add(action.path)
        self.links[action.path] = action.fnode
        _extend(node, op)
        return Outcome.APPLIED

    def _unlink(self, op: RecordedOp, action: Unlink) -> Outcome:
        node = self.nodes.get(action.fnode)
        if node is None:
            return Outcome.NOT_TRACKED
        if action.path not in node.links:
            return Outcome.NO_SUCH_LINK
        node.links.discard(action.path)
        del self.links[action.path]
        if node.links:
            _extend(node, op)
        else:
            del self.nodes[action.fnode]
        return Outcome.APPLIED

    def _write(self, op: RecordedOp, action: Write) -> Outcome:
        node = self.nodes.get(action.fnode)
        if node is None:
            return Outcome.NOT_TRACKED
        _extend(node, op)
        node.length = max(node.length, action.offset + action.length)
        return Outcome.APPLIED

    def _property(self, action: SetProperty) -> Outcome:
        if action.path in self.links:
            return Outcome.LINK_EXISTS
        # While hinted segments remain, drop the value: an older value would replace the value of the hints.
        # The operation with the last value may be in a gap that is jumped.
        if not self.hinted_segments:
            self.properties[action.path] = action.content
            self._properties_of_hints.discard(action.path)
        return Outcome.APPLIED

    def build_hints(self, log: str) -> FSMHints:
        """Return hints from which the present files can be rebuilt. A player reads ``log``, and the older
        logs that the segments name."""
        return FSMHints(
            log=log,
            live_nodes=tuple(
                FnodeSegments(
                    fnode=fnode,
                    segments=tuple(
                        replace(segment, log="") if segment.log == log else segment
                        for segment in self.nodes[fnode].segments
                    ),
                )
                for fnode in sorted(self.nodes)
            ),
            properties=tuple(
                Property(path=path, content=self.properties[path])
                for path in sorted(self.properties)
            ),
        )

    def oldest_offset(self) -> int | None:
        """Return the first offset in ``last_log`` of all live files, or None if that log has none of them.

        Files of an earlier log count by their first operation in ``last_log``: offsets of different logs
        cannot be compared.
        """
        oldest: int | None = None
        for node in self.nodes.values():
            offsets = (part.first_offset for part in node.segments if part.log == self.last_log)
            first = next(offsets, None)
            if first is not None and (oldest is None or first < oldest):
                oldest = first
            # Nodes are in the order of creation: later nodes of the same log begin later.
            if node.segments[0].log == self.last_log:
                break
        return oldest


def _extend(node: Fnode, op: RecordedOp) -> None:
    """Add ``op`` to the segments of ``node``."""
    if node.segments:
        last = node.segments[-1]
        if last.author == op.author and last.log == op.log:
            node.segments[-1] = replace(last, last_seq_no=op.seq_no, last_offset=op.last_offset)
            return
    node.segments.append(
        Segment(
            author=op.author,
            first_seq_no=op.seq_no,
            first_offset=op.first_offset,
            first_checksum=op.checksum,
            last_seq_no=op.seq_no,
            last_offset=op.last_offset,
            log=op.log,
        )
    )
