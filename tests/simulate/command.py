"""The command `gazette test`, as a user calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def gazette_test(
    *arguments: str, hash_seed: str = "random", directory: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gazette.main", "test", *arguments],
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
            "PYTHONHASHSEED": hash_seed,
        },
        capture_output=True,
        text=True,
        check=False,
    )
