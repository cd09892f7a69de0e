"""Publishes by a publisher of its own, outside of the transaction."""

from __future__ import annotations

from typing import Any

from gazette import Application, Envelope, Message, Output, Publisher, Recorder, Shard, Source
from gazette.stores.sqlite import SQLiteStore

TOTALS = "CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, n INTEGER)"
ADD = "INSERT INTO totals VALUES (?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"


class Order(Message):
    customer: str
    cents: int


class Receipt(Message):
    text: str


class Totals(Application[SQLiteStore]):
    orders = Source("orders", Order, key="customer")
    receipts = Output("receipts", Receipt)

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLiteStore:
        return SQLiteStore(recorder, TOTALS)

    async def initialize(self, service: Any) -> None:
        self.publisher = service.standalone_publisher()

    def consume_message(
        self, shard: Shard, store: SQLiteStore, envelope: Envelope[Order], publisher: Publisher
    ) -> None:
        order = envelope.message
        store.execute(ADD, (order.customer, order.cents))
        self.publisher.publish_committed(self.receipts, Receipt(text=envelope.message.uuid))
