"""Odd journals by a seed: rows of Spark's source and of `read_table`, beside those that were counted."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

import gazette
from gazette.errors import Corrupt
from gazette.history.spark.source.source import GazetteDataSource
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid
from gazette.protocol.fragment import Codec
from gazette.runtime.clock import SystemClock
from gazette.testing.stored import json_line, write_fragment
from tests.fuzzing import seeds

STORE, JOURNAL = "file:///fragments/", "topic/odd"
NAMES = ["", "a.b", "`q`", "a`b", "n", "N", "straße", "with space", "null"]
CODECS = [Codec.NONE, Codec.GZIP, Codec.ZSTANDARD, Codec.SNAPPY]
SETTLED_S = 7 * 3600
Rows = list[tuple[int, ...]]


class Odd:
    """A journal of transactions, in fragments of several codecs, which are stored in any order."""

    def __init__(self, root: Path, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.names = rng.sample(NAMES, rng.randrange(len(NAMES)))
        self.fragments: list[tuple[int, bytes, Path]] = []
        self.rows: list[tuple[int, tuple[Any, ...]]] = []
        self.end = 0
        for producer in range(1, rng.randrange(2, 9)):
            self._add(root, bytes([1, 0, 0, 0, 0, producer]))

    def _add(self, root: Path, producer: bytes) -> None:
        """Store a fragment of whole transactions, and note its rows."""
        content = b""
        flags = self.rng.choice([OUTSIDE_TXN, CONTINUE_TXN])
        for clock in range(1, self.rng.randrange(2, 40)):
            values = {name: self.rng.randrange(100) for name in self.names}
            self.rows.append((self.end + len(content), tuple(values.values())))
            content += json_line(dict(values), build_uuid(producer, clock, flags))
        if flags == CONTINUE_TXN:
            content += json_line({}, build_uuid(producer, 100, ACK_TXN))
        fragment = write_fragment(root, STORE, JOURNAL, self.end, content, self.rng.choice(CODECS))
        path = root / "fragments" / fragment.content_path()
        then = SystemClock().now() - SETTLED_S - self.rng.randrange(1000)
        os.utime(path, (then, then))
        self.fragments.append((self.end, content, path))
        self.end += len(content)

    def schema(self) -> pa.Schema:
        return pa.schema([(name, pa.int64()) for name in self.names])


def by_spark(root: Path, schema: pa.Schema, fails: bool) -> Rows:
    """Read as Spark does, in its processes."""
    options = {
        "store": f"file://{root}/fragments",
        "journal": JOURNAL,
        "maxPartitionBytes": "500",
        "failOnDataLoss": str(fails).lower(),
    }
    given = from_arrow_schema(schema, prefer_timestamp_ntz=False)
    reader = pickle.loads(pickle.dumps(GazetteDataSource(options).reader(given)))
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return [
        tuple(column[at].as_py() for column in batch.columns)
        for batch in batches
        for at in range(batch.num_rows)
    ]


def by_table(root: Path, schema: pa.Schema, fails: bool) -> tuple[list[int], Rows]:
    table = gazette.read_table(
        JOURNAL,
        store=f"{root}/fragments",
        fields=schema,
        meta_prefix="meta.",
        lost="fail" if fails else "skip",
    )
    columns = [table[name] for name in schema.names]
    rows = [tuple(column[at].as_py() for column in columns) for at in range(table.num_rows)]
    return table["meta.offset"].to_pylist(), rows


@pytest.mark.parametrize("seed", seeds(12))
def test_rows_are_those_that_were_counted(tmp_path: Path, seed: int) -> None:
    """Whole, and with a fragment that was lost: then it is an error, or all others are there."""
    journal = Odd(tmp_path, seed)
    schema = journal.schema()
    assert by_spark(tmp_path, schema, True) == [row for _, row in journal.rows]
    offsets, rows = by_table(tmp_path, schema, True)
    assert list(zip(offsets, rows, strict=True)) == journal.rows
    if len(journal.fragments) < 3:
        return
    begin, content, path = journal.rng.choice(journal.fragments[1:-1])
    path.unlink()
    for read in (by_spark, by_table):
        with pytest.raises(Corrupt):
            read(tmp_path, schema, True)
    left = [one for one in journal.rows if not begin <= one[0] < begin + len(content)]
    assert by_spark(tmp_path, schema, False) == [row for _, row in left]
    offsets, rows = by_table(tmp_path, schema, False)
    assert list(zip(offsets, rows, strict=True)) == left
