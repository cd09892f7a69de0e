"""The page on windows: its application and its test run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "windows.md"


def test_the_page_on_windows_runs(gazette_driver: Any) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found: dict[str, Any] = {"__name__": "page"}
    exec("\n".join(blocks), found)
    found["test_clicks_are_counted_by_the_minute"](gazette_driver)
    assert found["distinct"].add(["a"], "b") == ["a", "b"]
