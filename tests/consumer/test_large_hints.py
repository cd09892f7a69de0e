"""Hints of large shards: their encodings, and etcd's limit of what a request may hold."""

from __future__ import annotations

import logging
import random
import tracemalloc
import zlib
from dataclasses import replace
from typing import Any

import pytest

from gazette.cluster.etcd.client import Etcd
from gazette.consumer.shard.hints_store import (
    HintsSize,
    read_hints,
    store_recorded_hints,
    store_recovered_hints,
)
from gazette.errors import Corrupt, Invalid, Unavailable
from gazette.protocol.hints import (
    HINTS_BYTES_MAX,
    FnodeSegments,
    FSMHints,
    HintsForm,
    Property,
    Segment,
    decode_hints,
    encode_hints,
)
from gazette.protocol.pb import recoverylog_pb2
from gazette.recoverylog.log.fsm import RecoveryFSM
from gazette.testing.consumer import LOGS, shard_spec
from tests.consumer.apps import SHARD
from tests.facts import raises
from tests.support.instant_clock import InstantClock

SPEC = shard_spec(SHARD, hint_backups=3)
KEY = "/gazette/consumers/test/assign/shard-one#local#one#0"
IMAGE = 4 << 20
"""Bytes of a file as many tables have them, of which a shard of 100 GiB has 25,600."""
LARGE = (100 << 30) // IMAGE


def hints_of(files: int, begin: int = 1) -> FSMHints:
    """Return hints as a player gives them: each file written by two owners, with exact offsets."""
    nodes, seq_no, offset = [], begin, begin << 20
    for index in range(files):
        checksum = (index * 2654435761 + begin) & 0xFFFFFFFF
        end = offset + IMAGE + 77 * index % 4096
        nodes.append(
            FnodeSegments(
                seq_no, (Segment(0x9E3779B9, seq_no, offset, checksum, seq_no + 64, end),)
            )
        )
        seq_no, offset = seq_no + 65, end
    return FSMHints(f"{LOGS}/{SHARD}", tuple(nodes))


def test_each_form_gives_the_same_hints() -> None:
    hints = hints_of(50)
    sizes = {}
    protobuf = len(hints.to_pb().SerializeToString())
    for bytes_max in (1 << 20, protobuf, protobuf - 1):
        form, value = encode_hints(hints, bytes_max)
        sizes[form] = len(value)
        assert decode_hints(value) == hints
        assert len(value) <= bytes_max
    assert list(sizes) == [HintsForm.JSON, HintsForm.PROTOBUF, HintsForm.COMPRESSED]
    with raises(Invalid, files=50, says="100") as no:
        encode_hints(hints, 100)
    assert "target_file_size_base" in str(no.value.hint)


def test_what_the_original_reads_is_what_fits() -> None:
    """Small hints are JSON, as ever; larger ones protobuf, which it reads as well."""
    small, large = hints_of(100), hints_of(LARGE)
    assert encode_hints(small) == (HintsForm.JSON, small.to_json())
    form, value = encode_hints(large)
    assert form is HintsForm.PROTOBUF
    assert len(large.to_json()) > 2 * HINTS_BYTES_MAX
    assert FSMHints.from_pb(recoverylog_pb2.FSMHints.FromString(value)) == large
    RecoveryFSM(decode_hints(value))


@pytest.mark.long
def test_hints_that_are_larger_still_are_compressed() -> None:
    form, value = encode_hints(hints_of(2 * LARGE))
    assert form is HintsForm.COMPRESSED
    assert len(decode_hints(value).live_nodes) == 2 * LARGE


@pytest.mark.parametrize(
    "cut", [lambda v: v[:-9], lambda v: v + b"x", lambda v: v[:2] + b"??" + v[4:]]
)
def test_compressed_hints_that_are_damaged_are_an_error(cut: Any) -> None:
    value = encode_hints(hints_of(500), 15_000)[1]
    assert value[:2] == b"\x1f\x8b"
    with pytest.raises(Corrupt):
        decode_hints(cut(value))


def test_a_bomb_is_an_error() -> None:
    """All of it would be hints without content, which are none."""
    encoder = zlib.compressobj(1, wbits=31)
    block = bytes(1 << 20)
    bomb = b"".join([*(encoder.compress(block) for _ in range(257)), encoder.flush()])
    tracemalloc.start()
    try:
        with raises(Corrupt, "length"):
            decode_hints(bomb)
        assert tracemalloc.get_traced_memory()[1] < 520 << 20
    finally:
        tracemalloc.stop()


def noted(size: HintsSize, hints: FSMHints) -> None:
    form, value = encode_hints(hints)
    size.note(SPEC, hints, form, len(value))


