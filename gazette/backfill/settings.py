"""What is asked of a run of a backfill."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gazette.backfill.plan import Bounds
from gazette.protocol.label_set import LabelSelector


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What is asked of a run."""

    selector: LabelSelector
    staging: str
    run_id: str
    bounds: Bounds = Bounds()
    enable: bool = False
    """Whether publication enables the shards, so that they run at once."""
    overwrite: bool = False
    """Whether shards that have a state already get another."""
    forget_publications: bool = False
    """Whether a state is replaced also if it cannot be read, so that what it owes is not known, or if the
    shard publishes and the new state goes on elsewhere."""
    verify: int = 0
    """How many shards are compared with a replay before anything is published."""
    scratch: Path | None = None
    prefix: str = ""
    """The consumers' prefix in etcd: only shards whose store is a database need it."""

    application: str = ""
    """Name of the application that is to own the states; empty: that of the backfill's application."""

    def fqn(self, shard: str) -> str:
        """The shard's key in etcd; empty if the consumers' prefix is not known."""
        return f"{self.prefix}/items/{shard}" if self.prefix else ""
