"""Effort of the random tests of histories. `make fuzz-spark` tries more than `make test`."""

from __future__ import annotations

import os
from typing import Final

_FACTOR: Final = int(os.environ.get("GAZETTE_FUZZ_HISTORIES", "1"))
_FIRST: Final = int(os.environ.get("GAZETTE_FUZZ_SEED", "0"))


def examples(count: int) -> int:
    """Return the number of examples where `make test` tries ``count``."""
    return count * _FACTOR


def seeds(count: int) -> range:
    """Return the seeds where `make test` tries ``count``."""
    return range(_FIRST, _FIRST + count * _FACTOR)
