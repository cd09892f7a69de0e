"""A journal that has lost some fragments and its end for good, as an operator has confirmed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gazette.client.append.appender import AppendParams, SuspendControl
from gazette.client.read.reader import WRITE_HEAD, ReadParams
from gazette.cluster.etcd.client import Etcd
from gazette.errors import NotYet
from gazette.protocol.ids import JournalName, Offset
from gazette.protocol.label_set import LabelSet
from gazette.testing.broker import BrokerFixture, journal_spec

LENGTH = 1024
"""Length of a fragment. Lines are at least as long: each is a fragment of its own."""


@dataclass(frozen=True, slots=True)
class Holed:
    """The journal, at a broker that began when the fragments were gone."""

    broker: BrokerFixture
    journal: JournalName
    lost: tuple[tuple[Offset, Offset], ...]
    head: Offset
    """The offset at which the journal goes on once it is confirmed."""

    async def confirm(self) -> None:
        """Do as ``gazctl journals reset-head`` does."""
        keep = AppendParams(self.journal, offset=self.head, suspend=SuspendControl.KEEP)
        await self.broker.client.append(keep)

    async def append(self, line: bytes) -> None:
        await self.broker.client.append(AppendParams(self.journal), line)


@asynccontextmanager
async def holed_journal(
    etcd: Etcd,
    tmp_path: Path,
    journal: JournalName,
    lines: Sequence[bytes],
    gone: Collection[int],
    labels: LabelSet,
) -> AsyncIterator[Holed]:
    """Append ``lines``, and remove the fragments of those that are ``gone``, the last line among them."""
    assert len(lines) - 1 in gone
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as first:
        await first.create(journal_spec(journal, labels=labels, length=LENGTH))
        ends = [
            (await first.client.append(AppendParams(journal), line)).commit.end for line in lines
        ]
    begins = [0, *ends[:-1]]
    directory = tmp_path / "root" / "fragments" / journal
    for at in gone:
        (stored,) = directory.glob(f"{begins[at]:016x}-*")
        stored.unlink()
    async with await BrokerFixture.start(
        etcd, tmp_path, id="broker-two", lease_ttl_s=60.0
    ) as second:
        await second.settled(journal)
        lost = joined([(begins[at], ends[at]) for at in sorted(gone)])
        yield Holed(second, journal, lost, await head_of(second, journal))


def joined(spans: Sequence[tuple[Offset, Offset]]) -> tuple[tuple[Offset, Offset], ...]:
    """Return the spans, with those joined that adjoin."""
    found: list[tuple[Offset, Offset]] = []
    for begin, end in spans:
        if found and found[-1][1] == begin:
            begin, _ = found.pop()
        found.append((begin, end))
    return tuple(found)


async def head_of(broker: BrokerFixture, journal: JournalName) -> Offset:
    reader = broker.client.reader(ReadParams(journal, WRITE_HEAD, metadata_only=True))
    async with reader:
        with suppress(NotYet):
            await reader.open()
    return reader.write_head
