"""The lag of a standby behind its primary, in bytes and in seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from gazette.client.client import Client
from gazette.client.read.reader import ReadParams
from gazette.consumer import metrics
from gazette.errors import Broken, NotAllowed, NotFound, NotYet, Retryable
from gazette.recoverylog.playback.player import Player
from gazette.runtime.clock import Clock

SAMPLES_MAX: Final = 4096
"""Greatest number of heads to keep. With more, the oldest are dropped, and the lag in seconds is too low."""


class StandbyLag:
    """Lag computed from samples of a log's head and the played offset. Pure: callers give the time.

    The lag in seconds is the age of the oldest sampled head that the standby has not reached. Its error is at
    most the time between two samples.
    """

    def __init__(self) -> None:
        self._heads: deque[tuple[float, int]] = deque(maxlen=SAMPLES_MAX)
        """(time, offset) of each sampled head that the standby has not reached, the oldest first."""
        self._head = 0
        """Greatest head that was sampled."""

    def note_head(self, head: int, now: float) -> None:
        """Note that the log ended at the offset ``head`` at the time ``now``."""
        if head > self._head:
            self._head = head
            self._heads.append((now, head))

    def at(self, offset: int, now: float) -> tuple[int, float]:
        """Return the lag (bytes, seconds) of a player that has played up to ``offset``."""
        while self._heads and self._heads[0][1] <= offset:
            self._heads.popleft()
        seconds = now - self._heads[0][0] if self._heads else 0.0
        return max(0, self._head - offset), seconds


_GAUGES: Final = (
    metrics.STANDBY_LAG_BYTES,
    metrics.STANDBY_LAG_SECONDS,
    metrics.PLAYBACK_RATE,
)


async def watch_lag(
    fqn: str,
    player: Player,
    client: Client,
    clock: Clock,
    interval_s: float,
    is_standby: Callable[[], bool],
    note: Callable[[tuple[int, float] | None], None],
) -> None:
    """Sample the head of a standby's log, until the shard is no standby any more.

    Report each head to the player, so that a player that gets no bytes fails before a promotion needs it.
    Call ``note`` with the lag in (bytes, seconds), and with None at the end.
    """
    lag, last_at, last_bytes = StandbyLag(), clock.monotonic(), player.progress.bytes_read
    has_gauges = False
    try:
        while is_standby():
            head = await journal_head(client, player.progress.log)
            now, progress = clock.monotonic(), player.progress
            if head is not None:
                player.note_head(head)
                lag.note_head(head, now)
                present_lag = lag.at(progress.offset, now)
                note(present_lag)
                rate = (progress.bytes_read - last_bytes) / max(now - last_at, 1e-3)
                has_gauges = True
                for gauge, value in zip(_GAUGES, (*present_lag, rate), strict=True):
                    gauge.labels(fqn).set(value)
            last_at, last_bytes = now, progress.bytes_read
            await clock.sleep(interval_s)
    finally:
        note(None)
        if has_gauges:
            for gauge in _GAUGES:
                gauge.remove(fqn)


async def journal_head(client: Client, journal: str) -> int | None:
    """Return the head of a journal, from any of its brokers; None if no broker answers with it now."""
    reader = client.reader(ReadParams(journal, offset=-1, block=False, metadata_only=True))
    try:
        await reader.read()
    except NotYet:
        pass  # Expected: the journal has no bytes after its head.
    except (Retryable, Broken, NotFound, NotAllowed):
        return None  # Play-back, or the reader of the source, handles these errors.
    finally:
        reader.close()
    return reader.write_head
