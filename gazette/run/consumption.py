"""Reports of a running application: messages per second, lag and failed shards, as lines of text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from gazette.client.client import Client
from gazette.errors import GazetteError
from gazette.run.dev.heads import write_head
from gazette.run.http_get import get
from gazette.runtime.clock import Clock
from gazette.runtime.numbers import bytes_text
from gazette.runtime.tasks import TaskScope
from gazette.runtime.timeouts import timeout

_MESSAGES: Final = re.compile(
    rb'^gazette_shard_read_messages_total\{shard="([^"]*)"\} ([0-9.e+]+)$', re.MULTILINE
)
FREE_BYTES_MIN: Final = 16 << 20
_HEADS_S: Final = 5.0
_AT_ONCE: Final = 16
_PRIMARY: Final = "PRIMARY"
_FAILED: Final = "FAILED"
_SILENCE_S: Final = 60.0


class ConsumptionSeen(msgspec.Struct, frozen=True):
    """Answers of all members at one moment."""

    messages: Mapping[str, float]
    """Messages of finished transactions, by process and shard."""
    read_through: Mapping[str, int]
    """Offset that a primary has read through, by journal."""
    primaries: int
    errors: Mapping[str, str]
    """Errors of failed shards, by shard."""
    recoveries: Mapping[str, str] = {}
    """Progress of recovery, by shard."""
    waits: Mapping[str, str] = {}
    """Reason of a primary's wait, by shard."""


class ConsumptionReport:
    """Compares what members answer now with their answers at the last look. Call ``look`` at intervals."""

    def __init__(
        self,
        members: Callable[[], Sequence[str]],
        journals: Sequence[str],
        shards: int,
        client: Client,
        clock: Clock,
    ) -> None:
        self._members = members
        """Returns the HTTP addresses of the members."""
        self._journals = tuple(journals)
        self._shards = shards
        self._client = client
        self._clock = clock
        self._seen: ConsumptionSeen | None = None
        self._seen_at = clock.monotonic()
        self._state: tuple[int, int | None] | None = None  # Primaries and lag at the last look.
        self._said: dict[str, str] = {}  # Errors at the last look, by shard.
        self._waited: Mapping[str, str] = {}  # Reasons of waits at the last look, by shard.
        self._silent: dict[str, tuple[float, float]] = {}
        """By address of a member: time since which the member is silent, and time of the next line about
        that."""

    async def look(self) -> list[str]:
        """Return the news since the last look, as lines. Return no line while the application is idle."""
        now = self._clock.monotonic()
        members = self._members()
        answers = await asyncio.to_thread(_ask, members)
        seen = seen_in(answers)
        lag = await self._lag(seen.read_through)
        lines = self._silences([member for member in members if member not in answers], now)
        lines += self._failures(seen)
        lines += [
            f"{shard} is being recovered: {progress}"
            for shard, progress in sorted(seen.recoveries.items())
        ]
        lines += [
            f"{shard} waits for {reason}"
            for shard, reason in sorted(seen.waits.items())
            if self._waited.get(shard) != reason
        ]
        self._waited = seen.waits
        messages = 0.0 if self._seen is None else messages_between(self._seen, seen)
        state = (seen.primaries, lag)
        if messages or state != self._state:
            rate = messages / max(now - self._seen_at, 0.001)
            lines.append(consumption_text(rate, lag, seen.primaries, self._shards))
        self._seen, self._seen_at, self._state = seen, now, state
        return lines

    def _silences(self, silent: Sequence[str], now: float) -> list[str]:
        """Return a line for each member that did not answer at two looks or more; repeat it each minute."""
        lines, former, self._silent = [], self._silent, {}
        for address in silent:
            since, say_at = former.get(address, (now, now))
            if now > since and now >= say_at:
                lines.append(
                    f"{address} has not answered for {now - since:.0f} s: it starts, is paused, or one call"
                    " of the application keeps the interpreter lock"
                )
                say_at = now + _SILENCE_S
            self._silent[address] = (since, say_at)
        return lines

    def _failures(self, seen: ConsumptionSeen) -> list[str]:
        """Return a line for each error that the last look did not show."""
        lines = [
            f"{shard} failed: {error}"
            for shard, error in sorted(seen.errors.items())
            if self._said.get(shard) != error
        ]
        self._said = dict(seen.errors)
        return lines

    async def _lag(self, read_through: Mapping[str, int]) -> int | None:
        """Return the bytes that are not read yet. Return None if brokers fail, or do not answer in time."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def unread(journal: str) -> int:
            async with gate:
                head = await write_head(self._client, journal)
            return max(0, head - read_through.get(journal, 0))

        try:
            async with timeout(_HEADS_S), TaskScope("heads") as scope:
                tasks = [scope.spawn(unread(journal), name=journal) for journal in self._journals]
        except (TimeoutError, GazetteError):
            return None
        return sum(task.result() for task in tasks)


def seen_in(answers: Mapping[str, tuple[bytes, bytes]]) -> ConsumptionSeen:
    """Return what members have answered. ``answers`` has ``/metrics`` and ``/debug/shards``, by address."""
    messages: dict[str, float] = {}
    offsets: dict[str, int] = {}
    errors: dict[str, str] = {}
    recoveries: dict[str, str] = {}
    waits: dict[str, str] = {}
    primaries = 0
    for address, (metrics, debug) in answers.items():
        for shard, count in _MESSAGES.findall(metrics):
            messages[f"{address} {shard.decode()}"] = float(count)
        shards: list[dict[str, Any]] = msgspec.json.decode(debug)["shards"]
        for shard in shards:
            if shard["status"] == _FAILED:
                errors[shard["id"]] = "\n".join(shard["errors"]).strip()
            elif shard["slot"] == 0 and shard["status"] == _PRIMARY:
                primaries += 1
                offsets.update(shard["read_through"])
            elif shard["slot"] == 0 and shard["play_back"] and not shard["waits_for"]:
                recoveries[shard["id"]] = shard["play_back"]
            if shard["slot"] == 0 and shard["waits_for"]:
                waits[shard["id"]] = shard["waits_for"]
    return ConsumptionSeen(messages, offsets, primaries, errors, recoveries, waits)


def messages_between(before: ConsumptionSeen, after: ConsumptionSeen) -> float:
    """Return how many messages were consumed. A counter that became smaller began again at zero."""
    messages = 0.0
    for key, count in after.messages.items():
        former = before.messages.get(key, 0.0)
        messages += count - former if count >= former else count
    return messages


def consumption_text(rate: float, lag: int | None, primaries: int, shards: int) -> str:
    lag_text = "lag unknown" if lag is None else f"lag {bytes_text(lag)}"
    digits = 0 if rate >= 10 or rate == int(rate) else 1
    return f"{rate:,.{digits}f} messages/s, {lag_text}, {primaries} of {shards} shards run"


def space_text(directory: str, free_bytes: int) -> str:
    """Return a warning if the disk of a directory is nearly full, or else ""."""
    if free_bytes >= FREE_BYTES_MIN:
        return ""
    return (
        f"the disk of {directory} has {bytes_text(free_bytes)} left: messages cannot be appended while it is "
        "full. Make space; what waits goes on then"
    )


def _ask(addresses: Sequence[str]) -> dict[str, tuple[bytes, bytes]]:
    """Return ``/metrics`` and ``/debug/shards`` of each member that answers both, by address."""
    answers = {}
    for address in addresses:
        metrics, debug = get(f"{address}/metrics"), get(f"{address}/debug/shards")
        if metrics is not None and debug is not None:
            answers[address] = (metrics, debug)
    return answers
