"""Snapshots of stored journals, and what is read of them."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

import gazette
from gazette.errors import Corrupt, Invalid, NotFound, NotYet
from gazette.fragment.set_aside import SetAside
from gazette.history.columns import ColumnDecoder, Decoded, Malformed, MessageFormat, uuid_bytes
from gazette.history.first_pass import fold_by_threads
from gazette.history.merge import FoldedSnapshot
from gazette.history.read import read_columns, read_envelopes
from gazette.history.snapshot import LostBytes, Run, Snapshot
from gazette.history.snapshot_builder import Selection, take_snapshot
from gazette.history.source import Access
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.codec import DictCodec
from gazette.message.framing.frames import MalformedMessage, TruncatedFrame
from gazette.message.framing.framing import FIXED_MAGIC, JSONLinesFraming
from gazette.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    build_uuid,
    parse_columns,
)
from gazette.protocol.checkpoint import ProducerState
from gazette.protocol.fragment import Codec
from gazette.runtime.clock import SystemClock
from gazette.testing.stored import json_line, write_fragment, write_journal
from tests.facts import raises
from tests.fuzzing import seeds

STORE = "file:///fragments/"
JOURNAL = "topic/one"
NIL = b"00000000-0000-0000-0000-000000000000"
ALPHA, BETA = bytes([1, 0, 0, 0, 0, 1]), bytes([1, 0, 0, 0, 0, 2])


class Word(gazette.Message):
    word: str = ""


def fixed(payload: bytes) -> bytes:
    return FIXED_MAGIC + len(payload).to_bytes(4, "little") + payload


def line(producer: bytes, clock: int, flags: int, **fields: object) -> bytes:
    return json_line(fields, build_uuid(producer, clock, flags))


def taken(root: Path, **options: Any) -> tuple[Access, Snapshot]:
    access = Access.of(file_root=root, direct=True)
    selection = Selection(journals=(JOURNAL,), stores=(STORE,), **options)
    with access.open() as opened:
        return access, take_snapshot(opened, selection)


def fold_locally(access: Access, snapshot: Snapshot, **options: Any) -> FoldedSnapshot:
    with access.open() as opened:
        return fold_by_threads(opened, snapshot, **options)


def words(access: Access, folded: FoldedSnapshot) -> list[str]:
    with access.open() as opened:
        return [
            envelope.message.word
            for run in folded.runs
            for batch in read_envelopes(opened, run, Word)
            for envelope in batch
        ]


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP, Codec.ZSTANDARD, Codec.SNAPPY])
def test_what_has_committed_is_read(tmp_path: Path, codec: Codec) -> None:
    """Over fragments, runs of which hold one, and a second producer whose transaction is open."""
    write_journal(
        tmp_path,
        STORE,
        JOURNAL,
        [
            line(ALPHA, 10, CONTINUE_TXN, word="a") + line(BETA, 10, CONTINUE_TXN, word="no"),
            line(ALPHA, 10, CONTINUE_TXN, word="a") + line(ALPHA, 11, CONTINUE_TXN, word="b"),
            line(ALPHA, 12, ACK_TXN) + line(ALPHA, 13, OUTSIDE_TXN, word="c"),
            line(BETA, 9, ACK_TXN) + line(BETA, 12, CONTINUE_TXN, word="open"),
        ],
        codec,
    )
    access, snapshot = taken(tmp_path)
    for run_bytes in (1, 1 << 20):
        folded = fold_locally(access, snapshot, run_bytes=run_bytes)
        assert words(access, folded) == ["a", "b", "c"]
        end = snapshot.journals[0].end
        source = folded.sources[JOURNAL]
        begin = end - len(line(BETA, 12, CONTINUE_TXN, word="open"))
        assert source.read_through == end
        assert source.producers == {ALPHA: ProducerState(13, None), BETA: ProducerState(9, begin)}
        # And from there on, nothing.
        _, later = taken(tmp_path, sources=folded.sources)
        again = fold_locally(access, later, run_bytes=run_bytes)
        assert words(access, again) == []
        assert again.sources == folded.sources
    # The transaction commits, and what began before the checkpoint is read again.
    write_fragment(tmp_path, STORE, JOURNAL, end, line(BETA, 13, ACK_TXN), codec)
    access, later = taken(tmp_path, sources=folded.sources)
    assert words(access, fold_locally(access, later, run_bytes=1)) == ["open"]


def test_offsets_bound_what_is_read(tmp_path: Path) -> None:
    lines = [line(ALPHA, 10 + n, OUTSIDE_TXN, word=str(n)) for n in range(6)]
    fragments = write_journal(
        tmp_path, STORE, JOURNAL, [b"".join(lines[:3]), b"".join(lines[3:])], Codec.GZIP
    )
    size = len(lines[0])
    access, snapshot = taken(tmp_path, begin={JOURNAL: size}, end_all=4 * size)
    assert words(access, fold_locally(access, snapshot)) == ["1", "2", "3"]
    # An end within a message leaves that for later.
    access, snapshot = taken(tmp_path, begin_all=3 * size, end_all=5 * size - 1)
    kept = [piece.fragment for piece in snapshot.journals[0].pieces]
    assert [one.begin for one in kept if one is not None] == [fragments[1].begin]
    assert None not in kept
    folded = fold_locally(access, snapshot)
    assert words(access, folded) == ["3"]
    assert folded.sources[JOURNAL].read_through == 4 * size
    with raises(Invalid, path="end", says="topic/one"):
        taken(tmp_path, end_all=6 * size + 1)


def test_time_leaves_out_old_fragments(tmp_path: Path) -> None:
    contents = [line(ALPHA, 10 + n, OUTSIDE_TXN, word=str(n)) for n in range(3)]
    fragments = write_journal(tmp_path, STORE, JOURNAL, contents)
    for fragment, age in zip(fragments, (5000, 3000, 0), strict=True):
        path = tmp_path / "fragments" / fragment.content_path()
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    now = SystemClock().now()
    access, snapshot = taken(tmp_path, begin_time_s=now - 3030)
    assert words(access, fold_locally(access, snapshot)) == ["1", "2"]
    # A minute's grace, for clocks that differ.
    access, snapshot = taken(tmp_path, begin_time_s=now - 2970)
    assert words(access, fold_locally(access, snapshot)) == ["1", "2"]
    access, snapshot = taken(tmp_path, begin_time_s=now - 2000)
    assert words(access, fold_locally(access, snapshot)) == ["2"]


def test_gaps(tmp_path: Path) -> None:
    """A begin that was pruned is passed over; a young gap may yet be filled; an old one is lost."""
    content = line(ALPHA, 10, OUTSIDE_TXN, word="a")
    write_fragment(tmp_path, STORE, JOURNAL, 1000, content)
    access, snapshot = taken(tmp_path)
    assert words(access, fold_locally(access, snapshot)) == ["a"]
    later = line(ALPHA, 11, OUTSIDE_TXN, word="b")
    fragment = write_fragment(tmp_path, STORE, JOURNAL, 2000, later)
    with raises(NotYet, journal="topic/one", says=f"{1000 + len(content)} to 2000"):
        taken(tmp_path)
    access, snapshot = taken(tmp_path, lost="skip")
    assert words(access, fold_locally(access, snapshot)) == ["a", "b"]
    path = tmp_path / "fragments" / fragment.content_path()
    os.utime(path, (path.stat().st_mtime - 7 * 3600,) * 2)
    access, snapshot = taken(tmp_path)
    assert words(access, fold_locally(access, snapshot)) == ["a", "b"]


def test_lost_bytes_are_errors_or_passed_over(tmp_path: Path) -> None:
    """Old gaps, and what was pruned behind the wanted offset: but not what was pruned before the begin."""
    content = line(ALPHA, 10, OUTSIDE_TXN, word="a")
    write_fragment(tmp_path, STORE, JOURNAL, 1000, content)
    fragment = write_fragment(
        tmp_path, STORE, JOURNAL, 2000, line(ALPHA, 11, OUTSIDE_TXN, word="b")
    )
    path = tmp_path / "fragments" / fragment.content_path()
    with raises(NotYet, journal="topic/one"):
        taken(tmp_path, lost="fail")
    os.utime(path, (path.stat().st_mtime - 7 * 3600,) * 2)
    gap = (1000 + len(content), 2000)
    with raises(Corrupt, journal="topic/one", begin=gap[0], end=gap[1]):
        taken(tmp_path, lost="fail")
    # A gap at the end of what is wanted, too.
    with raises(Corrupt, journal="topic/one", begin=gap[0], end=1500):
        taken(tmp_path, lost="fail", end_all=1500)
    access, snapshot = taken(tmp_path, lost="skip")
    assert words(access, fold_locally(access, snapshot)) == ["a", "b"]
    assert snapshot.journals[0].missed == (LostBytes(*gap),)
    taken(tmp_path, lost="fail", end_all=gap[0])
    with raises(Corrupt, journal="topic/one", begin=500, end=1000, says="pruned"):
        taken(tmp_path, lost="fail", begin_all=500, end_all=gap[0])
    _, snapshot = taken(tmp_path, lost="skip", begin_all=500)
    assert snapshot.journals[0].missed == (LostBytes(500, 1000), LostBytes(*gap))


def test_bytes_that_only_brokers_can_confirm_are_not_read(tmp_path: Path) -> None:
    """An object aside marks a fragment, and a later primary has stored other bytes at its offsets."""
    content = line(ALPHA, 10, OUTSIDE_TXN, word="a")
    marked = write_fragment(tmp_path, STORE, JOURNAL, 0, 2 * content)
    aside = SetAside(marked, life=7, tenure=9)
    (tmp_path / "fragments" / aside.path).write_bytes(2 * content)
    access, snapshot = taken(tmp_path)
    assert words(access, fold_locally(access, snapshot)) == ["a"]  # No other has these bytes.
    later = line(ALPHA, 11, OUTSIDE_TXN, word="b")
    write_fragment(tmp_path, STORE, JOURNAL, len(content), later)
    with raises(Corrupt, fragment=marked.content_path(), store=STORE, advises="through a broker"):
        taken(tmp_path)
    (tmp_path / "fragments" / marked.content_path()).unlink()
    write_fragment(tmp_path, STORE, JOURNAL, 0, content)
    access, snapshot = taken(tmp_path)
    assert words(access, fold_locally(access, snapshot)) == ["a", "b"]


def test_fragments_that_nothing_explains_are_not_passed_over(tmp_path: Path) -> None:
    """No label is known without brokers, so the template is an option. Two are one, by a condition."""
    day = '{{ .Spool.FirstAppendTime.Format "2006/01/02" }}'
    begin = 0
    for word, postfix in (("a", "2025/06/01"), ("b", "old"), ("c", "")):
        content = line(ALPHA, 10 + begin, OUTSIDE_TXN, word=word)
        write_fragment(tmp_path, STORE, JOURNAL, begin, content, path_postfix=postfix)
        begin += len(content)
    for template in ("", day, "old"):
        with raises(Invalid, "begin", "end", journal=JOURNAL, store=STORE):
            taken(tmp_path, path_postfix_template=template)
    with raises(Invalid, path="path_postfix_template"):
        taken(tmp_path, path_postfix_template="{{ range .Labels }}old{{ end }}")
    both = f"{{{{ if true }}}}{day}{{{{ else }}}}old{{{{ end }}}}"
    access, snapshot = taken(tmp_path, path_postfix_template=both)
    assert words(access, fold_locally(access, snapshot)) == ["a", "b", "c"]
    # Case: a copy of what the journal has does no harm.
    write_fragment(tmp_path, STORE, JOURNAL, begin - len(content), content, path_postfix="copy")
    access, snapshot = taken(tmp_path, path_postfix_template=both)
    assert words(access, fold_locally(access, snapshot)) == ["a", "b", "c"]


def test_what_is_stored_is_not_trusted(tmp_path: Path) -> None:
    content = line(ALPHA, 10, OUTSIDE_TXN, word="a")
    fragment = write_fragment(tmp_path, STORE, JOURNAL, 0, content)
    path = tmp_path / "fragments" / fragment.content_path()
    path.write_bytes(content.replace(b'"a"', b'"b"'))
    access, snapshot = taken(tmp_path)
    with raises(Corrupt, "file", "found", journal="topic/one"):
        fold_locally(access, snapshot)
    path.write_bytes(content + b"x")
    with raises(Corrupt, "file", "end", journal="topic/one"):
        fold_locally(access, snapshot)
    path.unlink()
    with raises(NotFound, "file", journal="topic/one"):
        fold_locally(access, snapshot)


@pytest.mark.parametrize("malformed", ["fail", "skip", "null"])
def test_a_message_in_parts_is_read_to_its_end(tmp_path: Path, malformed: Malformed) -> None:
    """A run reads on into the next fragments, and the run behind it begins where the message ends."""
    lines = [line(ALPHA, 10 + n, OUTSIDE_TXN, word=word) for n, word in enumerate("abcd")]
    content, size = b"".join(lines), len(lines[0])
    cuts = [0, size + 11, size + 20, size + 30, 2 * size + 5, 3 * size, 4 * size - 1]
    parts = [content[low:high] for low, high in itertools.pairwise(cuts)]
    fragments = write_journal(tmp_path, STORE, JOURNAL, parts)
    access, snapshot = taken(tmp_path, shape=MessageFormat(malformed=malformed))
    for run_bytes in (1, 50, 1 << 20):
        folded = fold_locally(access, snapshot, run_bytes=run_bytes)
        assert words(access, folded) == ["a", "b", "c"]
        # The last one is incomplete, and left for later.
        assert folded.sources[JOURNAL].read_through == 3 * size
    # Without a first pass, a run does not know where to begin.
    with access.open() as opened, raises(TruncatedFrame, journal="topic/one", begin=59, end=70):
        list(read_columns(opened, snapshot.runs(1)[0]))
    # The middle one of these has the rest of a message, and nothing else.
    cuts = [0, size + 11, 2 * size, 3 * size + 7, 4 * size]
    parts = [content[low:high] for low, high in itertools.pairwise(cuts)]
    write_journal(tmp_path / "exact", STORE, JOURNAL, parts)
    access, exact = taken(tmp_path / "exact", shape=MessageFormat(malformed=malformed))
    for run_bytes in (1, 50, 1 << 20):
        assert words(access, fold_locally(access, exact, run_bytes=run_bytes)) == [*"abcd"]
    (tmp_path / "fragments" / fragments[2].content_path()).unlink()
    access, snapshot = taken(tmp_path, shape=MessageFormat(malformed=malformed), lost="skip")
    if malformed == "fail":
        for run_bytes in (1, 1 << 20):
            with raises(MalformedMessage, "begin", journal="topic/one"):
                fold_locally(access, snapshot, run_bytes=run_bytes)
    for run_bytes in (1, 50, 1 << 20) if malformed != "fail" else ():
        # With "null", the end of the second message is a row.
        folded = fold_locally(access, snapshot, run_bytes=run_bytes)
        assert folded.rows == (3 if malformed == "null" else 2)
        assert folded.sources[JOURNAL].read_through == 3 * size


def test_the_time_for_a_long_message_is_linear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are decoded some five times in all, and not once more for each block."""
    decoded: list[int] = []
    decode = ColumnDecoder.decode

    def counting(self: ColumnDecoder, buffer: bytes, base: int) -> Decoded:
        decoded.append(len(buffer))
        return decode(self, buffer, base)

    monkeypatch.setattr(ColumnDecoder, "decode", counting)
    content = line(ALPHA, 10, OUTSIDE_TXN, word="a") + line(
        ALPHA, 11, OUTSIDE_TXN, word="x" * (24 << 20)
    )
    for count in (1, 9):
        step = len(content) // count + 1
        parts = [content[at : at + step] for at in range(0, len(content), step)]
        write_journal(tmp_path / str(count), STORE, JOURNAL, parts)
        access, snapshot = taken(tmp_path / str(count))
        for run_bytes in (1, 1 << 30):
            decoded.clear()
            folded = fold_locally(access, snapshot, run_bytes=run_bytes)
            assert folded.rows == 2
            assert sum(decoded) < 8 * len(content)


