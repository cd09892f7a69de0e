"""``gazctl top``: rates, lags and ages, asked for by a bounded number of calls."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import random
import signal
import struct
import sys
import termios
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gazette.auth import Capability, Claims, KeyedAuth
from gazette.client.journals import JournalChange
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Invalid
from gazette.gazctl.commands import COMMANDS
from gazette.gazctl.context import Context
from gazette.gazctl.settings import schema_of
from gazette.gazctl.top.rows import TopRow, in_order
from gazette.gazctl.top.sampler import Sampler
from gazette.protocol.label_set import EVERYTHING
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.clock import ManualClock
from gazette.testing.consumer import ConsumerFixture, log_spec, shard_spec
from tests.consumer.apps import Gate, Tally, append, frame, source_spec
from tests.gazctl.runner import Runner, Streams
from tests.gazctl.test_process import ROOT

ONCE = ("top", "--json", "--interval=500ms")
KEYS = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
AWAY = "http://127.0.0.1:1"


def by_name(out: str) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in json.loads(out)["items"]}


async def test_rates_are_those_of_appends_and_reads(
    broker: BrokerFixture, consumer: ConsumerFixture, gazctl: Runner
) -> None:
    await broker.create(source_spec("a/source"), source_spec("b/idle"), log_spec("shard-one"))
    await consumer.create(shard_spec("shard-one", "a/source"))
    await append(broker, frame("one"), journal="b/idle")

    async def appending() -> None:
        while True:
            await append(broker, frame("one"), journal="a/source")

    async with TaskScope("test") as scope:
        scope.daemon(appending(), name="appending")
        result = await gazctl.ok(*ONCE)
        table = await gazctl.ok("top", "--once", "--interval=500ms", "-l", "name:prefix=a/")
        scope.cancel()
    document = json.loads(result.out)
    assert (document["listed"], document["asked"]) == (4, 4)
    assert document["items"][-1]["name"] == "b/idle"
    found = by_name(result.out)
    assert found["a/source"]["rate_bytes_per_s"] > 0
    assert found["shard-one"]["rate_bytes_per_s"] > 0
    assert found["b/idle"]["rate_bytes_per_s"] == 0
    assert (found["a/source"]["status"], found["shard-one"]["status"]) == ("1/1", "PRIMARY")
    assert found["a/source"]["age_is_at_least"] is False
    assert found["b/idle"]["age_is_at_least"] is True
    assert 0.4 < found["b/idle"]["age_s"] < 60
    assert [row[:3] for row in table.rows] == [["journal", "a/source", "1/1"]]


async def test_lags_and_errors_are_those_of_their_rows(
    etcd: Etcd, broker: BrokerFixture, gazctl: Runner, tmp_path: Path
) -> None:
    gate = Gate()

    def on_word(word: str) -> None:
        if word == "poison":
            raise ValueError("\x1b[2Jowned")
        gate()

    member = await ConsumerFixture.start(etcd, broker, Tally(on_word=on_word), tmp_path)
    gazctl.environ["CONSUMER_ADDRESS"] = member.endpoint
    try:
        logs = [log_spec(name) for name in ("shard-late", "shard-fails")]
        await broker.create(source_spec("a/source"), source_spec("b/source"), *logs)
        await member.create(shard_spec("shard-late", "a/source"))
        await member.create(shard_spec("shard-fails", "b/source"))
        await append(broker, frame("poison"), journal="b/source")
        await member.await_failed("shard-fails")
        head = await append(broker, frame("one"), frame("two"), journal="a/source")
        await asyncio.to_thread(gate.entered.wait)

        result = await gazctl.ok(*ONCE, "--sort", "lag")
        items = json.loads(result.out)["items"]
        assert (items[0]["name"], items[0]["lag_bytes"]) == ("shard-late", head)
        failed = by_name(result.out)["shard-fails"]
        assert (failed["status"], failed["lag_bytes"]) == ("FAILED", None)
        assert "\\x1b[2Jowned" in failed["error"]
        table = await gazctl.ok("top", "--interval=500ms", "--sort=lag")
        assert table.rows[0][:3] == ["shard", "shard-late", "PRIMARY"]
        assert "\\x1b[2Jowned" in table.out
        assert "no terminal with a screen" in table.err
    finally:
        gate.open()
        await member.crash()


def test_errors_of_servers_are_safe_to_show() -> None:
    item = TopRow("shard", "shard-one")
    item.fail("\x1b[2J\u202e\nowned")
    assert item.cells(0.0)["Note"] == item.document(0.0)["error"] == "\\x1b[2J\\u202e\\nowned"


@asynccontextmanager
async def context_of(environ: Mapping[str, str]) -> AsyncIterator[Context]:
    command = next(command for command in COMMANDS if command.words == ("top",))
    loaded = schema_of(command).load([], environ)
    context = Context(loaded, environ, Streams().terminal, SystemClock(), random.Random(1))
    try:
        yield context
    finally:
        await context.close()


async def test_a_large_cluster_is_asked_in_turn(broker: BrokerFixture, gazctl: Runner) -> None:
    """The items of the screen each time, and the others by the calls that are left."""
    names = [f"a/journal-{n:02}" for n in range(10)]
    await broker.create(*(journal_spec(name) for name in names))
    clock = SystemClock()
    async with context_of(gazctl.environ) as context:
        sampler = Sampler(context, EVERYTHING, calls_max=4)
        shown: list[TopRow] = []
        for _ in range(5):
            asked = await sampler.refresh(shown)
            assert len(asked) == sampler.asked == 4
            assert asked[: len(shown)] == shown
            shown = in_order(sampler.rows.values(), "age", clock.monotonic())[:2]
            await append(broker, b"x", journal=shown[0].name)
        assert all(item.position is not None for item in sampler.rows.values())
        # Case: the first refresh asks one item, if all that is permitted is less.
        sampler.calls_max = 0
        assert len(await sampler.refresh([])) == 1
        # Case: what is asked twice only is the same both times.
        twice = Sampler(context, EVERYTHING, calls_max=6, twice=True)
        first = await twice.refresh([])
        assert (await twice.refresh(first))[:6] == first
        assert all(row.rate is not None for row in first)
        # Case: what was deleted leaves the screen, and its place in turn.
        changes = [JournalChange(delete=name, expect_mod_revision=-1) for name in names[:9]]
        await broker.client.apply_journals(changes)
        sampler.problems["broker"] = "lists come again at once"
        assert [item.name for item in await sampler.refresh(shown)] == names[9:]
        # Case: while the broker is away, no row shows a rate of before, and none counts as asked.
        await sampler.refresh([])
        assert sampler.rows["journal", names[9]].rate is not None
        await broker.crash()
        sampler.problems["broker"] = "lists come again at once"
        assert (await sampler.refresh(shown), sampler.asked) == ([], 0)
        gone = sampler.rows["journal", names[9]]
        assert (gone.rate, gone.error) == (None, "the broker does not answer")


async def test_a_refusal_of_one_server_leaves_the_lists_of_the_other(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    await broker.create(journal_spec("a/source"))
    # A broker refuses what only members answer.
    async with context_of(gazctl.environ | {"CONSUMER_ADDRESS": broker.endpoint}) as context:
        sampler = Sampler(context, EVERYTHING, calls_max=4, pause=lambda *_: 3600.0)
        with pytest.raises(Invalid, match="is a broker"):
            await sampler.refresh([])
        assert sampler.rows["journal", "a/source"].position == 0
        await broker.create(journal_spec("b/later"))
        with pytest.raises(Invalid, match="is a broker"):
            await sampler.refresh([])
        assert sampler.listed.refusals.keys() == sampler.problems.keys() == {"consumer"}
        assert len(sampler.rows) == 1  # No list was repeated before the pause.


async def test_a_suspended_journal_and_a_shard_without_primary_are_not_asked(
    broker: BrokerFixture, consumer: ConsumerFixture, gazctl: Runner
) -> None:
    """Their calls would wait for nothing."""
    await broker.create(source_spec("a/source"), log_spec("shard-off"))
    await consumer.update(shard_spec("shard-off", "a/source", disable=True))
    await gazctl.ok("journals", "suspend", "-l", "name=a/source", "--force")
    found = by_name((await gazctl.ok(*ONCE)).out)
    assert found["a/source"]["status"] == "suspended"
    assert "fully suspended" in found["a/source"]["error"]
    assert (found["shard-off"]["status"], found["shard-off"]["rate_bytes_per_s"]) == (
        "DISABLED",
        None,
    )
    assert "no primary" in found["shard-off"]["error"]


async def test_a_cluster_that_cannot_be_asked_is_named(
    etcd: Etcd, tmp_path: Path, gazctl_alone: Runner
) -> None:
    away = await gazctl_alone(*ONCE, BROKER_ADDRESS=AWAY)
    assert (away.code, f"cannot reach the broker at {AWAY}" in away.err) == (1, True)
    wrong = await gazctl_alone("top", "--interval=1ms")
    assert (wrong.code, "--interval" in wrong.err) == (2, True)
    auth = KeyedAuth.parse(SystemClock(), KEYS)
    async with await BrokerFixture.start(etcd, tmp_path, auth=auth, lease_ttl_s=60.0) as broker:
        refused = await gazctl_alone(*ONCE, BROKER_ADDRESS=broker.endpoint)
        assert refused.code == 1
        assert "missing or empty Authorization token" in refused.err


@dataclass
class Screen:
    """A process on a terminal of its own."""

    process: Process
    descriptor: int
    rest: str = ""

    async def until(self, text: str) -> str:
        """Return what the process wrote next, up to a text."""
        while text not in self.rest:
            self.rest += (await asyncio.to_thread(os.read, self.descriptor, 1 << 16)).decode()
        before, _, self.rest = self.rest.partition(text)
        return before

    def press(self, keys: str) -> None:
        os.write(self.descriptor, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, size)

    async def ended(self) -> tuple[int, str]:
        """Return the exit code and the rest of the output, and check that the terminal is as before."""
        rest = await self.until("\x1b[?1049l")
        code = await self.process.wait()
        flags = termios.tcgetattr(self.descriptor)[3]
        assert flags & termios.ECHO
        assert flags & termios.ICANON
        return code, rest


@asynccontextmanager
async def on_a_terminal(gazctl: Runner, *argv: str) -> AsyncIterator[Screen]:
    controlling, own = pty.openpty()
    environ = {**os.environ, **gazctl.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    for name in ("COLUMNS", "LINES"):
        environ.pop(name, None)
    words = [sys.executable, "-m", "gazette.gazctl.main", "top", "--interval=500ms", *argv]
    fcntl.ioctl(controlling, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=own,
        stdout=own,
        stderr=own,
        env=environ,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    try:
        yield Screen(process, controlling)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(own)
        os.close(controlling)


async def test_the_screen_follows_keys_and_sizes(broker: BrokerFixture, gazctl: Runner) -> None:
    await broker.create(journal_spec("a/journal"))
    async with on_a_terminal(gazctl, "--interval=10m") as screen:
        shown = await screen.until("a/journal")
        assert "\x1b[?1049h" in shown
        assert "Rate*" in shown
        screen.press("a")
        await screen.until("Age*")
        screen.resize(30, 6)
        await screen.until("…")
        assert "Rate" not in await screen.until("a/journal")
        screen.press("q")
        code, _ = await screen.ended()
        assert code == 0


async def test_an_interrupt_ends_the_screen_well(gazctl_alone: Runner) -> None:
    """Also while no broker answers: the screen says so, and goes on."""
    gazctl_alone.environ["BROKER_ADDRESS"] = AWAY
    async with on_a_terminal(gazctl_alone) as screen:
        await screen.until("it is asked again")
        screen.press("\x03")
        code, rest = await screen.ended()
        assert (code, "Traceback" in rest) == (0, False)


async def test_a_token_that_is_refused_ends_the_screen(
    etcd: Etcd, tmp_path: Path, gazctl_alone: Runner
) -> None:
    auth = KeyedAuth.parse(SystemClock(), KEYS)
    async with await BrokerFixture.start(etcd, tmp_path, auth=auth, lease_ttl_s=60.0) as broker:
        gazctl_alone.environ["BROKER_ADDRESS"] = broker.endpoint
        async with on_a_terminal(gazctl_alone, "--broker.auth-token=expired") as screen:
            code, _ = await screen.ended()
            assert code == 1
            await screen.until("UNAUTHENTICATED")


async def test_a_token_that_expires_ends_the_screen(
    etcd: Etcd, tmp_path: Path, gazctl_alone: Runner
) -> None:
    clock = ManualClock(SystemClock().now())
    auth = KeyedAuth.parse(clock, KEYS)
    token = auth.sign(Claims(Capability.LIST | Capability.READ), 60)
    async with await BrokerFixture.start(etcd, tmp_path, auth=auth, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec("a/journal"))
        gazctl_alone.environ["BROKER_ADDRESS"] = broker.endpoint
        async with on_a_terminal(gazctl_alone, f"--broker.auth-token={token}") as screen:
            await screen.until("a/journal")
            clock.advance(3600)
            code, _ = await screen.ended()
            assert code == 1
            await screen.until("UNAUTHENTICATED")


async def test_a_signal_ends_the_screen_as_a_key_does(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    async with on_a_terminal(gazctl) as screen:
        await screen.until("no journal or shard matches")
        screen.process.send_signal(signal.SIGTERM)
        code, _ = await screen.ended()
        assert code == 0
