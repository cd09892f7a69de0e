"""The end of a process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

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


_TEARDOWN = """
import atexit, gc, os, sys
from gazette.runtime.process_exit import end_process

class Slow:
    def __del__(self, end=os._exit):
        end(9)

kept = Slow()
texts, content = open(sys.argv[1], "w"), open(sys.argv[2], "wb")
texts.write("text")
content.write(b"content")
gc.freeze()  # As a member does once it has started.
atexit.register(print, "registered")
print("printed")
end_process(7)
"""


def test_a_process_ends_without_freeing_what_it_holds(tmp_path: Path) -> None:
    """Check that functions of atexit run, that files are flushed, and that no object is finalized."""
    texts, content = tmp_path / "texts", tmp_path / "content"
    done = subprocess.run(
        [sys.executable, "-c", _TEARDOWN, texts, content],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (texts.read_text(), content.read_bytes()) == ("text", b"content")
    assert (done.returncode, done.stdout) == (7, "printed\nregistered\n")