def test_malformed_messages_fail_or_are_skipped(tmp_path: Path) -> None:
    content = line(ALPHA, 10, OUTSIDE_TXN, word="a")
    write_journal(tmp_path, STORE, JOURNAL, [content, b"what?\n" + content.replace(b"a", b"a")])
    access, snapshot = taken(tmp_path)
    with raises(MalformedMessage, journal="topic/one", begin=59, end=65) as raised:
        fold_locally(access, snapshot)
    assert raised.value.begin == len(content)
    access, snapshot = taken(tmp_path, shape=MessageFormat(malformed="skip"))
    assert words(access, fold_locally(access, snapshot)) == ["a"]


def test_envelopes_are_decoded_together_and_each_as_it_is(tmp_path: Path) -> None:
    """With what does not count between them; and one that is JSON, but no message of the type."""
    lines = [
        line(ALPHA, 10, OUTSIDE_TXN, word="a"),
        line(BETA, 10, CONTINUE_TXN, word="pending"),
        line(ALPHA, 12, OUTSIDE_TXN, word="b"),
        line(ALPHA, 12, OUTSIDE_TXN, word="b"),
        json_line({"word": "without"}),
        line(ALPHA, 13, OUTSIDE_TXN, word=7),
        line(ALPHA, 14, OUTSIDE_TXN, word="c"),
    ]
    write_journal(tmp_path, STORE, JOURNAL, [b"".join(lines[:5]), b"".join(lines[5:])])
    access, snapshot = taken(tmp_path)
    first, rest = fold_locally(access, snapshot, run_bytes=1).runs
    begins = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]
    with access.open() as opened:
        ((a, b, without),) = read_envelopes(opened, first, Word)
        assert (a.begin, a.end, a.message.word, a.producer) == (0, begins[1], "a", ALPHA)
        assert (b.begin, b.end, b.clock, b.flags) == (begins[2], begins[3], 12, OUTSIDE_TXN)
        assert (without.message.word, without.clock, without.producer) == ("without", 0, bytes(6))
        with pytest.raises(MalformedMessage, match="word") as raised:
            list(read_envelopes(opened, rest, Word))
        assert (raised.value.journal, raised.value.begin) == (JOURNAL, begins[5])
    access, snapshot = taken(tmp_path, shape=MessageFormat(malformed="skip"))
    (_, rest) = fold_locally(access, snapshot, run_bytes=1).runs
    with access.open() as opened:
        ((c,),) = read_envelopes(opened, rest, Word)
    assert (c.begin, c.message.word) == (begins[6], "c")


