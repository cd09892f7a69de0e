"""`gazette bench`: its arguments, what it reports, and small runs of it against real processes.

Nothing here says how fast anything has to be.
"""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
import zstandard
from rich.console import Console

from gazette import main
from gazette.errors import Invalid, NotFound, Unavailable
from gazette.http2.messages import prefixed
from gazette.protocol.pb import broker_pb2
from gazette.protocol.status import Status
from tests.facts import raises
from tools.bench import clients, load, sides
from tools.bench import main as bench
from tools.bench import processes as bench_processes
from tools.bench import report as bench_report
from tools.bench.app import MESSAGE_BYTES, BenchMessage, message_of
from tools.bench.bare import BareSQLite, decompress
from tools.bench.report import (
    Baseline,
    Figure,
    Report,
    number,
    percentile,
    ratio_at_least,
    ratio_at_most,
    value_at_least,
    value_at_most,
)

SUITES = [
    "append",
    "latency",
    "small",
    "large",
    "tailers",
    "read",
    "publish",
    "consume",
    "clients",
    "end-to-end",
    "timeline",
    "failover",
    "playback",
    "idle",
    "many",
    "memory",
    "allocator",
]


# -- arguments


def test_every_suite_of_the_design_is_there_and_all_is_the_default() -> None:
    assert list(bench.SUITES) == SUITES
    assert list(bench.suites_of([])) == SUITES
    assert list(bench.suites_of(["idle", "all"])) == SUITES


def test_suites_run_once_and_in_their_own_order() -> None:
    assert bench.suites_of(["idle", "append", "idle"]) == ("append", "idle")


def test_an_unknown_suite_is_refused_with_those_that_exist() -> None:
    with raises(Invalid, path="gazette bench", says='"appends"') as caught:
        bench.suites_of(["appends"])
    assert all(name in caught.value.hint for name in (*SUITES, "all"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["appends"], "unknown suite"),
        (["--secondz=1"], "did you mean --seconds"),
        (["--seconds=0"], "invalid seconds"),
        (["--seconds=soon"], "invalid value"),
        (["--rounds=0"], "invalid rounds"),
        (["--json=/does/not/exist/a.json"], "is not a directory"),
        (["--dir=/does/not/exist"], "is not a directory"),
        (["small", "--into=/does/not/exist.md"], "cannot read"),
        (["small", f"--into={__file__}"], "has no place for the table of these suites"),
    ],
)
def test_mistakes_in_flags_start_nothing(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["bench", *argv]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert "starting" not in printed.out


def test_less_time_prepares_less_but_never_nothing(tmp_path: Path) -> None:
    usual = bench.settings_of(bench.BenchFlags(), tmp_path)
    assert usual.scale == 1.0
    short = bench.settings_of(bench.BenchFlags(seconds=0.05), tmp_path)
    assert short.scale == pytest.approx(0.1)
    least = bench.settings_of(bench.BenchFlags(seconds=1e-6, rounds=1), tmp_path)
    assert least.scale == bench.SCALE_MIN
    assert least.kills == 1


# -- figures


def test_the_figure_is_a_median_and_its_ratio_that_of_rounds() -> None:
    """A round that was disturbed as a whole changes neither."""
    figure = Figure(
        "append", "x", "MB/s", (60.0, 9.0, 66.0), Baseline("bare", (100.0, 10.0, 120.0))
    )
    assert figure.value == 60.0
    assert figure.ratio == pytest.approx(0.6)
    assert figure.met is None


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (ratio_at_least(0.5), True),
        (ratio_at_least(0.51), False),
        (ratio_at_most(0.5), True),
        (ratio_at_most(0.49), False),
        (value_at_least(10, "ms"), True),
        (value_at_least(11, "ms"), False),
        (value_at_most(10, "ms"), True),
        (value_at_most(9, "ms"), False),
    ],
)
def test_targets_are_bounds_of_the_figure_or_of_its_ratio(
    target: bench_report.Target, met: bool
) -> None:
    assert Figure("s", "x", "ms", (10.0,), Baseline("b", (20.0,)), target).met is met


