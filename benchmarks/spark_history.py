"""A history to measure with: journals of the messages of `tools.bench.app`, in fragments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gazette.history.columns import Columns
from gazette.history.meta_columns import meta_array
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, UuidArrays, clock_at
from gazette.protocol.fragment import Codec, Fragment
from gazette.testing.stored import write_fragment
from tools.bench.app import WORDS

STORE = "file:///fragments/"
BEGAN = clock_at(1_700_000_000 * 10**9)
GOLDEN = 0x9E3779B97F4A7C15

Spread = Any
"""Numbers of 64 bits, one for each message, that are spread evenly and do not repeat."""


@dataclass(frozen=True)
class Shape:
    """Fields of messages beside a word and a count, and a query that reads all of them."""

    members: Callable[[Spread], pa.StringArray]
    """Makes the further members of messages, as JSON."""
    columns: str
    """Columns as in CREATE TABLE."""
    aggregates: tuple[str, ...]
    """SQL of what the query computes for each word, beside the sum of counts."""


def _joined(*parts: Any) -> pa.StringArray:
    return pc.binary_join_element_wise(*parts, "")


def _number(values: Any) -> pa.StringArray:
    return pa.array(values).cast(pa.string())


def _words(spread: Spread) -> pa.StringArray:
    return _joined(
        '"sent":', _number(np.int64(10**13) + (spread >> np.uint64(24)).astype(np.int64))
    )


def _floats(spread: Spread) -> pa.StringArray:
    """Make three doubles of 16 or 17 digits."""
    unit = spread.astype(np.float64) / 2.0**64
    return _joined(
        '"latitude":', _number(unit * 180 - 90),
        ',"longitude":', _number(np.sqrt(unit) * 360 - 180),
        ',"ratio":', _number(unit / 3),
    )  # fmt: skip


def _nanoseconds(spread: Spread) -> pa.StringArray:
    """Make a time of RFC 3339 with nanoseconds, and the same time as an integer of 19 digits."""
    nanos = np.int64(17 * 10**17) + (spread >> np.uint64(10)).astype(np.int64)
    texts = np.datetime_as_string(nanos.view("datetime64[ns]"))
    return _joined('"at":"', pa.array(texts.tolist()), 'Z","at_ns":', _number(nanos))


def _nested(spread: Spread) -> pa.StringArray:
    """Make an object with an object within, a list of objects, and a list of strings."""
    user = _number((spread >> np.uint64(40)).astype(np.int64))
    few = _number((spread >> np.uint64(56)).astype(np.int64))
    price = _number((spread >> np.uint64(50)).astype(np.int64) / 100)
    return _joined(
        '"user":{"id":', user, ',"name":"user ', user,
        '","address":{"city":"city ', few, '","zip":"', user, '"}},',
        '"items":[{"sku":"sku-', few, '","price":', price, ',"n":2},',
        '{"sku":"sku-', user, '","price":', price, ',"n":1}],"tags":["tag ', few, '","new"]',
    )  # fmt: skip


SHAPES = {
    "words": Shape(_words, "word string, count long", ()),
    "floats": Shape(
        _floats,
        "word string, count long, latitude double, longitude double, ratio double",
        ("max(latitude)", "min(longitude)", "max(ratio)"),
    ),
    "nanoseconds": Shape(
        _nanoseconds,
        "word string, count long, at timestamp, at_ns long",
        ("max(at)", "max(at_ns)"),
    ),
    "nested": Shape(
        _nested,
        "word string, count long,"
        " user struct<id: long, name: string, address: struct<city: string, zip: string>>,"
        " items array<struct<sku: string, price: double, n: long>>, tags array<string>",
        ("max(user.address.city)", "max(user.id)", "max(items[1].price)", "max(tags[0])"),
    ),
}


def journal_name(number: int) -> str:
    return f"bench/words/part-{number:03d}"


def content(shape: str, producer: int, first: int, count: int, per_transaction: int) -> pa.Buffer:
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
    members = SHAPES[shape].members(spread)
    head = '{"uuid":"'
    # As publishers do, acknowledge by a message of zeros: a shard decodes it together with the others.
    lines = pc.if_else(
        pa.array(acks),
        pc.binary_join_element_wise(head, texts, '","word":"","count":0}\n', ""),
        pc.binary_join_element_wise(
            head, texts, '","word":"', word, '","count":1,', members, "}\n", ""
        ),
    )
    return _data(lines)


def _data(lines: pa.StringArray) -> pa.Buffer:
    bounds = np.frombuffer(lines.buffers()[1], np.int32)
    return lines.buffers()[2].slice(0, int(bounds[len(lines)]))


def _write_journal(
    root: Path,
    shape: str,
    number: int,
    messages: int,
    per_fragment: int,
    per_transaction: int,
    codec: Codec,
) -> list[Fragment]:
    fragments: list[Fragment] = []
    offset = 0
    for first in range(0, messages, per_fragment):
        count = min(per_fragment, messages - first)
        data = content(shape, number + 1, first, count, per_transaction).to_pybytes()
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
    shape: str = "words",
    processes: int = 2,
) -> dict[str, list[Fragment]]:
    """Write the messages, spread over the journals, with some processes. Gives their fragments."""
    shares = [messages // journals + (number < messages % journals) for number in range(journals)]
    with ProcessPoolExecutor(processes) as pool:
        futures = [
            pool.submit(
                _write_journal, root, shape, number, share, per_fragment, per_transaction, codec
            )
            for number, share in enumerate(shares)
        ]
        return {journal_name(n): future.result() for n, future in enumerate(futures)}


def stored_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in _files(root))


def _files(root: Path) -> Iterator[Path]:
    return (path for path in (root / "fragments").rglob("*") if path.is_file())
