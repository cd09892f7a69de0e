"""``gazctl`` as a process: pipes, signals, and servers that do not answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Final

import pytest

from gazette.auth import KeyedAuth
from gazette.client.append.appender import AppendParams
from gazette.client.journals import JournalChange
from gazette.client.read.reader import ReadParams
from gazette.cluster.etcd.client import Etcd
from gazette.gazctl.context import Context
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.protocol.label_set import LabelSet
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.gazctl.runner import Runner
from tests.raw_server import raw_server

ROOT = Path(__file__).parents[2]


async def start(gazctl: Runner, *argv: str | Path, stdout: int = PIPE) -> Process:
    environ = {**os.environ, **gazctl.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "gazette.gazctl.main", *map(str, argv)]
    return await asyncio.create_subprocess_exec(
        *words, stdin=PIPE, stdout=stdout, stderr=PIPE, env=environ
    )


async def ended(process: Process) -> tuple[int, str, str]:
    """Return the exit code and the remaining output, when it has ended unasked."""
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = await process.stdout.read(), await process.stderr.read()
    return await process.wait(), out.decode(), err.decode()


async def test_a_blocking_read_that_is_interrupted_ends_well(
    broker: BrokerFixture, gazctl: Runner, tmp_path: Path
) -> None:
    """Its offsets are those of what it wrote."""
    await broker.create(journal_spec("a/journal"))
    await broker.client.append(AppendParams("a/journal"), b"content")
    offsets = tmp_path / "offsets.json"
    argv = ["journals", "read", "-l", "name=a/journal", "--block", "--offsets-out", str(offsets)]
    process = await start(gazctl, *argv)
    assert process.stdout is not None
    assert await process.stdout.readexactly(7) == b"content"
    process.send_signal(signal.SIGTERM)
    assert await ended(process) == (0, "", "")
    assert json.loads(offsets.read_text()) == {"a/journal": 7}


async def test_an_append_that_waits_for_its_input_can_be_interrupted(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    await broker.create(journal_spec("a/journal"))
    process = await start(gazctl, "journals", "append", "-l", "name=a/journal", "-f", "lines")
    assert process.stdin is not None
    process.stdin.write(b"a line\n")
    # What came in is appended, while more may come.
    async with broker.client.reader(_blocking("a/journal")) as reader:
        assert await reader.read() == b"a line\n"
    process.send_signal(signal.SIGINT)
    assert await ended(process) == (128 + signal.SIGINT, "", "")


INTERRUPTED: Final = (
    ["read", "a/first", "a/second"],
    ["journals", "read", "-l", "name:prefix=a/"],
)


@pytest.mark.parametrize("words", INTERRUPTED, ids=" ".join)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_exit_code_of_a_read_names_the_signal(
    number: signal.Signals, words: list[str], broker: BrokerFixture, gazctl: Runner
) -> None:
    """A read that would end waits for a second journal, whose store cannot be listed."""
    labels = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
    await broker.create(journal_spec("a/first", labels=labels))
    second = journal_spec("a/second", labels=labels, stores=("file:///missing/",))
    await broker.client.apply_journals([JournalChange(upsert=second)])
    await broker.client.append(AppendParams("a/first"), b"{}\n")
    process = await start(gazctl, *words)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"{}\n"
    process.send_signal(number)
    assert await ended(process) == (128 + number, "", "")


INTERRUPTED_CLOSE = f"""
import os, sys
from gazette.gazctl.io.terminal import Terminal
from gazette.gazctl.perform import perform
from gazette.gazctl.settings import prepare

