"""Journals of a broker: what it has stored, and what only it has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import gazette
from gazette.auth import KeyedAuth
from gazette.client.append.appender import AppendParams
from gazette.errors import Invalid, NotAllowed, NotFound
from gazette.etcd.client import Etcd
from gazette.history.first_pass import fold_by_threads
from gazette.history.read import read_envelopes
from gazette.history.snapshot_builder import Selection, take_snapshot
from gazette.history.source import Access
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid
from gazette.protocol.fragment import Codec
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.stored import json_line
from tests.facts import raises

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
