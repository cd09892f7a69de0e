"""The parts of `gazette run`: its flags, its lock, what it says, and what it watches."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import pytest

from gazette import Application, CSVRecord, Message, MessageTime, Source
from gazette.client.client import Client
from gazette.consumer.declare.declaration import Declaration, DeclaredJournals
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
from gazette.run.samples import NOW, NOW_S, MessageSample, samples_of
from gazette.run.session import RunSession
from gazette.run.settings import RunFlags
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.runtime.tasks import TaskScope
from gazette.testing.clock import ManualClock
from tests.support.instant_clock import eventually

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


def test_a_full_disk_is_named_and_a_crash_not_forgotten(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"{}")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(Invalid, match="cannot write to"), RunLock(tmp_path, "app.py"):
            raise AssertionError("it was written")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with RunLock(tmp_path, "app.py") as lock:
        assert lock.after_crash


def test_a_name_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["\udcff.py"]) == 2
    assert "is no UTF-8" in capsys.readouterr().err


# --- Files


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text("longer than before"),
        lambda path: path.unlink(),
        lambda path: (path.parent.parent / "new").rename(path),
        lambda path: (path.unlink(), path.parent.rmdir(), path.parent.write_text("x")),
    ],
    ids=["written", "removed", "replaced", "directory became a file"],
)
async def test_changed_files_are_seen(tmp_path: Path, change: Callable[[Path], Any]) -> None:
    path, other, new = tmp_path / "dir" / "a.py", tmp_path / "b.py", tmp_path / "new"
    path.parent.mkdir()
    for one in (path, other, new):
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
    samples = {source.name: sample for source, sample in samples_of(App(), "/here")}
    assert samples == {
        "words": MessageSample('{"word":"gazette","count":1}', "gazette"),
        "nested": MessageSample('{"inner":{"word":"gazette","count":1}}'),
    }, "a key that is a function of no text has no sample"


class Kind(Enum):
    FIRST = "first"


class Reading(Message):
    sensor: Annotated[str, msgspec.Meta(min_length=9)]
    level: Annotated[int, msgspec.Meta(ge=5)]
    share: Annotated[float, msgspec.Meta(lt=1)]
    kind: Kind
    unit: Literal["C", "F"]
    place: tuple[int, str]
    id: UUID
    note: str | None
    seen: datetime
    at: datetime | None = None


class Counted(msgspec.Struct):
    at_ms: int
    zone: str = ""


class Optional(Message):
    user: str = ""
    clicks: int = 0


class Row(msgspec.Struct, array_like=True):
    uuid: str
    user: str


class Put(Message, tag="put"):
    row: str


class Delete(Message, tag="delete"):
    row: str


class Many(Application[Any]):
    readings = Source("readings", Reading, key="sensor", time="at")
    counted = Source(
        "counted", Counted, partitions=2, key="zone", time=MessageTime("at_ms", unit="ms")
    )
    optional = Source("optional", Optional, partitions=2, key=lambda one: one.user)
    rows = Source("rows", Row)
    changes = Source[Put | Delete]("changes", Put | Delete, key="row")

    def new_store(self, shard: Any, recorder: Any) -> Any: ...
    def consume_message(self, *args: Any) -> None: ...


def test_samples_have_values_of_each_type_the_key_and_the_time() -> None:
    samples = {source.name: sample for source, sample in samples_of(Many(), "/here")}
    uuid = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
    declared = f"{__name__}:Many"
    assert samples == {
        "readings": MessageSample(
            '{"sensor":"gazette--","level":5,"share":0,"kind":"first","unit":"C",'
            f'"place":[1,"gazette"],"id":"{uuid}","note":"gazette","seen":"{NOW}Z","at":"{NOW}Z"}}',
            "gazette--",
        ),
        "counted": MessageSample(
            f'{{"at_ms":{NOW_S}000,"zone":"gazette"}}', "gazette", has_uuid=False
        ),
        "optional": MessageSample(
            '{"user":"gazette","clicks":1}', "gazette", f"{declared}.optional", "/here"
        ),
        "rows": MessageSample('["","gazette"]', "", f"{declared}.rows", "/here"),
        "changes": MessageSample('{"row":"gazette","type":"put"}', "gazette"),
    }


WORDS = DeclaredJournals("words", 4, KeyRule("word", "text", 4), "application/x-ndjson", "Word", 0)
SAMPLE = MessageSample('{"word":"it\'s"}', "it's")


def shown(command: str) -> tuple[str, str]:
    """Return what the command of the banner writes to `gazctl` by a shell, and its call of `gazctl`."""
    text, gazctl = command.split(" | ")
    done = subprocess.run(["/bin/sh", "-c", text], capture_output=True, text=True, check=True)
    return done.stdout, gazctl


def test_the_command_to_publish_names_the_brokers_and_lets_labels_choose() -> None:
    """A shell gets the words as they are."""
    assert shown(publish_command(WORDS, SAMPLE, "http://b:1")) == (
        '{"word":"it\'s"}\n',
        "gazctl produce -l name:prefix=words/part- --broker.address http://b:1",
    )
    assert publish_command(WORDS, SAMPLE, "http://[::1]:1").endswith("'http://[::1]:1'")
    by_function = msgspec.structs.replace(SAMPLE, declared="app:Words.words", directory="/my dir")
    assert shown(publish_command(WORDS, by_function, "http://b:1")) == (
        '{"word":"it\'s"}\n',
        (
            "PYTHONPATH='/my dir':$PYTHONPATH gazctl produce --declared app:Words.words "
            "--broker.address http://b:1"
        ),
    )


def test_messages_without_a_uuid_are_appended() -> None:
    plain = msgspec.structs.replace(SAMPLE, has_uuid=False)
    text, gazctl = shown(publish_command(WORDS, plain, "http://b:1"))
    assert text == 'it\'s\n{"word":"it\'s"}\n'
    assert gazctl.startswith(
        "gazctl journals append -l name:prefix=words/part- --framing lines --mapping modulo --broker"
    )
    one = msgspec.structs.replace(WORDS, partitions=1)
    text, gazctl = shown(publish_command(one, plain, "http://b:1"))
    assert text == '{"word":"it\'s"}\n'
    assert "--mapping" not in gazctl


def test_the_time_of_the_command_is_that_at_which_it_runs() -> None:
    begin = SystemClock().now()
    line = f'{{"at":"{NOW}Z","ms":{NOW_S}000,"s":{NOW_S}}}'
    text, _ = shown(publish_command(WORDS, MessageSample(line), "http://b:1"))
    sent = msgspec.json.decode(text)
    for seconds in (
        datetime.fromisoformat(sent["at"]).timestamp(),
        sent["ms"] / 1000,
        sent["s"],
    ):
        assert int(begin) <= seconds <= SystemClock().now()


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
