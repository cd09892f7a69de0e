"""The page on timers: its application and its test run as they are printed."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "timers.md"


def test_the_page_on_timers_runs(gazette_driver: Any) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found: dict[str, Any] = {"__name__": "page"}
    exec(compile("\n".join(blocks), str(PAGE), "exec", dont_inherit=True), found)
    tests = [value for name, value in found.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test(gazette_driver)
    check_recipes(gazette_driver, found)
    check_declared_times(found)
    driver = gazette_driver(found["ByEventTime"](), sources=["clicks"])
    driver.publish("clicks", found["Click"](user="ada"))
    driver.run()
    driver.advance(3600)
    assert [one.clicks for one in driver.committed("sessions/part-000", found["Session"])] == [1]


def check_declared_times(found: dict[str, Any]) -> None:
    shop, order = found["Shop"], found["Order"]
    at = datetime(2020, 1, 1, tzinfo=UTC)
    assert shop.orders.message_time.read(order(ordered_at=at)) == int(at.timestamp() * 1e6)
    assert shop.visits.message_time.read(found["Visit"](at_ms=5)) == 5000


def check_recipes(gazette_driver: Any, found: dict[str, Any]) -> None:
    """Run the recipes of the page, each with a crash."""
    clicks = found["Click"], found["Session"]

    def started(application: Any) -> Any:
        driver = gazette_driver(application, sources=["clicks"])
        driver.publish("clicks", clicks[0](user="ada"))
        driver.run()
        driver.crash()
        return driver

    driver = started(found["LastSeen"]())
    driver.advance(29 * 86_400)
    assert driver.store.query("SELECT user FROM session") == [("ada",)]
    driver.advance(2 * 86_400)
    assert driver.store.query("SELECT user FROM session") == []
    driver = started(found["Hourly"]())
    driver.clock.advance(7200)  # An outage.
    driver.run()
    driver.advance(3600)
    sums = driver.committed("sessions/part-000", clicks[1])
    assert [(one.user[11:16], one.clicks) for one in sums] == [
        ("23:00", 1),
        ("00:00", 1),
        ("01:00", 1),
    ]
    attempts: list[str] = []

    def remind(key: str) -> bool:
        attempts.append(key)
        return len(attempts) == 4

    application = found["Reminders"]()
    application.remind = remind
    driver = started(application)
    driver.advance(3600)
    assert attempts == ["ada"] * 4
