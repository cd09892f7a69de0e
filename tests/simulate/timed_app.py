"""An application with timers, windows and a join: orders and payments, by customer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from gazette import (
    Application,
    Envelope,
    EventTime,
    Message,
    Output,
    Publisher,
    Recorder,
    Shard,
    Source,
    Timer,
)
from gazette.stores.sqlite import SQLiteStore
from gazette.windows import Tumbling, Windows, count


class Order(Message):
    customer: str
    cents: int


class Payment(Message):
    customer: str
    cents: int


class Note(Message):
    text: str
    n: int


class Accounts(Application[SQLiteStore]):
    orders = Source("orders", Order, partitions=2, key="customer")
    payments = Source("payments", Payment, partitions=2, key="customer")
    notes = Output("notes", Note, partitions=2, key="text")
    event_time = EventTime()
    windows = Windows("orders_by_window", Tumbling(timedelta(seconds=5)), count())

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLiteStore:
        owed = "CREATE TABLE IF NOT EXISTS owed (customer TEXT PRIMARY KEY, cents INTEGER)"
        return SQLiteStore(recorder, f"{owed};{self.windows.schema}")

    def consume_message(
        self,
        shard: Shard,
        store: SQLiteStore,
        envelope: Envelope[Order | Payment],
        publisher: Publisher,
    ) -> None:
        message = envelope.message
        sign = 1 if isinstance(message, Order) else -1
        upsert = "INSERT INTO owed VALUES (?, ?) ON CONFLICT DO UPDATE SET cents = cents + excluded.cents"
        store.execute(upsert, (message.customer, sign * message.cents))
        if isinstance(message, Order):
            self.windows.add(shard, store, message.customer, envelope.time, 1)
            shard.schedule(f"remind {message.customer}", shard.now + timedelta(seconds=2))

    def on_timer(
        self, shard: Shard, store: SQLiteStore, timer: Timer, publisher: Publisher
    ) -> None:
        if timer.key.startswith("remind "):
            customer = timer.key.removeprefix("remind ")
            owed = "SELECT cents FROM owed WHERE customer = ? AND cents > 0"
            rows: list[tuple[Any, ...]] = store.execute(owed, (customer,)).fetchall()
            for (cents,) in rows:
                publisher.publish_uncommitted(self.notes, Note(text=customer, n=cents))
            return
        for window in self.windows.on_timer(shard, store, timer):
            publisher.publish_uncommitted(self.notes, Note(text=window.key, n=window.value))
