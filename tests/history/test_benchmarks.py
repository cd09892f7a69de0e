"""The benchmark of histories runs: it is no part of the package, and nothing else would notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_source_is_measured_with_each_shape() -> None:
    script = str(ROOT / "benchmarks" / "bench_spark.py")
    sizes = ("--messages", "2000", "--fragment", "500", "--repeats", "1")
    command = [sys.executable, script, "--no-spark", *sizes]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for shape in ("words", "floats", "nanoseconds", "nested"):
        assert f"{shape}, both passes, with offset and UUID: " in ended.stdout
