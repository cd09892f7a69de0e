"""Totals by the clock of the system."""

from __future__ import annotations

import time

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

    def consume_message(
        self, shard: Shard, store: SQLiteStore, envelope: Envelope[Order], publisher: Publisher
    ) -> None:
        order = envelope.message
        name = f"{order.customer} at {int(time.time()) // 3600}"  # noqa: TID251 - the mistake
        store.execute(ADD, (name, order.cents))
