"""Messages for the shards of `fold_app`, the state that they must lead to, and readers of that state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from gazette.client.client import Client
from gazette.client.read.reader import ReadParams
from gazette.errors import NotYet
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.envelope import EnvelopeDecoder
from gazette.message.framing.framing import framing_of
from gazette.message.sequencer.sequencer import Sequencer
from tests.faults.fold_app import Output

KEYS: Final = [f"key-{i:02d}" for i in range(30)]


def source_of(shard_id: str) -> str:
    return f"in/{shard_id}"


@dataclass(frozen=True)
class Pace:
    """How messages are published: in groups of any size up to ``group_max``, ``pause_s`` apart."""

    group_max: int = 8
    pause_s: float = 0.04


@dataclass
class Source:
    """What was published to one shard, in order, and what follows from it."""

    shard_id: str
    published: list[tuple[str, int]] = field(default_factory=list)
    futures: list[Any] = field(default_factory=list)

    def state(self) -> dict[str, tuple[int, int]]:
        state: dict[str, tuple[int, int]] = {}
        for key, n in self.published:
            count, total = state.get(key, (0, 0))
            state[key] = (count + 1, total + n)
        return state

    def outputs(self) -> list[tuple[str, int, int, int]]:
        state: dict[str, tuple[int, int]] = {}
        outputs = []
        for key, n in self.published:
            count, total = state.get(key, (0, 0))
            state[key] = (count + 1, total + n)
            outputs.append((key, n, *state[key]))
        return outputs


class CommittedReader:
    """Reads an output journal as far as it goes, again and again, and keeps what has committed."""

    def __init__(self, journal: str) -> None:
        self.journal = journal
        self.outputs: list[tuple[str, int, int, int]] = []
        self._offset = 0
        framing = framing_of(CONTENT_JSON_LINES, Output)
        self._decoder: EnvelopeDecoder[Any] = EnvelopeDecoder(journal, framing, 0)
        self._sequencer: Sequencer[Any] = Sequencer({}, 1 << 20)

    async def read(self, client: Client) -> None:
        reader = client.retry_reader(ReadParams(self.journal, self._offset, block=False))
        try:
            while data := await reader.read(1 << 20):
                self._take(data)
        except NotYet:
            pass
        finally:
            self._offset = reader.offset
            reader.close()

    def _take(self, data: bytes) -> None:
        decoder, sequencer = self._decoder, self._sequencer
        decoder.feed(data)
        while batch := decoder.decode():
            index = 0
            while index < len(batch):
                index = sequencer.queue_batch(batch, index)
                assert sequencer.replay_range is None
                while found := sequencer.dequeue(1 << 16):
                    self.outputs += [
                        (m.key, m.n, m.count, m.total)
                        for m in (one.message for one in found if not one.is_ack)
                    ]


def assert_same(found: list[Any], expected: list[Any], what: str) -> None:
    """Assert ``found == expected``, with a report that is short."""
    if found == expected:
        return
    at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), -1)
    at = min(len(found), len(expected)) if at < 0 else at
    raise AssertionError(
        f"{what}: {len(found)} outputs, expected {len(expected)}; from {at} on"
        f" {found[at : at + 3]}, expected {expected[at : at + 3]}"
    )
