"""Numbers orders by a counter of the module."""

from __future__ import annotations

from itertools import count

from gazette import Application, Envelope, Message, Publisher, Recorder, Shard, Source
from gazette.stores.sqlite import SQLiteStore

TOTALS = "CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, n INTEGER)"
ADD = "INSERT INTO totals VALUES (?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"


class Order(Message):
    customer: str
    cents: int


numbers = count()


class Totals(Application[SQLiteStore]):
    orders = Source("orders", Order, key="customer")

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLiteStore:
        return SQLiteStore(recorder, TOTALS)

    def consume_message(
        self, shard: Shard, store: SQLiteStore, envelope: Envelope[Order], publisher: Publisher
    ) -> None:
        order = envelope.message
        store.execute(ADD, (f"{order.customer} {next(numbers) % 3}", order.cents))
