"""Tables of lines whose UUIDs other software made: every line is a row, with the text that stands in it."""

from __future__ import annotations

import json
import random
import uuid as stdlib_uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from word_count import ngram_pb2

import gazette
from gazette.errors import Invalid
from gazette.history.columns import ColumnDecoder, MessageFormat
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.framing.frames import MalformedMessage
from gazette.message.framing.framing import framing_of
from gazette.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    FOREIGN_UUID,
    OUTSIDE_TXN,
    Clock,
    UuidMint,
    build_uuid,
    parse_uuid,
    uuid_text,
)
from gazette.testing.stored import write_journal
from tests.facts import raises
from tests.fuzzing import examples

JOURNAL = "a/journal"
STORE = "file:///fragments/"
PRODUCER = bytes.fromhex("0102030405ff")
LINES = 20_000


def rows(
    root: Path, content: bytes, journal: str = JOURNAL, **options: Any
) -> list[dict[str, Any]]:
    write_journal(root, STORE, journal, [content])
    table = gazette.read_table(journal, store=f"{root}/fragments", **options)
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def test_each_line_with_a_random_uuid_is_one_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(11)
    texts = [str(stdlib_uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(LINES)]
    content = b"".join(
        json.dumps({"uuid": text, "n": n}).encode() + b"\n" for n, text in enumerate(texts)
    )
    found = rows(tmp_path, content, "random/lines", fields="n long")
    assert [(row["uuid"], row["n"]) for row in found] == list(zip(texts, range(LINES), strict=True))
    assert {(row["clock"], row["flags"], row["timestamp"]) for row in found} == {(0, 0, None)}
    assert sum("random/lines" in one.getMessage() for one in caplog.records) == 1


def test_a_pending_message_stays_pending_among_them(tmp_path: Path) -> None:
    pending = uuid_text(build_uuid(PRODUCER, 100, CONTINUE_TXN))
    committed = uuid_text(build_uuid(PRODUCER[::-1], 100, CONTINUE_TXN))
    done = uuid_text(build_uuid(PRODUCER[::-1], 101, ACK_TXN))
    others = [str(stdlib_uuid.UUID(int=n << 70 | n, version=4)) for n in range(1, 6)]
    texts = [others[0], pending, others[1], committed, *others[2:], done]
    content = b"".join(b'{"uuid":"%s"}\n' % text.encode() for text in texts)
    found = rows(tmp_path, content, columns=["uuid"])
    assert [row["uuid"] for row in found] == [*others[:2], committed, *others[2:]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ('"F81D4FAE-7DEC-41D0-A765-00A0C91E6BF6"', "F81D4FAE-7DEC-41D0-A765-00A0C91E6BF6"),
        ('"{f81d4fae-7dec-41d0-a765-00a0c91e6bf6}"', "{f81d4fae-7dec-41d0-a765-00a0c91e6bf6}"),
        ('"f81d4fae7dec41d0a76500a0c91e6bf6"', "f81d4fae7dec41d0a76500a0c91e6bf6"),
        ('"f81d4fae-7dec-11d0-0765-00a0c91e6bf6"', "f81d4fae-7dec-11d0-0765-00a0c91e6bf6"),
        ('"hello"', "hello"),
        ('"\\u0068i"', "hi"),
        ("7", "7"),
        ("0", "0"),
        ("false", "false"),
        ('{"a":[1]}', '{"a":[1]}'),
        ('""', None),
        ("null", None),
    ],
)
def test_the_column_shows_what_stands_in_the_place(
    tmp_path: Path, value: str, text: str | None
) -> None:
    content = f'{{"n":1,"uuid":{value}}}\n{{"n":2}}\n'.encode()
    found = rows(tmp_path, content, misfits="null", fields="n long")
    assert [(row["n"], row["uuid"]) for row in found] == [(1, text), (2, None)]
    prefixed = gazette.read_table(
        JOURNAL,
        store=f"{tmp_path}/fragments",
        misfits="null",
        fields="uuid string",
        meta_prefix="_",
    )
    assert prefixed["uuid"].to_pylist() == [json.loads(value) if value == '""' else text, None]


