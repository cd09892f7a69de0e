"""A history to measure with: journals of the messages of `gazette.bench.app`, in fragments."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gazette.bench.app import WORDS
from gazette.history.columns import Columns
from gazette.history.meta_columns import meta_array
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, UuidArrays, clock_at
from gazette.protocol.fragment import Codec, Fragment
from gazette.testing.stored import write_fragment

STORE = "file:///fragments/"
BEGAN = clock_at(1_700_000_000 * 10**9)
GOLDEN = 0x9E3779B97F4A7C15


def journal_name(number: int) -> str:
    return f"bench/words/part-{number:03d}"


def content(producer: int, first: int, count: int, per_transaction: int) -> pa.Buffer:
    """Return messages ``first`` and following of a producer, in transactions; the last one ends with them."""
    # Each transaction has an acknowledgement behind its messages.
    index = np.arange(first, first + count, dtype=np.uint64)
    ends = np.append(np.arange(per_transaction, count, per_transaction), count)
    index = np.insert(index, ends, 0)
    acks = np.zeros(len(index), np.bool_)
    acks[ends + np.arange(len(ends))] = True
    places = np.arange(len(index), dtype=np.uint64) + np.uint64(2 * first)
    uuids = UuidArrays(
        np.full(len(index), (1 << 40) + producer, np.uint64),
        np.uint64(BEGAN) + places * np.uint64(160),
        np.where(acks, ACK_TXN, CONTINUE_TXN).astype(np.uint64),
    )
    nowhere = np.zeros(len(index), np.int64)
    rows = np.arange(len(index))
    texts = meta_array("uuid", "", Columns(nowhere, nowhere, uuids), rows)
    spread = index * np.uint64(GOLDEN)
    words = pa.array([f"word-{number:05d}" for number in range(WORDS)])
    word = words.take(pa.array(((spread >> np.uint64(40)) % np.uint64(WORDS)).astype(np.int32)))
    sent = pa.array(np.int64(10**13) + (spread >> np.uint64(24)).astype(np.int64)).cast(pa.string())
    head = '{"uuid":"'
    lines = pc.if_else(
        pa.array(acks),
        pc.binary_join_element_wise(head, texts, '"}\n', ""),
        pc.binary_join_element_wise(
            head, texts, '","word":"', word, '","count":1,"sent":', sent, "}\n", ""
        ),
    )
    return _data(lines)


def _data(lines: pa.StringArray) -> pa.Buffer:
    bounds = np.frombuffer(lines.buffers()[1], np.int32)
    return lines.buffers()[2].slice(0, int(bounds[len(lines)]))


def _write_journal(
    root: Path, number: int, messages: int, per_fragment: int, per_transaction: int, codec: Codec
) -> list[Fragment]:
    fragments: list[Fragment] = []
    offset = 0
    for first in range(0, messages, per_fragment):
        count = min(per_fragment, messages - first)
        data = content(number + 1, first, count, per_transaction).to_pybytes()
        fragments.append(write_fragment(root, STORE, journal_name(number), offset, data, codec))
        offset += len(data)
    return fragments


def write_history(
    root: Path,
    *,
    messages: int,
    journals: int,
    per_fragment: int,
    per_transaction: int,
    codec: Codec,
    processes: int = 2,
) -> dict[str, list[Fragment]]:
    """Write the messages, spread over the journals, with some processes. Gives their fragments."""
    shares = [messages // journals + (number < messages % journals) for number in range(journals)]
    with ProcessPoolExecutor(processes) as pool:
        futures = [
            pool.submit(_write_journal, root, number, share, per_fragment, per_transaction, codec)
            for number, share in enumerate(shares)
        ]
        return {journal_name(n): future.result() for n, future in enumerate(futures)}


def stored_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in _files(root))


def _files(root: Path) -> Iterator[Path]:
    return (path for path in (root / "fragments").rglob("*") if path.is_file())
