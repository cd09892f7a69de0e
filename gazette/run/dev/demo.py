"""``gazette demo``: count the words of real text, exactly once, while processes are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gazette.config.schema import Schema, exit_with, setting
from gazette.errors import GazetteError, Invalid
from gazette.run.dev.cluster import ClusterSettings, LocalCluster
from gazette.run.dev.console_process import console_beside
from gazette.run.dev.corpus import corpus_files, count_independently
from gazette.run.dev.demo_backfill import BackfillAct, Runner, choose_runner
from gazette.run.dev.demo_load import Publishing, Queries, all_counts
from gazette.run.dev.word_count import (
    Member,
    WordCountCluster,
    WordCountSettings,
    examples_path,
    import_examples,
)
from gazette.runtime.clock import Clock, SystemClock
from gazette.runtime.tasks import TaskScope

LEASE_S: Final = 4.0
TOP_WORDS: Final = 10
CATCH_UP_TIMEOUT_S: Final = 120.0
MORE_FILES: Final = 20
"""Number of files of the corpus that are published once more after the backfill."""


@dataclass(frozen=True, slots=True)
class DemoFlags:
    """Flags of ``gazette demo``."""

    corpus: Path | None = setting(
        None, "a file or directory of text to count (default: Python's standard library)"
    )
    json: bool = setting(False, "print one JSON object instead of progress")
    keep: bool = setting(False, "leave the cluster running afterwards, and print commands to try")
    host: str = setting(
        "127.0.0.1",
        "address that brokers and members listen on; 0.0.0.0: all, open to other machines",
    )
    dir: Path | None = setting(None, "directory of all state (default: a temporary one)")
    kill: bool = setting(True, "kill the busiest consumer and a broker in mid-stream")
    backfill: bool = setting(True, "wipe the state of a shard at the end, and backfill it")
    spark: bool | None = setting(
        None,
        "backfill it on Spark, and not with the local runner; by default if pygazette[spark] and"
        " a Java are installed",
    )
    no_spark: bool = setting(False, "backfill it with the local runner, as --spark=false")


@dataclass(slots=True)
class Report:
    """The report that ``--json`` prints."""

    ok: bool = False
    messages: int = 0
    words: int = 0
    mismatches: int = 0
    failover_ms: float = 0.0
    queries: int = 0
    queries_failed: int = 0
    backfill: str = ""
    """Runner of the backfill, ``local`` or ``spark``; empty without a backfill."""
    backfill_messages: int = 0
    backfill_seconds: float = 0.0
    seconds: float = 0.0
    top: list[tuple[str, int]] = field(default_factory=list)

    def as_json(self) -> str:
        value = asdict(self)
        del value["top"]
        value["failover_ms"] = round(self.failover_ms)
        value["seconds"] = round(self.seconds, 1)
        value["backfill_seconds"] = round(self.backfill_seconds, 1)
        return json.dumps(value)


def run(argv: Sequence[str]) -> int:
    """Run the subcommand. Return 0 if all counts are right, 1 if a count is wrong or the run failed, 2 for a
    wrong flag, 130 if it was stopped."""
    schema = Schema("gazette demo", {"": DemoFlags})
    try:
        flags = schema.load(argv, {}).group(DemoFlags)
        files = corpus_files(flags.corpus)
        runner = _runner_of(flags)
        examples_path()
        if flags.dir is not None and flags.dir.exists() and any(flags.dir.iterdir()):
            raise Invalid(
                f"{flags.dir} is not empty",
                path="--dir",
                hint="The demonstration counts from zero: give it a new directory.",
            )
    except Invalid as error:
        return exit_with(error, sys.stderr)
    except GazetteError as error:
        print(f"gazette demo: {error}\n  {error.hint}", file=sys.stderr)
        return 1
    console = Console(stderr=flags.json, highlight=False)
    try:
        if flags.dir is not None:
            return asyncio.run(_Demo(flags, files, flags.dir, console, runner).run())
        with tempfile.TemporaryDirectory(prefix="gazette-demo-") as directory:
            demo = _Demo(flags, files, Path(directory), console, runner)
            return asyncio.run(demo.run())
    except KeyboardInterrupt:
        return 130
    except GazetteError as error:
        console.print(f"[red]gazette demo: {escape(str(error))}[/]\n  {escape(error.hint)}")
        return 1


def _runner_of(flags: DemoFlags) -> Runner:
    """Return the runner of the backfill. Raise ``Invalid`` for wrong flags, ``Unavailable`` without Java."""
    if flags.spark and flags.no_spark:
        raise Invalid("must not be given with --spark", path="--no-spark")
    forced = False if flags.no_spark else flags.spark
    if forced and not flags.backfill:
        raise Invalid("needs a backfill, which --backfill=false switches off", path="--spark")
    return choose_runner(forced, os.environ)


class _Demo:
    def __init__(
        self,
        flags: DemoFlags,
        files: list[Path],
        directory: Path,
        console: Console,
        runner: Runner,
    ) -> None:
        self.flags = flags
        self.runner = runner
        self.files = files
        self.console = console
        self.clock: Clock = SystemClock()
        self.report = Report()
        self.cluster = LocalCluster(
            ClusterSettings(
                directory=directory, brokers=3, zones=2, lease_ttl_s=LEASE_S, host=flags.host
            ),
            self.clock,
        )
        self.words: WordCountCluster | None = None

    def say(self, text: str) -> None:
        self.console.print(text)

    async def run(self) -> int:
        began = self.clock.monotonic()
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        try:
            await self._count(began)
            if self.flags.keep:
                await self._keep()
        except asyncio.CancelledError:
            self.say("stopping …")
            return 130
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            if self.words is not None:
                await self.words.stop()
            await self.cluster.stop()
        return 0 if self.report.ok else 1

    async def _count(self, began: float) -> None:
        """Publish the text, query and kill meanwhile, and compare all counts with an independent count. Then
        backfill a shard, if the counts are right."""
        self.say("[bold]Gazette[/]: counting words exactly once, through failures\n")
        words = await self._start()
        import_examples()
        async with TaskScope("demo") as scope:
            expected = scope.spawn(
                asyncio.to_thread(count_independently, self.files), name="independent count"
            )
            publishing = Publishing(words, self.files, self.clock)
            queries = Queries(words, self.clock)
            asking = scope.spawn(queries.run(), name="queries")
            published = scope.spawn(publishing.run(), name="publish")
            progress = scope.spawn(self._show(publishing, queries), name="progress")
            if self.flags.kill:
                await self._break(words, publishing, queries)
            await published
            progress.cancel()
            await self._catch_up(words, publishing)
            queries.stop()
            await asking
            counts = await all_counts(words)
            counted = await expected
            self._judge(counts, counted, publishing, queries)
        if self.flags.backfill and self.report.ok:
            await self._backfill(words, publishing, counted)
        self.report.seconds = self.clock.monotonic() - began
        self._print(publishing)

    async def _backfill(
        self, words: WordCountCluster, publishing: Publishing, counted: Counter[str]
    ) -> None:
        """Rebuild a shard's state from history. Then publish more messages, which the shard must consume."""
        act = BackfillAct(words, self.clock, self.say, self.runner)
        await act.run()
        report = self.report
        report.backfill, report.backfill_messages = self.runner.name, act.messages
        report.backfill_seconds = act.seconds
        # The backfill reads stored fragments. The shard itself consumes the later messages.
        await words.await_read_through(await publishing.write_heads(), CATCH_UP_TIMEOUT_S)
        await self._compare(words, counted, "every count is as it was before")
        more_files = self.files[:MORE_FILES]
        publishing = Publishing(words, more_files, self.clock)
        await publishing.run()
        report.messages += publishing.messages
        await self._catch_up(words, publishing)
        counted = counted + await asyncio.to_thread(count_independently, more_files)
        await self._compare(words, counted, "and it keeps consuming")

    async def _compare(self, words: WordCountCluster, counted: Counter[str], success: str) -> None:
        wrong_words = self._differences(await all_counts(words), counted)
        self.report.mismatches += len(wrong_words)
        self.report.ok = self.report.ok and not wrong_words
        if not wrong_words:
            self.say(f"[green]✓ {success}[/]")

    async def _start(self) -> WordCountCluster:
        cluster = self.cluster
        self.say("starting etcd, 3 brokers in 2 zones, 2 consumer members …")
        await cluster.start()
        words = self.words = WordCountCluster(
            cluster, WordCountSettings(lease_ttl_s=LEASE_S), self.clock
        )
        await words.apply_journals()
        async with TaskScope("members") as scope:
            for _ in range(2):
                scope.spawn(words.start_member(), name="member")
        await words.apply_shards()
        await words.await_shards(standbys=True)
        count = len(words.shard_ids)
        self.say(f"  {count} partitions at R=2, {count} shards, each with a hot standby\n")
        return words

    async def _show(self, publishing: Publishing, queries: Queries) -> None:
        while True:
            await self.clock.sleep(1.0)
            self.say(
                f"  {publishing.fraction:4.0%} of the text,"
                f" {publishing.messages:>9,} messages, {queries.answered:>5,} queries answered"
            )

    async def _break(
        self, words: WordCountCluster, publishing: Publishing, queries: Queries
    ) -> None:
        """Kill the busiest member and a broker, in mid-stream."""
        await publishing.reached(0.3)
        shards_of = await words.primaries()
        busiest = max(words.members, key=lambda member: len(shards_of.get(member.id, ())))
        shards = shards_of.get(busiest.id, [])
        self.say(f"[yellow]✗ SIGKILL {busiest.id}[/], primary for {', '.join(shards)}")
        queries.is_to_be_killed(busiest)
        await busiest.process.kill()
        self.report.failover_ms = 1e3 * await queries.fail_over_s(shards)
        self.say(
            f"[green]✓ its shards answer again[/] after {self.report.failover_ms / 1e3:.1f} s"
            f" (a lease is {LEASE_S:.0f} s)"
        )
        await publishing.reached(0.6)
        broker = self.cluster.brokers[-1]
        self.say(f"[yellow]✗ SIGKILL {broker.process.name}[/]")
        await broker.process.kill()

    async def _catch_up(self, words: WordCountCluster, publishing: Publishing) -> None:
        self.say("all text is published; waiting until it is consumed …")
        await words.await_read_through(await publishing.write_heads(), CATCH_UP_TIMEOUT_S)

    def _judge(
        self, counts: Counter[str], expected: Counter[str], publishing: Publishing, queries: Queries
    ) -> None:
        """Report whether each message is counted once, and whether every query was answered."""
        report = self.report
        wrong_words = self._differences(counts, expected)
        report.messages = publishing.messages
        report.words = len(expected)
        report.mismatches = len(wrong_words)
        report.queries = queries.answered + len(queries.failures)
        report.queries_failed = len(queries.failures)
        for failure in queries.failures[:TOP_WORDS]:
            self.say(f"[red]a query failed:[/] {failure}")
        report.top = counts.most_common(TOP_WORDS)
        report.ok = not wrong_words and not queries.failures and report.messages == expected.total()

    def _differences(self, counts: Counter[str], expected: Counter[str]) -> set[str]:
        """Return the words whose counts are wrong, and print some of them."""
        wrong_words = {
            word for word in counts.keys() | expected.keys() if counts[word] != expected[word]
        }
        for word in sorted(wrong_words)[:TOP_WORDS]:
            self.say(f"[red]{word!r}: counted {counts[word]}, expected {expected[word]}[/]")
        return wrong_words

    def _print(self, publishing: Publishing) -> None:
        report = self.report
        if self.flags.json:
            print(report.as_json())
            return
        table = Table("word", "count", title="most frequent")
        table.columns[1].justify = "right"
        for word, count in report.top:
            table.add_row(word, f"{count:,}")
        self.console.print(table)
        self.say(
            f"{report.messages:,} messages, {report.words:,} different words,"
            f" {publishing.rate:,.0f} messages per second while publishing\n"
            f"fail-over {report.failover_ms / 1e3:.1f} s; {report.queries:,} queries,"
            f" {report.queries_failed} failed; {report.seconds:.0f} s in all"
        )
        if report.ok:
            self.say("[bold green]exactly once: every count equals the independent count[/]")
        else:
            self.say(f"[bold red]{report.mismatches} counts differ from the independent count[/]")

    async def _keep(self) -> None:
        words = self.words
        assert words is not None
        member: Member = next(member for member in words.members if member.process.running)
        broker = next(broker for broker in self.cluster.brokers if broker.process.running)
        cluster, say = self.cluster, partial(self.console.print, soft_wrap=True)
        self.say("\nEverything is left running. Try:\n")
        for line in commands_to_try(
            member.http_url, member.grpc_url, broker.http_url, broker.grpc_url, words.partitions[0]
        ):
            self.console.print(f"  {line}", soft_wrap=True)
        self.say(f"\nState and logs are in {self.cluster.directory}. Ctrl-C stops everything.")
        console = (cluster.directory, cluster.environ, self.clock, say)
        async with console_beside(*console, brokers=broker.grpc_url, consumers=member.grpc_url):
            await asyncio.Event().wait()


def commands_to_try(
    member_http: str, member: str, broker_http: str, broker: str, journal: str
) -> tuple[str, ...]:
    """Return commands that show the kept cluster. Each names all servers that it asks."""
    return (
        f"curl '{member_http}/query?prefix=gaz'",
        f'curl --json \'{{"text": "gazette gazette"}}\' {member_http}/publish',
        f"curl -s -i '{broker_http}/{journal}' | head -c 600",
        f"gazctl journals list --broker.address {broker}",
        f"gazctl shards list --lag --consumer.address {member} --broker.address {broker}",
    )
