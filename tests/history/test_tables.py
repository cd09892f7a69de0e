"""Journals as tables of Arrow, against the sequencer that reads them from begin to end."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import gc
import itertools
import math
import random
import signal
import socket
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from word_count import ngram_pb2

import gazette
from gazette.client.append.appender import AppendParams
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Corrupt, Invalid, NotFound, Unavailable
from gazette.history import in_order
from gazette.history.columns import MalformedArray
from gazette.history.json_values import JsonRow
from gazette.history.row_format import RowFormat
from gazette.history.rows import Unfit
from gazette.history.snapshot import Piece
from gazette.history.snapshot_builder import Selection, take_snapshot
from gazette.history.source import Access, OpenAccess
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED, CONTENT_TYPE
from gazette.message.envelope import Envelope
from gazette.message.framing.framing import framing_of
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid, clock_at, uuid_text
from gazette.protocol.fragment import Codec
from gazette.protocol.label_set import LabelSet
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.stored import json_line, write_journal
from tests.facts import raises
from tests.fuzzing import examples
from tests.history.decimal_lines import DIGITS_MAX, columns, samples, units_found
from tests.history.test_histories import Item, histories, sequenced

STORE, JOURNAL = "file:///fragments/", "a/journal"
ALPHA, BETA = bytes([1, 0, 0, 0, 0, 1]), bytes([1, 0, 0, 0, 0, 2])
LABELS = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))


def line(clock: int, flags: int, producer: bytes = ALPHA, **fields: object) -> bytes:
    return json_line(fields, build_uuid(producer, clock, flags))


def store_of(root: Path) -> str:
    return f"{root}/fragments"


class Chopped(OpenAccess):
    """An access that gives out bytes in chunks of chosen sizes, as a slow network does."""

    sizes: Iterator[int]

    def chunks(self, journal: str, pieces: Iterable[Piece]) -> Iterator[tuple[int, bytes]]:
        for begin, data in super().chunks(journal, pieces):
            at = 0
            while at < len(data):
                size = next(self.sizes)
                yield begin + at, data[at : at + size]
                at += size


@settings(max_examples=examples(150), deadline=None)
@given(
    items=histories,
    cuts=st.sets(st.integers(1, 3000), max_size=6),
    begin=st.integers(0, 30),
    part_bytes=st.sampled_from([1, 150, 400, 1 << 20]),
    seed=st.integers(0, 2**32),
    codec=st.sampled_from([Codec.NONE, Codec.ZSTANDARD]),
)
def test_rows_are_what_a_sequencer_delivers(
    items: list[Item], cuts: set[int], begin: int, part_bytes: int, seed: int, codec: Codec
) -> None:
    """Over fragments that end anywhere, from any message on, however the bytes arrive."""
    lines = [
        line(clock, flags, bytes([1, 0, 0, 0, 0, producer]), n=number)
        for number, (producer, clock, flags) in enumerate(items)
    ]
    content = b"".join(lines)
    ends = list(itertools.accumulate(map(len, lines), initial=0))
    envelopes: list[Envelope[Any]] = [
        Envelope(
            JOURNAL, low, high, at, bytes([1, 0, 0, 0, 0, item.producer]), item.clock, item.flags
        )
        for at, (item, (low, high)) in enumerate(zip(items, itertools.pairwise(ends), strict=True))
    ]
    first = ends[min(begin, len(items))]
    wanted, _ = sequenced(envelopes, None, first, len(content))
    bounds = sorted({0, *(cut for cut in cuts if cut < len(content)), len(content)})
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "fragments").mkdir()
        pieces = [content[low:high] for low, high in itertools.pairwise(bounds)]
        write_journal(root, STORE, JOURNAL, pieces, codec)
        selection = Selection((JOURNAL,), stores=(STORE,), begin_all=first)
        schema = pa.schema([("offset", pa.int64()), ("n", pa.int64())])
        format = RowFormat("json", schema, (("offset", "offset"),))
        with Chopped(Access.of(file_root=root, direct=True)) as access:
            access.sizes = iter(lambda: rng.choice([3, 40, 200, 4000]), 0)
            snapshot = take_snapshot(access, selection)
            parts = in_order.fold_in_order(access, snapshot, part_bytes)
            found = [
                row
                for journal in snapshot.journals
                for batch in in_order.rows_in_order(access, journal, parts, format)
                for row in batch.to_pylist()
            ]
    expected = [(e.begin, e.message) for e in wanted if not e.is_ack]
    assert [(row["offset"], row["n"]) for row in found] == sorted(expected)


def test_a_table_has_metadata_and_fields(tmp_path: Path) -> None:
    contents = [
        line(10, CONTINUE_TXN, n=1, word="a") * 2,
        line(11, ACK_TXN) + line(12, CONTINUE_TXN, n=2, word="pending"),
    ]
    write_journal(tmp_path, STORE, JOURNAL, contents, Codec.GZIP)
    store = store_of(tmp_path)
    table = gazette.read_table(JOURNAL, store=store)
    assert table.column_names == [
        *("journal", "offset", "uuid", "producer", "clock", "timestamp", "flags"),
        *("n", "word"),
    ]
    assert table.select(["n", "word"]).to_pylist() == [{"n": 1, "word": "a"}]
    table = gazette.read_table([JOURNAL], store=[store], columns=["word", "offset"])
    assert table.to_pylist() == [{"word": "a", "offset": 0}]
    assert gazette.read_table(JOURNAL, store=store, columns=["flags"]).to_pylist() == [{"flags": 1}]
    every = gazette.read_table(
        JOURNAL,
        store=store,
        fields=pa.schema([("n", pa.int8())]),
        columns=["n"],
        isolation="read_uncommitted",
    )
    assert every["n"].to_pylist() == [1, 1, 2]
    with_acks = gazette.read_table(
        JOURNAL, store=store, fields="n long", columns=["n", "flags"], acks=True
    )
    assert with_acks.to_pylist() == [{"n": 1, "flags": 1}, {"n": None, "flags": 2}]


def test_offsets_and_times_bound_a_table(tmp_path: Path) -> None:
    noon = clock_at(1_700_000_000_000_000_000)
    lines = [line(noon + second * 10**7 * 16, OUTSIDE_TXN, n=second) for second in range(4)]
    write_journal(tmp_path, STORE, JOURNAL, [b"".join(lines)])
    write_journal(tmp_path, STORE, "b/journal", [line(1, OUTSIDE_TXN, n=9)])

    def read(**options: Any) -> Any:
        table = gazette.read_table(JOURNAL, store=store_of(tmp_path), fields="n long", **options)
        return table["n"].to_pylist()

    at = list(itertools.accumulate(map(len, lines), initial=0))
    assert read(begin=at[1], end=at[3]) == [1, 2]
    assert read(begin={JOURNAL: at[2]}) == [2, 3]
    assert read(begin_time=1_700_000_001, end_time="2023-11-14T22:13:23Z") == [1, 2]
    zoned = datetime.datetime(2023, 11, 14, 22, 13, 22, tzinfo=datetime.UTC)
    assert read(begin_time=zoned) == [2, 3]
    assert read(begin_time="0001-01-01", end_time="9999-12-31", part_bytes=math.inf) == [0, 1, 2, 3]
    # Nothing is within the bounds: the columns are those of what is outside of them.
    later = gazette.read_table(JOURNAL, store=store_of(tmp_path), begin_time=4_102_444_800)
    assert (later.num_rows, later.schema.field("n").type) == (0, pa.int64())
    both = gazette.read_table(
        ["b/journal", JOURNAL], store=store_of(tmp_path), columns=["journal", "n"]
    )
    assert [row["journal"] for row in both.to_pylist()] == [JOURNAL] * 4 + ["b/journal"]


def test_every_kind_of_messages(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    uuids = [uuid_text(build_uuid(ALPHA, at, OUTSIDE_TXN)) for at in (1, 2)]
    rows = f"{uuids[0]},a,1\n{uuids[1]},b,2\n"
    write_journal(tmp_path, STORE, "rows/csv", [rows.encode()])
    table = gazette.read_table("rows/csv", store=store, value="csv")
    assert table.select(["c1", "c2"]).to_pylist()[1] == {"c1": "b", "c2": "2"}
    with raises(Invalid, path="columns", says="prefix of the columns"):
        gazette.read_table("rows/csv", store=store, content_type=CONTENT_CSV, columns=["c2"])
    framing = framing_of(CONTENT_PROTO_FIXED, ngram_pb2.NGramCount)
    uuid = build_uuid(ALPHA, 1, OUTSIDE_TXN)
    counted = ngram_pb2.NGramCount(uuid=uuid, n_gram="of the", count=3)
    write_journal(tmp_path, STORE, "protobuf", [framing.encode(counted)])
    table = gazette.read_table("protobuf", store=store, message=ngram_pb2.NGramCount)
    assert table.select(["n_gram", "count"]).to_pylist() == [{"n_gram": "of the", "count": 3}]
    write_journal(tmp_path, STORE, "text", [line(1, OUTSIDE_TXN, n=1)])
    (text,) = gazette.read_table("text", store=store, value="text")["value"].to_pylist()
    assert text.encode() + b"\n" == line(1, OUTSIDE_TXN, n=1)


def test_a_message_that_does_not_fit(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    lines = [line(1, OUTSIDE_TXN, n=1), line(2, OUTSIDE_TXN, n="x"), line(3, OUTSIDE_TXN, n=3)]
    write_journal(tmp_path, STORE, JOURNAL, [b"".join(lines)])

    def read(**options: Any) -> Any:
        table = gazette.read_table(JOURNAL, store=store, fields="n long", **options)
        return table["n"].to_pylist()

    with raises(Unfit, says='n: "x" is not an integer', journal=JOURNAL) as raised:
        read()
    assert 'misfits="null"' in raised.value.hint
    assert read(misfits="null") == [1, None, 3]
    assert read(misfits="skip") == [1, 3]


@pytest.mark.parametrize(
    ("options", "path", "says"),
    [
        ({"journals": ()}, "journals", "either names"),
        ({"selector": "prefix=a/"}, "journals", "either names"),
        ({"journals": (), "selector": "prefix=a/"}, "selector", "stores know"),
        ({"journals": "a,b"}, "journals", "'a,b' is not the name"),
        ({"journals": [JOURNAL, 7]}, "journals", "7"),
        ({"journals": [JOURNAL, JOURNAL]}, "journals", "twice"),
        ({"store": "nothing://x"}, "store", "nothing"),
        ({"broker": "http://localhost:1"}, "broker", "together with store"),
        ({"fields": "word strin"}, "fields", "no type strin"),
        ({"fields": 7}, "fields", "not columns: 7"),
        ({"fields": pa.schema([("n", pa.uint8())])}, "n", "uint8"),
        ({"fields": pa.schema([("n", pa.dictionary(pa.int8(), pa.string()))])}, "n", "dictionary"),
        ({"fields": "offset long"}, "meta_prefix", "offset"),
        ({"columns": "n"}, "columns", "one text"),
        ({"columns": ["m"]}, "columns", "no such columns: m"),
        ({"value": "xml"}, "value", "json, csv, protobuf"),
        ({"value": "protobuf"}, "message", "must be given"),
        ({"message": dict}, "message", "not a generated class"),
        ({"begin": -1}, "begin", "-1"),
        ({"begin": {"other": 1}}, "begin", "other"),
        ({"end": 10**9}, "end", "beyond its known bytes"),
        ({"begin_time": "noon"}, "begin_time", "'noon'"),
        ({"begin_time": 2, "end_time": 1}, "end_time", "before"),
        ({"begin_time": -1e300}, "begin_time", "milliseconds"),
        ({"isolation": "serializable"}, "isolation", "read_committed"),
        ({"lost": "keep"}, "lost", "settled, fail, skip"),
        ({"misfits": "drop"}, "misfits", "fail, skip, null"),
        ({"part_bytes": 0}, "part_bytes", "above 0"),
        ({"answer_s": "soon"}, "answer_s", "'soon'"),
        ({"field": "n long"}, "field", "no such option"),
        ({"access": Access.of("http://localhost:1")}, "access", "direct=True"),
    ],
)
def test_what_cannot_be_right_is_named(
    tmp_path: Path, options: dict[str, Any], path: str, says: str
) -> None:
    write_journal(tmp_path, STORE, JOURNAL, [line(1, OUTSIDE_TXN, n=1)])
    given = {"journals": JOURNAL, "store": store_of(tmp_path), **options}
    with raises(Invalid, path=path, says=says):
        gazette.read_table(given.pop("journals"), **given)


BROKEN = [
    b'{"uuid":"%b","n":1',
    b'{"n":tru,"uuid":"%b"}',
    b'{"n":[1 2],"_meta":{"uuid":"no"},"uuid":"%b"}',
    b'{"text":"\\q\x01","uuid":"%b","n":01}',
    b"{'uuid':'%b','n':None}",
    b'INFO {"uuid" : "%b"} ]',
    b'{"text":"\xff","uuid":"%b"}',
]
"""Lines that are no JSON, not even to Spark."""
LENIENT = [
    b"{'uuid':'%b','n':1}",
    b'{"n":1,"uuid":"%b","x":NaN}',
    b'\xef\xbb\xbf{"n":1,"uuid":"%b"}',
    b'{"uuid":"%b","n":1} {"n":2}',
    b'{"text":"\\ud800","n":1,"uuid":"%b"}',
]
"""Lines that are no JSON, and that Spark reads all the same."""


@pytest.mark.parametrize("many", [1, 30])
@pytest.mark.parametrize("form", [*BROKEN, *LENIENT])
def test_a_line_stays_in_its_transaction(tmp_path: Path, form: bytes, many: int) -> None:
    """Whatever else is wrong with it: no row of a pending transaction is seen, in any mode."""

    def lines(producer: bytes, count: int = many) -> bytes:
        uuids = [uuid_text(build_uuid(producer, at, CONTINUE_TXN)) for at in range(1, count + 1)]
        return b"".join(form % uuid.encode() + b"\n" for uuid in uuids)

    pending, committed = lines(ALPHA), lines(BETA)
    acknowledged = line(many + 1, ACK_TXN, BETA)
    content = line(0, OUTSIDE_TXN, n=7) + pending + committed + acknowledged
    write_journal(tmp_path, STORE, JOURNAL, [content])

    def read(misfits: Any) -> list[int | None]:
        store, columns = store_of(tmp_path), ["n"]
        table = gazette.read_table(
            JOURNAL, store=store, fields="n long", columns=columns, misfits=misfits
        )
        found: list[int | None] = table["n"].to_pylist()
        return found

    if form in LENIENT:
        assert read("fail") == read("null") == read("skip") == [7] + [1] * many
        return
    assert read("null") == [7] + [None] * many
    assert read("skip") == [7]
    with raises(Corrupt, journal=JOURNAL):
        read("fail")


def test_a_broken_record_of_csv_stays_in_its_transaction(tmp_path: Path) -> None:
    uuids = [uuid_text(build_uuid(ALPHA, at, CONTINUE_TXN)).encode() for at in (1, 2)]
    content = b'%b,1\n"%b",2,3\n' % (*uuids,) + b'%b,bare"quote\n' % uuids[1]
    write_journal(tmp_path, STORE, "rows/csv", [content])
    table = gazette.read_table(
        "rows/csv", store=store_of(tmp_path), value="csv", fields="n long", misfits="null"
    )
    assert table.num_rows == 0


def test_blank_lines_are_no_messages(tmp_path: Path) -> None:
    content = (
        b"\n" + line(1, OUTSIDE_TXN, n=1) + b" \t\r\n\n" + line(2, OUTSIDE_TXN, n=2) + b"\n" * 40
    )
    write_journal(tmp_path, STORE, JOURNAL, [content])
    for name in ("n", "offset"):
        for fields in ("n long", pa.schema([("n", pa.int8())])):
            table = gazette.read_table(
                JOURNAL, store=store_of(tmp_path), fields=fields, columns=[name]
            )
            assert table.num_rows == 2
    assert gazette.read_table(JOURNAL, store=store_of(tmp_path))["n"].to_pylist() == [1, 2]
    text = gazette.read_table(JOURNAL, store=store_of(tmp_path), value="text", columns=["value"])
    assert text.num_rows == 2


def test_arrays_are_named(tmp_path: Path) -> None:
    """Spark would make a row of each item, and null would be nothing of either."""
    first, array = line(1, OUTSIDE_TXN, n=1), b'[{"n":1},{"n":2}]\n'
    write_journal(tmp_path, STORE, JOURNAL, [first + array])
    write_journal(tmp_path, STORE, "b/journal", [array * 20])
    misfits: Any
    for journal, begin in ((JOURNAL, len(first)), ("b/journal", 0)):
        for misfits in ("fail", "null"):
            with raises(MalformedArray, journal=journal, begin=begin):
                gazette.read_table(
                    journal, store=store_of(tmp_path), misfits=misfits, fields="n long"
                )
            with raises(MalformedArray, journal=journal, begin=begin):
                gazette.read_table(journal, store=store_of(tmp_path), misfits=misfits)
    table = gazette.read_table(
        JOURNAL, store=store_of(tmp_path), fields="n long", columns=["n"], misfits="skip"
    )
    assert table["n"].to_pylist() == [1]


def test_columns_are_inferred_from_lines_that_spark_reads(tmp_path: Path) -> None:
    content = (
        b"{'a':NaN}\n" + b'\xef\xbb\xbf{"b":"\\ud800"} x\n' + b'{"c":1' + b'}\n{"\\ud800":1}\n'
    )
    write_journal(tmp_path, STORE, JOURNAL, [content])
    table = gazette.read_table(
        JOURNAL, store=store_of(tmp_path), columns=["a", "b", "c"], misfits="null"
    )
    assert [field.type for field in table.schema] == [pa.float64(), pa.string(), pa.int64()]
    assert table["b"].to_pylist() == [None, "?", None, None]


@pytest.mark.parametrize(("begin", "end"), [(b"[", b"]"), (b'{"b":', b"}")])
@pytest.mark.parametrize("depth", [300, 900, 1100])
def test_a_value_of_many_levels_is_no_obstacle(
    tmp_path: Path, depth: int, begin: bytes, end: bytes
) -> None:
    """The innermost objects and lists are a text. A line that is too deep for Python adds no column."""
    deep = begin * depth + b"1" + end * depth
    lines = [b'{"a":1,"deep":%b}\n' % deep, b'{"a":2,"deep":%b}\n' % deep.replace(b"1", b"0.5")]
    write_journal(tmp_path, STORE, JOURNAL, [*lines, b'{"a":3}\n'])
    table = gazette.read_table(JOURNAL, store=store_of(tmp_path), misfits="null")
    assert table["a"].to_pylist() == ([1, 2, 3] if depth < 1000 else [None, None, 3])


def test_names_of_columns_in_a_table(tmp_path: Path) -> None:
    write_journal(tmp_path, STORE, JOURNAL, [b'{"":1,"a.b":2,"`q`":3,"OFFSET":4}\n'])
    table = gazette.read_table(
        JOURNAL, store=store_of(tmp_path), fields="`` long, `a.b` int, ```q``` int, OFFSET int"
    )
    assert table.select(["", "a.b", "`q`", "OFFSET", "offset"]).to_pylist() == [
        {"": 1, "a.b": 2, "`q`": 3, "OFFSET": 4, "offset": 0}
    ]
    twice = pa.field("x", pa.int64())
    for name, fields in (
        ("x", pa.schema([twice, twice])),
        ("s.x", pa.schema([("s", pa.list_(pa.struct([twice, twice])))])),
    ):
        with raises(Invalid, path=name):
            gazette.read_table(JOURNAL, store=store_of(tmp_path), fields=fields)
    with raises(Invalid, path="offset"):
        gazette.read_table(JOURNAL, store=store_of(tmp_path), columns=["offset", "offset"])


@pytest.mark.parametrize(
    "kind",
    [
        *(
            pa.uint8(),
            pa.uint64(),
            pa.float16(),
            pa.decimal128(10, -2),
            pa.timestamp("ns", tz="UTC"),
        ),
        *(pa.timestamp("ms"), pa.timestamp("s", tz="UTC"), pa.time64("us"), pa.duration("us")),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("path", "within"),
    [
        ("x", lambda kind: kind),
        ("x", pa.list_),
        ("x.y", lambda kind: pa.struct([("y", pa.map_(pa.string(), kind))])),
    ],
)
def test_a_type_that_would_have_other_values_is_refused(
    tmp_path: Path, kind: pa.DataType, path: str, within: Callable[[pa.DataType], pa.DataType]
) -> None:
    """A count of microseconds would be one of nanoseconds in such a column, and -1 no number at all."""
    write_journal(tmp_path, STORE, JOURNAL, [b'{"x":null}\n'])
    fields = pa.schema([("x", within(kind))])
    with raises(Invalid, path=path):
        gazette.read_table(JOURNAL, store=store_of(tmp_path), fields=fields)


def test_decimals_of_all_digits_and_scales(tmp_path: Path) -> None:
    """Both paths: the compiled pass reads small numbers, unless many lines are misfits."""
    rng = random.Random(0)
    every = range(1, DIGITS_MAX + 1)
    for precision, filler in [(digits, 0) for digits in every] + [(19, 20), (12, 20), (1, 20)]:
        given = samples(precision, rng)
        content = b"".join(sample.line + b"{}\n" * filler for sample in given)
        journal = f"decimals/{precision}-{filler}"
        write_journal(tmp_path, STORE, journal, [content])
        table = gazette.read_table(
            journal,
            store=store_of(tmp_path),
            fields=columns(precision),
            columns=[f"c{scale}" for scale in range(precision + 1)],
            misfits="null",
        )
        assert units_found(given, table.to_pylist()[:: filler + 1]) == given


def test_decimals_know_no_context_of_a_thread() -> None:
    """Whatever an application has set for its own arithmetic."""
    read = JsonRow(pa.schema([("a", pa.decimal128(38, 9))])).read
    with decimal.localcontext(prec=3, rounding=decimal.ROUND_UP, Emax=5, Emin=-5) as context:
        context.traps[decimal.Inexact] = True
        values, misfits = read(b'{"a":12345678901234567890123456789.1234567885}')
    assert not misfits
    assert str(values[0]) == "12345678901234567890123456789.123456789"


def test_a_journal_that_is_not_there(tmp_path: Path) -> None:
    write_journal(tmp_path, STORE, JOURNAL, [line(1, OUTSIDE_TXN, n=1)])
    with raises(NotFound, journal="a/jornal"):
        gazette.read_table("a/jornal", store=store_of(tmp_path), fields="n long")


def test_a_transaction_whose_fragment_was_damaged(tmp_path: Path) -> None:
    """The stream fails where the bytes are wrong. It does not end as if all was read."""
    write_journal(tmp_path, STORE, JOURNAL, [line(at, OUTSIDE_TXN, n=at) for at in (1, 2)])
    reader = gazette.read_batches(JOURNAL, store=store_of(tmp_path), fields="n long")
    last = max((tmp_path / "fragments" / JOURNAL).iterdir())
    last.write_bytes(last.read_bytes().replace(b'"n":2', b'"n":7'))
    assert reader.read_next_batch()["n"].to_pylist() == [1]
    with pytest.raises(Corrupt):
        reader.read_next_batch()


def held_bytes(root: Path, fragments: int, transaction: bool, part_bytes: int) -> int:
    """Return the most bytes that a read of so many fragments of 1 MB held at a time."""
    flags = CONTINUE_TXN if transaction else OUTSIDE_TXN
    text = "x" * 900
    contents = [
        b"".join([line(at * 1000 + n + 1, flags, text=text) for n in range(1000)])
        for at in range(fragments)
    ]
    # One fragment has it all: a run of tasks would be as large.
    contents = [b"".join(contents), line(fragments * 1000 + 1, ACK_TXN)]
    write_journal(root, STORE, JOURNAL, contents, Codec.ZSTANDARD)
    del contents
    gc.collect()
    rows, most, arrow = 0, 0, pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        reader = gazette.read_batches(
            JOURNAL, store=store_of(root), fields="text string", part_bytes=part_bytes
        )
        for batch in reader:
            rows += len(batch)
            most = max(most, pa.total_allocated_bytes() - arrow)
        python = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows == fragments * 1000
    return most + python


@pytest.mark.parametrize("transaction", [False, True])
def test_memory_does_not_grow_with_the_journal(tmp_path: Path, transaction: bool) -> None:
    """Nor with its fragments, nor with a transaction that is open all the time."""
    small = held_bytes(tmp_path / "small", 8, transaction, 2 << 20)
    large = held_bytes(tmp_path / "large", 32, transaction, 2 << 20)
    assert large < small * 1.2
    assert large < 24 << 20


@pytest.mark.parametrize("direct", [False, True])
async def test_brokers_are_read_to_the_head(
    etcd: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(
            journal_spec("topic/a", labels=LABELS), journal_spec("topic/b", labels=LABELS)
        )
        client = broker.client
        await client.append(AppendParams("topic/a"), line(1, CONTINUE_TXN, n=1))
        await client.append(AppendParams("topic/a"), line(2, ACK_TXN))
        await client.append(AppendParams("topic/b"), line(1, OUTSIDE_TXN, BETA, n=2))
        access = Access.of(broker.endpoint, file_root=broker.file_root, direct=direct)

        def read(*journals: str, **options: Any) -> Any:
            return gazette.read_table(journals, **options)["n"].to_pylist()

        assert await asyncio.to_thread(read, "topic/a", "topic/b", access=access) == [1, 2]
        assert await asyncio.to_thread(read, selector="prefix=topic/", access=access) == [1, 2]
        assert await asyncio.to_thread(read, "topic/b", broker=broker.endpoint) == [2]
        monkeypatch.setenv("BROKER_ADDRESS", broker.endpoint)
        assert await asyncio.to_thread(read, "topic/a") == [1]
        with raises(NotFound, journal="topic/c"):
            await asyncio.to_thread(read, "topic/c")
        with raises(NotFound, selector="prefix=none/"):
            await asyncio.to_thread(read, selector="prefix=none/")
        with raises(Invalid, path="fields", says="no message to infer"):
            await broker.create(journal_spec("empty", labels=LABELS))
            await asyncio.to_thread(read, "empty")
        assert await asyncio.to_thread(read, "empty", fields="n long") == []


async def test_brokers_that_do_not_answer_are_an_error(etcd: Etcd, tmp_path: Path) -> None:
    """Within the given time, also if they go away between the two passes."""
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec("topic/a", labels=LABELS))
        await broker.client.append(AppendParams("topic/a"), line(1, OUTSIDE_TXN, n=1))
        reader = await asyncio.to_thread(
            gazette.read_batches, "topic/a", broker=broker.endpoint, answer_s=0.5
        )
    with raises(Unavailable, says=broker.endpoint.rpartition("/")[2]):
        await asyncio.to_thread(reader.read_all)


def test_a_class_that_messages_cannot_be_imported_from() -> None:
    local: Any = type("Local", (), {"DESCRIPTOR": ngram_pb2.NGramCount.DESCRIPTOR})
    with raises(Invalid, path="message", says="Local"):
        gazette.read_table(JOURNAL, message=local)


INTERRUPTED = """
import signal
import sys
import gazette

# A test that runs in the background inherits that interrupts are ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    gazette.read_table("topic/a", broker=sys.argv[1])
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_ends_a_read_that_waits() -> None:
    """A broker that accepts connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-c", INTERRUPTED, address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            connection, _ = silent.accept()
            with connection:
                process.send_signal(signal.SIGINT)
                assert process.communicate(timeout=60)[0] == "interrupted\n"


async def test_a_running_loop_is_no_obstacle(tmp_path: Path) -> None:
    """As in a notebook, whose cells run within one."""
    write_journal(tmp_path, STORE, JOURNAL, [line(1, OUTSIDE_TXN, n=1)])
    assert gazette.read_table(JOURNAL, store=store_of(tmp_path))["n"].to_pylist() == [1]
