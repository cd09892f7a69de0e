"""Every view of the console in Chromium, on a cluster of `gazette run`, under load and kills.

`test_accessibility` needs axe-core from the registry of npm. It prints a figure for each view:

    pytest -s tests/run/console/test_live.py -k accessibility
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from gazette import Message
from gazette.client.client import Client
from gazette.message.publishing.client_publisher import ClientPublisher
from gazette.protocol.label_set import LabelSelector
from gazette.run.dev.processes import ChildProcess, python_module
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from tests.support.browser import Browser, missing_browser

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing_browser()), reason=f"apt-get install {missing_browser()}"),
]
ROOT = Path(__file__).parents[3]
CLOCK = SystemClock()
APPLICATION = """
from gazette import Application, Message, Output, PoisonPolicy, Source
from gazette.stores.sqlite import SQLiteStore

class Order(Message):
    customer: str = ""
    cents: int = 0

class Total(Message):
    customer: str = ""
    cents: int = 0

class Shop(Application[SQLiteStore]):
    orders = Source("shop/orders", Order, partitions=2, key="customer")
    totals = Output("shop/totals", Total, partitions=2, key="customer")

    async def initialize(self, service):
        self.to_totals = self.totals.mapping()

    def poison_policy(self, shard):
        return PoisonPolicy("shop/dead-letters", errors=(ValueError,), limit=1_000_000)

    def new_store(self, shard, recorder):
        schema = "CREATE TABLE IF NOT EXISTS totals (customer TEXT PRIMARY KEY, cents INTEGER)"
        return SQLiteStore(recorder, schema)

    def consume_message(self, shard, store, envelope, publisher):
        order = envelope.message
        if order.cents == 0:
            raise ValueError("an order of nothing")
        upsert = "INSERT INTO totals VALUES (?, ?) ON CONFLICT DO UPDATE SET cents = cents + excluded.cents"
        store.execute(upsert, (order.customer, order.cents)).fetchall()
        ((cents,),) = store.query("SELECT cents FROM totals WHERE customer = ?", (order.customer,))
        publisher.publish_uncommitted(self.to_totals, Total(customer=order.customer, cents=cents))
