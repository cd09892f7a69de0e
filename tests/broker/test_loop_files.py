"""No broker waits for a disk on its event loop, whatever it does with spools, stores and readers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from gazette.client.append.appender import AppendParams
from gazette.client.journals import FragmentsParams
from gazette.cluster.etcd.client import Etcd
from gazette.protocol.fragment import Codec
from gazette.protocol.pb import broker_pb2
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.loop_files import files_on_the_loop

CODECS = {
    "none": Codec.NONE,
    "gzip": Codec.GZIP,
    "zstandard": Codec.ZSTANDARD,
}
IN_MEMORY = "os.preadv in fragment/local_file.py:LocalFile.pread_now"
"""Reads from the page cache, and fails instead of waiting."""


class Load:
    """Appends to journals and reads them, as chance will have it. ``content`` is what they must have."""

    def __init__(self, broker: BrokerFixture, rng: random.Random) -> None:
        self.broker = broker
        self.rng = rng
        self.content = dict.fromkeys(CODECS, b"")

    async def append(self, journal: str) -> None:
        content = self.rng.randbytes(self.rng.choice((1, 100, 100, 10_000, 300_000, 1_500_000)))
        await self.broker.client.append(AppendParams(journal), content)
        self.content[journal] += content

    async def read(self, journal: str) -> None:
        end = len(self.content[journal])
        offset = self.rng.choice((0, self.rng.randrange(end + 1), max(0, end - 200)))
        request = broker_pb2.ReadRequest(journal=journal, offset=offset, end_offset=end)
        stub = self.broker.client.channels.journal(self.broker.endpoint)
        read = b"".join([one.content async for one in stub.Read(request)])
        assert read == self.content[journal][offset:]

    async def list(self, journal: str) -> None:
        await self.broker.client.list_journals()
        await self.broker.client.list_fragments(FragmentsParams(journal))

    async def step(self) -> None:
        work = self.rng.choice((self.append, self.append, self.read, self.list))
        await work(self.rng.choice(list(CODECS)))


@pytest.mark.parametrize("seed", range(3))
async def test_a_broker_has_no_file_operations_on_its_loop(
    etcd: Etcd, tmp_path: Path, seed: int
) -> None:
    """Spools are written, rolled, compressed, stored, let go, read from the store, and handed over."""
    limits: Any = {"spool_memory_bytes": 200_000 * seed, "kept_spools": seed}
    async with (
        await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0, **limits) as one,
        await BrokerFixture.start(
            etcd, tmp_path, id="broker-two", lease_ttl_s=60.0, **limits
        ) as two,
    ):
        load = Load(one, random.Random(seed))
        with files_on_the_loop() as found:
            await one.create(
                *(
                    journal_spec(name, codec=codec, replication=2, length=400_000)
                    for name, codec in CODECS.items()
                )
            )
            for journal in CODECS:
                await load.append(journal)
            for _ in range(60):
                await load.step()
            await two.stop()
            for journal in CODECS:
                await load.read(journal)
    del found[IN_MEMORY]
    assert found == {}
