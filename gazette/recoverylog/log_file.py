"""A recovery log that is recorded into a local file first, to be appended to its journal later.

That is how a shard's state is built away from the shard: the store runs as ever, over a recorder whose
appends go to a file. What comes out is a *branch*: operations of a new author, whose sequence numbers
begin where no other branch of the log is. Whoever plays the journal by the hints that it had before
passes over the operations of a branch, as over those of any stranger; whoever plays it by the branch's
hints reads nothing else. So a branch may be appended, wholly or in part, without taking effect, and
takes effect at the moment at which its hints are stored.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from gazette.client.appender import AppendParams, AppendResult
from gazette.errors import Bug
from gazette.protocol.fragment import Fragment
from gazette.protocol.hints import FnodeSegments, FSMHints
from gazette.protocol.ids import ProcessId
from gazette.protocol.label_set import EMPTY_LABELS
from gazette.protocol.route import EMPTY_ROUTE, EtcdHeader, Header
from gazette.recoverylog.fsm import RecoveryFSM
from gazette.recoverylog.ops import RecordedOp, encode_op
from gazette.recoverylog.private_files import write_private
from gazette.recoverylog.recorder import Recorder
from gazette.tasks import OpFuture, first_failure, resolved

BRANCH_SEQ_NO_MIN: Final = 1 << 48
"""Branches begin from here on: a log of one operation per microsecond gets here in nine years."""
_BRANCH_BITS: Final = 46
_BRANCH_ALIGNMENT: Final = 1 << 16
_HEADER: Final = Header(ProcessId("local", "log-file"), EMPTY_ROUTE, EtcdHeader(1, 1, 1, 1))


@dataclass(frozen=True, slots=True)
class Branch:
    """Who writes a branch, and from which sequence number on."""

    author: int
    first_seq_no: int

    @classmethod
    def new(cls, rng: random.Random) -> Branch:
        """A branch that is like no other."""
        distance = rng.getrandbits(_BRANCH_BITS) * _BRANCH_ALIGNMENT
        return cls(rng.randrange(1, (1 << 32) - 1), BRANCH_SEQ_NO_MIN + distance)

    def fsm(self, log: str) -> RecoveryFSM:
        """The FSM of a branch in which nothing happened yet."""
        fsm = RecoveryFSM(FSMHints(log=log))
        fsm.next_seq_no = self.first_seq_no
        return fsm

    def opening(self, rng: random.Random, *, empty: bool) -> bytes:
        """What is appended before the branch, to carry its fence into the log's registers.

        Operations that take effect for nobody. In a log that is ``empty`` another author makes the
        first operation: a reader without hints has to begin somewhere, and must then know that the
        branch is not of who it follows.
        """
        frames = b""
        if empty:
            stranger = self.author
            while stranger == self.author:
                stranger = rng.randrange(1, (1 << 32) - 1)
            frames, _ = encode_op(RecordedOp(seq_no=1, checksum=0, author=stranger, action=None))
        frame, _ = encode_op(
            RecordedOp(seq_no=self.first_seq_no - 1, checksum=0, author=self.author, action=None)
        )
        return frames + frame


class LogFile:
    """The file, with the part of an append service that recorders use. Used by one thread.

    ``ends`` are the offsets at which appends ended: a log may be cut there and nowhere else.
    """

    def __init__(self, path: Path) -> None:
        """Create the file, which must not exist."""
        self.path = path
        self.ends: list[int] = []
        self.end = 0
        write_private(path, b"", new=True)
        self._file: BinaryIO = path.open("r+b")
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of everything that was appended, in hexadecimal."""
        return self._digest.hexdigest()

    def start_append(
        self, params: AppendParams, dependencies: Collection[OpFuture[Any]] = ()
    ) -> FileTxn:
        """Begin an append, whose dependencies must have succeeded already."""
        if not all(future.done() for future in dependencies):
            raise Bug("a log file does not wait for dependencies", log=params.journal)
        if (error := first_failure(dependencies)) is not None:
            raise error
        return FileTxn(self, params.journal)

    def _append(self, journal: str, chunks: list[bytes]) -> OpFuture[AppendResult]:
        begin = self.end
        for chunk in chunks:
            self._file.write(chunk)
            self._digest.update(chunk)
            self.end += len(chunk)
        if self.end > begin:
            self.ends.append(self.end)
        return resolved(AppendResult(Fragment(journal, begin, self.end), EMPTY_LABELS, _HEADER))

    def close(self) -> None:
        """Write out what is buffered. Raises ``OSError`` when the disk is full."""
        self._file.close()


class FileTxn:
    """One append to a log file."""

    def __init__(self, file: LogFile, journal: str) -> None:
        self._file = file
        self._journal = journal
        self._chunks: list[bytes] = []

    def write(self, content: bytes | bytearray | memoryview) -> None:
        self._chunks.append(bytes(content))

    def release(self) -> OpFuture[AppendResult]:
        return self._file._append(self._journal, self._chunks)

    def roll_back(self) -> None:
        self._chunks.clear()


def offline_recorder(log: str, branch: Branch, directory: Path, file: LogFile) -> Recorder:
    """A recorder of a branch of ``log`` into a file. ``directory`` exists, and is empty."""
    return Recorder(branch.fsm(log), branch.author, directory, file, log, 0, offline=True)


def moved_hints(hints: FSMHints, base: int) -> FSMHints:
    """Hints of a branch that was recorded from offset 0 on, and is in its journal from ``base`` on."""
    return replace(
        hints,
        live_nodes=tuple(
            FnodeSegments(
                node.fnode,
                tuple(
                    replace(
                        segment,
                        first_offset=segment.first_offset + base,
                        last_offset=segment.last_offset + base if segment.last_offset else 0,
                    )
                    for segment in node.segments
                ),
            )
            for node in hints.live_nodes
        ),
    )