"""
ORDERS, TOTALS = "shop/orders/part-000", "shop/totals/part-000"
MESSAGES_A_SECOND = 200
AXE = "axe-core@4.14.1"
SCORE_MIN = 95
TRACE_S = 5.0


class Order(Message):
    customer: str = ""
    cents: int = 0


@dataclass
class Live:
    """A running `gazette run`. ``url`` is the address of its console, with the key."""

    url: str
    brokers: str
    runner: psutil.Process

    def process(self, word: str) -> psutil.Process:
        """Return the process of the cluster whose command line has a word."""
        return next(
            child for child in self.runner.children(True) if word in " ".join(child.cmdline())
        )

    def at(self, view: str) -> str:
        return f"{self.url.partition('?')[0]}#{view}"


async def publish(brokers: str) -> None:
    """Publish orders without end. Some are refused, as they are of nothing."""
    selector = LabelSelector.parse("name:prefix=shop/orders/part-")
    numbers = itertools.count()
    async with Client(brokers) as client, ClientPublisher(client) as publisher:
        while True:
            async with publisher.transaction() as transaction:
                for number in itertools.islice(numbers, MESSAGES_A_SECOND // 5):
                    customer = f"customer-{number % 40}"
                    order = Order(customer=customer, cents=number % 100)
                    await transaction.publish(selector, order, key=customer)
            await CLOCK.sleep(0.2)


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Live]:
    (tmp_path / "shop.py").write_text(APPLICATION)
    flags = ("--brokers=3", "--workers=2", "--standbys=1", "--lease=5s", "--port=0")
    argv = python_module(
        "gazette.main", "run", str(tmp_path / "shop.py"), f"--dir={tmp_path / 'state'}",
        "--broker-port=0", *flags,
    )  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    log = tmp_path / "run.log"
    process = ChildProcess("run", argv, log, environ, CLOCK)
    await process.start()
    try:
        while "Ctrl-C stops it" not in (text := log.read_text()):
            assert process.running, text
            await CLOCK.sleep(0.1)
        url, brokers = (
            re.search(pattern, text) for pattern in (r"console +(\S+)", r"brokers +(\S+)")
        )
        assert url is not None
        assert brokers is not None
        yield Live(url[1], brokers[1], psutil.Process(process.pid))
    finally:
        assert await process.stop(60.0)


@pytest.fixture
async def browser(live: Live) -> AsyncIterator[Browser]:
    async with TaskScope("load") as scope, Browser() as browser:
        scope.spawn(publish(live.brokers), name="publish")
        await browser.open(live.url)
        await browser.until_seen("Cluster", "broker-3")
        yield browser
        scope.cancel()


async def trace_view(live: Live, browser: Browser) -> str:
    """Return the view of the newest message of a committed transaction."""
    await browser.open(live.at(f"/journal/{TOTALS.replace('/', '%2F')}"))
    await browser.until_seen("committed at")
    script = """
        const rows = [...document.querySelectorAll("tr")];
        return rows.find((row) => row.textContent.includes("committed at")).querySelector("a").hash;
    """
    return str(await browser.run(script))[1:]


def views(trace: str) -> dict[str, tuple[str, ...]]:
    """Return what each view shows."""
    return {
        "/": ("Everything is as it should be", "broker-3", "worker-2"),
        "/journals": (ORDERS, "shop/dead-letters", "KiB/s"),
        f"/journal/{TOTALS.replace('/', '%2F')}": ("Fragments over time", "committed at"),
        "/application": ("shard-001", "PRIMARY", "an order of nothing", "behind"),
        "/shard/shard-000": ("Rows: ", "customer-", "Last transactions", "STANDBY"),
        trace: ("Rows that its transaction changed", "totals: ", "Messages that its transaction"),
    }


async def test_every_view_lives_through_kills_under_load(live: Live, browser: Browser) -> None:
    """While a view is open, a process hangs and dies: the view says so, and all of it comes back."""
    victims = iter(("broker-3", "broker-2", "broker-1", "worker-1", "worker-2"))
    trace = await trace_view(live, browser)
    for view, words in views(trace).items():
        await browser.open(live.at(view))
        begun = CLOCK.monotonic()
        await browser.until_seen(*words)
        if view == trace:
            assert CLOCK.monotonic() - begun < TRACE_S
            continue
        name = next(victims)
        victim = live.process(f"id={name}")
        victim.suspend()
        # Until its lease has expired, the page may name the process itself.
        await browser.until_seen("2 of 3" if "broker" in name else "it has 0 of 1 hot standbys")
        victim.kill()
        await browser.until_seen(*words[-1:])
        await browser.open(live.at("/"))
        await browser.until_seen("Everything is as it should be")
    assert [text for text in await browser.problems() if "status of " not in text] == []


async def test_a_member_that_hangs_does_not_hide_the_others(live: Live, browser: Browser) -> None:
    hung = live.process("id=worker-1")
    await browser.open(live.at("/application"))
    await browser.until_seen("shard-001", "PRIMARY")
    hung.suspend()
    try:
        # The list of the other one is newer than the lease.
        text = await browser.until_seen("2 shards: ", "it has 0 of 1 hot standbys")
        assert "the consumer does not answer" not in text
        assert text.count("PRIMARY") == 2
    finally:
        hung.resume()


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the script of axe-core. Skip without npm, or without its registry."""
    directory = tmp_path_factory.mktemp("axe")
    npm = shutil.which("npm")
    command = [npm or "npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", AXE]
    if not npm or subprocess.run(command, cwd=directory, capture_output=True).returncode:
        pytest.skip("npm cannot install axe-core")
    return (directory / "node_modules" / "axe-core" / "axe.min.js").read_text()


RUN_AXE = """
    return axe.run(document).then((result) => ({
        passed: result.passes.length, violated: result.violations.length,
        says: result.violations.map((rule) => `${rule.id}: ${rule.nodes[0].html.slice(0, 200)}`),
    }));
"""


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_accessibility(
    live: Live, browser: Browser, axe: str, width: int, scheme: str
) -> None:
    """No rule of axe is violated. The figure is the share of rules that hold, in percent."""
    trace = await trace_view(live, browser)
    await browser.prefer(scheme)
    if width < 400:
        await browser.narrow(width)
    for view, words in views(trace).items():
        await browser.open(live.at(view))
        await browser.until_seen(*words)
        await browser.run(axe)
        result = await browser.run(RUN_AXE)
        score = 100 * result["passed"] / (result["passed"] + result["violated"])
        figure = f"{score:6.1f}  {result['passed']} rules, {scheme}, {width} px  {view}"
        print(figure)  # noqa: T201 - what `pytest -s` is run for
        assert result["says"] == []
        assert score >= SCORE_MIN