def test_a_ratio_to_nothing_is_none_and_meets_nothing() -> None:
    target = ratio_at_least(0.5)
    assert Figure("s", "x", "ms", (10.0,), None, target).met is None
    assert Figure("s", "x", "ms", (10.0,), Baseline("b", (0.0,)), target).ratio is None


def test_percentiles() -> None:
    samples = [float(one) for one in range(100, 0, -1)]
    assert percentile(samples, 50) == 51.0
    assert percentile(samples, 99) == 100.0
    assert percentile([3.0], 99) == 3.0
    with pytest.raises(NotFound):
        percentile([], 50)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.1234, "0.123"), (12.34, "12.3"), (1234567.8, "1,234,568")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def report_of(*figures: Figure) -> Report:
    return Report(figures, {"cores": 2}, "gazette bench append", 1.25, {"append": 1.0})


def test_the_table_says_what_was_met_and_what_was_not() -> None:
    beside = Baseline("bare stream", (100.0,))
    report = report_of(
        Figure("append", "fast", "MB/s", (70.0,), beside, ratio_at_least(0.6), "a note"),
        Figure("append", "slow", "MB/s", (50.0,), beside, ratio_at_least(0.6)),
        Figure("idle", "plain", "/s", (0.0,)),
    )
    output = io.StringIO()
    Console(file=output, width=120).print(report.table())
    rows = {
        line.split("│")[1].strip(): line for line in output.getvalue().splitlines() if "│" in line
    }
    assert "70 MB/s" in rows["fast"]
    assert "100 MB/s bare stream" in rows["fast"]
    assert "0.70 ×" in rows["fast"]
    assert "yes" in rows["fast"]
    assert "no" in rows["slow"].split("│")[6]
    assert "≥ 0.6 ×" in rows["slow"]
    assert report.notes() == ["fast: a note"]


def test_a_table_of_a_page_is_replaced_and_the_rest_of_it_stays(tmp_path: Path) -> None:
    machine = {
        "date": "2026-11-24T05:00:00+00:00",
        "cores": 2,
        "python": "3.14.6",
        "python_build": "PGO and LTO",
        "load_at_start": [0.5, 1.0, 1.0],
        "load_at_end": [2.25, 1.0, 1.0],
    }
    beside = Baseline("original", (4.0,))
    fast = Figure("small", "p50", "ms", (6.0,), beside, ratio_at_most(2.0))
    text = Report((fast,), machine, "", 1.0).markdown("gazette bench small")
    lines = text.splitlines()
    assert lines[0] == (
        "`gazette bench small`, on 2026-11-24 at 05:00:00 UTC, on 2 cores, by Python 3.14.6 (PGO and LTO). "
        "The load was 0.5 before, and 2.2 after."
    )
    assert lines[1:] == [
        "",
        "| figure | measured | beside | ratio | target | met |",
        "|---|---|---|---|---|---|",
        "| p50 | 6 ms | 4 ms original | 1.50 × | ≤ 2 × | yes |",
    ]
    path = tmp_path / "page.md"
    path.write_text("a\n<!-- gazette bench small -->\nold\n<!-- end of the table -->\nb\n")
    assert bench.table_of(path, ["small"]) == (
        "a\n<!-- gazette bench small -->\n",
        "<!-- end of the table -->\nb\n",
    )
    with raises(
        Invalid, path="--into", says="no place", advises="<!-- gazette bench small many -->"
    ):
        bench.table_of(path, ["small", "many"])


