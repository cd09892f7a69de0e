"""Keeps the totals in `self`."""

from __future__ import annotations

from gazette import Application, Envelope, Message, Publisher, Recorder, Shard, Source
from gazette.stores.sqlite import SQLiteStore

TOTALS = "CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, n INTEGER)"
ADD = "INSERT INTO totals VALUES (?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"


class Order(Message):
    customer: str
    cents: int


class Totals(Application[SQLiteStore]):
    orders = Source("orders", Order, key="customer")

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLiteStore:
        return SQLiteStore(recorder, TOTALS)

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}

    def consume_message(
        self, shard: Shard, store: SQLiteStore, envelope: Envelope[Order], publisher: Publisher
    ) -> None:
        order = envelope.message
        self.totals[order.customer] = self.totals.get(order.customer, 0) + order.cents
        store.execute(
            "INSERT OR REPLACE INTO totals VALUES (?, ?)",
            (order.customer, self.totals[order.customer]),
        )
