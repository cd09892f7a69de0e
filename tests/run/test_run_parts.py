"""The parts of `gazette run`: its flags, its lock, what it says, and what it watches."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gazette import Application, CSVRecord, Message, Source
from gazette.client.client import Client
from gazette.declare.declaration import Declaration, DeclaredJournals
from gazette.errors import Conflict, Invalid
from gazette.message.key_rule import KeyRule
from gazette.run.banner import banner, publish_command, query_command
from gazette.run.changed_files import ChangedFiles
from gazette.run.command import run
from gazette.run.consumption import (
    FREE_BYTES_MIN,
    ConsumptionReport,
    ConsumptionSeen,
    consumption_text,
    messages_between,
    seen_in,
    space_text,
)
from gazette.run.lock import FILE, RunLock
from gazette.run.samples import MessageSample, samples_of
from gazette.run.session import RunSession
from gazette.run.settings import RunFlags
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.runtime.tasks import TaskScope
from gazette.testing.clock import ManualClock
from gazette.testing.instant_clock import eventually

ROOT = Path(__file__).parents[2]


class Word(Message):
    word: str
    count: int
    note: str = ""


# --- The import


async def test_an_import_that_takes_long_is_said_every_ten_seconds(tmp_path: Path) -> None:
    """The module waits for a file, which is made at the third notice."""
    program, done = tmp_path / "app.py", tmp_path / "done"
    program.write_text(
        "import pathlib, time\n"
        f"while not pathlib.Path({str(done)!r}).exists():\n"
        "    time.sleep(0.01)\n"
        "raise SystemExit\n"
    )
    clock = ManualClock()
    said: list[str] = []

    def say(text: str, *, at: bool = True) -> None:
        said.append(text)
        if len(said) == 3:
            done.touch()

    async def pass_time() -> None:
        while True:
            await eventually(lambda: clock.sleepers)
            clock.advance(10.0)

    flags = RunFlags(dir=tmp_path / ".gazette")
    session = RunSession(str(program), flags, "", "", (), clock, say, os.environ, lambda: False)
    async with TaskScope("time") as scope:
        scope.daemon(pass_time(), name="time")
        assert await session.run() == 2
        scope.cancel()
    assert said[1] == f"{program} is still being imported, for 20 s now (Ctrl-C ends it)"


# --- Flags


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "no application is named"),
        (["app.py", "other.py"], "2 applications are named"),
        (["app.py", "--standby=1"], "did you mean --standbys"),
        (["app.py", "--standbys=-1"], "-1 standbys"),
        (["app.py", "--standbys=1", "--workers=1"], "Give --workers 2"),
        (["app.py", "--workers=65"], "65 processes"),
        (["app.py", "--replication=2"], "Give --brokers 2."),
        (["app.py", "--broker.address=http://b:1"], "Give --etcd.address as well"),
        (["app.py", "--etcd.address=http://e:1"], "Give --broker.address as well"),
        (["app.py", "--broker.address=http://b:1", "--etcd.address=http://e:1"], "no blob store"),
        (["app.py", "--store=s3://b/"], "Leave it out, or give --broker.address."),
        (["app.py", "--report=0s"], "--report"),
        (["app.py", "--dir="], "a directory is needed"),
    ],
)
def test_flags_that_cannot_be_are_named(
    argv: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything is started or written."""
    monkeypatch.chdir(tmp_path)
    assert run(argv) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_standbys_need_one_process_more() -> None:
    assert RunFlags().member_count() == 1
    assert RunFlags(standbys=2).member_count() == 3
    assert RunFlags(workers=4, standbys=1).member_count() == 4
    assert RunFlags(standbys=1).spec_settings(embedded=True).hot_standbys == 1
    assert RunFlags(brokers=5).spec_settings(embedded=True).replication == 3


# --- The lock


def test_the_directory_of_a_run_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with RunLock(tmp_path / "state", "app.py"):
            assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_a_second_run_names_the_first(tmp_path: Path) -> None:
    with (
        RunLock(tmp_path, "app.py") as lock,
        pytest.raises(
            Conflict, match=f"process {os.getpid()} uses {tmp_path}: it runs app.py since"
        ) as caught,
        RunLock(tmp_path, "other.py"),
    ):
        raise AssertionError("two have the lock")
    assert f"kill {os.getpid()}" in caught.value.hint
    assert not lock.after_crash
    with RunLock(tmp_path, "other.py") as second:
        assert not second.after_crash