def test_json_holds_all_rounds_and_is_written_whole(tmp_path: Path) -> None:
    beside = Baseline("bare", (2.0, 4.0))
    report = report_of(
        Figure("append", "x", "MB/s", (1.0, 3.0), beside, ratio_at_least(0.6)),
        Figure("idle", "y", "/s", (0.0,), target=value_at_most(0, "/s")),
    )
    path = tmp_path / "figures.json"
    bench.write_json(path, report.as_json())
    assert os.listdir(tmp_path) == ["figures.json"]
    written = json.loads(path.read_text())
    assert written["schema"] == bench_report.SCHEMA
    assert written["suites"] == {"append": 1.0}
    assert (written["targets"], written["targets_met"]) == (2, 2)
    check_shape(written)
    first = written["figures"][0]
    assert first["values"] == [1.0, 3.0]
    assert first["baseline"] == {"name": "bare", "value": 3.0, "values": [2.0, 4.0]}
    assert first["ratio"] == pytest.approx(0.625)
    assert first["target"] == {"of": "ratio", "at_least": True, "bound": 0.6}
    assert first["met"] is True


def check_shape(written: dict[str, Any]) -> None:
    assert written["command"].startswith("gazette bench")
    assert written["machine"]["cores"] >= 1
    for figure in written["figures"]:
        assert set(figure) == {
            "suite",
            "name",
            "unit",
            "value",
            "values",
            "baseline",
            "ratio",
            "target",
            "met",
            "note",
        }
        assert figure["values"]
        assert min(figure["values"]) <= figure["value"] <= max(figure["values"])
        assert (figure["met"] is None) == (figure["target"] is None)


# -- what it measures with


def test_messages_are_a_hundred_bytes_each_and_differ() -> None:
    lines = []
    for index in range(2000):
        message = message_of(index)
        message.uuid = "0" * 36
        lines.append(msgspec.json.encode(message) + b"\n")
    assert {len(line) for line in lines} == {MESSAGE_BYTES}
    assert len(set(lines)) == len(lines)
    assert len({message_of(index).word for index in range(2000)}) > 1000


def test_the_bare_loops_count_every_message(tmp_path: Path) -> None:
    messages = [message_of(index) for index in range(300)]
    lines = [
        b"".join(msgspec.json.encode(one) + b"\n" for one in messages[begin : begin + 100])
        for begin in range(0, 300, 100)
    ]
    expected = Counter(one.word for one in messages)
    for way in (BareSQLite.fold, BareSQLite.upsert):
        path = tmp_path / f"{way.__name__}.db"
        bare = BareSQLite(path)
        assert way(bare, lines) == 300
        bare.close()
        connection = apsw.Connection(str(path))
        assert dict(connection.execute("SELECT word, n FROM counts")) == expected
        connection.close()


def test_the_bare_decompressor_reads_everything(tmp_path: Path) -> None:
    content = os.urandom(1 << 20) + bytes(1 << 20)
    paths = [tmp_path / "a.zst", tmp_path / "b.zst"]
    for path in paths:
        path.write_bytes(zstandard.compress(content))
    assert decompress(paths) == decompress(paths, verify=True) == 2 * len(content)


def test_cpu_and_metrics_of_processes_are_read() -> None:
    before = bench_processes.cpu_seconds([os.getpid()])
    while bench_processes.cpu_seconds([os.getpid()]) == before:  # It grows in steps of 10 ms.
        sum(range(200_000))
    assert bench_processes.cpu_seconds([os.getpid()]) > before
    with raises(NotFound, says="4194305"):
        bench_processes.cpu_seconds([4_194_305])
    metrics = bench_processes.parse(
        "# HELP a text\n# TYPE a counter\n"
        'a{grpc_method="Range",grpc_service="KV"} 3\na{grpc_method="Range",x="y"} 4\n'
        'a{grpc_method="Put"} 1e+01\nb 2.5\nab 7\n'
    )
    assert bench_processes.by_method(metrics, "a") == {"Range": 7.0, "Put": 10.0}
    assert bench_processes.total(metrics, "a") == 17.0
    assert bench_processes.total(metrics, "b") == 2.5


