"""Logs of SQLite shards that the Go original has recorded: ``testdata/original-*``.

``tools/conformance/original_logs.py`` made them, with the original at commit e54beb5, on SQLite 3.40 and
RocksDB 7.8. In ``sqlite`` the database is in WAL mode. In ``journal`` there are two databases, and each
transaction of theirs has a journal. An application counted words; see ``tools/conformance/original``.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gazette.protocol.hints import FSMHints
from gazette.recoverylog.log.fsm import Outcome
from gazette.recoverylog.log.ops import RecordedOp
from gazette.recoverylog.playback.playback import Playback
from gazette.testing.recovery import LOG

NAMES: Final = ("sqlite", "journal")
_DATA: Final = Path(__file__).parent / "testdata"


@dataclass(frozen=True)
class OriginalLog:
    """A log, and what its last commit holds."""

    name: str
    data: bytes
    counts: dict[str, int]
    source: str
    read_through: int

    def cuts(self) -> Iterator[tuple[int, frozenset[str]]]:
        """Yield where a write to the log ended, and the paths of the files that live there."""
        found: list[tuple[int, frozenset[str]]] = []

        def note(op: RecordedOp, outcome: Outcome) -> None:
            assert outcome is Outcome.APPLIED
            found.append((op.first_offset, frozenset(playback.fsm.links)))

        playback = Playback(FSMHints(LOG), observer=note)
        playback.feed(self.data)
        yield from found


def original_log(name: str) -> OriginalLog:
    facts = json.loads((_DATA / f"original-{name}.json").read_text())
    data = lzma.decompress((_DATA / f"original-{name}.log.xz").read_bytes())
    return OriginalLog(
        name, data, facts["counts"], f"handover/{name}/source", facts["read_through"]
    )
