"""What a primary holds back, and what becomes of it."""

from __future__ import annotations

import gzip
import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gazette.broker.replication.upload_gate import UploadGate
from gazette.errors import Corrupt
from gazette.fragment.completed_spool import CompletedSpool, SpoolCompression
from gazette.fragment.local_file import LocalFile
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.label_set import EMPTY_LABELS
from gazette.runtime.latch import Latch
from gazette.runtime.tasks import BlockingPool

CONTENT = bytes(range(256)) * 4096
"""More than is read in one go."""


class Uploads:
    """Takes spools, and says which."""

    def __init__(self) -> None:
        self.spools: list[tuple[CompletedSpool, Latch | None]] = []
        self.ends: list[int | None] = []
        self.completed: list[int] = []

    def spool_complete(
        self,
        spool: CompletedSpool,
        *,
        life: int,
        tenure: int,
        reassigned: Latch | None = None,
        end: int | None = None,
    ) -> None:
        assert (life, tenure) in ((7, 8), (7, 9), (7, 0))
        self.spools.append((spool, reassigned))
        self.ends.append(end)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [(spool.fragment.begin, spool.fragment.end) for spool, _ in self.spools]


@pytest.fixture
async def pool() -> AsyncIterator[BlockingPool]:
    pool = BlockingPool("spools", 1)
    yield pool
    pool.close()


@pytest.fixture
def uploads() -> Uploads:
    return Uploads()


@pytest.fixture
def gate(uploads: Uploads) -> UploadGate:
    return UploadGate(uploads, 7, uploads.completed.append)


@pytest.fixture
def make(tmp_path: Path, pool: BlockingPool) -> Callable[..., CompletedSpool]:
    def make(begin: int, content: bytes = b"content", codec: Codec = Codec.NONE) -> CompletedSpool:
        file = LocalFile(tmp_path)
        file.pwrite(content, 0)
        sum = hashlib.sha1(content).digest()
        return CompletedSpool(
            fragment=Fragment("a/journal", begin, begin + len(content), sum, codec),
            registers=EMPTY_LABELS,
            first_append_time=1.0,
            file=file,
            compression=None if codec is Codec.NONE else SpoolCompression(file, codec, pool),
        )

    return make


async def test_who_follows_gives_everything_on(
    gate: UploadGate, uploads: Uploads, make: Callable[..., CompletedSpool]
) -> None:
    gate.agree(3, EMPTY_LABELS)
    assert gate.end is None
    gate.spool_complete(make(0))
    gate.finish()
    assert uploads.ranges == [(0, 7)]
    assert uploads.spools[0][1] is None


async def test_who_follows_leaves_the_same_bytes_to_the_primary(
    gate: UploadGate, uploads: Uploads, make: Callable[..., CompletedSpool]
) -> None:
    """Not other bytes at the same offsets, and not more or fewer of them."""
    same, other = make(0), make(0, b"CONTENT")
    reassigned = Latch()
    gate.confirm(same.fragment, reassigned, 8)
    gate.spool_complete(same)
    gate.spool_complete(other)
    gate.spool_complete(make(0, b"conten"))
    assert [event for _, event in uploads.spools] == [reassigned, None, None]
    # Case: another primary has proposed other bytes since.
    gate.confirm(other.fragment, Latch(), 9)
    gate.spool_complete(same)
    assert uploads.spools[-1][1] is None


async def test_who_leads_gives_on_what_is_agreed(
    gate: UploadGate, uploads: Uploads, make: Callable[..., CompletedSpool]
) -> None:
    gate.become_primary(7, EMPTY_LABELS, 8)
    gate.become_primary(0, EMPTY_LABELS, 8)  # Of no effect: it leads.
    gate.spool_complete(make(0))
    assert uploads.ranges == [(0, 7)]
    # Case: what is not yet waits, and nothing else waits for it.
    gate.spool_complete(make(7))
    gate.spool_complete(make(14))
    gate.agree(13, EMPTY_LABELS)
    assert uploads.ranges == [(0, 7)]
    gate.agree(14, EMPTY_LABELS)
    assert uploads.ranges == [(0, 7), (7, 14)]
    # Case: answers of another pipeline come late.
    gate.agree(7, EMPTY_LABELS)
    assert gate.end == 14
    assert uploads.completed == [7, 14]
    gate.agree(21, EMPTY_LABELS)
    assert uploads.ranges == [(0, 7), (7, 14), (14, 21)]
    assert all(event is None for _, event in uploads.spools)


async def test_what_never_was_agreed_is_cut_off(
    gate: UploadGate,
    uploads: Uploads,
    make: Callable[..., CompletedSpool],
    caplog: pytest.LogCaptureFixture,
) -> None:
    end = 100 + len(CONTENT)
    gate.become_primary(0, EMPTY_LABELS, 8)
    gate.spool_complete(make(100, CONTENT))
    gate.spool_complete(make(end))
    gate.agree(end - 1, EMPTY_LABELS)
    with caplog.at_level(logging.WARNING):
        gate.finish()
    found: list[Any] = [record.args for record in caplog.records]
    assert [(args["begin"], args["end"]) for args in found] == [
        (end - 1, end),
        (end, end + 7),
    ]
    assert uploads.ranges == [(100, end)]
    assert uploads.ends == [end - 1]
    assert uploads.completed == [end - 1]  # What is known of the journal's head is agreed.
    assert uploads.spools[0][1] is None
    # Case: it is over.
    gate.finish()
    assert len(uploads.spools) == 1


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP])
async def test_the_part_of_a_spool_is_a_spool(
    make: Callable[..., CompletedSpool], pool: BlockingPool, codec: Codec
) -> None:
    spool = make(100, CONTENT, codec)
    if spool.compression is not None:
        spool.compression.advance(len(CONTENT))  # All of it, and it must not be used.
    end = 100 + len(CONTENT)
    cut = await spool.cut_to(end - 1, pool)
    sum = hashlib.sha1(CONTENT[:-1]).digest()
    assert cut.fragment == Fragment("a/journal", 100, end - 1, sum, codec)
    with cut.open() as source:
        stored = source.read()
    assert CONTENT[:-1] == (stored if codec is Codec.NONE else gzip.decompress(stored))


async def test_a_damaged_spool_is_not_cut_to_a_good_one(
    make: Callable[..., CompletedSpool], pool: BlockingPool
) -> None:
    """The digest of the part would be that of the damaged bytes."""
    spool = make(0, CONTENT)
    assert isinstance(spool.file, LocalFile)
    spool.file.pwrite(b"damaged", 1000)
    with pytest.raises(Corrupt):
        await spool.cut_to(2000, pool)
