"""The end of a process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

_PROGRAM = """
import atexit, os, sys
from gazette.runtime.process_exit import end_process

atexit.register(lambda: os.kill(os.getpid(), int(sys.argv[1])))
end_process(7)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_the_end_does_not_change_the_exit_code(number: int) -> None:
    """The loop that handled it is closed, and the interpreter takes a moment to end."""
    command = [sys.executable, "-c", _PROGRAM, str(int(number))]
    assert subprocess.run(command, check=False).returncode == 7
