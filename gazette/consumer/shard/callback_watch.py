"""Warn of code of the application that blocks a shard or a member for too long.

The code may block:

- *The thread of a shard*, in a callback. Only this shard waits.
- *The event loop*, in a route, a servicer or a task of the application. All calls wait, and a thread renews
  the lease for a minute.
- *The process*, in one call into C that keeps the interpreter lock. No thread of the process runs.

The watch has its own thread, which runs in the first two cases. So it also reports a call that never returns.
In the third case, it reports afterwards for how long no thread ran.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gazette.cluster.etcd.lease_thread import STALL_MAX_S
from gazette.consumer.timers.timer import Timer
from gazette.consumer.transaction.shard_callbacks import RunningCallback
from gazette.message.envelope import Envelope
from gazette.runtime.clock import Clock
from gazette.runtime.user_code import place_of_thread

log = logging.getLogger(__name__)

REPEAT_S: Final = 60.0
"""Seconds between two warnings about the same call."""
_LOOKS: Final = 4
"""Number of times that the watch looks at a call before it reports the call."""
_SHARE: Final = 3
"""Number of renewals within the length of a lease. A call that takes longer than this part of the length
delays a renewal."""


@dataclass(slots=True)
class _SeenCall:
    call: object
    since: float
    warned_at: float | None = None


@dataclass(slots=True)
class _Probe:
    """A function that waits for the event loop to run it."""

    sent_at: float
    answered: bool = False
    warned_at: float | None = None

    def answer(self) -> None:
        self.answered = True


class CallbackWatch:
    """Watch over the running callbacks of a member's shards, and over the event loop that serves them.

    A call is reported after a third of the lease, counted from the first look that finds the call. Before
    that look, the call may have run for a quarter of this time.
    """

    def __init__(self, clock: Clock, lease_ttl_s: float) -> None:
        self._clock = clock
        self._lease_s = lease_ttl_s
        self._limit_s = lease_ttl_s / _SHARE
        self.interval_s = self._limit_s / _LOOKS
        """Seconds from one look to the next."""
        self._lock = threading.Lock()
        self._running: dict[RunningCallback, None] = {}
        self._seen_calls: dict[RunningCallback, _SeenCall] = {}
        """By shard, the call that ran at the last look."""
        self._looked_at: float | None = None
        """Time of the last look, by the monotonic clock."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._probe: _Probe | None = None
        """The probe that was sent to the loop last."""

    def add(self, running: RunningCallback) -> None:
        """Watch the callbacks of a shard from now on. Any thread may call this."""
        with self._lock:
            self._running[running] = None

    def remove(self, running: RunningCallback) -> None:
        """Stop watching the callbacks of a shard. May be repeated. Any thread may call this."""
        with self._lock:
            self._running.pop(running, None)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Run the watch on its own thread while the block runs. Call this on the event loop's thread."""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        ending = threading.Event()

        def run() -> None:
            while not ending.wait(self.interval_s):
                self.look()

        thread = threading.Thread(target=run, name="callback watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()
            self._loop = None

    def look(self) -> None:
        """Warn of calls that have taken too long. The watch's thread calls this every ``interval_s``."""
        now = self._clock.monotonic()
        with self._lock:
            shards = list(self._running)
        last_look_at, self._looked_at = self._looked_at, now
        if last_look_at is not None and now - last_look_at - self.interval_s >= self._limit_s:
            self._warn_of_process(now - last_look_at - self.interval_s, shards)
            self._probe = None  # The loop stood still, too: this warning covers it.
        for running in shards:
            self._look_at(running, now)
        self._seen_calls = {
            shard: self._seen_calls[shard] for shard in shards if shard in self._seen_calls
        }
        if self._loop is not None:
            self._look_at_loop(self._loop, now)

    def _look_at(self, running: RunningCallback, now: float) -> None:
        """Warn of the shard's running call if it takes too long, and log when such a call has returned."""
        call, seen = running.call, self._seen_calls.get(running)
        if seen is not None and call is not seen.call:
            if seen.warned_at is not None:
                log.info(
                    "shard %(shard)s: its callback has returned, after %(seconds).1f s",
                    {"shard": running.shard_id, "seconds": now - seen.since},
                )
            del self._seen_calls[running]
            seen = None
        if call is None:
            return
        if seen is None:
            seen = self._seen_calls[running] = _SeenCall(call, now)
        if now - seen.since >= self._limit_s and _is_due(seen.warned_at, now):
            seen.warned_at = now
            log.warning(
                "shard %(shard)s: %(callback)s has not returned for %(seconds).1f s%(where)s. Until it"
                " returns, the shard consumes no messages, and queries of uncommitted state wait. A hand-over"
                " waits 10 s, and then drops what the callback did. Give the call a time-out, or divide its"
                " work",
                {
                    "shard": running.shard_id,
                    "callback": running.callback,
                    "seconds": now - seen.since,
                    "where": _place_text(running.thread, call),
                },
                extra={"cause": f"slow callback of {running.shard_id}"},
            )

    def _look_at_loop(self, loop: asyncio.AbstractEventLoop, now: float) -> None:
        """Send a probe to the event loop, or warn if the loop has not run the last probe for too long."""
        probe = self._probe
        if probe is None or probe.answered:
            self._probe = probe = _Probe(now)
            with contextlib.suppress(RuntimeError):  # The loop is closed: the process ends.
                loop.call_soon_threadsafe(probe.answer)
        elif now - probe.sent_at >= self._limit_s and _is_due(probe.warned_at, now):
            probe.warned_at = now
            log.warning(
                "the event loop has run nothing for %(seconds).1f s%(where)s: after %(limit)g s the member's"
                " lease is no longer renewed, and other members take over its shards. Use await there, or run"
                " the blocking call with asyncio.to_thread",
                {
                    "seconds": now - probe.sent_at,
                    "where": _place_text(self._loop_thread, None),
                    "limit": STALL_MAX_S,
                },
                extra={"cause": "blocked event loop"},
            )

    def _warn_of_process(self, seconds: float, shards: list[RunningCallback]) -> None:
        """Warn that this thread did not run for some time, and perhaps no thread. Name the running calls."""
        calls = [(shard, shard.call) for shard in shards]
        running_calls = "; ".join(
            f"shard {shard.shard_id} runs {shard.callback}{_place_text(shard.thread, call)}"
            for shard, call in calls
            if call is not None
        )
        log.warning(
            "this process stood still for %(seconds).1f s: the member loses its lease of %(lease)g s, and its"
            " shards, if it stands still for longer. Either the machine gave it no processor, or one call"
            " into C, such as a regular expression, kept the interpreter lock. Now %(what)s. Bound such"
            " calls, or run them in another process",
            {
                "seconds": seconds,
                "lease": self._lease_s,
                "what": running_calls or "no callback of a shard runs",
            },
            extra={"cause": "process that stood still"},
        )


def _is_due(warned_at: float | None, now: float) -> bool:
    return warned_at is None or now - warned_at >= REPEAT_S


def _place_text(thread: int, call: object | None) -> str:
    """Return, in parentheses, the line of the user's code in which a thread is, and its message or timer."""
    facts = []
    if place := place_of_thread(thread):
        facts.append(f"at {place}")
    match call:
        case Envelope():
            facts.append(f"message {call.journal} {call.begin}")
        case [Envelope() as first, *_]:
            facts.append(f"messages from {first.journal} {first.begin} on")
        case Timer():
            facts.append(f"timer {call.key}")
    return f" ({', '.join(facts)})" if facts else ""
