"""A cluster of real processes under load: broken on purpose, restarted in turn, and lost as a whole."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from gazette.client.append.appender import AppendParams, AppendResult, append_once
from gazette.client.client import Client
from gazette.client.journals import FragmentsParams, JournalChange
from gazette.client.read.reader import OffsetJump, ReadParams
from gazette.client.rpc.errors import status_of
from gazette.errors import Conflict, GazetteError, Unavailable
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.text import duration
from gazette.run.dev.heads import write_head
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from tools.chaos.cluster import STORE, Broker, ChaosCluster, ChaosSettings
from tools.chaos.run import run

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

DOCS = Path(__file__).parents[2] / "docs"
JOURNAL = "the/journal"


def history_of(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "history.ndjson").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_what_is_broken_for_a_minute_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    assert run(["--minutes=1.2", "--seed=5", f"--dir={directory}"]) == 0
    printed = capsys.readouterr().out
    assert "verdict   no violation" in printed
    history = history_of(directory)
    outcomes = {one["outcome"] for one in history if one["type"] == "completed"}
    assert outcomes == {"ok", "fail", "unknown"}
    assert len([one for one in history if one["type"] == "fault"]) > 5


def test_three_rolling_restarts_under_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No operation of a client fails, and no journal is ever without all of its replicas."""
    directory = tmp_path / "run"
    argv = ["--restarts=3", "--brokers=4", "--replication=2,3", f"--dir={directory}"]
    assert run(argv) == 0, capsys.readouterr().out
    history = history_of(directory)
    restarts = [one for one in history if one["type"] == "fault" and one["phase"] == "settled"]
    assert len(restarts) == 12
    # The watch has seen replicas come and go, and never too few of them.
    replicas = [one for one in history if one["type"] == "replicas"]
    assert {one["assigned"] - one["wanted"] for one in replicas} >= {0, 1}


class Lost:
    """A cluster all of whose replicas of a journal are killed at once."""

    def __init__(self, directory: Path) -> None:
        self.clock = SystemClock()
        self.cluster = ChaosCluster(ChaosSettings(directory, lease_ttl_s=4.0), self.clock)
        self.client: Client
        self.appended: list[tuple[bytes, AppendResult]] = []

    async def create(self) -> None:
        fragment = FragmentSpec(
            length=1 << 20,
            codec=Codec.SNAPPY,
            stores=(f"file:///{STORE}/",),
            refresh_interval_ns=10 * duration.SECOND,
        )
        spec = JournalSpec(JOURNAL, 2, fragment=fragment)
        await self.client.apply_journals([JournalChange(upsert=spec)])

    async def append(self, content: bytes) -> AppendResult:
        async with asyncio.timeout(60):
            result = await self.client.append(AppendParams(JOURNAL), content)
        self.appended.append((content, result))
        return result

    async def stored_to(self) -> int:
        """Return the offset up to which the journal is in the blob store."""
        listed = await self.client.list_fragments(FragmentsParams(JOURNAL))
        return max((one.fragment.end for one in listed if one.fragment.mod_time), default=0)

    async def kill_replicas(self) -> list[Broker]:
        """Send SIGKILL to all brokers of the journal at the same time."""
        route, _ = self.cluster.route(JOURNAL)
        names = {member.suffix for member in route.members}
        assert len(names) == 2
        killed = [one for one in self.cluster.brokers if one.name in names]
        await asyncio.gather(*(one.process.kill() for one in killed))
        return killed

    async def refused(self) -> str:
        """Return the status with which an append is refused, once it is by brokers that agree."""
        async with asyncio.timeout(90):
            while True:
                try:
                    async with asyncio.timeout(10):
                        await append_once(self.client, AppendParams(JOURNAL), b"refused")
                    return ""
                except Unavailable:
                    await self.clock.sleep(0.5)
                except TimeoutError:
                    continue
                except GazetteError as error:
                    if status := status_of(error):
                        return status
                    await self.clock.sleep(0.5)

    async def gazctl(self, command: str) -> str:
        """Run a command as it stands on a page. What it says."""
        words = shlex.split(command)
        assert words[0] == "gazctl"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gazette.gazctl.main",
            *words[1:],
            f"--broker.address={self.cluster.brokers[0].url}",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        assert process.returncode == 0, out.decode()
        return out.decode()

    async def content(self, begin: int, end: int) -> bytes:
        content = bytearray()
        params = ReadParams(JOURNAL, offset=begin, end_offset=end)
        async with self.client.retry_reader(params) as reader:
            async for piece in reader.chunks():
                content += piece
        return bytes(content)