def test_a_run_after_a_crash_knows_it(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; from gazette.run.lock import RunLock\n"
        "RunLock(pathlib.Path(sys.argv[1]), 'app.py').__enter__(); os.kill(os.getpid(), 9)"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environ, check=False)
    assert ended.returncode == -9
    with RunLock(tmp_path, "app.py") as lock:
        assert lock.after_crash
    assert (tmp_path / FILE).read_bytes() == b""


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Invalid, match="cannot write to") as caught, RunLock(tmp_path / "file", "a"):
        raise AssertionError("it was written")
    assert caught.value.path == "--dir"


# --- Files


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text("longer than before"),
        lambda path: path.unlink(),
        lambda path: path.with_name("new").rename(path),
    ],
    ids=["written", "removed", "replaced"],
)
async def test_changed_files_are_seen(tmp_path: Path, change: Callable[[Path], Any]) -> None:
    path, other = tmp_path / "a.py", tmp_path / "b.py"
    for one in (path, other, tmp_path / "new"):
        one.write_text("x")
    files = ChangedFiles([str(path), str(other)])
    change(path)
    async with asyncio.timeout(10):
        assert await files.wait(SystemClock()) == [str(path)]


# --- What is consumed

METRICS = b"""\
# HELP gazette_shard_read_messages_total Messages of finished transactions.
gazette_shard_read_messages_total{shard="/app/items/shard-000"} 1200.0
gazette_shard_read_messages_total{shard="/app/items/shard-001"} 1e+06
gazette_shard_read_messages_created{shard="/app/items/shard-001"} 1.7e+09
"""


def _shard(name: str, slot: int, status: str, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "slot": slot,
        "status": status,
        "read_through": {},
        "errors": [],
        "play_back": None,
        "waits_for": None,
        **more,
    }


def test_members_say_what_they_consumed() -> None:
    shards = [
        _shard("shard-000", 0, "PRIMARY", read_through={"words/part-000": 7}),
        _shard("shard-001", 1, "STANDBY", read_through={"words/part-001": 3}),
        _shard("shard-002", 0, "FAILED", errors=["ValueError: no"]),
        _shard("shard-003", 0, "BACKFILL", play_back="playing x at 1 of 2, 1.0 MB/s, 0 s left"),
        _shard("shard-004", 1, "BACKFILL", play_back="of a standby"),
        _shard("shard-005", 0, "BACKFILL", play_back="at 0 of 0", waits_for="a/log: no broker"),
    ]
    seen = seen_in({"http://a": (METRICS, msgspec.json.encode({"shards": shards}))})
    assert seen.messages == {
        "http://a /app/items/shard-000": 1200,
        "http://a /app/items/shard-001": 1e6,
    }
    assert seen.read_through == {"words/part-000": 7}
    assert seen.primaries == 1
    assert seen.errors == {"shard-002": "ValueError: no"}
    assert seen.recoveries == {"shard-003": "playing x at 1 of 2, 1.0 MB/s, 0 s left"}
    assert seen.waits == {"shard-005": "a/log: no broker"}


async def test_a_process_that_does_not_answer_is_named_once_a_minute() -> None:
    clock = ManualClock()
    address = f"http://127.0.0.1:{free_port()}"
    async with Client("http://127.0.0.1:1", clock=clock) as client:
        report = ConsumptionReport(lambda: [address], (), 1, client, clock)
        silent = re.compile(rf"{address} has not answered for (\d+) s: ")
        said = []
        for _ in range(9):
            said += [found[1] for line in await report.look() if (found := silent.match(line))]
            clock.advance(10)
    assert said == ["10", "70"], "not the first time: it may have just started"


def test_a_counter_that_began_again_counts_from_zero() -> None:
    before = ConsumptionSeen({"a": 100, "b": 50, "gone": 9}, {}, 0, {})
    after = ConsumptionSeen({"a": 110, "b": 5, "new": 7}, {}, 0, {})
    assert messages_between(before, after) == 10 + 5 + 7


