"""The inbox of a shard whose thread a test drives step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gazette.consumer.inbox import Call, Event, Inbox
from gazette.message.envelope import Envelope


class _DirectLoop:
    """Stand-in for an event loop's ``call_soon_threadsafe``."""

    def call_soon_threadsafe(self, fn: Callable[..., Any], *args: Any) -> None:
        fn(*args)


class SteppedInbox(Inbox):
    """An inbox that reports when its thread has nothing to do. It ignores time: only an event, `wake` or
    `stop` ends a wait of its thread. `get` with a ``timeout_s`` of 0 does not wait."""

    def __init__(self) -> None:
        super().__init__(1 << 40, _DirectLoop())  # type: ignore[arg-type]
        self._idle = False

    def get(self, timeout_s: float | None) -> Event | None:
        if timeout_s == 0:
            return super().get(0)
        self._await_work(lambda: bool(self._events))
        return super().get(0)

    def get_call(self, timeout_s: float | None) -> Call | None:
        self._await_work(lambda: any(isinstance(event, Call) for event in self._events))
        return super().get_call(0)

    def _await_work(self, has_work: Callable[[], bool]) -> None:
        """Block until there is work, or until the inbox is woken or stopped. Meanwhile the shard is idle."""
        with self._changed:
            while not (has_work() or self._woken or self.stopped):
                self._idle = True
                self._changed.notify_all()
                self._changed.wait()
            self._idle = False

    def put(self, event: Event) -> None:
        with self._changed:
            self._idle = False
            super().put(event)
            self._changed.notify_all()

    def put_messages(self, batch: Sequence[Envelope[Any]], messages_max: int) -> None:
        with self._changed:
            self._idle = False
            super().put_messages(batch, messages_max)

    def wake(self, _: object = None) -> None:
        with self._changed:
            self._idle = False
            super().wake()
            self._changed.notify_all()

    def await_idle(self, ended: Callable[[], bool], timeout_s: float) -> bool:
        """Block until the thread waits for work or has ended. Return False after ``timeout_s`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle or ended(), timeout_s)

    def note_end(self) -> None:
        """Let `await_idle` see that the thread has ended."""
        with self._changed:
            self._changed.notify_all()
