"""Commands whose standard streams are closed, full, or pipes without a reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = [
    "gazette.main",
    "gazette.main --help",
    "gazette.main nope",
    "gazette.main print-config",
    "gazette.main run nope.py",
    "gazette.gazctl.main",
    "gazette.gazctl.main nope",
    "gazette.gazctl.main journals list --help",
    "gazette.gazctl.main print-config",
    "gazette.gazctl.main context list",
]
STREAMS = ["<&- >&- 2>&-", ">&-", ">/dev/full", ">/dev/full 2>/dev/full", "2>&1 | true"]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_stream_gives_a_traceback(tmp_path: Path, command: str) -> None:
    """A full one is an error in one line. A pipe without a reader ends the command by SIGPIPE's code."""
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "PYTHONUNBUFFERED": "1" if len(command) % 2 else "",  # It makes other streams.
    }
    for streams in STREAMS:
        line = f"set -o pipefail; {{ {sys.executable} -m {command}; }} {streams}"
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Traceback" not in done.stderr, (streams, done.stderr)
        assert "Exception ignored" not in done.stderr, (streams, done.stderr)
        assert done.returncode in (0, 1, 2, 141), (streams, done.stderr)


@pytest.mark.parametrize("command", ["main --help", "gazctl.main print-config"])
def test_output_that_is_lost_is_an_error(command: str) -> None:
    """It is reported once."""
    line = f"{sys.executable} -m gazette.{command} >/dev/full"
    done = subprocess.run(
        ["bash", "-c", line],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        1,
        "cannot write the output: No space left on device\n",
    )
