"""Objects that the garbage collector leaves alone."""

from __future__ import annotations

import gc
import subprocess
import sys

PROGRAM = """
import gc
from gazette.runtime.long_lived import LongLived
counted = LongLived()
kept = []
for n in range(1000):
    kept.append([n])
    counted.add()
assert gc.get_freeze_count() >= 1000, gc.get_freeze_count()
"""


def test_many_things_that_live_long_are_frozen_from_time_to_time() -> None:
    """In a process of its own: to thaw the objects of this one takes long."""
    assert gc.isenabled()
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
