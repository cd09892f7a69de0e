"""``python app.py specs`` and ``apply``: as a user runs them, against a real cluster."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import pytest

from gazette.client.client import Client
from gazette.client.shards import ShardClient
from gazette.gazctl.journals.apply import parse_changes
from gazette.protocol.shard_list import ShardList
from gazette.run.dev.cluster import ClusterSettings, LocalCluster
from gazette.run.dev.processes import ChildProcess, await_ready
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port

pytestmark = pytest.mark.timeout(180)
ROOT = Path(__file__).parents[2]
CLOCK = SystemClock()
STORE = "--store=file:///"
ONE_BROKER = ("--replication=1", "--hot-standbys=0")

APPLICATION = """
from gazette import Application, Message, PoisonPolicy, Source, runconsumer
from gazette.stores.sqlite import SQLiteStore

class Word(Message):
    word: str = ""

class Words(Application[SQLiteStore]):
    words = Source("words", Word, partitions=2, key="word")

    def poison_policy(self, shard):
        return PoisonPolicy("dead-letters")

    def new_store(self, shard, recorder):
        return SQLiteStore(recorder, "CREATE TABLE IF NOT EXISTS counts (word PRIMARY KEY, n)")

    def consume_message(self, shard, store, envelope, publisher):
        pass

if __name__ == "__main__":
    runconsumer.main(Words(), bind_host="127.0.0.1")
