"""Consumes tables, and counts the first row of each."""

from __future__ import annotations

import pyarrow as pa

from gazette import Message, Publisher, Recorder, Shard, Source, TableApplication
from gazette.stores.sqlite import SQLiteStore

TOTALS = "CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, n INTEGER)"
ADD = "INSERT INTO totals VALUES (?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"


class Order(Message):
    customer: str
    cents: int


class Totals(TableApplication[SQLiteStore]):
    orders = Source("orders", Order, key="customer")

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLiteStore:
        return SQLiteStore(recorder, TOTALS)

    def consume_table(
        self, shard: Shard, store: SQLiteStore, table: pa.RecordBatch, publisher: Publisher
    ) -> None:
        order = table.to_pylist()[0]
        store.execute(ADD, (order["customer"], order["cents"]))
