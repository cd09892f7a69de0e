"""Adds floats by transaction."""

from __future__ import annotations

from gazette import Application, Envelope, Message, Publisher, Recorder, Shard, Source
from gazette.stores.sqlite import SQLiteStore

TOTALS = "CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, n REAL)"
ADD = "INSERT INTO totals VALUES (?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"


class Order(Message):
    customer: str
    price: float


class Totals(Application[SQLiteStore]):
    orders = Source("orders", Order, key="customer")

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLiteStore:
        return SQLiteStore(recorder, TOTALS)

    def begin_transaction(self, shard: Shard, store: SQLiteStore) -> None:
        self.sums = dict[str, float]()

    def consume_message(
        self, shard: Shard, store: SQLiteStore, envelope: Envelope[Order], publisher: Publisher
    ) -> None:
        order = envelope.message
        self.sums[order.customer] = self.sums.get(order.customer, 0.0) + order.price

    def finalize_transaction(self, shard: Shard, store: SQLiteStore, publisher: Publisher) -> None:
        for customer, price in self.sums.items():
            store.execute(ADD, (customer, price))
