"""The callback that a shard's thread runs now, for other threads to see."""

from __future__ import annotations

import threading


class RunningCallback:
    """The running callback. The shard's thread writes it; any thread reads it. One assignment per message."""

    __slots__ = ("call", "callback", "shard_id", "thread")

    def __init__(self, shard_id: str = "") -> None:
        self.shard_id = shard_id
        self.callback = ""
        """Name of the callback that was entered last."""
        self.call: object | None = None
        """Object that identifies the call: the message, the batch, or the timer. None between calls."""
        self.thread = 0
        """Identity of the thread that runs the callback."""

    def enter(self, callback: str, call: object) -> None:
        """Note that calls of a callback begin, the first one with ``call``."""
        self.callback, self.thread, self.call = callback, threading.get_ident(), call

    def leave(self) -> None:
        """Note that no callback runs."""
        self.call = None
