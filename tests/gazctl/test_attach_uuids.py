"""UUIDs before lines of text."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import BinaryIO, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.errors import Invalid
from gazette.gazctl.attach_uuids import Template, UuidAttacher, read_lines, whole_records
from gazette.message.framing.csv import format_record, parse_record
from gazette.message.uuid import OUTSIDE_TXN, parse_text, parse_uuid
from gazette.testing.clock import ManualClock
from tests.gazctl.runner import offline


def test_each_line_gets_a_uuid_of_one_producer_whose_clock_ascends(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("a,1\r\nb,2\n")
    (tmp_path / "two.csv").write_text("c,3\n\nd,4")
    result = offline("attach-uuids", str(tmp_path / "one.csv"), str(tmp_path / "two.csv"))
    assert result.code == 0
    rows = [line.split(",", 1) for line in result.out.splitlines()]
    assert [row[1] for row in rows] == ["a,1", "b,2", "c,3", "", "d,4"]
    parsed = [parse_uuid(parse_text(row[0])) for row in rows]
    assert len({one.producer for one in parsed}) == 1
    assert {one.flags for one in parsed} == {OUTSIDE_TXN}
    clocks = [one.clock for one in parsed]
    assert clocks == sorted(set(clocks))


def test_two_runs_are_two_producers() -> None:
    runs = [offline("attach-uuids", "--template={{.UUID}}", stdin=b"x\n").out for _ in range(2)]
    assert len({parse_uuid(parse_text(uuid)).producer for uuid in runs}) == 2


def test_clocks_follow_the_wall(clock: ManualClock) -> None:
    attacher = UuidAttacher(Template("{{.UUID}}"), clock, random.Random(1))
    first = parse_uuid(parse_text(attacher.attach([b"x"]).decode()))
    clock.advance(10.0)
    second = parse_uuid(parse_text(attacher.attach([b"x"]).decode()))
    # A difference of ten seconds, in 100 ns with four bits of sequence, to within a tick.
    assert abs(second.clock - first.clock - (10 * 10**7 << 4)) <= 160


def test_headers_are_left_out_of_every_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"header\n{name}\n")
    argv = ["attach-uuids", "--skip-header", "--template={{.Line}};"]
    assert offline(*argv, str(tmp_path / "one"), str(tmp_path / "two")).out == "one;two;"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{.Line}},{{.UUID}}\n", b"a line,U\n"),
        ('{"uuid":"{{ .UUID }}","record":{{.Line}}}', b'{"uuid":"U","record":a line}'),
        ("{{.Line}}{{.Line}}", b"a linea line"),
        ("text", b"text"),
        ("", b""),
    ],
)
def test_templates_are_rendered(template: str, expected: bytes) -> None:
    assert Template(template).render(b"U", b"a line") == expected


@pytest.mark.parametrize(
    "template", ["{{.Uuid}}", "{{}}", "{{range .}}x{{end}}", "{{.UUID", "a {{ b"]
)
def test_templates_that_cannot_be_rendered_are_refused(template: str) -> None:
    with pytest.raises(Invalid):
        Template(template)
    assert offline("attach-uuids", "--template", template, stdin=b"x\n").code == 2


def test_a_line_that_is_too_long_is_named() -> None:
    """It is refused whether or not it has an end."""
    for text in (b"ok\n" + b"x" * 11 + b"\n", b"ok\n" + b"x" * 11):
        result = offline("attach-uuids", "--max-length=10", stdin=text)
        assert result.code == 2
        assert "line 2 of - is longer than 10 bytes" in result.err
    assert offline("attach-uuids", "--max-length=10", stdin=b"x" * 10).code == 0


def test_no_output_is_begun_if_a_file_is_missing(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("x\n")
    result = offline("attach-uuids", str(tmp_path / "one"), str(tmp_path / "missing"))
    assert (result.code, result.out) == (2, "")
    assert "missing" in result.err


class Pieces(io.RawIOBase):
    """A file that gives a piece at a time."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = [piece for piece in pieces if piece]

    def read1(self, _size: int) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""


@given(st.lists(st.binary(max_size=6).map(lambda b: b.replace(b"x", b"\n"))))
def test_lines_do_not_depend_on_how_they_come(pieces: list[bytes]) -> None:
    """The same lines as of the whole, whatever pieces it came in."""
    whole = b"".join(pieces)
    expected = whole.split(b"\n")
    if not expected[-1]:
        expected.pop()
    expected = [line.removesuffix(b"\r") for line in expected]
    found = [
        line for batch in read_lines("f", cast("BinaryIO", Pieces(pieces)), 1000) for line in batch
    ]
    assert found == expected


fields = st.lists(st.text("a\",\n'x\u00e9", max_size=6), min_size=1, max_size=4)


@given(records=st.lists(fields, max_size=6), chunk=st.integers(1, 40))
def test_records_of_csv_keep_their_fields(records: list[list[str]], chunk: int) -> None:
    """Quoted newlines among them: the UUID stands before a record, and never within a field."""
    content = "".join(map(format_record, records)).encode("utf-8", "surrogatepass")
    pieces = [content[at : at + chunk] for at in range(0, len(content), chunk)]
    file = cast(BinaryIO, Pieces(pieces))
    attacher = UuidAttacher(Template("{{.UUID}},{{.Line}}\n"), ManualClock(), random.Random(1))
    batches = whole_records("in", read_lines("in", file, 1 << 20), 1 << 20)
    written = b"".join(map(attacher.attach, batches))
    found, at = [], 0
    while at < len(written):
        record = parse_record(written, at)
        assert record is not None
        assert not record.error
        found.append(record.fields)
        at = record.end
    assert [one[1:] for one in found] == records
    for one in found:
        parse_text(one[0])


def test_a_quote_that_is_not_closed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('a,1\nb,"x\ny\n')
    result = offline("attach-uuids", str(path))
    assert result.code != 0
    assert "line 2" in result.err
    # Lines of other templates have no quotes.
    assert offline("attach-uuids", "--template={{.Line}} {{.UUID}}\n", str(path)).code == 0
    result = offline("attach-uuids", "--max-length=8", stdin=b'"abc\ndef\nghi"\n')
    assert result.code != 0
    assert "line 1" in result.err
