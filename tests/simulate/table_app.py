"""An application that consumes tables, and does all that others do: outputs, views, poison and a backfill."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pyarrow as pa

from gazette import (
    DeferToNextTransaction,
    EventTime,
    Message,
    Output,
    PoisonPolicy,
    Publisher,
    Recorder,
    Shard,
    Source,
    StateView,
    TableApplication,
    Timer,
)
from gazette.backfill import Backfill
from gazette.stores.sqlite import SQLiteStore

_POISON_CENTS = 9
_ROWS_MAX = 3


class Order(Message):
    customer: str
    cents: int
    price: float | None = None
    tags: tuple[str, ...] = ()


class Payment(Message):
    customer: str
    cents: int = 1


class Receipt(Message):
    customer: str
    source: str
    cents: int
    clock: int


class Accounts(TableApplication[SQLiteStore]):
    """Orders are decoded by their type, and payments by the scanner of columns."""

    orders = Source("orders", Order, partitions=2, key="customer")
    payments = Source("payments", Payment, partitions=2, key="customer")
    receipts = Output("receipts", Receipt, partitions=2, key="customer")
    table_meta = ("journal", "clock")

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLiteStore:
        owed = "CREATE TABLE IF NOT EXISTS owed (customer TEXT PRIMARY KEY, cents INTEGER)"
        return SQLiteStore(recorder, owed)

    def new_view(self, shard: Shard, directory: Any) -> StateView:
        return SQLiteStore.view(directory)

    def consume_table(
        self, shard: Shard, store: SQLiteStore, table: pa.RecordBatch, publisher: Publisher
    ) -> None:
        sign = 1 if "tags" in table.schema.names else -1
        orders = pa.Table.from_batches([table]).group_by("customer")
        store.execute_tables(
            "INSERT INTO owed SELECT customer, ? * cents_sum FROM sums WHERE true "
            "ON CONFLICT DO UPDATE SET cents = cents + excluded.cents",
            (sign,),
            sums=orders.aggregate([("cents", "sum")]),
        )
        for row in table.to_pylist():
            source, _, _ = row["journal"].rpartition("/")
            receipt = Receipt(row["customer"], source, row["cents"], row["clock"])
            publisher.publish_uncommitted(self.receipts, receipt)


class AccountsBackfill(Backfill):
    application = Accounts
    discard_publications = True


class Skipping(Accounts):
    """Skips rows of nine cents, and bytes that are no messages."""

    def poison_policy(self, shard: Shard) -> PoisonPolicy | None:
        return PoisonPolicy("skipped")

    def consume_table(
        self, shard: Shard, store: SQLiteStore, table: pa.RecordBatch, publisher: Publisher
    ) -> None:
        super().consume_table(shard, store, table, publisher)
        if _POISON_CENTS in table["cents"].to_pylist():
            raise ValueError("a row of nine cents")


class Deferring(Accounts):
    """Has at most a few rows in each transaction, and sums them up in its end."""

    def __init__(self) -> None:
        self.tables: dict[str, list[pa.RecordBatch]] = {}

    def begin_transaction(self, shard: Shard, store: SQLiteStore) -> None:
        self.tables[shard.id] = []

    def consume_table(
        self, shard: Shard, store: SQLiteStore, table: pa.RecordBatch, publisher: Publisher
    ) -> None:
        tables = self.tables[shard.id]
        if len(table) + sum(map(len, tables)) > _ROWS_MAX:
            raise DeferToNextTransaction("the transaction has enough rows")
        tables.append(table)

    def finalize_transaction(self, shard: Shard, store: SQLiteStore, publisher: Publisher) -> None:
        for table in self.tables[shard.id]:
            super().consume_table(shard, store, table, publisher)


class Reminding(Accounts):
    """Sets a timer for each customer. Its tables are made of decoded messages."""

    event_time = EventTime()

    def consume_table(
        self, shard: Shard, store: SQLiteStore, table: pa.RecordBatch, publisher: Publisher
    ) -> None:
        super().consume_table(shard, store, table, publisher)
        for customer in table["customer"].to_pylist():
            shard.schedule(f"remind {customer}", shard.now + timedelta(seconds=2))

    def on_timer(
        self, shard: Shard, store: SQLiteStore, timer: Timer, publisher: Publisher
    ) -> None:
        customer = timer.key.removeprefix("remind ")
        owed = "SELECT cents FROM owed WHERE customer = ?"
        rows: list[tuple[Any, ...]] = store.execute(owed, (customer,)).fetchall()
        publisher.publish_uncommitted(self.receipts, Receipt(customer, "timer", rows[0][0], 0))
