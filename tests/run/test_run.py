"""`gazette run`, as a user runs it: real processes, killed and started again."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import sys
from base64 import b64encode
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
CLOCK = SystemClock()

APPLICATION = """
from gazette import Application, Message, Source, shard_route
from gazette.stores.sqlite import SQLiteStore

class Word(Message):
    word: str

class Words(Application[SQLiteStore]):
    words = Source("words", Word, partitions=2, key="word")

    async def initialize(self, service):
        self.service = service
        service.add_route("/shards/{shard}/counts", self.counts)

    @shard_route()
    def counts(self, store, request):
        return dict(store.query("SELECT word, n FROM counts"))

    def new_store(self, shard, recorder):
        schema = "CREATE TABLE IF NOT EXISTS counts (word TEXT PRIMARY KEY, n INTEGER)"
        return SQLiteStore(recorder, schema)

    def consume_message(self, shard, store, envelope, publisher):
        if envelope.message.word == "bad":
            raise ValueError("no such word")
        upsert = "INSERT INTO counts VALUES (?, 1) ON CONFLICT DO UPDATE SET n = n + 1"
        store.execute(upsert, (envelope.message.word,))
"""

PLAIN = APPLICATION.replace(', partitions=2, key="word"', "")
WINDOWS = """
from datetime import datetime, timedelta
from gazette import Application, EventTime, Message, Source, shard_route
from gazette.stores.sqlite import SQLiteStore
from gazette.windows import Tumbling, Windows, count

class Click(Message):
    user: str
    at: datetime

class Clicks(Application[SQLiteStore]):
    event_time = EventTime(lateness=timedelta(0))
    clicks = Source("clicks", Click, partitions=2, key="user", time="at")
    minutes = Windows("minutes", Tumbling(timedelta(days=36500)), count())

    async def initialize(self, service):
        service.add_route("/shards/{shard}/counts", self.counts)

    @shard_route()
    def counts(self, store, request):
        return dict(store.query("SELECT key, state FROM minutes"))

    def new_store(self, shard, recorder):
        return SQLiteStore(recorder, self.minutes.schema)

    def consume_message(self, shard, store, envelope, publisher):
        assert self.minutes.add(shard, store, envelope.message.user, envelope.time, 1)

    def on_timer(self, shard, store, timer, publisher):
        list(self.minutes.on_timer(shard, store, timer))
