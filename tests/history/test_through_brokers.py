"""Journals of a broker: what it has stored, and what only it has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import gazette
from gazette.auth import KeyedAuth
from gazette.client.append.appender import AppendParams
from gazette.client.journals import FragmentsParams
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Invalid, NotAllowed, NotFound, NotYet
from gazette.history.first_pass import fold_by_threads
from gazette.history.read import read_envelopes
from gazette.history.snapshot import JournalSnapshot, LostBytes
from gazette.history.snapshot_builder import Lost, Selection, take_snapshot
from gazette.history.source import Access
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid
from gazette.protocol.fragment import Codec
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import STORE, BrokerFixture, journal_spec
from gazette.testing.stored import json_line
from tests.confirmed_loss import LENGTH, holed_journal
from tests.facts import logged, raises

LABELS = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
KEYS = "YSBrZXkgdGhhdCBpcyBsb25nIGVub3VnaCBmb3IgdGhpcw=="
ALPHA = bytes([1, 0, 0, 0, 0, 1])


class Word(gazette.Message):
    word: str = ""


def line(clock: int, flags: int, **fields: object) -> bytes:
    return json_line(fields, build_uuid(ALPHA, clock, flags))


def read(access: Access, selection: Selection) -> tuple[list[str], list[bool]]:
    """Return what has committed; and for each piece whether it is stored."""
    with access.open() as opened:
        snapshot = take_snapshot(opened, selection)
        folded = fold_by_threads(opened, snapshot)
        found = [
            envelope.message.word
            for run in folded.runs
            for batch in read_envelopes(opened, run, Word)
            for envelope in batch
        ]
    pieces = [piece for journal in snapshot.journals for piece in journal.pieces]
    return found, [piece.fragment is not None for piece in pieces]


@pytest.mark.parametrize("direct", [False, True])
async def test_the_tail_is_read_from_brokers(etcd: Etcd, tmp_path: Path, direct: bool) -> None:
    """A fragment at its store, then what has not been stored, of two journals by their label."""
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        spec = journal_spec("topic/a", labels=LABELS, codec=Codec.GZIP, length=1024)
        await broker.create(spec, journal_spec("topic/b", labels=LABELS))
        client = broker.client
        # Longer than a fragment: the next append begins another, and this one is stored.
        await client.append(AppendParams("topic/a"), line(1, CONTINUE_TXN, word="x" * 1024))
        await client.append(AppendParams("topic/a"), line(2, ACK_TXN))
        await client.append(AppendParams("topic/a"), line(3, OUTSIDE_TXN, word="tail"))
        await client.append(AppendParams("topic/b"), line(1, OUTSIDE_TXN, word="other"))
        selection = Selection(selector=LabelSelector.of(prefix="topic/"))
        access = Access.of(broker.endpoint, file_root=broker.file_root, direct=direct)
        while True:
            found, stored = await asyncio.to_thread(read, access, selection)
            assert found == ["x" * 1024, "tail", "other"]
            if stored == [True, False, True]:  # The first append of a journal is stored at once.
                break
        with raises(NotFound, selector="prefix=none/"):
            await asyncio.to_thread(
                read, access, Selection(selector=LabelSelector.of(prefix="none/"))
            )
        with raises(NotFound, journal="topic/c"):
            await asyncio.to_thread(read, access, Selection(journals=("topic/c",)))
        with raises(Invalid, path="end", says="9999"):
            await asyncio.to_thread(read, access, Selection(journals=("topic/b",), end_all=9999))


async def test_keys_are_presented(etcd: Etcd, tmp_path: Path) -> None:
    auth = KeyedAuth.parse(SystemClock(), KEYS)
    async with await BrokerFixture.start(etcd, tmp_path, auth=auth, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec("topic/a", labels=LABELS))
        await broker.client.append(AppendParams("topic/a"), line(1, OUTSIDE_TXN, word="a"))
        selection = Selection(journals=("topic/a",))
        keyed = Access.of(broker.endpoint, auth_keys=KEYS)
        assert (await asyncio.to_thread(read, keyed, selection))[0] == ["a"]
        with pytest.raises(NotAllowed):
            await asyncio.to_thread(read, Access.of(broker.endpoint), selection)


@pytest.mark.parametrize("lost", ["settled", "fail", "skip", "wait"])
@pytest.mark.parametrize("gone", [{1, 3}, {0, 3}, {0, 1, 2, 3}], ids=["within", "begin", "all"])
async def test_no_reader_waits_for_what_an_operator_has_confirmed(
    etcd: Etcd, tmp_path: Path, gone: set[int], lost: Lost, caplog: pytest.LogCaptureFixture
) -> None:
    """All else is read: before anything is behind the confirmed head, and when something is."""
    lines = [line(at + 1, OUTSIDE_TXN, word=str(at), pad="x" * LENGTH) for at in range(5)]
    kept = [str(at) for at in range(4) if at not in gone]
    async with holed_journal(etcd, tmp_path, "topic/a", lines[:4], gone, LABELS) as holed:
        access = Access.of(holed.broker.endpoint, file_root=holed.broker.file_root, direct=True)
        selection = Selection(journals=("topic/a",), lost=lost)
        await holed.confirm()
        found, _ = await asyncio.to_thread(read, access, selection)
        assert found == kept
        await holed.append(lines[4])
        found, _ = await asyncio.to_thread(read, access, selection)
        assert found == [*kept, "4"]
        journal = await asyncio.to_thread(snapshot_of, access, selection)
        assert journal.awaited is None
        assert journal.missed == tuple(LostBytes(*one, is_confirmed=True) for one in holed.lost)
        # Case: the lost end, by its offset.
        if lost == "settled":
            rows = await asyncio.to_thread(
                gazette.read_table, "topic/a", broker=holed.broker.endpoint, end=holed.head
            )
            assert rows.column("word").to_pylist() == kept
            begin, end = holed.lost[-1]
            assert logged(caplog, "reason", journal="topic/a", begin=begin, end=end)


async def test_what_is_not_confirmed_is_waited_for(etcd: Etcd, tmp_path: Path) -> None:
    """A hole that appeared otherwise. A store alone knows of no operator, and advises a broker."""
    lines = [line(at + 1, OUTSIDE_TXN, word=str(at), pad="x" * LENGTH) for at in range(5)]
    async with holed_journal(etcd, tmp_path, "topic/a", lines[:4], {1, 3}, LABELS) as holed:
        await holed.confirm()
        await holed.append(lines[4])
        access = Access.of(holed.broker.endpoint, file_root=holed.broker.file_root, direct=True)
        (begin, end), _ = holed.lost
        stored = Selection(journals=("topic/a",), stores=(STORE,))
        with raises(NotYet, journal="topic/a", says=f"{begin} to {end}", advises="broker"):
            await asyncio.to_thread(read, access, stored)
        (third,) = (holed.broker.file_root / "fragments/topic/a").glob(f"{end:016x}-*")
        third.unlink()
        await until_listed(holed.broker, end)
        given = Selection(journals=("topic/a",))
        with raises(NotYet, journal="topic/a", says=f"{begin} to {holed.head}"):
            await asyncio.to_thread(read, access, given)


def snapshot_of(access: Access, selection: Selection) -> JournalSnapshot:
    with access.open() as opened:
        (journal,) = take_snapshot(opened, selection).journals
    return journal


async def until_listed(broker: BrokerFixture, without: int) -> None:
    """Return once the broker's listing has no fragment that begins there."""
    listed = [without]
    while without in listed:
        found = await broker.client.list_fragments(FragmentsParams("topic/a"))
        listed = [one.fragment.begin for one in found]
