"""The start of a member's process."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import asyncio, gc, weakref
from gazette.cluster.process.bootstrap import serve_until_signal

class Node:
    pass

class Service:
    async def start(self):
        self.kept = Node()
        garbage = Node()
        garbage.itself = garbage
        self.garbage = weakref.ref(garbage)

    async def wait(self):
        visited = [type(one) for one in gc.get_objects()]
        print(visited.count(Node), self.garbage() is None, len(visited) < gc.get_freeze_count() / 10)

    async def stop(self):
        pass

    def stop_soon(self):
        pass

    def fail(self, error):
        print(repr(error))

gc.disable()  # The process's own collection is what is tried.
print(asyncio.run(serve_until_signal("test", Service, "", "")))
"""


def test_full_collections_do_not_visit_what_a_process_has_started_with() -> None:
    """Check that what has started is frozen, and that garbage is not."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], check=True, capture_output=True, text=True
    )
    assert done.stdout == "0 True True\n0\n"