"""


class Run:
    """A project directory, and what `gazette run` says there.

    ``programs`` is the directory of an installed `gazette` and `gazctl`. None: those of this tree.
    """

    def __init__(self, directory: Path, programs: Path | None = None) -> None:
        self.directory = directory
        self.log = directory / "said.txt"
        self.process: asyncio.subprocess.Process | None = None
        self._begin = 0
        self.environ = {
            "PATH": f"{programs or Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(directory),
        }
        if programs is None:
            self.environ["PYTHONPATH"] = str(ROOT)
            self.python = sys.executable
            self._gazette = [sys.executable, "-m", "gazette.main"]
            self._gazctl = f"{sys.executable} -m gazette.gazctl.main"
        else:
            self.python = str(programs / "python")
            self._gazette = [str(programs / "gazette")]
            self._gazctl = "gazctl"

    @property
    def said(self) -> str:
        """What the present run has written."""
        with self.log.open("rb") as log:
            log.seek(self._begin)
            return log.read().decode(errors="replace")

    @property
    def program(self) -> Path:
        return self.directory / "app.py"

    async def start(self, *argv: str, port: int = 0) -> None:
        self._begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(*self._gazette, "run", "app.py"),
                *(f"--port={port}", "--broker-port=0", "--lease=5s", "--report=1s", *argv),
                cwd=self.directory,
                env=self.environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Below `nohup` it would be ignored, and a program keeps to that.
                preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),
            )

    async def until(self, text: str, *, times: int = 1) -> None:
        """Return once it has said a text so often."""
        assert self.process is not None
        async with asyncio.timeout(90):
            while self.said.count(text) < times:
                assert self.process.returncode is None, self.said
                await CLOCK.sleep(0.05)

    async def ends(self) -> int:
        assert self.process is not None
        async with asyncio.timeout(90):
            return await self.process.wait()

    async def stop(self) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)
        return await self.ends()

    def children(self, text: str) -> list[psutil.Process]:
        assert self.process is not None
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in found if text in " ".join(one.cmdline())]

    async def publish(self) -> None:
        """Run the command that the banner shows."""
        (line,) = re.findall(r"^  (printf .*)$", self.said, re.MULTILINE)[-1:]
        line = line.replace("gazctl", self._gazctl)
        child = await asyncio.create_subprocess_shell(line, env=self.environ, cwd=self.directory)
        async with asyncio.timeout(60):
            assert await child.wait() == 0

    async def gazctl(self, *argv: str) -> tuple[int, str]:
        """Run a command in another directory. Return its exit code and what it wrote."""
        child = await asyncio.create_subprocess_exec(
            *(*self._gazctl.split(), *argv),
            cwd="/",
            env=self.environ,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(90):
            written, _ = await child.communicate()
        assert child.returncode is not None
        return child.returncode, written.decode()

    async def count(self, wanted: int) -> None:
        """Return once the query that the banner shows answers with a count."""
        await self.answers({"gazette": wanted})

    async def answers(self, wanted: object, path: str = "") -> None:
        """Return once the query that the banner shows, or that of another path, has an answer."""
        (url,) = re.findall(r"^  curl (.*)$", self.said, re.MULTILINE)[-1:]
        url = str(httpx.URL(url).join(path)) if path else url
        answer: object = None
        async with httpx.AsyncClient() as client:
            for _ in range(600):
                try:
                    answer = (await client.get(url, timeout=30)).json()
                except (httpx.HTTPError, ValueError) as error:
                    answer = error
                if answer == wanted:
                    return
                await CLOCK.sleep(0.1)
        raise AssertionError(f"{answer}, not {wanted}:\n{self.said}")


@pytest.fixture
async def project(tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(tmp_path)
    run.program.write_text(APPLICATION)
    yield run
    if run.process is not None and run.process.returncode is None:
        await run.stop()


async def test_one_command_serves_and_its_state_survives_kill_9(project: Run) -> None:
    """The commands of the banner work. A member that is killed returns, and so does a killed run."""
    await project.start()
    await project.until("Ctrl-C stops it")
    assert "app.py runs as application app.Words" in project.said
    await project.publish()
    await project.count(1)
    await project.until("2 of 2 shards run")
    (member,) = project.children("gazette.run.member")
    member.kill()
    await project.until("worker-1 ended (killed by SIGKILL); it is started again")
    (member,) = project.children("gazette.run.member")
    await project.until(f"worker-1 serves again, process {member.pid}")
    await project.count(1)
    await project.publish()
    await project.count(2)
    assert project.process is not None
    killed = project.children("")
    project.process.kill()
    await project.ends()

    await project.start()
    await project.until("the last run was killed")
    await project.until("Ctrl-C stops it")
    left = [one for one in killed if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert not left, "two runs work in one directory"
    await project.count(2)
    await project.publish()
    await project.count(3)
    assert await project.stop() == 0
    assert "Traceback" not in project.said
    assert _left(project.directory) == []

    await project.start()
    await project.until("Ctrl-C stops it")
    assert "the last run was killed" not in project.said
    await project.count(3)


def _open_to_others(state: Path) -> dict[str, str]:
    """Return the modes of paths that other users may read or enter. What is in a store has the store's."""
    return {
        str(path): oct(mode)
        for path in (state, *state.rglob("*"))
        if "fragments" not in path.parent.parts and not path.is_socket()
        if (mode := path.stat().st_mode & 0o777) & 0o077
    }


