"""Claims of a backfill on states in a shared database: the values, and the store's part.

A store with a recovery log is built away from its shard. One in a database is built in place. So
the database has to tell a late attempt from one that may write:

- While the shard is idle, the run's driver *looks*: it reads the fence of the shard's row, and changes
  nothing. Then it makes sure that the shard is still idle.
- Each attempt *claims* the state with that fence. The transaction in which it writes begins by
  locking the row, and requires the same fence. It ends by incrementing the fence. A live owner
  increments it as well, before it reads anything. So a shard that has been opened since is safe.
- The same transaction leaves a *mark* with the run's token. By it another attempt, and a resumed
  run, knows that the state is theirs. A checkpoint would not prove that: a shard that has consumed
  all of the history has the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gazette.consumer.application import Shard
from gazette.protocol.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class BackfillClaim:
    """Permission for a run's attempts to write the state of one shard. ``token`` identifies the run."""

    fence: int
    """Fence of the shard's row, read while the shard was idle; zero if there was no row."""
    token: str


@dataclass(frozen=True, slots=True)
class HeldState:
    """Content of a database that concerns one shard."""

    fence: int = 0
    checkpoint: Checkpoint = Checkpoint()
    mark: str = ""
    """Token of the backfill whose state was last committed here; empty if there was none."""
    mark_fence: int = 0
    """The fence that the backfill left behind."""

    def is_of(self, token: str) -> bool:
        """Return True if a run with this token wrote the state, and no owner has opened the state since."""
        return bool(token) and self.mark == token and self.mark_fence == self.fence

    def is_followed(self, token: str) -> bool:
        """Return True if a run with this token wrote the state, and an owner has opened the state since."""
        return bool(token) and self.mark == token and self.mark_fence < self.fence


@runtime_checkable
class Claimable(Protocol):
    """Part of a store in a database that backfills call. Both methods block."""

    def held(self, shard: Shard) -> HeldState:
        """Return what the database holds. Leave the fence unchanged. Raise ``Unavailable``."""
        ...

    def claim(self, shard: Shard, claim: BackfillClaim) -> HeldState:
        """Make the next transaction that of a backfill. Call it instead of ``restore_checkpoint``.

        Return what the database holds already. If that is of the claim's run, write nothing. The
        commit adds the ``ack_intents`` of the replaced checkpoint to those of the new one.

        Raise ``Fenced`` when another owner has opened the state since the claim's fence was read. The
        first statement of the transaction, and its commit, raise it too; then nothing has changed.
        """
        ...