def test_a_warning_at_half_of_the_limit_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    size = HintsSize()
    with caplog.at_level(logging.WARNING, "gazette.consumer.shard.hints_store"):
        noted(size, hints_of(100))
        assert not caplog.records
        for _ in range(3):
            noted(size, hints_of(7000))
        assert len(caplog.records) == 1
        assert "name 7000 files" in caplog.text
        assert "VACUUM" in caplog.text
        size.note(SPEC, hints_of(10), HintsForm.COMPRESSED, HINTS_BYTES_MAX - 1)
        assert "which the original cannot read" in caplog.text


@pytest.mark.parametrize("tables", [5_500, 10_000])
def test_hints_of_ten_thousand_tables_fit_and_are_warned_of(
    tables: int, caplog: pytest.LogCaptureFixture
) -> None:
    """RocksDB has a file for each table, and only the application can make them larger."""
    hints = hints_of(tables)
    assert len(encode_hints(hints)[1]) <= HINTS_BYTES_MAX
    with caplog.at_level(logging.WARNING, "gazette.consumer.shard.hints_store"):
        noted(HintsSize(), hints)
    assert f"name {tables} files" in caplog.text
    assert "table_bytes" in caplog.text


async def assigned(etcd: Etcd) -> int:
    """Create an assignment of the shard. Return its revision."""
    await etcd.put(KEY, b"")
    kv = await etcd.get(KEY)
    assert kv is not None
    return kv.create_revision


async def values(etcd: Etcd) -> list[FSMHints | None]:
    return [slot.hints for slot in await read_hints(etcd, SPEC)]


async def stored(etcd: Etcd) -> list[bytes]:
    """Return the values of all slots, not decoded."""
    return [slot.value for slot in await read_hints(etcd, SPEC, check=False)]


async def rotate(etcd: Etcd, hints: FSMHints, revision: int) -> None:
    await store_recovered_hints(etcd, InstantClock(), SPEC, hints, KEY, revision)


@pytest.mark.long
async def test_every_slot_holds_hints_of_100_gib(etcd: Etcd) -> None:
    """Four of them are more than etcd takes in one transaction."""
    revision = await assigned(etcd)
    first, last = hints_of(LARGE), hints_of(LARGE, begin=2)
    await rotate(etcd, first, revision)
    await rotate(etcd, last, revision)
    await rotate(etcd, first, revision)
    assert await store_recorded_hints(etcd, SPEC, last, KEY, revision)
    a, b = encode_hints(first)[1], encode_hints(last)[1]
    assert await stored(etcd) == [b, a, b, a]


@pytest.mark.long
async def test_the_first_hints_fill_every_empty_slot(etcd: Etcd) -> None:
    revision = await assigned(etcd)
    hints = hints_of(LARGE)
    assert await store_recorded_hints(etcd, SPEC, hints, KEY, revision)
    assert await stored(etcd) == [encode_hints(hints)[1]] * 4


class Away:
    """An etcd that is away for the write behind so many. ``interrupted`` has the sizes of such writes."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self.left = -1
        self.interrupted: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._etcd, name)

    async def txn(self, compares: Any, operations: Any, *otherwise: Any) -> Any:
        if compares:  # Reads compare nothing.
            self.left -= 1
            if self.left == -1:
                self.interrupted.append(len(operations))
                raise Unavailable("etcd is away")
        return await self._etcd.txn(compares, operations, *otherwise)


@pytest.mark.parametrize("writes", range(4))
async def test_a_rotation_that_is_interrupted_loses_nothing(etcd: Etcd, writes: int) -> None:
    """etcd is away after some slots were written; the next attempt, or owner, goes on."""
    revision = await assigned(etcd)
    one, two, three, four = (hints_of(3, begin=1 + n) for n in range(4))
    for hints in (one, two):
        await rotate(etcd, hints, revision)
    away: Any = Away(etcd)
    away.left = writes
    await rotate(away, three, revision)
    assert (await values(etcd))[1:] == [three, two, one]
    away.left = writes
    await rotate(away, four, revision)
    assert away.interrupted == ([1, 1] if writes < 3 else [])
    found = (await values(etcd))[1:]
    assert found == [four, three, two]


async def test_hints_that_never_fit_are_refused_once(etcd: Etcd) -> None:
    text = random.Random(1).randbytes(2 << 20).hex()  # It is as random when it is compressed.
    large = replace(hints_of(100), properties=(Property("/long", text),))
    revision = await assigned(etcd)
    with raises(Invalid, files=100, says=f"{HINTS_BYTES_MAX}"):
        await rotate(etcd, large, revision)
