"""Rides in a SQL database, PostgreSQL above all: other programs can read them there, in one table."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from bike_share.history import History
from gazette.stores.sql.store import SQLStore, checkpoint_table, shared_engine

METADATA = sa.MetaData()
checkpoint_table(METADATA)
sa.Table(
    "rides",
    METADATA,
    sa.Column("bike", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("ride", sa.BigInteger, primary_key=True, autoincrement=False),
    *(
        sa.Column(name, sa.Text, nullable=False)
        for name in ("start_time", "start_station", "end_time", "end_station")
    ),
)


class SQLHistory(History, SQLStore):
    def __init__(self, database: str) -> None:
        super().__init__(shared_engine(database, METADATA))

    def change(self, sql: str, **parameters: Any) -> None:
        self.execute(sql, parameters)

    def look(self, sql: str, **parameters: Any) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.execute(sql, parameters)]

    def read(self, sql: str, **parameters: Any) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.query(sql, parameters)]
