"""Claims of a backfill on states in a shared database: the values, and the store's part.

A store with a recovery log is built away from its shard. A store in a database is built in place. So
the database must refuse a late attempt:

- While the shard is idle, the run's driver *looks*: it reads the fence of the shard's row, and changes
  nothing. Then it checks that the shard is still idle.
- Each attempt *claims* the state with that fence. Its transaction first locks the row and requires the
  same fence, and at the end increments the fence. A live owner also increments the fence, before
  it reads anything. So an attempt cannot change a state that a shard has opened since the look.
- The same transaction leaves a *mark* with the run's token. By the mark, another attempt or a resumed run
  recognizes its own state. A checkpoint would not identify the run: a shard that has consumed the whole
  history has the same checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gazette.consumer.application import Shard
from gazette.protocol.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class BackfillClaim:
    """Permission for a run's attempts to write the state of a shard. ``token`` identifies the run."""

    fence: int
    """Fence of the shard's row, read while the shard was idle; zero if there was no row."""
    token: str


@dataclass(frozen=True, slots=True)
class HeldState:
    """Fence, checkpoint and mark that a database holds of one shard."""

    fence: int = 0
    checkpoint: Checkpoint = Checkpoint()
    mark: str = ""
    """Token of the last backfill that committed a state here; empty without a backfill."""
    mark_fence: int = 0
    """The fence after the commit of that backfill."""

    def is_of(self, token: str) -> bool:
        """Return True if a run with this token wrote the state, and no owner has opened the state since."""
        return bool(token) and self.mark == token and self.mark_fence == self.fence

    def is_followed(self, token: str) -> bool:
        """Return True if a run with this token wrote the state, and an owner has opened the state since."""
        return bool(token) and self.mark == token and self.mark_fence < self.fence


@runtime_checkable
class Claimable(Protocol):
    """Methods of a store in a database, which backfills call. Both block."""

    def held(self, shard: Shard) -> HeldState:
        """Return the shard's rows, and change nothing. Raise ``Unavailable`` if the database is silent."""
        ...

    def claim(self, shard: Shard, claim: BackfillClaim) -> HeldState:
        """Make the next transaction write a backfill's state. Call this instead of ``restore_checkpoint``.

        Return what the database holds. If `HeldState.is_of` says that this run wrote it, write nothing. The
        commit adds the ``ack_intents`` of the replaced checkpoint to the new checkpoint's.

        Raise ``Fenced`` if another owner has opened the state since the claim's fence was read. The first
        statement of the transaction, and its commit, raise ``Fenced``, too, and change nothing.
        """
        ...
