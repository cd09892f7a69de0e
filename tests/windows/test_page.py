"""The pages on windows and joins: their applications and tests run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def blocks_of(page: str) -> dict[str, Any]:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    found: dict[str, Any] = {"__name__": "page"}
    exec("\n".join(blocks), found)
    return found


def test_the_page_on_windows_runs(gazette_driver: Any) -> None:
    found = blocks_of("windows.md")
    found["test_clicks_are_counted_by_the_minute"](gazette_driver)
    assert found["distinct"].add(["a"], "b") == ["a", "b"]


def test_the_page_on_joins_runs(gazette_driver: Any) -> None:
    tests = [one for name, one in blocks_of("joins.md").items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test(gazette_driver)
