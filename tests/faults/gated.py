"""A backfill whose attempts wait for the test, or for each other, wherever they run."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gazette.runtime import failpoints
from tests.backfill.apps import WordsBackfill

GATES_ENV = "GAZETTE_TEST_GATES"
"""A directory that the test and all attempts share."""
MODE = "mode"
HOLD, STOP, MEET = "hold", "stop", "meet"
"""Attempts wait for the test; the first one stops in mid-upload; two at the slow shard meet."""
SLOW = "shard-1"
GO = "go"
WAIT_S = 240.0
_POLL_S = 0.05


def gates() -> Path:
    return Path(os.environ[GATES_ENV])


def _await(condition: Callable[[], Any], what: str) -> None:
    for _ in range(int(WAIT_S / _POLL_S)):
        if condition():
            return
        threading.Event().wait(_POLL_S)
    raise TimeoutError(f"an attempt waited {WAIT_S:g} s for {what}")


def _mark(name: str) -> bool:
    """Make a file; whether this process made it."""
    try:
        (gates() / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class GatedBackfill(WordsBackfill):
    """Begun attempts are files ``begun-<shard>-<process>``."""

    def build(self, shard: Any, store: Any, messages: Any) -> None:
        super().build(shard, store, messages)
        mode = (gates() / MODE).read_text() if (gates() / MODE).exists() else ""
        _mark(f"begun-{shard.id}-{uuid.uuid4().hex[:8]}-{os.getpid()}")
        if mode == HOLD:
            _await((gates() / GO).exists, "the test")
        elif mode == STOP and shard.id == SLOW and _mark("stopped"):
            failpoints.arm("backfill.uploading=stop")
        elif mode == MEET and shard.id == SLOW:
            _await(lambda: len(list(gates().glob(f"begun-{SLOW}-*"))) > 1, "another attempt")
