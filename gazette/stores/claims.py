"""What a backfill says to a store whose state is in a shared database: values, and the store's part.

A store with a recovery log is built away from its shard. One in a database is built in place, so it is
the database that has to tell an attempt that comes late from one that may write:

- While the shard is idle, the run's driver *looks*: it reads the fence of the shard's row, and changes
  nothing. It then sees to it that the shard is idle still.
- Each attempt *claims* the state with that fence. The transaction in which it writes begins by locking
  the row, and requires the fence to be the same; it ends by counting it up. A live owner counts it up as
  well, before it reads anything, so a shard that has been opened since is out of reach.
- The same transaction leaves a *mark* with the run's token, by which another attempt, and a run that is
  resumed, knows that the state is theirs. A checkpoint would not tell: a shard that has consumed all of
  the history is there as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gazette.consumer.application import Shard
from gazette.protocol.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class BackfillClaim:
    """With which a run's attempts write the state of one shard. ``token`` is the run's."""

    fence: int
    """Of the shard's row, as it was while the shard was idle; zero: there was no row."""
    token: str


@dataclass(frozen=True, slots=True)
class Held:
    """What a database holds of a shard."""

    fence: int = 0
    checkpoint: Checkpoint = Checkpoint()
    mark: str = ""
    """The token of the backfill whose state was last committed here, if there was one."""
    mark_fence: int = 0
    """The fence that it left behind."""

    def is_of(self, token: str) -> bool:
        """Whether it is what a run with this token has committed, and nobody has opened it since."""
        return bool(token) and self.mark == token and self.mark_fence == self.fence

    def is_followed(self, token: str) -> bool:
        """Whether a run with this token has committed it, and somebody has opened it since."""
        return bool(token) and self.mark == token and self.mark_fence < self.fence


@runtime_checkable
class Claimable(Protocol):
    """The part of a store that keeps states in a database, for backfills. Both methods block."""

    def held(self, shard: Shard) -> Held:
        """What there is, which stays as it is: no fence is counted up. Raises ``Unavailable``."""
        ...

    def claim(self, shard: Shard, claim: BackfillClaim) -> Held:
        """Have the next transaction be the one of a backfill; instead of ``restore_checkpoint``.

        Its commit adds the ``ack_intents`` of the checkpoint that it replaces to those of the new one.

        What there is already; if that is of the claim's run, nothing is to be written. Raises
        ``Fenced`` when somebody else has opened the state since the claim's fence was read. So do
        the first statement of the transaction, and its commit; nothing has changed then.
        """
        ...
