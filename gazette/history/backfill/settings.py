"""Settings of a run of a backfill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gazette.protocol.ids import JournalName, Offset
from gazette.protocol.label_set import LabelSelector


@dataclass(frozen=True, slots=True)
class HistoryEnd:
    """End of the history: the present heads, given offsets, or the fragments stored up to a Unix time."""

    offsets: Mapping[JournalName, Offset] = field(default_factory=dict)
    until_s: float = 0


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of a run."""

    selector: LabelSelector
    staging: str
    run_id: str
    end: HistoryEnd = HistoryEnd()
    enable: bool = False
    """True if the publication enables the shards, so that they run at once."""
    overwrite: bool = False
    """True to replace states of shards that have a state already."""
    forget_publications: bool = False
    """True to replace a state although published messages may be lost or repeated.

    They may be lost if the state is unreadable, so that its owed acknowledgements are unknown. They may be
    lost or repeated if the shard publishes, and the new state continues at other offsets.
    """
    verify: int = 0
    """Number of shards whose new states are compared with a replay before any state is published."""
    scratch: Path | None = None
    prefix: str = ""
    """The consumers' prefix in etcd: needed only for shards with a state in a database."""

    application: str = ""
    """Name of the application that will own the states. Empty: the backfill's application."""

    def fqn(self, shard: str) -> str:
        """Return the shard's key in etcd; empty if the consumers' prefix is unknown."""
        return f"{self.prefix}/items/{shard}" if self.prefix else ""
