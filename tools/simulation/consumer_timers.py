"""The application of simulated members with timers: it publishes an output when a timer fires, not before.

So the judge of outputs judges timers, too. Every input has one output, whatever happens between the
transaction that sets its timer and the transaction in which the timer fires.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from gazette.consumer.application import Shard
from gazette.consumer.timers.timer import EventTime, TimeDomain, Timer
from gazette.message.envelope import Envelope
from gazette.message.publisher import Publisher
from tools.simulation.consumer_app import FoldApp, Input, Output

_DELAYS_S: Final = (0.0, 0.02, 0.3, 2.0, 15.0)
_WRONG: Final = b"replaced"


class TimedFoldApp(FoldApp):
    """Sets timers for each input: one that publishes, and others that must not fire."""

    event_time = EventTime(idle_after=timedelta(seconds=10))

    def consume_message(
        self, shard: Shard, store: Any, envelope: Envelope[Input], publisher: Publisher
    ) -> None:
        self._work()
        number = envelope.message.number
        count = store.fold(number)
        key, payload = str(number), b"%d" % count
        delay = timedelta(seconds=_DELAYS_S[number % len(_DELAYS_S)])
        if number % 3 == 0:
            # The watermark may end at the last message: a timer for a later time might never fire.
            shard.schedule(key, envelope.time - delay, payload, domain=TimeDomain.EVENT)
        else:
            shard.schedule(key, shard.now - delay, _WRONG)
            shard.schedule(key, shard.now + delay, payload)
        shard.schedule(f"cancelled {number}", shard.now + delay, _WRONG)
        shard.cancel(f"cancelled {number}")

    def on_timer(self, shard: Shard, store: Any, timer: Timer, publisher: Publisher) -> None:
        self._work()
        if timer.payload == _WRONG:
            self._around.violated(f"{shard.id} fires {timer.key}, which was replaced or cancelled")
            return
        if timer.domain is TimeDomain.PROCESSING and timer.at > shard.now:
            self._around.violated(f"{shard.id} fires {timer.key} before its time")
        if timer.key[-1] in "13579" and timer.key[0] != "-":
            # Set a second timer, for the same time or 1 s later: only that one publishes.
            again = int(timer.key) // 2 % 2
            shard.schedule(f"-{timer.key}", timer.at + timedelta(seconds=again), timer.payload)
            return
        number = int(timer.key.removeprefix("-"))
        publisher.publish_uncommitted(self._map, Output(number=number, count=int(timer.payload)))
