"""Consumes tables, and publishes by a publisher of its own, outside of the transaction."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from gazette import Message, Output, Publisher, Recorder, Shard, Source, TableApplication
from gazette.stores.sqlite import SQLiteStore

TOTALS = "CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, n INTEGER)"
ADD = "INSERT INTO totals VALUES (?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"


class Order(Message):
    customer: str
    cents: int


class Receipt(Message):
    text: str


class Totals(TableApplication[SQLiteStore]):
    orders = Source("orders", Order, key="customer")
    receipts = Output("receipts", Receipt)
    table_meta = ("offset",)

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLiteStore:
        return SQLiteStore(recorder, TOTALS)

    async def initialize(self, service: Any) -> None:
        self.publisher = service.standalone_publisher()

    def consume_table(
        self, shard: Shard, store: SQLiteStore, table: pa.RecordBatch, publisher: Publisher
    ) -> None:
        for order in table.to_pylist():
            store.execute(ADD, (order["customer"], order["cents"]))
            self.publisher.publish_committed(self.receipts, Receipt(text=f"{order['offset']}"))
