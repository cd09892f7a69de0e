"""Stage 14 of the byte path: claims of a backfill in a SQL database.

`gazette.stores.claims` says what a claim is for. The mark is a row of the table of checkpoints, with a key
that no shard has. So databases need neither another table nor a migration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import sqlalchemy as sa
from sqlalchemy import exc

from gazette.errors import Fenced
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.ids import JournalName
from gazette.stores.claims import BackfillClaim, HeldState

MARK: Final = "#backfill"
"""Suffix of the key of a mark. Ids of shards have no ``#``."""


def held_in(connection: sa.Connection, table: sa.Table, fqn: str) -> HeldState:
    """Return the rows of a shard and of its mark in the table of checkpoints."""
    keys = (fqn, fqn + MARK)
    rows = connection.execute(
        sa.select(table.c.shard_fqn, table.c.fence, table.c.checkpoint).where(
            table.c.shard_fqn.in_(keys)
        )
    ).all()
    by_key = {row.shard_fqn: (int(row.fence), bytes(row.checkpoint)) for row in rows}
    fence, data = by_key.get(fqn, (0, b""))
    mark_fence, mark = by_key.get(fqn + MARK, (0, b""))
    return HeldState(
        fence, Checkpoint.from_bytes(data), mark.decode("utf-8", "replace"), mark_fence
    )


def taken_over(fqn: str) -> Fenced:
    return Fenced(
        "the shard's state was opened after the run began: the backfill changed nothing",
        hint="The shard was enabled, or another backfill was faster. To replace its state all the "
        "same, disable it, and run the backfill again with a new --run-id.",
        shard=fqn,
    )


class ClaimedRow:
    """The row of a shard's checkpoint, for the only transaction of an attempt."""

    def __init__(self, table: sa.Table, fqn: str, claim: BackfillClaim) -> None:
        self._table = table
        self._fqn = fqn
        self._claim = claim
        self._owed: Mapping[JournalName, bytes] = {}

    @property
    def next_fence(self) -> int:
        """The fence after the transaction: it stops former owners and other attempts."""
        return self._claim.fence + 1

    def lock(self, connection: sa.Connection) -> None:
        """Lock the row until the transaction ends, and leave the mark. Raise ``Fenced`` for another fence.

        Wait for a transaction that holds the lock. Remember the row's owed ACK intents, for `carrying`.
        """
        table = self._table
        if self._claim.fence:
            own_row = sa.select(table.c.fence, table.c.checkpoint).where(
                table.c.shard_fqn == self._fqn
            )
            row = connection.execute(own_row.with_for_update()).one_or_none()
            if row is None or row.fence != self._claim.fence:
                raise taken_over(self._fqn)
            self._owed = Checkpoint.from_bytes(bytes(row.checkpoint)).ack_intents
        else:
            self._insert(connection, self._fqn, 0, Checkpoint().to_bytes())
        key = self._fqn + MARK
        connection.execute(table.delete().where(table.c.shard_fqn == key))
        self._insert(connection, key, self.next_fence, self._claim.token.encode())

    def carrying(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint, with the owed ACK intents of the replaced one. Call `lock` first."""
        return replace(checkpoint, ack_intents={**self._owed, **checkpoint.ack_intents})

    def _insert(self, connection: sa.Connection, key: str, fence: int, value: bytes) -> None:
        """Insert a row. Raise ``Fenced`` if it exists: an owner or another attempt was faster."""
        insert = self._table.insert().values(shard_fqn=key, fence=fence, checkpoint=value)
        try:
            connection.execute(insert)
        except exc.IntegrityError as error:
            raise taken_over(self._fqn) from error
