"""The parts of the console that decide without IO."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from gazette.client.journals import ListedJournal
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.uuid import CONTINUE_TXN, build_uuid, uuid_text
from gazette.protocol.route import EMPTY_ROUTE
from gazette.recoverylog.log.ops import Create, RecordedOp, Write, encode_op
from gazette.run.console.cluster import shards_in
from gazette.run.console.frames import SHOWN_BYTES, FrameCutter, message_of
from gazette.run.console.log_moments import commits_in
from gazette.run.console.metric_lines import by_shard, samples_in
from gazette.run.console.verdicts import CRITICAL, WARNING, Verdict, grouped, journal_verdicts
from gazette.testing.broker import journal_spec
from tests.consumer.apps import CLOCK, PRODUCER

UUID = build_uuid(PRODUCER, CLOCK, CONTINUE_TXN)
TEXT = uuid_text(UUID)
METRICS = """
# HELP gazette_build_info 1, of the version that runs.
gazette_build_info{python="3.11.2",version="0.1.0"} 1.0
gazette_shard_phase_seconds_total{phase="20-consuming",shard="/gazette/x/items/a",type="sync"} 1.5
gazette_shard_phase_seconds_total{shard="/gazette/x/items/a/b" 7
gazette_other_total{shard="/gazette/x/items/a"} 3.0
process_cpu_seconds_total nonsense
process_resident_memory_bytes 1e+06
"""


def cut(content_type: str, data: bytes, size: int = 7, offset: int = 100) -> list[Any]:
    """Cut bytes that arrive in pieces."""
    cutter = FrameCutter(content_type, offset)
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return [frame for piece in pieces for frame in cutter.feed(piece)]


def fixed(payload: bytes) -> bytes:
    return b"\x66\x33\x93\x36" + len(payload).to_bytes(4, "little") + payload


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_lines_are_cut_alike_however_they_arrive(size: int) -> None:
    long = b"x" * 10_000
    frames = cut(CONTENT_JSON_LINES, b"one\n\n" + long + b"\nrest", size)
    assert [(frame.begin, frame.end, frame.length) for frame in frames] == [
        *((100, 104, 3), (104, 105, 0), (105, 10_106, 10_000))
    ]
    assert (frames[0].head, frames[2].head) == (b"one", long[:SHOWN_BYTES])


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_fixed_frames_are_found_behind_junk(size: int) -> None:
    data = (
        b"junk" + fixed(b"one") + b"\x66\x33" + fixed(b"") + fixed(b"x" * 9000) + fixed(b"cut")[:-1]
    )
    frames = cut(CONTENT_PROTO_FIXED, data, size)
    assert [(frame.begin, frame.end - frame.begin, frame.length) for frame in frames] == [
        *((104, 11, 3), (117, 8, 0), (125, 9008, 9000))
    ]
    assert (frames[0].head, len(frames[2].head)) == (b"one", SHOWN_BYTES)


@pytest.mark.parametrize(
    ("content_type", "place", "data", "text"),
    [
        (CONTENT_JSON_LINES, "uuid", f'{{"a":{{"uuid":"x"}},"uuid":"{TEXT}"}}\n'.encode(), None),
        (CONTENT_JSON_LINES, "_meta.uuid", f'{{"_meta":{{"uuid":"{TEXT}"}}}}\n'.encode(), None),
        (CONTENT_JSON_LINES, "uuid", f'{{"uuid":"{TEXT}","x":"{"y" * 9000}"}}\n'.encode(), None),
        (CONTENT_CSV, "uuid", f"{TEXT},a\n".encode(), None),
        (
            CONTENT_PROTO_FIXED,
            "uuid",
            fixed(b"\x0a\x10" + UUID + b"\x12\x03one\x18\x96\x01\x25\x01\x00\x00\x00"),
            "",
        ),
    ],
)
def test_uuids_are_found_without_the_type(
    content_type: str, place: str, data: bytes, text: str | None
) -> None:
    message = message_of(cut(content_type, data)[0], content_type, place)
    assert (message["uuid"], message["role"]) == (TEXT, "pending")
    assert message["producer"] == PRODUCER.hex()
    assert text is None or message["text"] == text


@pytest.mark.parametrize(
    "line", [b'{"uuid":7}', b'{"uuid":"x"}', b"[1]", b"[" * 5000, b"\xff", b'"uuid"']
)
def test_what_has_no_uuid_is_shown_all_the_same(line: bytes) -> None:
    message = message_of(cut(CONTENT_JSON_LINES, line + b"\n")[0], CONTENT_JSON_LINES, "uuid")
    assert "uuid" not in message
    assert (
        message_of(cut(CONTENT_PROTO_FIXED, fixed(line))[0], CONTENT_PROTO_FIXED, "uuid")["begin"]
        == 100
    )


def test_metrics_of_another_form_are_left_out() -> None:
    samples = samples_in(METRICS)
    assert samples["process_resident_memory_bytes"] == {(): 1e6}
    assert samples["gazette_build_info"] == {(("python", "3.11.2"), ("version", "0.1.0")): 1.0}
    assert "process_cpu_seconds_total" not in samples
    phases = by_shard(samples)["a"]["gazette_shard_phase_seconds_total"]
    assert phases == {(("phase", "20-consuming"), ("type", "sync")): 1.5}


def test_commits_are_found_from_the_middle_of_a_log() -> None:
    def op(action: Any, group_time: int = 0) -> bytes:
        return encode_op(RecordedOp(1, 0, 7, action, group_time=group_time))[0]

    first = op(Create("/a"), 1000) + op(Write(1, 0, 9)) + b"raw bytes"
    second = op(Write(1, 9, 4), 2000) + b"\x66\x33\x93\x36"
    data = b"rest of another" + first + second
    begin = 50 + len(b"rest of another")
    commits = commits_in(data, 50)
    assert [
        (commit.begin, commit.end, commit.time_ms, commit.operations) for commit in commits
    ] == [
        (begin, begin + len(first), 1000, 2),
        (begin + len(first), 50 + len(data), 2000, 1),
    ]
    # A commit that is cut is left out.
    assert len(commits_in(data[:-1], 50)) == 1


def test_verdicts_of_one_reason_are_one_entry_and_the_most_urgent_is_first() -> None:
    many = [Verdict(WARNING, "journal", f"j{number}", "thin", "do", "c") for number in range(30)]
    entries = grouped([*many, Verdict(CRITICAL, "shard", "s", "failed", "mend")])
    assert [(entry["severity"], entry["count"], len(entry["names"])) for entry in entries] == [
        ("critical", 1, 1),
        ("warning", 30, 20),
    ]


def test_urls_of_specifications_are_quoted_in_commands() -> None:
    url = "s3://bucket/?endpoint=http://minio&profile=$(id)"
    spec = journal_spec("a/journal", stores=(url,))
    journal = ListedJournal(spec, 1, 1, EMPTY_ROUTE)
    problem, _ = journal_verdicts([journal], {("journal", "a/journal"): "it fails"})
    assert shlex.split(problem.command) == ["gazctl", "journals", "store-health", url]


@pytest.mark.parametrize(
    "page",
    [
        *("", "404 page not found", "7", "[]", '{"shards": 5}', '{"shards": {"id": "a"}}'),
        *('{"shards": [1, {}, {"id": 7}]}', "[" * 100_000, '{"shards": [{"id": 1e999}]}'),
    ],
)
def test_pages_of_another_version_have_no_shards(page: str) -> None:
    assert shards_in(page) == []


def test_samples_are_numbers_of_json() -> None:
    names = ("process_cpu_seconds_total", "process_resident_memory_bytes")
    for number in ("NaN", "+Inf", "-Inf", "many"):
        assert samples_in("".join(f"{name} {number}\n" for name in names)) == {}
