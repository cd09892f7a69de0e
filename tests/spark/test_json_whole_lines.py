# ruff: noqa: E501
"""Whole lines as rows: the same rows that ``spark.read.json`` makes of the same lines.

Spark itself is the oracle, also for lines that are no JSON by its standard, or not at all.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gazette.history.lenient_json import is_array
from gazette.message.uuid import OUTSIDE_TXN, build_uuid, uuid_text
from gazette.testing.stored import write_journal
from tests.fuzzing import seeds

pytestmark = [pytest.mark.spark, pytest.mark.long]

STORE, JOURNAL = "file:///fragments/", "topic/one"
COLUMNS = (
    "a bigint, s string, d double, f float, b boolean, e decimal(10,2), t timestamp, "
    "st struct<x:double,y:bigint,s:string>, ar array<double>, m map<string,double>, bi binary, z bigint, v variant"
)
NAMES = [column.split()[0].encode() for column in COLUMNS.split(", ")]
SCHEMA = f"{COLUMNS}, _corrupt_record string"
UUID = uuid_text(build_uuid(bytes([1, 0, 0, 0, 0, 1]), 1 << 40, OUTSIDE_TXN))

LINES = [
    rb'{"a":1,"z":1} garbage', rb'{"a":1,"z":1}{"a":2}', b'\xef\xbb\xbf{"a":1,"z":1}', b"", b"   ", b"\t\r",
    rb"{'a':1,'s':'x','z':1}", rb"{'s':'it\'s " + b'"q"' + rb"','z':1}", rb'{"s":"it\'s"}', rb'{"s":' + b"'\\u0041\xc3\xa9'}",
    rb'{"d":NaN,"f":NaN,"s":NaN}', rb'{"d":Infinity,"f":-Infinity,"s":-Infinity}', rb'{"d":+INF,"f":-INF,"s":+INF}',
    rb'{"d":+Infinity}', rb'{"d":INF}', rb'{"d":"INF","f":"+INF"}', rb'{"d":+1}', rb'{"d":nan}', rb'{"d":-NaN}', rb'{"d":NaNx}',
    rb'{"a":NaN,"z":1}', rb'{"x":NaN,"z":1}', rb'{"e":NaN,"z":1}', rb'{"t":NaN,"b":NaN,"z":1}', rb'{"bi":NaN,"z":1}',
    rb'{"st":{"x":NaN},"z":1}', rb'{"ar":[1,NaN,-Infinity],"m":{"k":NaN}}', rb'{"s":{"k":NaN, "j":' + b"'q'}}",
    b"{'s':['k' , NaN]}", b"{'st':{'s':{'k' : 'v'}}}", b"{'v':{'a':[NaN,'x',\"y\",-INF]}}", b"{'d':'NaN','e':'1,234.5'}",
    rb'{"s":"\ud800"}', rb'{"s":"\ud800x\udc00"}', rb'{"s":"\udc00\ud800"}', rb'{"s":"\ud83d\ude00"}', rb'{"x":"\ud800","z":1}',
    rb'{"s":["\ud800"]}', rb'{"v":"\ud800"}', rb'{"m":{"k":1},"st":{"s":"\udfff"}}', rb'{"k\ud83d":1,"z":1}', rb'{"m":{"\ud83d":1}}',
    rb'{"s":"\q"}', rb'{"x":"\q"}', b'{"s":"a\x01b"}', b'{"x":"a\tb"}', b'{"s":"\xff"}', b'{"x":"\xff"}', b'{"s":"\x7f"}',
    b"null", b"1", b'"x"', b"true", b'""', b"x", b"{", b"{}", b"{ }", b"{,}", b'{"z":1,}', b'{,"z":1}', b'{"z":1', b'{"z":1]',
    rb'{"b":tru,"z":1}', rb'{"x":tru,"z":1}', rb'{"z":01}', rb'{"x":01,"z":1}', rb'{"z":1.}', rb'{"d":.5}', rb'{"d":1e}', rb'{z:1}',
    rb'{"z":1 /* c */}', rb'# {"z":1}', rb'{"z":1;"a":2}', rb'{"z":1x}', rb'{"z":1 "a":2}', rb'{"z" 1}', rb'{"x":[1 2],"z":1}',
    rb'{"x":{"q" 1},"z":1}', rb'{"a":1,"x":"', b'{"z":1}\x00', b'{"z":1}\xff', b'\xc2\xa0{"z":1}', b'\x0b{"z":1}',
    rb'{"":1,"z":1}', rb'{"S":1,"Z":1}', rb'{"z":1,"z":2}', rb'{"m":{"k":1,"k":2}}', b'\r{"z":\r1}\r', rb'{"st":[1],"ar":{},"z":1}',
    rb'{"s":"a\u0000b"}', b'{"x":' + b"[" * 1200 + b"]" * 1200 + b',"z":1}',
    b'{"x":' + b"[" * 900 + b"]" * 900 + b',"z":1}', b'{"s":' + b"[" * 900 + b"]" * 900 + b',"z":1}',
]  # fmt: skip
EDITS: Sequence[bytes] = [
    b"", b"'", b'"', b"\\", b"\\'", b"{", b"}", b"[", b"]", b",", b":", b" ", b"\t", b"\r", b"1", b"0", b"-", b"+", b".",
    b"e", b"N", b"NaN", b"Infinity", b"-INF", b"null", b"tru", b"\x01", b"\\ud800", b"\\udc00", b"\xef\xbb\xbf", "é".encode(), b"\\u",
]  # fmt: skip


def message(rng: random.Random) -> bytes:
    """Return a line whose values mostly fit."""
    words = [
        "",
        "x",
        "it's",
        'a "b"',
        "é😀",
        "NaN",
        "2024-01-02T03:04:05Z",
        "AQID",
        "1.5",
        "\ud800",
    ]

    def value(depth: int = 0) -> Any:
        number = rng.choice([0, 1, -7, 12.75, 1e300, float("nan"), float("inf"), -float("inf")])
        nested = (
            [[], {}] if depth else [[value(1)], {"k": value(1)}, {"x": value(1), "s": value(1)}]
        )
        return rng.choice([None, True, number, number, rng.choice(words), rng.choice(nested)])

    fitting = {
        "uuid": UUID, "a": 7, "s": rng.choice(words), "d": float("nan"), "b": False, "e": 1.5, "t": words[6],
        "st": {"x": 1.5, "s": rng.choice(words)}, "ar": [1, -float("inf")], "m": {"k": 2.0}, "bi": "AQID", "z": 1, "v": [1],
    }  # fmt: skip
    names = rng.sample([*fitting, "x", "other"], rng.randint(1, 6))
    found = {name: fitting.get(name) if rng.random() < 0.7 else value() for name in names}
    text = json.dumps(
        found, ensure_ascii=rng.random() < 0.5, separators=rng.choice([(",", ":"), (", ", " : ")])
    )
    if rng.random() < 0.2:
        text = text.replace('"', "'")
    return text.encode("utf-8", "replace")


def damaged(line: bytes, rng: random.Random) -> bytes:
    """Return a line with up to three edits anywhere."""
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        at = rng.randint(0, len(line))
        line = line[:at] + rng.choice(EDITS) + line[at + rng.randint(0, 2) :]
    return line


def rows_of(frame: Any) -> list[tuple[dict[str, str], bool]]:
    """Return the values of each row that are not null, as texts, and whether the line is corrupt."""
    frame = frame.selectExpr("* except(t, v)", "cast(t as string) as t", "to_json(v) as v")
    rows = [row.asDict(recursive=True) for row in frame.collect()]
    return [
        ({name: repr(value) for name, value in row.items() if value is not None}, bad)
        for row in rows
        for bad in [row.pop("_corrupt_record") is not None]
    ]


def require_same(spark: Any, root: Path, lines: Sequence[bytes]) -> None:
    """Require the same rows for the same lines, in their order."""
    content = b"".join(line + b"\n" for line in lines)
    (root / "lines.json").write_bytes(content)
    write_journal(root, STORE, JOURNAL, [content])
    want = rows_of(spark.read.schema(SCHEMA).option("lineSep", "\n").json(f"{root}/lines.json"))
    given = {
        "store": f"file://{root}/fragments", "journal": JOURNAL, "isolation": "read_uncommitted", "acks": "true",
    }  # fmt: skip
    found = rows_of(spark.read.format("gazette").options(**given).schema(SCHEMA).load())
    present = [line for line in lines if line.removeprefix(b"\xef\xbb\xbf").strip(b" \t\r")]
    wrong = [
        (line, ours, theirs)
        for line, ours, theirs in zip(present, found, want, strict=False)
        if ours != theirs and not is_excused(line, ours, theirs)
    ]
    assert not wrong, wrong[:5]
    assert len(found) == len(want) == len(present)


def is_excused(line: bytes, ours: Any, theirs: Any) -> bool:
    """Return True for a difference that the page on Spark names."""
    if any(line.count(b"%c%b%c" % (mark, name, mark)) > 1 for mark in b"\"'" for name in NAMES):
        return True  # Of equal names the last one counts.
    if ours == ({}, True):
        # Of a line that is no JSON, Spark sometimes keeps fields. It reads control characters in base64.
        return bool(theirs[1]) or b"\x01" in line
    # Spark loses the place in a line behind what is no base64.
    return bool(ours[1] and theirs == ({}, True) and b"bi" in line)


def test_lines_of_every_kind(spark: Any, tmp_path: Path) -> None:
    require_same(spark, tmp_path, LINES)


@pytest.mark.parametrize("seed", seeds(3))
def test_damaged_lines(spark: Any, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    lines = [damaged(message(rng), rng) for _ in range(3000)]
    require_same(spark, tmp_path, [line for line in lines if not is_array(line)])
