"""The application of the README, run as its users run it, against `gazette dev`."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
from pathlib import Path

import httpx
import pytest

from gazette.client.append.service import AppendService
from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.client.shards import ShardChange, ShardClient
from gazette.labels import CONTENT_JSON_LINES, CONTENT_RECOVERY_LOG, CONTENT_TYPE
from gazette.message.mapping import fixed_mapping
from gazette.message.message import Message
from gazette.message.publisher import Publisher
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ShardSource, ShardSpec
from gazette.run.dev.cluster import ClusterSettings, LocalCluster
from gazette.run.dev.heads import write_head
from gazette.run.dev.processes import ChildProcess, await_ready
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.testing.broker import journal_spec
from tests.run.test_run import CLOCK, Run
from tests.wheel import install_wheels

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]


class Word(Message):
    word: str


async def test_it_counts_words_published_to_its_journal(tmp_path: Path) -> None:
    """Messages are consumed through a real broker by the process that the README describes."""
    clock = SystemClock()
    cluster = LocalCluster(ClusterSettings(tmp_path, brokers=1, zones=1, lease_ttl_s=60.0), clock)
    await cluster.start()
    port, http = free_port(), free_port()
    broker = cluster.brokers[0].grpc_url
    application = ChildProcess(
        "first",
        [
            *(sys.executable, str(ROOT / "examples" / "first_application.py")),
            *("--consumer.host=127.0.0.1", f"--consumer.port={port}"),
            *(f"--consumer.http-port={http}", f"--broker.address={broker}"),
            *(f"--etcd.address={cluster.etcd.endpoint}", "--consumer.drain-timeout=0s"),
        ],
        tmp_path / "first.log",
        {**cluster.environ, "PYTHONPATH": str(ROOT)},
        clock,
    )
    try:
        async with Client(broker, clock=clock) as client:
            words = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
            log = LabelSet.of((CONTENT_TYPE, CONTENT_RECOVERY_LOG))
            stores = ("file:///",)
            specs = [
                journal_spec("words/part-000", labels=words, stores=stores),
                journal_spec("recovery/first/shard-000", labels=log, stores=stores),
            ]
            await client.apply_journals([JournalChange(upsert=spec) for spec in specs])
            await application.start()
            await await_ready(application, http, clock, 30.0)
            appends = AppendService(client)
            publisher = Publisher.standalone(appends, clock, random.SystemRandom())
            mapping = fixed_mapping("words/part-000", CONTENT_JSON_LINES)
            text = ["to", "be", "or", "not", "to", "be"]
            await publisher.publish_from_loop(mapping, [Word(word=one) for one in text])
            await appends.flush()
            await appends.close()
            await consumed(port, client, clock)
    finally:
        assert await application.stop(30.0), application.log_tail()
        await cluster.stop()
    assert application.exit_code == 0, application.log_tail()


async def consumed(port: int, client: Client, clock: SystemClock) -> None:
    """Apply the shard, and return when it has read all that was published."""
    async with ShardClient(f"http://127.0.0.1:{port}", clock=clock) as shards:
        spec = ShardSpec(
            id="shard-000",
            sources=(ShardSource("words/part-000"),),
            recovery_log_prefix="recovery/first",
            hint_prefix="/gazette/hints/first",
            max_txn_duration_ns=1_000_000_000,
        )
        await shards.apply_shards([ShardChange(upsert=spec)])
        head = await write_head(client, "words/part-000")
        while True:
            listed = (await shards.list_shards()).shards
            if listed and listed[0].route.primary is not None:
                break
            await clock.sleep(0.05)
        stat = await shards.stat("shard-000", {"words/part-000": head})
        assert stat.read_through["words/part-000"] == head


async def test_the_page_is_executed_as_written(tmp_path: Path) -> None:
    await follow_the_page(Run(tmp_path))


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_the_page_is_executed_as_written_with_the_installed_wheel(tmp_path: Path) -> None:
    """Its programs are those that `pip install` makes. What the wheel lacks would be missing here."""
    programs = install_wheels(tmp_path / "venv")
    project = tmp_path / "project"
    project.mkdir()
    run = Run(project, programs)
    await follow_the_page(run)
    where = "import gazette; print(gazette.__file__)"
    child = await asyncio.create_subprocess_exec(
        *(run.python, "-c", where),
        cwd=project,
        env=run.environ,
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await child.communicate()
    assert Path(printed.decode().strip()).is_relative_to(tmp_path / "venv")


async def kill_each_member(run: Run, counts: dict[str, int]) -> None:
    """Kill one process after the other with kill -9, while the other one is asked all the time.

    No answer may lack a count. Each standby has become the primary once.
    """
    members = re.findall(r"serves +(\S+) \(HTTP\) .* process (\d+)", run.said)
    assert len(members) == 2
    for number, ((_, pid), (other, _)) in enumerate(zip(members, members[::-1], strict=True), 1):
        await run.until("1 of 1 shards run", times=number)
        async with httpx.AsyncClient(base_url=other, timeout=60) as client:
            os.kill(int(pid), signal.SIGKILL)
            said = f"worker-{number} ended (killed by SIGKILL); it is started again"
            asked = 0
            while said not in run.said or asked < 20:
                assert await ask(client) == counts
                asked += 1
            # It is asked next, while the other one is killed.
            await run.until(f"worker-{number} serves again, process ")
            before = consumed_reports(run)
            await run.publish()
            seen = [await ask(client)]
            while seen[-1] == counts:
                seen.append(await ask(client))
            counts["gazette"] += 1
            assert seen[-1] == counts
            # A primary shows a transaction before its commit is in the log: a kill would take that back.
            async with asyncio.timeout(90):
                while consumed_reports(run) == before:
                    await CLOCK.sleep(0.05)


def consumed_reports(run: Run) -> int:
    """Return how many of its reports counted messages of finished transactions."""
    return len(re.findall(r"^\S+ +(?!0 )[0-9.,]+ messages/s", run.said, re.MULTILINE))


async def ask(client: httpx.AsyncClient) -> dict[str, int]:
    answer = (await client.get("/counts")).json()
    return {one["key"]: one["value"] for one in answer["items"]}


async def follow_the_page(run: Run) -> None:
    """Do what the page says, with its files and its commands, but at ports that are free here."""
    page = (ROOT / "docs" / "first-application.md").read_text()
    app, publish, main = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    commands = re.findall(r"^    (gazette|printf|curl|python)( .*)$", page, re.MULTILINE)
    said = [name + rest for name, rest in commands]
    assert said[:3] == [
        "gazette run app.py",
        "printf '%s\\n' '{\"word\":\"gazette\"}' | gazctl produce -l name:prefix=words/part-",
        "curl http://127.0.0.1:9001/counts/gazette",
    ]
    assert said[3:] == [
        "gazette run app.py --standbys 1",
        "gazette run app.py --reload",
        "python publish.py",
    ]
    counts = {"be": 1, "gazette": 1, "or": 1, "to": 2}
    items = [{"key": key, "value": n} for key, n in counts.items()]
    listed = {"items": items, "next": None, "duplicates": []}
    run.program.write_text(app)
    await run.start()
    try:
        await run.until("Ctrl-C stops it")
        # The banner shows the commands of the page, with the addresses of this run.
        assert said[1] in run.said
        assert said[2].rpartition("9001")[2] in run.said
        await run.publish()
        await run.answers({"n": 1})
        (broker,) = re.findall(r"brokers  (\S+)", run.said)
        (run.directory / "publish.py").write_text(publish.replace("http://localhost:8080", broker))
        child = await asyncio.create_subprocess_exec(
            *(run.python, "publish.py"), cwd=run.directory, env=run.environ
        )
        assert await child.wait() == 0
        await run.answers(listed, path="/counts")
        assert run.process is not None
        run.process.kill()
        await run.ends()
        await run.start(*said[3].split()[3:])
        await run.until("Ctrl-C stops it")
        await run.answers(listed, path="/counts")
        await kill_each_member(run, counts)
        assert await run.stop() == 0
        await run.start(*said[4].split()[3:])
        await run.until("Ctrl-C stops it")
        await run.answers({"n": 3})
        run.program.write_text(f"{app}(")
        await run.until("SyntaxError")
        await run.answers({"n": 3})
        run.program.write_text(app.replace("n = n + 1", "n = n + 5"))
        await run.until("app.py runs again")
        await run.publish()
        await run.answers({"n": 8})
    finally:
        assert await run.stop() == 0
    imported = app.replace("shard_route\n", "runconsumer, shard_route\n", 1)
    run.program.write_text(f"{imported}\n\n{main}")
    child = await asyncio.create_subprocess_exec(
        *(run.python, "app.py", "specs", "--store=file:///"),
        cwd=run.directory,
        env=run.environ,
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await child.communicate()
    assert b"words/part-000" in printed