def _left(directory: Path) -> list[str]:
    """Return the command lines of processes that still work in a directory."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or ()
        if any(str(directory) in word for word in words):
            found.append(f"{process.info['pid']} {' '.join(words)}")
    return found


OF_PUBLISHER = WINDOWS.replace(', time="at"', "").replace("    at: datetime\n", "")
OF_FUNCTIONS = WINDOWS.replace('key="user"', "key=lambda one: one.user").replace(
    'time="at"', "time=lambda one: one.at"
)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (PLAIN, {"gazette": 2}),
        (WINDOWS, {"gazette": "2"}),
        (OF_PUBLISHER, {"gazette": "2"}),
        (OF_FUNCTIONS, {"gazette": "2"}),
    ],
    ids=["plain", "windows", "time of the publisher", "functions"],
)
async def test_the_application_consumes_what_the_banner_publishes(
    project: Run, text: str, wanted: object
) -> None:
    project.program.write_text(text)
    await project.start()
    await project.until("Ctrl-C stops it")
    await project.publish()
    await project.publish()
    await project.answers(wanted)
    assert "failed" not in project.said
    assert await project.stop() == 0


async def test_an_etcd_that_ends_is_started_again(project: Run) -> None:
    former = os.umask(0)
    try:
        await project.start()
    finally:
        os.umask(former)
    await project.until("Ctrl-C stops it")
    await project.publish()
    await project.count(1)
    assert _open_to_others(project.directory / ".gazette") == {}
    (etcd,) = [one for one in project.children("etcd") if one.name() == "etcd"]
    etcd.kill()
    await project.until("etcd ended with exit code -9, and was started again")
    await project.publish()
    await project.count(2)
    assert await project.stop() == 0
    assert _left(project.directory) == []


async def test_changed_files_are_reloaded_and_mistakes_keep_the_former_ones(project: Run) -> None:
    await project.start("--reload", "--standbys=1")
    await project.until("Ctrl-C stops it")
    assert len(project.children("gazette.run.member")) == 2
    await project.publish()
    await project.count(1)
    project.program.write_text("x = (\n")
    await project.until("SyntaxError: '(' was never closed")
    await project.until("waiting for the next change: the run continues once the file is mended")
    assert "run the command again" not in project.said
    await project.count(1)
    project.program.write_text(APPLICATION.replace("partitions=2", "partitions=3"))
    await project.until("about 67 % of the keys would move")
    await project.until("the application goes on as it was")
    await project.count(1)
    project.program.write_text(APPLICATION.replace("SET n = n + 1", "SET n = n + 10"))
    await project.until("its files have changed")
    await project.until("app.py runs again")
    await project.publish()
    await project.count(11)
    assert await project.stop() == 0
    assert _left(project.directory) == []


async def test_a_failed_shard_says_why(project: Run) -> None:
    text = PLAIN.replace('"bad"', '"gazette"')
    project.program.write_text(text)
    await project.start()
    await project.until("Ctrl-C stops it")
    await project.publish()
    await project.until("shard-000 failed: ")
    await project.until("0 of 1 shards run")
    said = project.said
    assert "failed: consume_message raised ValueError: no such word (line=app.py:" in said
    first = said[said.index("Traceback (most recent call last):") :].splitlines()[1]
    assert re.fullmatch(r'  File ".*/app.py", line \d+, in consume_message', first), said
    assert "dispatch.py" not in said, "frames that tell the user nothing"
    assert await project.stop() == 0


async def test_a_recovery_shows_its_progress(project: Run) -> None:
    project.environ["GAZETTE_FAILPOINTS"] = "recovery.handed_off(*/shard-000)=delay:4"
    await project.start()
    await project.until("shard-000 is being recovered: ")
    assert re.search(
        r"recovered: \w+ recovery/\S+/shard-000 at \d+ of \d+, [\d.]+ MB/s, ", project.said
    )
    await project.until("2 of 2 shards run")
    assert await project.stop() == 0


async def test_a_callback_that_hangs_is_named_while_it_does(project: Run) -> None:
    text = APPLICATION.replace("partitions=2", "partitions=1")
    slow = "import threading; threading.Event().wait()"
    project.program.write_text(
        text.replace('raise ValueError("no such word")', slow).replace("bad", "gazette")
    )
    await project.start()
    await project.until("Ctrl-C stops it")
    await project.publish()
    await project.until("shard shard-000: consume_message has not returned for")
    assert re.search(
        r"\(at app.py:\d+ in consume_message, message words/part-000 0\)", project.said
    )
    assert await project.stop() == 0


async def test_gazctl_finds_a_run_without_flags_and_each_of_two_by_its_name(project: Run) -> None:
    await project.start()
    await project.until("Ctrl-C stops it")
    assert "gazctl finds it without flags, in any directory (context run)" in project.said
    code, journals = await project.gazctl("journals", "list")
    assert code == 0
    assert "words/part-001" in journals
    code, shards = await project.gazctl("shards", "list")
    assert code == 0
    assert "shard-001" in shards
    second = Run(project.directory / "second")
    second.directory.mkdir()
    second.program.write_text(APPLICATION.replace('"words"', '"texts"'))
    second.environ["HOME"] = project.environ["HOME"]
    try:
        await second.start()
        await second.until("Ctrl-C stops it")
        assert "gazctl finds it by --context=run-2 (another run is there)" in second.said
        code, written = await project.gazctl("journals", "list")
        assert code == 2
        assert "2 applications are run" in written
        code, written = await project.gazctl("journals", "list", "--context=run-2")
        assert code == 0
        assert "texts/part-000" in written
        assert await project.stop() == 0
        code, written = await project.gazctl("journals", "list")
        assert code == 0
        assert "texts/part-000" in written
        assert second.process is not None
        second.process.kill()
        await second.ends()
        assert "there are no contexts" in (await project.gazctl("context", "list"))[1]
    finally:
        await second.stop()


async def test_only_one_run_has_a_directory(project: Run, tmp_path: Path) -> None:
    await project.start()
    await project.until("starting app.py")
    second = Run(tmp_path)
    await second.start()
    assert await second.ends() == 1
    assert project.process is not None
    assert f"process {project.process.pid} uses .gazette: it runs app.py since" in second.said
    # It ends at once, though it has not started everything yet.
    assert await project.stop() == 0
    assert _left(project.directory) == []


async def test_more_partitions_are_raised_by_a_flag_only(project: Run) -> None:
    await project.start()
    await project.until("Ctrl-C stops it")
    assert await project.stop() == 0
    project.program.write_text(APPLICATION.replace("partitions=2", "partitions=3"))
    await project.start()
    assert await project.ends() == 1
    assert "words has 2 partitions, and the declaration says 3" in project.said
    assert "--more-partitions" in project.said
    assert "To begin again with an empty state, remove .gazette/." in project.said
    await project.start("--more-partitions")
    await project.until("3 of 3 shards run")
    assert await project.stop() == 0
    project.program.write_text(APPLICATION.replace('Source("words"', 'Source("texts"'))
    await project.start()
    assert await project.ends() == 1
    assert "reads words/part-000, which the declaration does not have" in project.said


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("from gazette import Application\n", "app.py has no application"),
        (
            "import nowhere\n",
            "app.py, line 1, in <module>\n    import nowhere\nModuleNotFoundError",
        ),
        (
            APPLICATION.replace("    words = Source", "    # words = Source"),
            "no source is declared",
        ),
        ("import os\nos._exit(7)\n", "with exit code 7"),
    ],
)
async def test_an_application_that_cannot_be_used_starts_nothing(
    project: Run, source: str, says: str
) -> None:
    project.program.write_text(source)
    await project.start()
    assert await project.ends() in (1, 2)
    assert says in project.said
    assert "Traceback" not in project.said
    assert not (project.directory / ".gazette" / "etcd").exists()


async def test_a_broker_that_was_paused_beyond_its_lease_is_started_again(project: Run) -> None:
    """It ends because its lease is gone, and stores what it holds before. Nothing is lost."""
    await project.start()
    await project.until("Ctrl-C stops it")
    await project.publish()
    await project.count(1)
    (broker,) = project.children("--broker.id=broker-1")
    broker.suspend()
    await lease_ends(project)
    broker.resume()
    await project.until("broker-1 ended with exit code 1, and is started again")
    await project.until("broker-1 serves again")
    await project.publish()
    await project.count(2)
    (again,) = project.children("--broker.id=broker-1")
    again.kill()
    assert await project.ends() == 1
    assert "broker-1 was killed by SIGKILL" in project.said
    assert "It was the only broker" in project.said
    assert _left(project.directory) == []


async def lease_ends(run: Run) -> None:
    """Return once etcd knows no broker."""
    (etcd,) = run.children("etcdbin/etcd")
    listen = next(one for one in etcd.cmdline() if one.startswith("--listen-client-urls="))
    first, end = (
        b64encode(one).decode()
        for one in (b"/gazette/cluster/members/", b"/gazette/cluster/members0")
    )
    async with httpx.AsyncClient(base_url=listen.partition("=")[2]) as client, asyncio.timeout(60):
        while (
            "kvs"
            in (await client.post("/v3/kv/range", json={"key": first, "range_end": end})).json()
        ):
            await CLOCK.sleep(0.1)


async def test_one_of_several_brokers_may_be_killed(project: Run) -> None:
    await project.start("--brokers=3")
    await project.until("Ctrl-C stops it")
    await project.publish()
    await project.count(1)
    (broker,) = project.children("--broker.id=broker-1")
    broker.kill()
    await project.until("broker-1 ended with exit code -9, and is started again")
    await project.until("broker-1 serves again")
    await project.publish()
    await project.count(2)
    assert await project.stop() == 0
    assert _left(project.directory) == []


async def test_a_directory_that_is_removed_ends_the_run(project: Run) -> None:
    """No process writes into it any more, so that the next run begins with nothing."""
    await project.start()
    await project.until("Ctrl-C stops it")
    await project.publish()
    await project.count(1)
    state = project.directory / ".gazette"
    shutil.rmtree(state)
    assert await project.ends() == 1
    assert f"{state} was removed while it was in use" in project.said
    assert not (state / "fragments").exists()
    await project.start()
    await project.until("Ctrl-C stops it")
    await project.publish()
    await project.count(1)
    assert await project.stop() == 0
    shutil.rmtree(state / "etcd")
    await project.start()
    assert await project.ends() == 2
    assert f"--dir: {state} is not whole" in project.said
    assert f"rm -r {state}" in project.said


async def test_a_terminal_that_is_closed_stops_it(project: Run) -> None:
    await project.start()
    await project.until("Ctrl-C stops it")
    assert project.process is not None
    project.process.send_signal(signal.SIGHUP)
    assert await project.ends() == 0
    assert "stopping …" in project.said
    assert _left(project.directory) == []
    await project.start()
    await project.until("Ctrl-C stops it")
    assert "the last run was killed" not in project.said


async def test_an_output_that_is_closed_stops_it(project: Run) -> None:
    """As of `gazette run app.py | head -1`."""
    ours, theirs = os.pipe()
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gazette.main", "run", "app.py", "--port=0", "--broker-port=0"),
        cwd=project.directory,
        env=project.environ,
        stdout=theirs,
        stderr=asyncio.subprocess.PIPE,
    )
    os.close(theirs)
    assert await asyncio.to_thread(os.read, ours, 1 << 16)
    os.close(ours)
    async with asyncio.timeout(90):
        _, errors = await child.communicate()
    assert child.returncode == 1
    assert errors.decode().splitlines() == [
        "gazette run: cannot write to the standard output: Broken pipe",
        "Everything has stopped, and the state stays. To run without a reader, write to a file.",
    ]
    assert _left(project.directory) == []


@pytest.mark.parametrize("flag", ["--port", "--broker-port"])
async def test_a_port_in_use_is_named(project: Run, flag: str) -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        await project.start(f"{flag}={port}")
        assert await project.ends() == 2
    assert f"{flag}: port {port} is in use" in project.said
    assert "another port (0: any)" in project.said
    assert _left(project.directory) == []


async def test_a_cluster_that_runs_already_is_used(project: Run) -> None:
    """Nothing is started here but the application. Its own flags come after --."""
    address = f"http://127.0.0.1:{free_port()}"
    cluster = ("--broker.address", address, "--etcd.address", address, "--store=file:///")
    await project.start(*cluster)
    assert await project.ends() == 1
    assert f"cannot reach the broker at {address}" in project.said
    first = Run(project.directory / "first")
    first.directory.mkdir()
    first.program.write_text(APPLICATION)
    await first.start()
    try:
        await first.until("Ctrl-C stops it")
        broker = re.findall(r"brokers  (\S+)", first.said)[0]
        (etcd,) = first.children("etcdbin/etcd")
        client = next(one for one in etcd.cmdline() if one.startswith("--listen-client-urls="))
        text = APPLICATION.replace('Source("words"', 'Source("texts"')
        named = "class Words(Application[SQLiteStore]):\n"
        project.program.write_text(text.replace(named, f'{named}    application_name = "second"\n'))
        await project.start(
            *("--broker.address", broker, "--etcd.address", client.partition("=")[2]),
            *("--store=file:///", "--replication=1"),
            *("--", "--etcd.prefix=/gazette/consumers/second"),
        )
        await project.until("Ctrl-C stops it")
        assert project.children("etcd") == project.children("gazette.run.member")
        await project.publish()
        await project.count(1)
        assert await project.stop() == 0
        await first.publish()
        await first.count(1)
    finally:
        assert await first.stop() == 0
