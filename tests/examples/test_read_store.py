"""A store that brokers wrote is read by a script that knows names and codecs, and nothing of ours."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import pytest

from gazette.client.append.appender import AppendParams
from gazette.cluster.etcd.client import Etcd
from gazette.protocol.fragment import Codec
from gazette.testing.broker import BrokerFixture, journal_spec

SCRIPT = Path(__file__).parents[2] / "examples" / "read_store.py"


async def read(directory: Path) -> tuple[int, bytes, bytes]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", str(SCRIPT), str(directory)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode or 0, out, err


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP, Codec.ZSTANDARD, Codec.SNAPPY])
async def test_every_byte_is_there(etcd: Etcd, tmp_path: Path, codec: Codec) -> None:
    rng = random.Random(codec)
    name = "a/journal"
    appends = [b"%d %s\n" % (index, rng.randbytes(300).hex().encode()) for index in range(20)]
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec(name, codec=codec, length=4096))
        for content in appends:
            await broker.client.append(AppendParams(name), content)
        file_root = broker.file_root
    # The broker has left: what it held is in the store.
    directory = file_root / "fragments" / name
    fragments = sorted(path for path in directory.rglob("*") if path.is_file())
    assert len(fragments) > 2
    assert await read(directory) == (0, b"".join(appends), b"")

    missing = fragments[1].read_bytes()
    fragments[1].unlink()
    status, _, said = await read(directory)
    assert status == 1
    assert b"a hole before" in said
    fragments[1].write_bytes(missing[:-9] + bytes(9))
    status, out, _ = await read(directory)
    assert status == 1
    assert b"".join(appends).startswith(out)