@pytest.mark.parametrize(
    "text",
    [
        "00000000-0000-1000-8000-01000000000g",
        "00000000-0000-1000-8000-0100000000  ",
        "00000000-0000-1000-8000-01  00000001",
        "00000000-0000-1000-8000-01-000000001",
        "00000000-0000-1000-8000-01--00000001",
        "00000000_0000-1000-8000-010000000001",
        "0000000-00000-1000-8000-010000000001",
    ],
)
def test_what_only_looks_like_a_uuid_is_reported(text: str) -> None:
    good = line(ALPHA, 10, OUTSIDE_TXN, word="a")
    bad = b'{"uuid":"%s","word":"b"}\n' % text.encode()
    for buffer, begin in ((bad + good, 0), (bad * 3, 0)):
        with pytest.raises(MalformedMessage) as raised:
            ColumnDecoder(JOURNAL, MessageFormat()).decode(buffer, 0)
        assert raised.value.begin == begin
    # Behind messages it is left for the next call.
    found = ColumnDecoder(JOURNAL, MessageFormat(malformed="skip")).decode(good + bad + good, 0)
    assert found.columns.begins.tolist() == [0, len(good) + len(bad)]


def test_a_journal_that_is_not_there_is_empty(tmp_path: Path) -> None:
    """Of a store one cannot say more: a broker would say that there is no such journal."""
    (tmp_path / "fragments").mkdir()
    access, snapshot = taken(tmp_path)
    folded = fold_locally(access, snapshot)
    assert words(access, folded) == []
    assert folded.sources[JOURNAL].read_through == 0


