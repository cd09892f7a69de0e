"""The page on timers: its application and its test run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "timers.md"


def test_the_page_on_timers_runs(gazette_driver: Any) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found: dict[str, Any] = {"__name__": "page"}
    exec("\n".join(blocks), found)
    tests = [value for name, value in found.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test(gazette_driver)
    driver = gazette_driver(found["ByEventTime"](), sources=["clicks"])
    driver.publish("clicks", found["Click"](user="ada"))
    driver.run()
    driver.advance(3600)
    assert [one.clicks for one in driver.committed("sessions/part-000", found["Session"])] == [1]
