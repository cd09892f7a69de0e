"""Writes by a connection of its own, outside of the transaction."""

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
ADD = sa.text(
    "INSERT INTO totals VALUES (:name, :n) ON CONFLICT (name) DO UPDATE SET n = totals.n + excluded.n"
)


class Order(Message):
    customer: str
    cents: int


class Totals(Application[SQLStore]):
    orders = Source("orders", Order, key="customer")
    recovery_logs = False

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLStore:
        return SQLStore(shared_engine("postgresql+psycopg://nowhere/production", METADATA))

    def consume_message(
        self, shard: Shard, store: SQLStore, envelope: Envelope[Order], publisher: Publisher
    ) -> None:
        order = envelope.message
        with store.engine.begin() as connection:
            connection.execute(ADD, {"name": order.customer, "n": order.cents})