"""


@dataclass(frozen=True)
class Said:
    """What a command wrote, and its exit code."""

    code: int
    out: str
    err: str


@dataclass
class Project:
    """A directory with an application."""

    directory: Path
    cluster: LocalCluster | None = None

    @property
    def program(self) -> Path:
        return self.directory / "app.py"

    def change(self, old: str, new: str) -> None:
        text = self.program.read_text()
        assert old in text
        self.program.write_text(text.replace(old, new))

    async def run(self, *argv: str) -> Said:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            str(self.program),
            *argv,
            cwd=self.directory,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(self.directory)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(60):
            out, err = await child.communicate()
        assert child.returncode is not None
        assert b"Traceback" not in err, err.decode()
        return Said(child.returncode, out.decode(), err.decode())

    async def apply(self, *argv: str) -> Said:
        assert self.cluster is not None
        broker = f"--broker.address={self.cluster.brokers[0].grpc_url}"
        return await self.run("apply", STORE, *ONE_BROKER, broker, *argv)

    def member(self, port: int, http: int, argv: Sequence[str]) -> ChildProcess:
        """Return a member that listens at these ports. It is not started yet."""
        assert self.cluster is not None
        return ChildProcess(
            "member",
            [
                *(sys.executable, str(self.program), *argv, "--consumer.host=127.0.0.1"),
                *(f"--consumer.port={port}", f"--consumer.http-port={http}"),
                f"--broker.address={self.cluster.brokers[0].grpc_url}",
                f"--etcd.address={self.cluster.etcd.endpoint}",
                "--consumer.drain-timeout=0s",
            ],
            self.directory / "member.log",
            {**self.cluster.environ, "PYTHONPATH": str(ROOT)},
            CLOCK,
        )


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "app.py").write_text(APPLICATION)
    return Project(tmp_path)


@pytest.fixture
async def running(project: Project, tmp_path: Path) -> AsyncIterator[Project]:
    """Yield the project beside a cluster of one broker."""
    settings = ClusterSettings(tmp_path / "cluster", brokers=1, zones=1, lease_ttl_s=60.0)
    project.cluster = LocalCluster(settings, CLOCK)
    await project.cluster.start()
    yield project
    await project.cluster.stop()


async def test_specs_are_yaml_for_gazctl(project: Project) -> None:
    journals = await project.run("specs", "journals", STORE)
    shards = await project.run("specs", "shards", STORE)
    assert (journals.code, shards.code) == (0, 0), journals.err + shards.err
    names = [change.upsert.name for change in parse_changes(journals.out) if change.upsert]
    assert names == [
        "dead-letters",
        "recovery/app.Words/shard-000",
        "recovery/app.Words/shard-001",
        "words/part-000",
        "words/part-001",
    ]
    listed = ShardList.parse(shards.out).push_down()
    assert [one.spec.id for one in listed.shards] == ["shard-000", "shard-001"]
    both = await project.run("specs", STORE)
    assert both.out.count("\n---\n") == 1
    assert journals.out in both.out
    assert shards.out in both.out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("specs",), "--store s3://bucket/prefix/"),
        (("specs", "journal", STORE), 'unexpected argument "journal"'),
        (("specs", STORE, "--replicas=3"), "did you mean --replication"),
        (("spec",), "did you mean specs?"),
        (("specs", STORE, "--replication=9"), "invalid Replication (9"),
        (("apply",), "no blob store is given"),
        (("apply", STORE, "--broker.address=localhost"), "--broker"),
    ],
)
async def test_a_mistake_is_named(project: Project, argv: tuple[str, ...], says: str) -> None:
    said = await project.run(*argv)
    assert said.code == 2
    assert says in said.err


async def test_a_class_that_declares_nothing_is_shown_how(project: Project) -> None:
    project.change('    words = Source("words", Word, partitions=2, key="word")\n', "")
    said = await project.run("specs", STORE)
    assert said.code == 2
    assert (
        'Words: no source is declared\nDeclare what it reads: in Words, words = Source("words"'
        in (said.err)
    )


async def test_no_broker_is_an_error_of_the_cluster(project: Project) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    said = await project.run("apply", STORE, "--shards=false", f"--broker.address={address}")
    assert said.code == 1
    assert f"cannot reach the broker at {address}" in said.err
    assert "--broker.address" in said.err


async def test_a_deployment_from_nothing(running: Project) -> None:
    """Journals, then members, then shards. Each step can be repeated, and says what it does."""
    cluster = running.cluster
    assert cluster is not None
    port, http = free_port(), free_port()
    member = f"--consumer.address=http://127.0.0.1:{port}"
    no_member = await running.apply()
    assert no_member.code == 2
    assert "--shards=false" in no_member.err
    shown = await running.apply("--shards=false", "--dry-run")
    assert "+ journal words/part-000  1 replicas, in file:///\n" in shown.out
    assert "+ shard" not in shown.out
    assert "dry run: nothing was changed" in shown.out
    broker = cluster.brokers[0].grpc_url
    no_consumer = await running.apply(f"--consumer.address={broker}")
    assert no_consumer.code == 2
    assert f"the server at {broker} is a broker, and this command calls a consumer" in (
        no_consumer.err
    )
    done = await running.apply(member)
    assert done.code == 1
    assert "applied journals" in done.out
    assert f"cannot reach the consumer at http://127.0.0.1:{port}" in done.err
    async with Client(cluster.brokers[0].grpc_url) as client:
        assert len((await client.list_journals()).journals) == 5
    application = running.member(port, http, [])
    await application.start()
    try:
        await await_ready(application, http, CLOCK, 30.0)
        first, again = await running.apply(member), await running.apply(member)
        assert (first.code, again.code) == (0, 0), first.err + again.err
        assert "+ shard shard-001  reads words/part-001; 0 hot standbys\n" in first.out
        assert again.out == "= 7 unchanged\napplied\n"
        await _changes_of_the_declaration(running, member, port)
    finally:
        assert await application.stop(30.0), application.log_tail()


async def test_journals_fit_the_brokers_and_get_no_store_that_is_unhealthy(
    running: Project,
) -> None:
    assert running.cluster is not None
    broker = f"--broker.address={running.cluster.brokers[0].grpc_url}"
    common = ("apply", broker, "--shards=false")
    # Case: a store that cannot be used: nothing is put.
    wrong = await running.run(*common, "--store=file:///wrong&more/")
    assert wrong.code == 1
    assert "the store file:///wrong&more/ is unhealthy, and nothing was changed" in wrong.err
    # A shell takes the whole URL.
    assert "gazctl journals store-health 'file:///wrong&more/'" in wrong.err
    # Case: no number is given: as many replicas as there are brokers, and a warning.
    done = await running.run(*common, STORE)
    assert done.code == 0, done.err
    assert "+ journal words/part-000  1 replicas, in file:///\n" in done.out
    assert "warning: 1 broker runs, and journals get a replication of 1" in done.err
    # Case: more than there are: that is done, and said. Recovery logs change, too.
    more = await running.run(*common, STORE, "--replication=3")
    assert more.code == 0, more.err
    assert "warning: 1 broker runs, and a replication of 3 needs 3" in more.err
    async with Client(running.cluster.brokers[0].grpc_url) as client:
        listed = (await client.list_journals()).journals
    assert {one.spec.replication for one in listed} == {3}
    # Case: an apply without the flag leaves that as it is.
    same = await running.run(*common, STORE)
    assert same.out == "= 5 unchanged\napplied\n"


async def test_the_page_on_declaring_is_followed(running: Project) -> None:
    """Its application, and its commands with the addresses of this cluster."""
    cluster = running.cluster
    assert cluster is not None
    page = (ROOT / "docs" / "declaring.md").read_text()
    # `tests/backfill/test_misplaced.py` runs what the page says of tables.
    declared, methods, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    store = """
