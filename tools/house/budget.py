"""The budget: lines of each room, and files and functions that one append or transaction may run through.

Lower a figure when the counts go down. To raise one takes a line in docs/architecture.md that says what for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class WalkBudget:
    """Most files, and most functions of ours, that one call runs through."""

    files: int
    functions: int


APPEND: Final = {1: WalkBudget(42, 240), 3: WalkBudget(51, 288)}
"""By replication: one small append, from the client to the brokers."""
TRANSACTION: Final = WalkBudget(80, 555)
"""One message that is published, and the transaction of a shard that consumes it, in SQLite."""
FIELDS_MAX: Final = 12
ARGUMENTS_MAX: Final = 8
FILE_MAX: Final = 500
FUNCTION_MAX: Final = 60
WIDE_CLASSES: Final = 66
"""Classes with more than ``FIELDS_MAX`` fields."""
LONG_CONSTRUCTORS: Final = 11
"""Constructors with more than ``ARGUMENTS_MAX`` arguments."""
LONG_FILES: Final = 15
"""Files with more than ``FILE_MAX`` lines."""
PRIVATE_USES: Final = 201
"""Uses of private names in tests: see `tools.house.privates`. Tests go through what users have."""
PATCHES: Final = 83
"""Calls of ``monkeypatch`` in tests that replace a part of what is tested, or of what it uses."""
WHEEL_LINES: Final = 106_694
"""Most lines of the distribution ``pygazette``, without those of ``pygazette-client``."""
VAGUE: Final = frozenset({"found", "held", "kind", "made", "one", "ones"})
"""Names that do not say what a variable or parameter holds."""
VAGUE_NAMES: Final = 180
"""Greatest number of variables and parameters with such a name."""
ROOMS: Final[dict[str, int]] = {
    "(root)": 967,
    "backfill/": 42,
    "blobs/": 3180,
    "broker/": 11398,
    "client/": 6744,
    "cluster/": 6264,
    "config/": 823,
    "consumer/": 13093,
    "fragment/": 3665,
    "gazctl/": 10450,
    "history/": 18140,
    "http2/": 3241,
    "message/": 9438,
    "net/": 4379,
    "protocol/": 6669,
    "recoverylog/": 5560,
    "run/": 7359,
    "runconsumer/": 614,
    "runtime/": 3065,
    "spark/": 49,
    "stores/": 7971,
    "testing/": 13148,
    "windows/": 1291,
}
"""Most lines of each room: code, docstrings, comments and blank lines, without generated code."""
