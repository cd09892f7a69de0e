"""Consumes tables, and keeps the totals in `self`."""

from __future__ import annotations

import pyarrow as pa

from gazette import Message, Publisher, Recorder, Shard, Source, TableApplication
from gazette.stores.sqlite import SQLiteStore

TOTALS = "CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, n INTEGER)"


class Order(Message):
    customer: str
    cents: int


class Totals(TableApplication[SQLiteStore]):
    orders = Source("orders", Order, key="customer")

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLiteStore:
        return SQLiteStore(recorder, TOTALS)

    def consume_table(
        self, shard: Shard, store: SQLiteStore, table: pa.RecordBatch, publisher: Publisher
    ) -> None:
        orders = pa.Table.from_batches([table]).group_by("customer")
        for row in orders.aggregate([("cents", "sum")]).to_pylist():
            customer = row["customer"]
            self.totals[customer] = self.totals.get(customer, 0) + row["cents_sum"]
            store.execute(
                "INSERT OR REPLACE INTO totals VALUES (?, ?)", (customer, self.totals[customer])
            )