terminal = Terminal.system()
command, loaded, in_use = prepare(["journals", "list"], os.environ, terminal)
command = command._replace(target="{__name__}:list_and_interrupt")
sys.exit(perform(command, loaded, os.environ, terminal, in_use))
"""


async def list_and_interrupt(context: Context) -> int:
    """Call a broker as a command does. A signal comes as the command ends."""
    client = await context.broker()
    await client.list_journals()
    os.kill(os.getpid(), signal.SIGINT)
    return 0


async def test_a_signal_as_a_command_closes_its_connections_ends_it(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    environ = {**os.environ, **gazctl.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", INTERRUPTED_CLOSE, stdout=PIPE, stderr=PIPE, env=environ
    )
    assert await ended(process) == (128 + signal.SIGINT, "", "")


def _blocking(journal: str) -> ReadParams:
    return ReadParams(journal, block=True)


async def test_commands_end_well_whether_or_not_streams_are_buffered(gazctl_alone: Runner) -> None:
    for unbuffered in ("", "1"):
        gazctl_alone.environ["PYTHONUNBUFFERED"] = unbuffered
        code, out, err = await ended(await start(gazctl_alone, "completion", "bash"))
        assert (code, err) == (0, "")
        assert out.endswith("complete -o default -F _gazctl gazctl\n")


async def test_whoever_reads_no_further_gets_no_message(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    await broker.create(journal_spec("a/journal"))
    await broker.client.append(AppendParams("a/journal"), b"x" * (4 << 20))
    reading, writing = os.pipe()
    argv = ("journals", "read", "-l", "name=a/journal")
    process = await start(gazctl, *argv, stdout=writing)
    os.close(writing)
    assert await asyncio.to_thread(os.read, reading, 10) == b"x" * 10
    os.close(reading)
    assert process.stderr is not None
    assert await process.stderr.read() == b""
    assert await process.wait() == 128 + signal.SIGPIPE


async def test_a_server_that_does_not_answer_is_named(gazctl_alone: Runner) -> None:
    """It listens, and that is all."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with raw_server(silent) as server:
        address = f"http://{server.target}"
        result = await gazctl_alone("journals", "list", "--timeout=300ms", BROKER_ADDRESS=address)
    assert result.code == 1
    assert f"cannot reach the broker at {address}: it does not answer" in result.err


async def test_a_server_that_stops_answering_is_named(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    """A read that waits for a journal without brokers, for one, ends by --timeout."""
    await broker.create(journal_spec("a/journal"))
    two = journal_spec("a/journal", replication=2)
    from gazette.client.journals import JournalChange

    await broker.client.apply_journals([JournalChange(upsert=two, expect_mod_revision=-1)])
    argv = ("journals", "suspend", "-l", "name=a/journal", "--timeout=300ms")
    result = await gazctl(*argv)
    assert result.code == 1
    assert f"no answer from {broker.endpoint} within 0.3 s" in result.out


async def test_tokens_are_signed_by_the_keys_of_the_cluster(
    etcd: Etcd, tmp_path: Path, gazctl_alone: Runner
) -> None:
    keys = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
    auth = KeyedAuth.parse(SystemClock(), keys)
    async with await BrokerFixture.start(etcd, tmp_path, auth=auth, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec("a/journal"))
        gazctl_alone.environ["BROKER_ADDRESS"] = broker.endpoint
        refused = await gazctl_alone("journals", "list")
        assert refused.code == 1
        assert "missing or empty Authorization token" in refused.err
        command = ("journals", "list", "--broker.auth-keys", keys)
        assert (await gazctl_alone.ok(*command)).out == "Name\na/journal\n"
        append = ("journals", "append", "-l", "name=a/journal", "--broker.auth-keys", keys)
        await gazctl_alone.ok(*append, stdin=b"content")


async def test_two_commands_at_once_do_not_meet(broker: BrokerFixture, gazctl: Runner) -> None:
    await broker.create(journal_spec("a/journal"))
    async with TaskScope("test") as scope:
        tasks = [
            scope.spawn(
                gazctl.ok("journals", "append", "-l", "name=a/journal", stdin=b"x"), name="x"
            )
            for _ in range(8)
        ]
    assert all(task.result().code == 0 for task in tasks)
    assert (await gazctl.ok("journals", "read", "-l", "name=a/journal")).out == "x" * 8
