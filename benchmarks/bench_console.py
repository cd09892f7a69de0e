"""The console in Chromium: what it costs brokers and members, and its first view of a large cluster.

::

    PYTHONPATH=. python benchmarks/bench_console.py [--seconds 60] [--journals 10000] [--shards 1000]

It runs three brokers and two members of the word count. For each process it prints the share of a processor
that it takes at rest without a page, and with each view open. Then it creates journals and shards. It prints
seconds until a new console shows its first view and its first page of journals and shards, and until
``gazctl top --once`` ends. The shards are disabled: they are listed, and none runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from gazette.client.journals import JournalChange
from gazette.client.shards import ShardChange
from gazette.protocol.label_set import EVERYTHING
from gazette.run.dev.cluster import ClusterSettings, LocalCluster
from gazette.run.dev.console_process import console_beside
from gazette.run.dev.processes import python_module
from gazette.run.dev.word_count import WordCountCluster, WordCountSettings
from gazette.runtime.clock import SystemClock
from tests.support.browser import Browser
from tools.bench.cluster import journal_spec
from tools.bench.processes import cpu_seconds

_CLOCK: Final = SystemClock()
_BATCH: Final = 100
_SETTLES_S: Final = 8.0
_REPEATS: Final = 5


@contextlib.asynccontextmanager
async def _console(words: WordCountCluster, directory: Path) -> AsyncIterator[str]:
    """Run a console of its own process during the block. Yield its address, with the key."""
    said = list[str]()
    brokers = ",".join(broker.grpc_url for broker in words.cluster.brokers)
    consumers = ",".join(member.grpc_url for member in words.members)
    ends = {"brokers": brokers, "consumers": consumers}
    async with console_beside(directory, os.environ, _CLOCK, said.append, **ends):
        yield said[0].removeprefix("console  ")


async def _enter(browser: Browser, url: str) -> float:
    """Open a console as soon as it serves. Return the seconds of its first view."""
    while True:
        begun = _CLOCK.monotonic()
        await browser.open(url)
        if "Gazette" in await browser.text():
            await browser.until_seen("Endpoint")
            return _CLOCK.monotonic() - begun
        await _CLOCK.sleep(0.1)


async def _costs(words: WordCountCluster, url: str, seconds: float) -> None:
    processes = {f"broker {at}": one.process.pid for at, one in enumerate(words.cluster.brokers)}
    processes |= {member.id: member.process.pid for member in words.members}

    async def shares() -> list[float]:
        await _CLOCK.sleep(_SETTLES_S)
        before = [cpu_seconds([pid]) for pid in processes.values()]
        await _CLOCK.sleep(seconds)
        return [
            (cpu_seconds([pid]) - used) / seconds
            for pid, used in zip(processes.values(), before, strict=True)
        ]

    def report(view: str, figures: Sequence[float]) -> None:
        print(f"{view:40}" + "".join(f"{figure:10.2%}" for figure in figures), flush=True)

    print(f"{'of a processor':40}" + "".join(f"{name:>10}" for name in processes))
    await _CLOCK.sleep(_SETTLES_S)
    idle = await shares()
    report("no page is open", idle)
    async with Browser() as browser:
        await _enter(browser, url)
        partition = words.partitions[0].replace("/", "%2F")
        views = ("/", "/journals", f"/journal/{partition}", "/application", "/shard/shard-000")
        for view in views:
            await browser.open(f"{url.partition('?')[0]}#{view}")
            opened = await shares()
            added = [with_page - without for with_page, without in zip(opened, idle, strict=True)]
            report(f"added by {view}", added)


async def _apply(words: WordCountCluster, journals: int, shards: int) -> None:
    specs = [journal_spec(f"many/{at // 100:03d}/part-{at:05d}") for at in range(journals)]
    for begin in range(0, journals, _BATCH):
        changes = [JournalChange(upsert=spec) for spec in specs[begin : begin + _BATCH]]
        await words.client.apply_journals(changes)
    while True:  # Brokers are not idle before each journal has one.
        listed = await words.client.list_journals(EVERYTHING)
        if all(journal.route.primary is not None for journal in listed.journals):
            break
        await _CLOCK.sleep(1.0)
    model = replace(words.shard_specs()[0], disable=True)
    async with words.shard_client() as client:
        for begin in range(0, shards, _BATCH):
            ids = [f"many-{at:05d}" for at in range(begin, min(shards, begin + _BATCH))]
            await client.apply_shards([ShardChange(upsert=replace(model, id=id)) for id in ids])


async def _first_views(words: WordCountCluster, directory: Path) -> None:
    begun = _CLOCK.monotonic()
    async with _console(words, directory) as url, Browser() as browser:
        await _enter(browser, url)
        print(f"a new console shows the cluster after {_CLOCK.monotonic() - begun:.2f} s")
        base = url.partition("?")[0]
        views = {
            "/": "Endpoint",
            "/journals": "many/000/part-00000",
            "/application": "many-00000",
            "/journal/many%2F000%2Fpart-00007": "Where it is",
        }
        for view, words_seen in views.items():
            took = []
            for _ in range(_REPEATS):
                async with Browser() as other:
                    await other.open(f"{base}debug/ready")  # The browser itself has started.
                    took.append(await _enter(other, url))
                    if view != "/":
                        begun = _CLOCK.monotonic()
                        await other.open(f"{base}#{view}")
                        await other.until_seen(words_seen)
                        took[-1] = _CLOCK.monotonic() - begun
            figures = f"median {statistics.median(took):.2f} s, least {min(took):.2f} s"
            print(f"  {view}: first view: {figures}", flush=True)
    brokers = words.cluster.brokers[0].grpc_url
    begun = _CLOCK.monotonic()
    argv = python_module(
        "gazette.gazctl.main", "top", "--once", "--json", f"--broker.address={brokers}"
    )
    argv += [f"--consumer.address={words.members[0].grpc_url}"]
    top = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    said, _ = await top.communicate()
    took_s = _CLOCK.monotonic() - begun
    print(
        f"gazctl top --once --json: {len(said):,} bytes after {took_s:.2f} s, exit code {top.returncode}"
    )


async def _run(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-console-") as name:
        directory = Path(name)
        flags = (f"--broker.limit={2 * arguments.journals}",)
        cluster = LocalCluster(ClusterSettings(directory / "cluster", broker_flags=flags), _CLOCK)
        await cluster.start()
        words = WordCountCluster(cluster, WordCountSettings(), _CLOCK)
        try:
            await words.apply_journals()
            for _ in range(2):
                await words.start_member()
            await words.apply_shards()
            await words.await_shards(standbys=True)
            async with _console(words, directory / "small") as url:
                await _costs(words, url, arguments.seconds)
            await _apply(words, arguments.journals, arguments.shards)
            await _first_views(words, directory / "large")
        finally:
            await words.stop()
            await cluster.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--journals", type=int, default=10_000)
    parser.add_argument("--shards", type=int, default=1_000)
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