def test_machine_facts_say_what_figures_depend_on() -> None:
    from gazette.runtime.clock import SystemClock

    facts = bench_report.machine_facts(SystemClock())
    assert facts["cores"] >= 1
    assert facts["libraries"]["grpcio"]
    assert facts["date"].endswith("+00:00")


# -- runs of it


def run(tmp_path: Path, *argv: str) -> dict[str, Any]:
    path = tmp_path / "figures.json"
    assert main.run(["bench", *argv, f"--json={path}", f"--dir={tmp_path}"]) == 0
    written: dict[str, Any] = json.loads(path.read_text())
    assert os.listdir(tmp_path) == ["figures.json"], "state was left behind"
    check_shape(written)
    return written


def names(written: dict[str, Any], suite: str) -> list[str]:
    return [one["name"] for one in written["figures"] if one["suite"] == suite]


def test_a_small_run_measures_journals_and_recovery(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suites = ("append", "latency", "read", "publish", "playback")
    written = run(tmp_path, *suites, "--seconds=0.005", "--rounds=1")
    assert list(written["suites"]) == list(suites)
    figures = {one["name"]: one for one in written["figures"]}
    for name in ("append, R=1", "append, R=3", "read, caught up", "read fragments directly"):
        assert figures[name]["unit"] == "MB/s"
        assert figures[name]["ratio"] > 0
        assert figures[name]["target"]["of"] == "ratio"
    assert figures["append latency, R=1, p50"]["target"]["bound"] == 2.0
    assert figures["append latency, R=3, p50"]["target"]["bound"] == 4.0
    assert figures["publish committed, in batches"]["target"]["bound"] == 300_000
    # Sizes are no times: these hold on any machine.
    assert figures["recovery horizon"]["met"] is True
    assert figures["log bytes per byte of a small transaction"]["met"] is True
    printed = capsys.readouterr().out
    assert "append, R=1" in printed
    assert "≥ 0.6 ×" in printed


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_run_of_everything(tmp_path: Path) -> None:
    written = run(tmp_path, "--seconds=0.05", "--rounds=1")
    assert list(written["suites"]) == SUITES
    assert all(names(written, suite) for suite in SUITES)
    figures = {one["name"]: one for one in written["figures"]}
    assert figures["failed queries"]["value"] == 0
    assert figures["blob store operations that are no listings"]["value"] == 0


def test_the_message_type_is_what_applications_use() -> None:
    assert issubclass(BenchMessage, msgspec.Struct)
    assert BenchMessage(word="a", count=1).uuid == ""


@pytest.mark.long
def test_small_calls_are_measured(tmp_path: Path) -> None:
    written = run(tmp_path, "small", "--seconds=0.005", "--rounds=1")
    small = names(written, "small")
    for shape in ("R=1, one appender, p50", "R=3, 8 appenders on one journal, rate"):
        assert f"{shape}, http2" in small
    assert {one["baseline"]["name"] for one in written["figures"] if one["suite"] == "small"} == {
        "bare http2"
    }


@pytest.mark.long
def test_large_appends_are_measured(tmp_path: Path) -> None:
    written = run(tmp_path, "large", "--seconds=0.005", "--rounds=1")
    assert "R=3, appends of 32 MiB, http2" in names(written, "large")
    assert "R=1, append service, 100 bytes each, http2" in names(written, "large")


@pytest.mark.long
def test_readers_are_measured(tmp_path: Path) -> None:
    written = run(tmp_path, "tailers", "--seconds=0.005", "--rounds=1")
    assert "5 readers at 1 MB/s, append p50, http2" in names(written, "tailers")


@pytest.mark.long
def test_many_journals_are_measured(tmp_path: Path) -> None:
    page = tmp_path / "figures.md"
    begin, end = "<!-- gazette bench many -->\n", "<!-- end of the table -->\n"
    page.write_text(f"before\n{begin}old\n{end}after\n")
    argv = ["--seconds=0.005", "--rounds=1", f"--dir={tmp_path}", f"--into={page}"]
    assert main.run(["bench", "many", *argv]) == 0
    assert os.listdir(tmp_path) == ["figures.md"], "state was left behind"
    written = page.read_text()
    assert written.startswith(f"before\n{begin}\n`gazette bench many")
    assert written.endswith(f"\n{end}after\n")
    assert "| start of a broker, 10 journals, http2 |" in written


def test_a_directory_without_the_original_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sides.ORIGINAL_ENV, str(tmp_path))
    with raises(Invalid, path="GAZETTE_GO", says="has no program gazette"):
        sides.original_directory()


