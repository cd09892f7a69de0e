"""Settings of a run of a backfill."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gazette.backfill.plan import Bounds
from gazette.protocol.label_set import LabelSelector


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of a run."""

    selector: LabelSelector
    staging: str
    run_id: str
    bounds: Bounds = Bounds()
    enable: bool = False
    """True if publication enables the shards, so that they run at once."""
    overwrite: bool = False
    """True to replace the state of shards that have one."""
    forget_publications: bool = False
    """True to replace a state although messages may be lost or published twice.

    That is so if the state is unreadable, so that its debts are unknown. It is also so if the shard
    publishes and the new state continues elsewhere.
    """
    verify: int = 0
    """Number of shards that are compared with a replay before anything is published."""
    scratch: Path | None = None
    prefix: str = ""
    """The consumers' prefix in etcd; needed only for shards with a database as store."""

    application: str = ""
    """Name of the application that is to own the states; empty for the backfill's own application."""

    def fqn(self, shard: str) -> str:
        """Return the shard's key in etcd; empty if the consumers' prefix is not known."""
        return f"{self.prefix}/items/{shard}" if self.prefix else ""