def new_store(self, shard, recorder):
    return SQLiteStore(recorder)
"""
    main = "from gazette import runconsumer\nrunconsumer.main(WordCount(), bind_host='127.0.0.1')\n"
    running.program.write_text(f"{declared}{indent(methods + store, '    ')}\n\n{main}")
    commands = [
        line.split()[2:] for line in re.findall(r"^    (python app\.py .*)$", page, re.MULTILINE)
    ]
    journals, shards, apply_journals, serve, apply_shards = commands
    assert [" ".join(one[:2]) for one in (journals, shards)] == ["specs journals", "specs shards"]

    port, http = free_port(), free_port()
    broker = cluster.brokers[0].grpc_url
    here = {
        "s3://bucket/prefix/": "file:///",
        "http://broker:8080": broker,
        "http://etcd:2379": cluster.etcd.endpoint,
        "http://member:9000": f"http://127.0.0.1:{port}",
        "9000": str(port),
    }

    async def run(command: Sequence[str], *more: str) -> Said:
        said = await running.run(*(here.get(word, word) for word in command), *more)
        assert said.code == 0, said.err
        return said

    for command in (journals, shards):
        specs = await run(command[: command.index("|")])
        assert "words/part-003" in specs.out
    first = await run(apply_journals, *ONE_BROKER)
    assert "+ journal words/part-003" in first.out
    assert "kept 720h0m0s" in first.out
    assert serve[0] == "serve"
    member = running.member(port, http, [here.get(word, word) for word in serve])
    await member.start()
    try:
        await await_ready(member, http, CLOCK, 30.0)
        assert "+ shard" in (await run(apply_shards, *ONE_BROKER)).out
        async with ShardClient(f"http://127.0.0.1:{port}") as client:
            assert len((await client.list_shards()).shards) == 4
    finally:
        assert await member.stop(30.0), member.log_tail()


async def _changes_of_the_declaration(running: Project, member: str, port: int) -> None:
    """Refuse fewer and more partitions; raise them if that was asked for; delete nothing."""
    running.change("partitions=2", "partitions=1")
    fewer = await running.apply(member, "--more-partitions")
    assert fewer.code == 1
    assert "partitions are never removed" in fewer.err
    running.change("partitions=1", "partitions=3")
    more = await running.apply(member)
    assert more.code == 1
    assert "about 67 % of the keys would move" in more.err
    assert "--more-partitions" in more.err
    async with ShardClient(f"http://127.0.0.1:{port}") as shards:
        assert len((await shards.list_shards()).shards) == 2
        raised = await running.apply(member, "--more-partitions")
        assert raised.code == 0, raised.err
        listed = (await shards.list_shards()).shards
        assert [one.spec.id for one in listed] == ["shard-000", "shard-001", "shard-002"]