def test_what_is_no_uuid_is_an_error_that_names_the_remedy(tmp_path: Path) -> None:
    with raises(MalformedMessage, journal=JOURNAL, begin=0, advises="_meta.uuid"):
        rows(tmp_path, b'{"uuid":"hello"}\n', fields="n long")
    found = gazette.read_table(
        JOURNAL, store=f"{tmp_path}/fragments", uuid_field="_meta.uuid", meta_prefix="_"
    )
    assert found["uuid"].to_pylist() == ["hello"]


def test_of_csv_and_protobuf(tmp_path: Path) -> None:
    one = stdlib_uuid.UUID("f81d4fae-7dec-41d0-a765-00a0c91e6bf6")
    found = rows(
        tmp_path, f"{str(one).upper()},a\n".encode(), content_type=CONTENT_CSV, value="csv"
    )
    assert [(row["uuid"], row["c1"]) for row in found] == [(str(one).upper(), "a")]
    framing = framing_of(CONTENT_PROTO_FIXED, ngram_pb2.NGramCount)
    content = framing.encode(ngram_pb2.NGramCount(uuid=one.bytes, n_gram="x"))
    found = rows(
        tmp_path,
        content,
        "b/journal",
        content_type=CONTENT_PROTO_FIXED,
        message=ngram_pb2.NGramCount,
    )
    assert [(row["uuid"], row["n_gram"]) for row in found] == [(str(one), "x")]


@pytest.mark.parametrize("place", ["", "_meta.uuid"])
def test_what_is_published_is_the_same_in_a_table(tmp_path: Path, place: str) -> None:
    """Whatever stands in fields named ``uuid``, unless the publisher refuses it."""
    rng = random.Random(place)
    values: list[Any] = [
        None,
        "",
        0,
        7,
        True,
        "A-17",
        [1],
        {"b": 2},
        str(stdlib_uuid.UUID(int=5, version=4)),
    ]
    mint = UuidMint(PRODUCER, Clock(160))
    framing = framing_of(CONTENT_JSON_LINES, dict, place=place)
    stamp, content, want = framing.stamper(mint), bytearray(), []
    for n in range(300):
        message = {"uuid": rng.choice(values), "n": n}
        before = dict(message)
        if place or before["uuid"] in (None, ""):
            stamp(message, OUTSIDE_TXN, content)
            want.append(before)
        else:
            with raises(Invalid, path="uuid"):
                stamp(message, OUTSIDE_TXN, bytearray())
    write_journal(tmp_path, STORE, JOURNAL, [bytes(content)])
    table = gazette.read_table(
        JOURNAL, store=f"{tmp_path}/fragments", value="text", uuid_field=place, meta_prefix="_"
    )
    found = [json.loads(text) for text in table["value"].to_pylist()]
    keys = ("uuid", "n") if place else ("n",)
    assert [{key: one[key] for key in keys} for one in found] == [
        {key: one[key] for key in keys} for one in want
    ]
    assert len(set(table["_clock"].to_pylist())) == len(want)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.one_of(
            st.uuids().map(str),
            st.uuids().map(lambda one: str(one).upper()),
            st.builds(
                lambda clock, flags: uuid_text(build_uuid(PRODUCER, clock, flags)),
                st.integers(0, 1 << 60),
                st.integers(0, 0x3FF),
            ),
            st.just("00000000-0000-0000-0000-000000000000"),
        ),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from(["uuid", "_meta.uuid"]),
)
def test_both_ways_of_decoding_agree_with_the_specification(texts: list[str], place: str) -> None:
    def line(text: str) -> bytes:
        return json.dumps({"uuid": text} if place == "uuid" else {"_meta": {"uuid": text}}).encode()

    buffer = b"".join(line(text) + b"\n" for text in texts)
    want = [parse_uuid(stdlib_uuid.UUID(text).bytes) for text in texts]
    found = ColumnDecoder(JOURNAL, MessageFormat(uuid_field=place)).decode(buffer, 0)
    producers, clocks, flags = (array.tolist() for array in found.columns.uuids)
    assert flags == [one.flags for one in want]
    assert clocks == [one.clock for one in want]
    assert producers == [int.from_bytes(one.producer, "big") for one in want]
    assert FOREIGN_UUID not in [one.flags for one in want if one.clock]