def test_selections_are_checked() -> None:
    with raises(Invalid, path="journals"):
        Selection().validate()
    with raises(Invalid, path="broker"):
        Access.of()


@pytest.mark.parametrize("seed", seeds(30))
def test_columns_are_what_the_framing_finds(seed: int) -> None:
    """The fast path of lines that begin with their UUID, and the slow one, in any mixture."""
    rng = random.Random(seed)
    fast, lines = seed % 3 == 0, []
    for number in range(rng.randint(1, 40)):
        uuid = build_uuid(rng.randbytes(6), rng.getrandbits(64), rng.getrandbits(10))
        one = json_line({"word": "x" * rng.randint(0, 9), "n": number}, uuid)
        if not fast and rng.random() < 0.3:
            plain = msgspec.json.decode(one)
            choices = [
                msgspec.json.encode({"n": 1, **{k: v for k, v in plain.items() if k != "uuid"}}),
                msgspec.json.encode({"n": 1, "uuid": plain["uuid"]}),
                msgspec.json.encode({"uuid": plain["uuid"].upper(), "in": {"uuid": "other"}}),
                one[:-2] + b',"uuid":""}',
                b' {"uuid" : null}',
            ]
            one = rng.choice(choices).rstrip(b"\n") + b"\n"
        lines.append(one)
    buffer, base = b"".join(lines) + b'{"uuid":"', rng.randint(0, 99)
    want = JSONLinesFraming(DictCodec(), 1 << 20).decode(buffer, base)
    columns, consumed, _ = ColumnDecoder(JOURNAL, MessageFormat()).decode(buffer, base)
    assert (columns.begins.tolist(), columns.ends.tolist()) == (want.begins, want.ends)
    assert consumed == want.consumed
    assert parse_columns(uuid_bytes(columns.uuids)) == parse_columns(want.uuids)
    assert columns.uuids.clocks.tolist() == parse_columns(want.uuids).clocks


