"""Rides in a SQL database, PostgreSQL above all: other programs can read them there, in one table."""

from __future__ import annotations

from functools import cache
from typing import Any

import sqlalchemy as sa

from bike_share.history import History
from gazette.stores.sql import SQLStore, checkpoint_table, create_engine, create_tables

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


@cache
def engine_of(database: str) -> sa.Engine:
    """One engine for all shards of the process, with the tables that they need."""
    engine = create_engine(database)
    create_tables(engine, METADATA)
    return engine


class SQLHistory(History, SQLStore):
    def __init__(self, database: str) -> None:
        super().__init__(engine_of(database))

    def change(self, sql: str, **parameters: Any) -> None:
        self.execute(sql, parameters)

    def look(self, sql: str, **parameters: Any) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.execute(sql, parameters)]

    def read(self, sql: str, **parameters: Any) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.query(sql, parameters)]
