"""The process of a member, at its end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

_PROGRAM = """
import asyncio, os, signal, sys
from gazette.config.bootstrap import run_to_the_end

async def serve():
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, print)
    return 7

code = run_to_the_end(serve)
os.kill(os.getpid(), int(sys.argv[1]))
sys.exit(code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_the_end_does_not_change_the_exit_code(number: int) -> None:
    """Its handler is gone, and the interpreter takes a moment to end."""
    command = [sys.executable, "-c", _PROGRAM, str(int(number))]
    assert subprocess.run(command, check=False).returncode == 7