def test_uuids_within_other_fields() -> None:
    decoder = ColumnDecoder(JOURNAL, MessageFormat(uuid_field="_meta.uuid"))
    uuid = "00000000-0000-1000-8002-010000000001"
    buffer = b'{"_meta":{"uuid":"%s"}}\n{"a":1}\n{"_meta":null}\n' % uuid.encode()
    columns, consumed, _ = decoder.decode(buffer, 0)
    assert consumed == len(buffer)
    assert columns.uuids.flags.tolist() == [ACK_TXN, 0, 0]
    assert columns.uuids.producers.tolist() == [int.from_bytes(ALPHA, "big"), 0, 0]


@pytest.mark.parametrize("malformed", ["fail", "skip", "null"])
@pytest.mark.parametrize(
    ("content_type", "messages"),
    [
        (CONTENT_JSON_LINES, [b'{"n":1}\n', b'{"text":"{}"}\n', b"{}\n"]),
        (CONTENT_CSV, [NIL + b",2\n", NIL + b",34\n", NIL + b",5\n"]),
        (CONTENT_PROTO_FIXED, [fixed(b"one"), fixed(b"four"), fixed(b"")]),
    ],
)
def test_an_offset_inside_a_message_is_an_error(
    content_type: str, messages: list[bytes], malformed: Malformed, tmp_path: Path
) -> None:
    """At any offset but those of messages, and whatever is done with malformed ones."""
    write_journal(tmp_path, STORE, JOURNAL, [messages[0], b"".join(messages)], Codec.GZIP)
    ends = list(itertools.accumulate(map(len, [messages[0], *messages]), initial=0))
    shape = MessageFormat(malformed=malformed)
    for begin in range(ends[-1]):
        access, snapshot = taken(
            tmp_path, begin={JOURNAL: begin}, shape=shape, content_type=content_type
        )
        (run,) = snapshot.runs(1 << 20)
        with access.open() as opened:
            if begin in ends:
                found = [at for b in read_columns(opened, run) for at in b.columns.begins.tolist()]
                assert found == [at for at in ends[:-1] if at >= begin]
            else:
                with raises(Corrupt, says="is inside another one", begin=begin):
                    list(read_columns(opened, run))


