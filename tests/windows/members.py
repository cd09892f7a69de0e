"""Members that take one shard over from another, at the worst moments: for histories of windows and joins."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Self

from hypothesis import strategies as st

from gazette import Application
from gazette.errors import Fenced
from gazette.message.uuid import (
    ACK_TXN,
    OUTSIDE_TXN,
    build_uuid,
    clock_at,
    parse_text,
    parse_uuid,
    uuid_text,
)
from gazette.testing.app_driver import AppDriver
from gazette.testing.clock import ManualClock
from gazette.testing.memory_journals import MemoryJournals
from gazette.testing.recovery import LOG

EPOCH_US: Final = 1_700_000_000 * 10**6
EPOCH: Final = datetime.fromtimestamp(EPOCH_US // 10**6, UTC)
TARGET: Final = "results"

CRASH, COMMIT, ACK, MEANWHILE, BEHIND = "crash", "commit", "ack", "meanwhile", "behind"
FATES: Final = (CRASH, COMMIT, ACK, MEANWHILE, BEHIND)
"""What happens to the primary. It crashes, and goes on. Or another member takes over: while its commit,
or its acknowledgement, is on its way; after a commit that came during the hand-off; or before it
consumes messages, which it does not know.
"""
fates = st.dictionaries(st.integers(0, 40), st.sampled_from(FATES), max_size=4)


def us(number: int) -> timedelta:
    return timedelta(microseconds=number)


def since_epoch(at: datetime) -> int:
    return (at - EPOCH) // us(1)


@dataclass(frozen=True)
class Event:
    """One message: its source, producer, time in microseconds, key and value."""

    source: str
    producer: int
    at: int
    key: str
    value: Any

    @property
    def frame(self) -> bytes:
        clock = clock_at((EPOCH_US + self.at) * 1000)
        uuid = build_uuid(bytes([1, 0, 0, 0, 0, self.producer]), clock, OUTSIDE_TXN)
        text = {"uuid": uuid_text(uuid), "key": self.key, "value": self.value}
        return json.dumps(text).encode() + b"\n"


class Members:
    """Members of one application, of which one is primary. Use it in a ``with`` statement."""

    def __init__(
        self,
        application: Callable[[], Application[Any]],
        directory: Path,
        sources: list[str],
        chunk_bytes: int = 1 << 20,
    ) -> None:
        self._application = application
        self._directory = directory
        self._sources = sources
        self._chunk_bytes = chunk_bytes
        self._journals = MemoryJournals()
        self._clock = ManualClock()
        self._count = 0
        self.primary = self._start()
        self.fail_overs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.primary.close()

    def _start(self) -> AppDriver[Any]:
        self._count += 1
        return AppDriver(
            self._application(),
            self._directory / f"member-{self._count}",
            self._sources,
            journals=self._journals,
            clock=self._clock,
            seed=self._count,
            chunk_bytes=self._chunk_bytes,
        )

    def feed(self, event: Event) -> None:
        self._journals.append(event.source, event.frame)

    def meet(self, fate: str) -> None:
        """Consume what there is, as far as the fate lets it."""
        if fate == CRASH:
            self.primary.crash()
            self.primary.run()
            return
        self.fail_overs += 1
        former, self.primary = self.primary, self._start()
        try:
            self._hand_over(former, fate)
        finally:
            self._journals.on_hand_off = lambda journal: None
            self._journals.release()
        self.primary.run()
        # The former one learns of it when its next commit is refused, if it has one.
        try:
            former.run()
        except Fenced:
            pass
        finally:
            former.close()

    def _hand_over(self, former: AppDriver[Any], fate: str) -> None:
        if fate == MEANWHILE:
            runs = iter([former.run])

            def commit_meanwhile(journal: str) -> None:
                next(runs, lambda: 0)()

            self._journals.on_hand_off = commit_meanwhile
        elif fate == BEHIND:
            _ = former.store  # It is primary, and has consumed nothing of what came last.
        else:
            _ = former.store
            self._journals.holds = _at_commit if fate == COMMIT else _at_ack
            former.run()
            self._journals.holds = lambda journal, content: False
        _ = self.primary.store


def _at_commit(journal: str, content: bytes) -> bool:
    return journal == LOG


def _at_ack(journal: str, content: bytes) -> bool:
    text = json.loads(content.partition(b"\n")[0]).get("uuid", "") if journal == TARGET else ""
    return bool(text) and parse_uuid(parse_text(text)).flags == ACK_TXN