def commands_of(page: str, title: str) -> list[str]:
    """Return the commands of a section: the lines that are indented and call ``gazctl``."""
    text = (DOCS / page).read_text()
    section = text[text.index(f"\n## {title}\n") + 1 :]
    section = section[: section.find("\n## ", 3)]
    return re.findall(r"^ {4,}(gazctl .+)$", section, re.MULTILINE)


async def test_all_replicas_are_lost_and_the_head_is_reset(tmp_path: Path) -> None:
    """What had reached the store is there; the rest is not, and its offsets are used again."""
    lost = Lost(tmp_path)
    cluster = lost.cluster
    try:
        await cluster.start()
        lost.client = cluster.client()
        async with TaskScope("test") as scope:
            scope.daemon(cluster.watch(), name="watch")
            await lost.create()
            await cluster.until("assignment", cluster.has_replicas, 60.0)
            for number in range(20):
                await lost.append(b"stored %d\n" % number * 1000)
            # A primary that leaves has the fragment closed and stored.
            route, _ = cluster.route(JOURNAL)
            assert route.primary_id is not None
            leaver = next(one for one in cluster.brokers if one.name == route.primary_id.suffix)
            assert await leaver.process.stop(60.0)
            await cluster.revive(leaver)
            await cluster.until("hand-off", cluster.has_replicas, 60.0)
            stored = await lost.append(b"the last one that is stored, or the first that is not")
            async with asyncio.timeout(60):
                while await lost.stored_to() < stored.commit.begin:
                    await lost.clock.sleep(0.2)
            for number in range(20):
                await lost.append(b"lost %d\n" % number)
            end = lost.appended[-1][1].commit.end

            killed = await lost.kill_replicas()
            for broker in killed:
                await cluster.revive(broker)
            # Refused, until an operator says that the dead are dead.
            assert await lost.refused() == "INDEX_HAS_GREATER_OFFSET"
            commands = commands_of("operating.md", "When all replicas of a journal were lost")
            assert any("reset-head" in one for one in commands)
            for command in commands:
                await lost.gazctl(command.replace("the/journal", JOURNAL))
            again = await lost.append(b"appended after the loss")
            head = again.commit.begin

            # What was lost is a tail, from the end of what had been stored. Its offsets are given out again,
            # but for those before the known head: that is the end of the first append of the last primary.
            gap = stored.commit.begin
            assert gap <= head < end
            content = await lost.content(0, gap)
            for held, result in lost.appended[:-1]:
                commit = result.commit
                kept = commit.end <= gap
                assert (content[commit.begin : commit.end] == held) == kept
            assert head == stored.commit.end
            # Readers of what is lost go on at the head at once.
            with pytest.raises(OffsetJump) as jump:
                await lost.content(gap, head)
            assert (jump.value.facts["expected"], jump.value.facts["offset"]) == (gap, head)
            assert await write_head(lost.client, JOURNAL) == again.commit.end
            assert await lost.content(head, again.commit.end) == b"appended after the loss"
            # Repeating the command does nothing.
            for command in commands:
                await lost.gazctl(command.replace("the/journal", JOURNAL))
            # A writer at explicit offsets notices: its place is not the head any more.
            with pytest.raises(Conflict):
                await append_once(lost.client, AppendParams(JOURNAL, offset=end), b"?")
            assert (await lost.append(b"!")).commit.begin == again.commit.end
            scope.cancel()
        await lost.client.close()
    finally:
        await cluster.stop()
