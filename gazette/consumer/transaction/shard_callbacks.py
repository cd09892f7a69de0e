"""Call the callbacks of one shard's application and store, and check their results.

An exception becomes `ApplicationFailed`, which names the callback. A `GazetteError` passes through.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gazette.consumer.application import Application, MessageProducer, Shard, Store
from gazette.consumer.contract.callbacks import (
    ApplicationFailed,
    application_failed,
    require_instance,
    require_none,
    require_result,
)
from gazette.errors import GazetteError
from gazette.message.envelope import Envelope
from gazette.message.publisher import Publisher
from gazette.message.sequencer.sequencer import ReplayRange
from gazette.protocol.checkpoint import Checkpoint
from gazette.runtime.tasks import OpFuture


class RunningCallback:
    """The running callback. The shard's thread writes this object; any thread reads it."""

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
        """Note that calls of a callback begin. ``call`` identifies the first call."""
        self.callback, self.thread, self.call = callback, threading.get_ident(), call

    def leave(self) -> None:
        """Note that no callback runs."""
        self.call = None


class application_code:
    """Wraps exceptions of a callback, so that they differ from our own. Notes the callback in ``running``."""

    def __init__(self, callback: str, running: RunningCallback | None = None) -> None:
        self._callback = callback
        self._running = running

    def __enter__(self) -> None:
        if self._running is not None:
            self._running.enter(self._callback, self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: object
    ) -> None:
        if self._running is not None:
            self._running.leave()
        if error is None or isinstance(error, GazetteError):
            return
        raise application_failed(self._callback, error) from error


_DEFAULTS: Final = {
    name: vars(Application)[name]
    for name in ("begin_transaction", "finalize_transaction", "finished_transaction")
}
"""The default callbacks, which do nothing. A program may replace these methods, to trace calls."""


@dataclass(frozen=True, slots=True)
class ShardCallbacks:
    """The application, the store and the arguments of one shard's callbacks. Used on the shard's thread."""

    application: Application[Any]
    shard: Shard
    store: Store
    publisher: Publisher
    running_callback: RunningCallback = field(default_factory=RunningCallback)

    def start_reading(self, checkpoint: Checkpoint, feed: Any) -> None:
        """Have a `MessageProducer` begin to bring its messages to ``feed``."""
        application = self.application
        assert isinstance(application, MessageProducer)
        with application_code("start_reading", self.running_callback):
            result: object = application.start_reading(self.shard, self.store, checkpoint, feed)
        require_none("start_reading", result)

    def replay(self, wanted: ReplayRange) -> Iterator[Sequence[Envelope[Any]]]:
        """Yield the messages of a range, which a `MessageProducer` brings again."""
        application = self.application
        assert isinstance(application, MessageProducer)
        with application_code("replay", self.running_callback):
            replayed = application.replay(self.shard, self.store, *wanted)
            yield from require_result("replay", replayed)

    def restore_checkpoint(self) -> Checkpoint:
        with application_code("Store.restore_checkpoint", self.running_callback):
            checkpoint = self.store.restore_checkpoint(self.shard)
        require_instance("Store.restore_checkpoint", checkpoint, Checkpoint)
        return checkpoint

    def begin_transaction(self) -> object:
        """Return the callback's result without a check: a transaction begins even if the result is wrong."""
        return self._call("begin_transaction")

    def finalize_transaction(self) -> None:
        self._call_for_nothing("finalize_transaction", self.publisher)

    def start_commit(
        self, checkpoint: Checkpoint, waits: Collection[OpFuture[Any]]
    ) -> OpFuture[Any]:
        with application_code("Store.start_commit", self.running_callback):
            commit = self.store.start_commit(self.shard, checkpoint, waits)
        if isinstance(commit, OpFuture):
            return commit
        require_result("Store.start_commit", commit)
        raise ApplicationFailed(
            f"Store.start_commit returned {type(commit).__name__}, not a future"
        )

    def finished_transaction(self, commit: OpFuture[Any]) -> None:
        self._call_for_nothing("finished_transaction", commit)

    def _call(self, callback: str, *arguments: Any) -> object:
        """Call a callback of the application, unless it is the default, which does nothing."""
        with application_code(callback, self.running_callback):
            function = getattr(self.application, callback)
            if getattr(function, "__func__", None) is _DEFAULTS[callback]:
                return None
            return function(self.shard, self.store, *arguments)

    def _call_for_nothing(self, callback: str, *arguments: Any) -> None:
        if (result := self._call(callback, *arguments)) is not None:
            require_none(callback, result)
