"""The watermark of a shard: how far its sources have come in event time. Pure.

Times are Unix microseconds. `observe` notes the time of a message. `watch` notes the present time, with which
sources may become idle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Final

import msgspec

from gazette.consumer.timers.timer import EventTime
from gazette.errors import Corrupt, NotAllowed
from gazette.protocol.ids import JournalName
from gazette.runtime.decoders import json_decoder

_MICROSECOND: Final = timedelta(microseconds=1)


class _State(msgspec.Struct):
    """Committed state: the watermark, and the greatest time of each source."""

    watermark: int | None = None
    sources: dict[str, int] = {}
    times: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """For each source with a declared time, the text of the time: `MessageTime.text`."""


class Watermark:
    """Watermark of one shard over its sources. ``now`` is a time of the monotonic clock, in seconds.

    Each of ``sources`` holds the watermark back until its first message, or until it is idle. Any other
    journal counts from its first message on.
    """

    def __init__(
        self,
        event_time: EventTime,
        sources: Collection[JournalName],
        now: float,
        times: Mapping[JournalName, str] = MappingProxyType({}),
    ) -> None:
        self._times = dict(sorted(times.items()))
        self._lateness_us = event_time.lateness // _MICROSECOND
        idle = event_time.idle_after
        self._idle_s = None if idle is None else idle.total_seconds()
        self._sources = frozenset(sources)  # Empty: any journal is a source.
        self._greatest: dict[JournalName, int | None] = dict.fromkeys(sources)
        """By source, the greatest time of its messages; None before its first message."""
        self._seen: dict[JournalName, float] = dict.fromkeys(sources, now)
        """By source, the monotonic time at which its last message came; before, the time of the start."""
        self._now = now
        self.value: int | None = None
        """The watermark. None while no message has come, or while a source without messages holds it back."""

    def observe(self, journal: JournalName, at_us: int) -> None:
        """Note the time of a message of a source."""
        self._seen[journal] = self._now
        greatest = self._greatest.get(journal)
        if greatest is None or at_us > greatest:
            self._greatest[journal] = at_us
            self._advance()

    def watch(self, now: float) -> None:
        """Note the present time, since sources may have become idle."""
        self._now = now
        if self._idle_s is not None:
            self._advance()

    @property
    def next_idle_at(self) -> float | None:
        """Monotonic time at which the next source becomes idle; None if no source will become idle."""
        idle_s = self._idle_s
        if idle_s is None:
            return None
        return min(
            (at + idle_s for at in self._seen.values() if at + idle_s > self._now), default=None
        )

    def _advance(self) -> None:
        """Raise the watermark to the least of the active sources' greatest times, minus the lateness. Do
        nothing while an active source has had no message."""
        times = self._greatest
        if self._idle_s is not None:
            oldest = self._now - self._idle_s
            active = {name: times[name] for name, seen in self._seen.items() if seen > oldest}
            if not active:
                # All sources are idle: the greatest of their times counts.
                known_us = [at_us for at_us in times.values() if at_us is not None]
                self._raise_value(max(known_us, default=None))
                return
            times = active
        least_us: int | None = None
        for at_us in times.values():
            if at_us is None:
                return
            if least_us is None or at_us < least_us:
                least_us = at_us
        self._raise_value(least_us)

    def _raise_value(self, at_us: int | None) -> None:
        if at_us is None:
            return
        value = at_us - self._lateness_us
        if self.value is None or value > self.value:
            self.value = value

    def to_bytes(self) -> bytes:
        """Return the state to commit."""
        sources = {name: us for name, us in sorted(self._greatest.items()) if us is not None}
        return msgspec.json.encode(_State(self.value, sources, self._times or msgspec.UNSET))

    def restore(self, data: bytes) -> None:
        """Continue from a committed state. Forget journals that are no sources any more.

        Raise ``Corrupt`` for a damaged state. Raise ``NotAllowed`` if the declared time of a source has
        changed: windows would get two results.
        """
        try:
            state = json_decoder(_State).decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Corrupt(f"the watermark of the state does not decode: {error}") from error
        former = {} if state.times is msgspec.UNSET else state.times
        for journal in state.sources:
            if journal in self._sources or not self._sources:
                self._require_same_time(journal, former.get(journal, ""))
        self.value = state.watermark
        for journal, at_us in state.sources.items():
            if journal in self._sources or not self._sources:
                self._greatest[journal] = at_us
                self._seen.setdefault(journal, self._now)

    def _require_same_time(self, journal: JournalName, former: str) -> None:
        declared = self._times.get(journal, "")
        if declared == former:
            return
        raise NotAllowed(
            f"the watermark of the state follows {_named(former)}, and the source now declares"
            f" {_named(declared)}",
            journal=journal,
            former=former,
            declared=declared,
            hint="Declare the former time= again. For another one, build the state from the history, or give"
            " the application another name.",
        )


def _named(time: str) -> str:
    return f"the time {time}" if time else "the clock of publishers"
