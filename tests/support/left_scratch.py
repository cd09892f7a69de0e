"""Directories of shards that a process has left behind as it was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import os, pathlib, signal, sys
from gazette.recoverylog.scratch import Scratch, shard_prefix
made = [Scratch(shard_prefix(shard), pathlib.Path(sys.argv[1])) for shard in sys.argv[2:]]
print(*(one.path for one in made), sep="\\n", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def left_scratch(parent: Path, *shards: str) -> list[Path]:
    """Return the directories that a process has made for shards, before it was killed."""
    command = [sys.executable, "-c", _PROGRAM, str(parent), *shards]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [Path(line) for line in printed.splitlines()]