@pytest.mark.parametrize("malformed", ["skip", "null"])
def test_an_offset_where_a_malformed_message_begins(malformed: Malformed, tmp_path: Path) -> None:
    """Reading may begin there: the message before it has ended."""
    for content_type, good, bad in (
        (CONTENT_JSON_LINES, b"{}\n", b"nonsense\n"),
        (CONTENT_PROTO_FIXED, fixed(b"one"), b"nonsense"),
    ):
        root = tmp_path / content_type
        write_journal(root, STORE, JOURNAL, [good + bad + good])
        shape = MessageFormat(malformed=malformed)
        begin = {JOURNAL: len(good)}
        access, snapshot = taken(root, begin=begin, shape=shape, content_type=content_type)
        (run,) = snapshot.runs(1 << 20)
        with access.open() as opened:
            found = [at for b in read_columns(opened, run) for at in b.columns.begins.tolist()]
        assert found[-1] == len(good + bad)
        assert len(found) == (2 if malformed == "null" else 1)


def test_bytes_need_no_frames(tmp_path: Path) -> None:
    write_journal(tmp_path, STORE, JOURNAL, [b"\x00\x01", b"\x02"])
    access, snapshot = taken(tmp_path, content_type="application/octet-stream")
    (run,) = snapshot.runs()
    assert isinstance(run, Run)
    with access.open() as opened:
        found = [(batch.base, batch.buffer) for batch in read_columns(opened, run)]
        assert found == [(0, b"\x00\x01"), (2, b"\x02")]
