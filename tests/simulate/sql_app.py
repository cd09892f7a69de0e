"""Totals in PostgreSQL, with an output and timers."""

from __future__ import annotations

from datetime import timedelta

import sqlalchemy as sa

from gazette import (
    Application,
    Envelope,
    Message,
    Output,
    Publisher,
    Recorder,
    Shard,
    Source,
    Timer,
)
from gazette.stores.sql.store import SQLStore, checkpoint_table, shared_engine, timer_table

URL = "postgresql+psycopg://nowhere/production"
METADATA = sa.MetaData()
checkpoint_table(METADATA)
timer_table(METADATA)
sa.Table(
    "totals",
    METADATA,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("n", sa.BigInteger, nullable=False),
)
ADD = (
    "INSERT INTO totals VALUES (:name, :n)"
    " ON CONFLICT (name) DO UPDATE SET n = totals.n + excluded.n RETURNING n"
)


class Order(Message):
    customer: str
    cents: int


class Total(Message):
    customer: str
    cents: int


class Totals(Application[SQLStore]):
    orders = Source("orders", Order, key="customer", partitions=2)
    totals = Output("totals", Total)
    recovery_logs = False

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLStore:
        return SQLStore(shared_engine(URL, METADATA))

    def consume_message(
        self, shard: Shard, store: SQLStore, envelope: Envelope[Order], publisher: Publisher
    ) -> None:
        order = envelope.message
        store.execute(ADD, {"name": "all", "n": order.cents})
        total = store.execute(ADD, {"name": order.customer, "n": order.cents}).scalar_one()
        publisher.publish_uncommitted(self.totals, Total(customer=order.customer, cents=total))
        shard.schedule(f"of {order.customer[:20]}", shard.now + timedelta(seconds=60))

    def on_timer(self, shard: Shard, store: SQLStore, timer: Timer, publisher: Publisher) -> None:
        store.execute(ADD, {"name": f"timers {timer.key}", "n": 1})
