"""Adds floats by table."""

from __future__ import annotations

import pyarrow as pa

from gazette import Message, Publisher, Recorder, Shard, Source, TableApplication
from gazette.stores.sqlite import SQLiteStore

TOTALS = "CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, n REAL)"


class Order(Message):
    customer: str
    price: float


class Totals(TableApplication[SQLiteStore]):
    orders = Source("orders", Order, key="customer")

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLiteStore:
        return SQLiteStore(recorder, TOTALS)

    def consume_table(
        self, shard: Shard, store: SQLiteStore, table: pa.RecordBatch, publisher: Publisher
    ) -> None:
        orders = pa.Table.from_batches([table]).group_by("customer")
        store.execute_tables(
            "INSERT INTO totals SELECT customer, price_sum FROM sums WHERE true "
            "ON CONFLICT DO UPDATE SET n = n + excluded.n",
            sums=orders.aggregate([("price", "sum")]),
        )
