"""The state of summers in one SQL database, which is an extra of the package."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from gazette import Shard
from gazette.stores.sql.store import SQLStore, checkpoint_table, shared_engine
from stream_sum.state import Partial, StreamState, Totals, changed_and_ended

METADATA = sa.MetaData()
checkpoint_table(METADATA)
STREAMS = sa.Table(
    "stream_sum_streams",
    METADATA,
    sa.Column("shard", sa.String(200), primary_key=True),
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("seq_no", sa.BigInteger, nullable=False),
    sa.Column("value", sa.String(16), nullable=False),
)
TOTALS = sa.Table(
    "stream_sum_totals",
    METADATA,
    sa.Column("shard", sa.String(200), primary_key=True),
    sa.Column("transactions", sa.BigInteger, nullable=False),
    sa.Column("sums", sa.BigInteger, nullable=False),
)


class SQLState(StreamState, SQLStore):
    def __init__(self, shard: Shard, database: str) -> None:
        self.shard = shard.fqn
        super().__init__(shared_engine(database, METADATA))

    def load(self, key: bytes) -> Partial | None:
        row = self.execute(
            sa.select(STREAMS.c.seq_no, STREAMS.c.value).where(
                STREAMS.c.shard == self.shard, STREAMS.c.id == key.hex()
            )
        ).first()
        return None if row is None else Partial(int(row.seq_no), int(row.value, 16))

    def save(self, changes: dict[bytes, Partial | None], sums: int) -> int:
        changed, ended = changed_and_ended(changes)
        keys = [key.hex() for key in ended]
        if keys:
            self.execute(
                sa.delete(STREAMS).where(STREAMS.c.shard == self.shard, STREAMS.c.id.in_(keys))
            )
        if changed:
            self.execute(
                "INSERT INTO stream_sum_streams (shard, id, seq_no, value)"
                " VALUES (:shard, :id, :seq_no, :value) ON CONFLICT (shard, id)"
                " DO UPDATE SET seq_no = excluded.seq_no, value = excluded.value",
                [
                    {"shard": self.shard, "id": key.hex(), "seq_no": n, "value": f"{value:x}"}
                    for key, (n, value) in changed.items()
                ],
            )
        if sums:
            self.execute(
                "INSERT INTO stream_sum_totals (shard, transactions, sums) VALUES (:shard, 1, :sums)"
                " ON CONFLICT (shard) DO UPDATE SET sums = stream_sum_totals.sums + excluded.sums,"
                " transactions = stream_sum_totals.transactions + 1",
                {"shard": self.shard, "sums": sums},
            )
        row = self.execute(sa.select(TOTALS.c.transactions).where(TOTALS.c.shard == self.shard))
        return int(row.scalar() or 0)

    def totals(self) -> Totals:
        parameters: dict[str, Any] = {"shard": self.shard}
        count = "SELECT COUNT(*) FROM stream_sum_streams WHERE shard = :shard"
        rows = self.query(
            "SELECT transactions, sums FROM stream_sum_totals WHERE shard = :shard", parameters
        )
        transactions, sums = rows[0] if rows else (0, 0)
        return Totals(int(self.query(count, parameters)[0][0]), int(transactions), int(sums))
