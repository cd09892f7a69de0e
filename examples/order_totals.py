"""The application of docs/tables.md that consumes orders as tables of Arrow."""

import pyarrow as pa

from gazette import Message, Publisher, Recorder, Shard, Source, TableApplication, runconsumer
from gazette.stores.sqlite import SQLiteStore


class Order(Message):
    customer: str
    cents: int


class OrderTotals(TableApplication[SQLiteStore]):
    orders = Source("orders", Order, partitions=2, key="customer")

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLiteStore:
        schema = "CREATE TABLE IF NOT EXISTS totals (customer TEXT PRIMARY KEY, n INTEGER, cents INTEGER)"
        return SQLiteStore(recorder, schema)

    def consume_table(
        self, shard: Shard, store: SQLiteStore, table: pa.RecordBatch, publisher: Publisher
    ) -> None:
        orders = pa.Table.from_batches([table]).group_by("customer")
        sums = orders.aggregate([("cents", "count"), ("cents", "sum")])
        store.execute_tables(
            "INSERT INTO totals SELECT customer, cents_count, cents_sum FROM sums WHERE true "
            "ON CONFLICT DO UPDATE SET n = n + excluded.n, cents = cents + excluded.cents",
            sums=sums,
        )


if __name__ == "__main__":
    runconsumer.main(OrderTotals(), bind_host="127.0.0.1")