@pytest.mark.parametrize(
    ("rate", "lag", "text"),
    [
        (0.0, 0, "0 messages/s, lag 0 B, 1 of 2 shards run"),
        (0.55, 1023, "0.6 messages/s, lag 1023 B, 1 of 2 shards run"),
        (12345.6, 1536, "12,346 messages/s, lag 1.5 KiB, 1 of 2 shards run"),
        (1.0, 5 << 40, "1 messages/s, lag 5.0 TiB, 1 of 2 shards run"),
        (1.0, None, "1 messages/s, lag unknown, 1 of 2 shards run"),
    ],
)
def test_one_line_says_rate_and_lag(rate: float, lag: int | None, text: str) -> None:
    assert consumption_text(rate, lag, 1, 2) == text


def test_a_disk_that_is_nearly_full_is_named() -> None:
    assert space_text(".gazette/", FREE_BYTES_MIN) == ""
    text = space_text(".gazette/", FREE_BYTES_MIN - 1)
    assert text.startswith(
        "the disk of .gazette/ has 16.0 MiB left: messages cannot be appended while"
    )


# --- Samples, and the banner


class Nested(Message):
    inner: Word


class App(Application[Any]):
    words = Source("words", Word, partitions=2, key="word")
    counts = Source("numbers", Word, partitions=2, key=lambda one: bytes([255, one.count]))
    rows = Source("rows", CSVRecord, partitions=2)
    nested = Source("nested", Nested, partitions=2)

    def new_store(self, shard: Any, recorder: Any) -> Any: ...
    def consume_message(self, *args: Any) -> None: ...


def test_samples_fill_the_required_fields() -> None:
    samples = {source.name: sample for source, sample in samples_of(App())}
    assert samples == {"words": MessageSample('{"word":"gazette","count":1}', "gazette")}


WORDS = DeclaredJournals("words", 4, KeyRule("word", "text", 4), "application/x-ndjson", "Word", 0)
SAMPLE = MessageSample('{"word":"it\'s"}', "it's")


def test_the_command_to_publish_sends_a_key_where_it_matters() -> None:
    """A shell gets the words as they are."""
    command = publish_command(WORDS, SAMPLE, "http://127.0.0.1:8080")
    text, gazctl = command.split(" | ")
    shown = subprocess.run(["/bin/sh", "-c", text], capture_output=True, text=True, check=True)
    assert shown.stdout == 'it\'s\n{"word":"it\'s"}\n'
    assert gazctl == (
        "gazctl journals append -l name:prefix=words/part- --framing lines --mapping modulo"
    )
    one = publish_command(msgspec.structs.replace(WORDS, partitions=1), SAMPLE, "http://b:1")
    assert "--mapping" not in one
    assert one.endswith("--broker.address http://b:1")
    assert "it's\n" not in one


@pytest.mark.parametrize(
    ("routes", "url"),
    [
        ([], "http://a:1/debug/shards"),
        (["/all"], "http://a:1/all"),
        (["/all", "/shards/{shard}/of/{word}"], "http://a:1/shards/shard-002/of/WORD"),
        (["/shards/{shard:path}/counts"], "http://a:1/shards/shard-002/counts"),
        (["/{x}", "/counts/{text}"], "http://a:1/counts/to%20be%3F"),
    ],
)
def test_the_command_to_query_names_what_is_known(routes: list[str], url: str) -> None:
    values = {"shard": "shard-002", "text": "to be?"}
    assert query_command(routes, "http://a:1", values) == f"curl {url}"


def test_the_banner_asks_the_shard_of_the_sample() -> None:
    lines = banner(
        Declaration("app.Words", (WORDS,), ()),
        {"words": MessageSample('{"word":"gazette"}', "gazette")},
        ["/shards/{shard}/counts/{word}"],
        target="app.py",
        state=".gazette/",
        brokers="http://127.0.0.1:8080",
        members=[("http://127.0.0.1:9000", "http://127.0.0.1:9001")],
    )
    assert lines[0] == "app.py runs as application app.Words"
    assert "  reads    words: 4 partitions of Word, by key" in lines
    assert "  curl http://127.0.0.1:9001/shards/shard-003/counts/gazette" in lines
    assert lines[-1] == "Ctrl-C stops it; the state stays."
