"""Keeps the totals in `self`, in front of a database."""

from __future__ import annotations

import sqlalchemy as sa

from gazette import Application, Envelope, Message, Publisher, Recorder, Shard, Source
from gazette.stores.sql.store import SQLStore, checkpoint_table, shared_engine

METADATA = sa.MetaData()
checkpoint_table(METADATA)
sa.Table(
    "totals",
    METADATA,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("n", sa.BigInteger, nullable=False),
)
SET = "INSERT INTO totals VALUES (:name, :n) ON CONFLICT (name) DO UPDATE SET n = excluded.n"


class Order(Message):
    customer: str
    cents: int


class Totals(Application[SQLStore]):
    orders = Source("orders", Order, key="customer")
    recovery_logs = False

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLStore:
        return SQLStore(shared_engine("postgresql+psycopg://nowhere/production", METADATA))

    def consume_message(
        self, shard: Shard, store: SQLStore, envelope: Envelope[Order], publisher: Publisher
    ) -> None:
        order = envelope.message
        self.totals[order.customer] = self.totals.get(order.customer, 0) + order.cents
        store.execute(SET, {"name": order.customer, "n": self.totals[order.customer]})
