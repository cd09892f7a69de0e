"""Totals in PostgreSQL, with an output and timers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

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
from gazette.protocol.checkpoint import Checkpoint
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


class AnyOrder(Totals):
    """Changes shared rows in any order, by statements of SQLAlchemy: transactions wait for each other."""

    on_timer = Application.on_timer

    def consume_message(
        self, shard: Shard, store: SQLStore, envelope: Envelope[Order], publisher: Publisher
    ) -> None:
        order = envelope.message
        names = ["all", "some"] if order.cents % 2 else ["some", "all"]
        for name in names:
            store.transaction().execute(sa.text(ADD), {"name": name, "n": order.cents})


class Overlap(AnyOrder):
    """Has the next transaction begin while the former one commits."""

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLStore:
        return SQLStore(shared_engine(URL, METADATA), overlap=True)


class _Unfenced(SQLStore):
    def restore_checkpoint(self, shard: Shard) -> Checkpoint:
        """Restore as the first owner does: all owners have the same fence, and no name."""
        super().restore_checkpoint(shard)
        self._session_name, self._fence = "", 1
        own_row = self._table.c.shard_fqn == shard.fqn
        with self.engine.begin() as connection:
            connection.execute(self._table.update().where(own_row).values(fence=1))
            return Checkpoint.from_bytes(
                connection.execute(sa.select(self._table.c.checkpoint).where(own_row)).scalar_one()
            )


class WithoutFence(Totals):
    """Has a store whose former owners can commit."""

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLStore:
        return _Unfenced(shared_engine(URL, METADATA))


def never(query: Callable[..., list[tuple[Any, ...]]]) -> None:
    """Fail, and say whether the query has each row once."""
    rows = query("SELECT n FROM totals WHERE name = :name", {"name": "all"})
    assert len(rows) != 1, "the sum of all orders is there once"