def test_figures_of_clients_are_ratios_to_the_original_if_it_took_part() -> None:
    row = clients.Row("publish", ratio_at_least(0.5), [clients.Taken(2_000_000, 4.0, 6.0)])
    rate, cpu = row.figures()
    assert (rate.value, rate.unit, rate.ratio, rate.met) == (500_000, "msg/s", None, None)
    assert (cpu.value, cpu.unit) == (3.0, "s/M msg")
    row.original.append(clients.Taken(1_000_000, 1.0, 1.5))
    rate, cpu = row.figures()
    assert (rate.ratio, rate.met) == (0.5, True)
    assert (cpu.ratio, cpu.met) == (2.0, None)


def test_a_directory_without_clients_of_the_original_says_how_to_build_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sides.ORIGINAL_ENV, str(tmp_path))
    with raises(Invalid, path="GAZETTE_GO", says="no program gazette-bench", advises="README"):
        sides.original_program(clients.PROGRAM, clients.BUILD_HINT)
    (tmp_path / clients.PROGRAM).touch(mode=0o755)
    assert sides.original_program(clients.PROGRAM, "") == tmp_path / clients.PROGRAM


@pytest.mark.long
@pytest.mark.timeout(300)
def test_clients_are_measured_with_and_without_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = os.environ.get(sides.ORIGINAL_ENV, "")
    monkeypatch.delenv(sides.ORIGINAL_ENV, raising=False)
    written = run(tmp_path, "clients", "--seconds=0.005", "--rounds=1")
    rows = names(written, "clients")
    assert "catch up, an SQL upsert each, CPU" in rows
    assert {one["ratio"] for one in written["figures"]} == {None}
    assert [bool(one["note"]) for one in written["figures"]].count(True) == 1
    assert "the original is left out" in capsys.readouterr().out
    if (Path(directory) / clients.PROGRAM).is_file():
        monkeypatch.setenv(sides.ORIGINAL_ENV, directory)
        written = run(tmp_path, "clients", "--seconds=0.005", "--rounds=1")
        assert names(written, "clients") == rows
        assert all(one["ratio"] > 0 for one in written["figures"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo no broker; exit 3", "ended with exit code 3"),
        ("echo done", "printed no result: done"),
    ],
)
def test_a_publisher_of_the_original_that_fails_is_no_measurement(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    words: str,
) -> None:
    program = tmp_path / clients.PROGRAM
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv(sides.ORIGINAL_ENV, str(tmp_path))
    argv = ["clients", "--seconds=0.005", "--rounds=1", f"--dir={tmp_path}"]
    assert main.run(["bench", *argv]) == 1
    assert words in capsys.readouterr().out


def test_an_append_that_fails_is_no_measurement() -> None:
    response = broker_pb2.AppendResponse(status=Status.NOT_ALLOWED.name)
    refused = prefixed(response.SerializeToString())
    for answered in (b"", refused):
        with raises(Unavailable, says="an append failed"):
            load.check_answer(answered, b"")
    load.check_answer(prefixed(broker_pb2.AppendResponse(total_chunks=2).SerializeToString()), b"")
