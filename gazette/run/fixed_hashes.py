"""Runs ``gazette test`` in a process where sets of texts have the same order as in all others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

from gazette.lazy import import_function

_HASH_SEED: Final = "0"


def run(argv: Sequence[str]) -> int:
    """Run the subcommand in this process, or in its successor, before anything large is imported."""
    if os.environ.get("PYTHONHASHSEED") != _HASH_SEED:
        environ = {**os.environ, "PYTHONHASHSEED": _HASH_SEED}
        os.execve(sys.executable, sys.orig_argv, environ)  # noqa: S606 - the same program again
    simulate: Callable[[Sequence[str]], int] = import_function("gazette.run.simulate:run")
    return simulate(argv)
