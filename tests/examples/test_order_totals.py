"""The example that consumes tables: its totals, and the page that shows it."""

from __future__ import annotations

from pathlib import Path

from order_totals import Order, OrderTotals

from gazette import Source
from gazette.testing.app_driver import AppDriver

ROOT = Path(__file__).parents[2]
PART = "orders/part-000"


def test_totals_are_exact_over_a_crash(tmp_path: Path) -> None:
    source: Source[Order] = OrderTotals.orders
    customers = [name for name in map("customer-{}".format, range(20)) if is_first(source, name)]
    with AppDriver(OrderTotals(), tmp_path, sources=[PART]) as driver:
        driver.publish(PART, *[Order(customer=name, cents=5) for name in customers])
        driver.publish_pending(PART, Order(customer=customers[0], cents=100))
        driver.run()
        driver.crash()
        driver.acknowledge()
        driver.run()
        totals = driver.store.query("SELECT * FROM totals WHERE customer = ?", (customers[0],))
        assert totals == [(customers[0], 2, 105)]
        assert driver.store.query("SELECT sum(n) FROM totals") == [(len(customers) + 1,)]


def is_first(source: Source[Order], customer: str) -> bool:
    return source.partition_of_key(customer) == PART


def test_the_page_shows_the_example() -> None:
    page = (ROOT / "docs" / "tables.md").read_text()
    example = (ROOT / "examples" / "order_totals.py").read_text()
    start, end = example.index("class Order("), example.index('\n\nif __name__ == "__main__"')
    assert example[start:end].strip() in page
