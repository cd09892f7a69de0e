"""A shard that is backfilled and goes on, beside one that consumes everything: of any application."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gazette.consumer.application import Application
from gazette.history.backfill.definition import Backfill
from gazette.history.backfill.local import LocalRunner
from gazette.history.backfill.plan import message_format_of, tasks_of
from gazette.history.backfill.settings import RunSettings
from gazette.history.backfill.staging import open_staging, state_name
from gazette.history.snapshot_builder import Selection, take_snapshot
from gazette.history.source import Access
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.hints import FSMHints
from gazette.protocol.label_set import EVERYTHING
from gazette.protocol.shard import ShardSource
from gazette.recoverylog.log.log_file import moved_hints
from gazette.runtime.tasks import resolved
from gazette.stores.state_builder import OfflineShard
from gazette.testing.app_driver import AppDriver, MemoryJournals
from gazette.testing.recovery import LOG
from gazette.testing.stored import write_journal
from tests.backfill.cluster import Line, history

STORE = "file:///fragments/"
LAST = bytes([1, 0, 0, 0, 0, 9])
LOG_PREFIX, SHARD = LOG.rsplit("/", 1)


@dataclass(frozen=True)
class Subject:
    """An application that is backfilled, and the messages that it consumes."""

    application: Callable[[], Application[Any]]
    backfill: Backfill
    message_type: type[Any]
    content_type: str
    line_of: Callable[[str], Line]
    """How lines of a journal are made."""
    published: Callable[[AppDriver[Any]], list[Any]] = lambda driver: []
    """What the shard has published and committed, without what differs by chance."""


@dataclass(frozen=True)
class Story:
    """A history, and how it is read."""

    seed: int
    counts: tuple[int, int] = (40, 60)
    """Messages of each journal."""
    cuts: tuple[float, float] = (0.5, 0.7)
    """How much of them is backfilled."""
    per_fragment: int = 7
    lost: int = 1
    """Fragments that were deleted, of each journal's begin."""
    run_bytes: int = 500
    torn: bool = False
    """Whether the backfilled part ends within a message."""
    old: bool = False
    """Whether the shard had a state before."""


JOURNALS = ("words/one", "words/two")


class Replay:
    """One story of one subject, in a directory."""

    def __init__(self, subject: Subject, story: Story, root: Path) -> None:
        self.subject = subject
        self.story = story
        self.root = root
        self.journals = MemoryJournals()
        self.ends: dict[str, int] = {}
        self.sources: list[ShardSource] = []
        self.open_producers: Sequence[bytes] = ()
        rng = random.Random(story.seed)
        for name, count, cut in zip(JOURNALS, story.counts, story.cuts, strict=True):
            self._write(rng, name, count, cut)

    def _write(self, rng: random.Random, name: str, count: int, cut: float) -> None:
        story, line = self.story, self.subject.line_of(name)
        # The last message ends whatever is open.
        lines = [*history(rng, count, line=line), line(LAST, 1 << 40)]
        size = story.per_fragment
        pieces = [b"".join(lines[n : n + size]) for n in range(0, len(lines), size)]
        gone = min(story.lost, len(pieces) - 1)
        begin = sum(map(len, pieces[:gone]))
        self.sources.append(ShardSource(name, begin))
        write_journal(self.root, STORE, name, pieces[gone:], begin=begin)
        self.journals.append(name, b"".join(pieces))
        kept = lines[gone * size :]
        before = kept[: round(cut * (len(kept) - 1))]
        # Not beyond what there is: a torn end is one within the next message.
        self.ends[name] = begin + sum(map(len, before)) + (3 if story.torn else 0)

    def _driver(self, name: str, journals: MemoryJournals) -> AppDriver[Any]:
        made: AppDriver[Any] = AppDriver(
            self.subject.application(),
            self.root / name,
            JOURNALS,
            journals=journals,
            content_types=dict.fromkeys(JOURNALS, self.subject.content_type),
            initialize=False,  # The subject has its settings and mappings already.
        )
        made.spec = replace(
            made.spec,
            id=SHARD,
            recovery_log_prefix=LOG_PREFIX,
            hint_prefix="/hints",
            sources=tuple(self.sources),
        )
        return made

    def _head(self, name: str) -> AppDriver[Any]:
        """Run a shard until it has consumed what is backfilled, and stop it."""
        driver = self._driver(name, MemoryJournals())
        for journal in JOURNALS:
            driver.journals.append(journal, self.journals.content(journal)[: self.ends[journal]])
        settled(driver)
        driver.crash()
        return driver

    def check(self, runner: Any = None) -> None:
        """Check that content, checkpoint and publications of both shards are equal.

        ``runner``: that of the backfill.
        """
        head = self._head("head")
        backfilled = head if self.story.old else self._driver("backfilled", MemoryJournals())
        published = [] if self.story.old else self.subject.published(head)
        backfilled.hints = self._build(backfilled, LocalRunner(1) if runner is None else runner)
        for name in JOURNALS:
            done = len(backfilled.journals.content(name))
            backfilled.journals.append(name, self.journals.content(name)[done:])
        replayed = self._driver("replayed", self.journals)
        with ExitStack() as stack:
            for one in (replayed, backfilled):
                stack.enter_context(one)
                settled(one)
            expected, found = self._state(replayed), self._state(backfilled)
            assert found[0] == expected[0]
            assert found[1] == expected[1]
            published += self.subject.published(backfilled)
            assert sorted(published) == sorted(self.subject.published(replayed))

    def _state(self, driver: AppDriver[Any]) -> tuple[list[Any], Checkpoint]:
        ((data,),) = driver.store.query("SELECT checkpoint FROM gazette_checkpoint")
        # What it has to acknowledge is of its own transaction: that is compared as what it published.
        checkpoint = replace(Checkpoint.from_bytes(data), ack_intents={})
        shard: Any = OfflineShard(driver.spec, "", lambda: resolved(None))
        return list(self.subject.backfill.content(shard, driver.store)), checkpoint

    def _build(self, driver: AppDriver[Any], runner: Any) -> FSMHints:
        """Build the shard's state up to the ends, append it to the driver's log, and give its hints."""
        subject = self.subject
        access = Access.of(file_root=self.root, direct=True)
        selection = Selection(
            journals=JOURNALS,
            stores=(STORE,),
            shape=message_format_of(subject.content_type, subject.message_type, "uuid"),
            begin={one.journal: one.min_offset for one in driver.spec.sources},
            end=self.ends,
        )
        with access.open() as opened:
            snapshot = take_snapshot(opened, selection)
        folded = runner.fold(access, snapshot, lambda _: None, subject.backfill)
        self.open_producers = [one for found in folded.open.values() for one in found]
        (task,) = tasks_of(
            subject.backfill,
            "",
            [driver.spec],
            folded,
            access,
            RunSettings(EVERYTHING, str(self.root / "staging"), "run", scratch=self.root),
        )
        (attempt,) = runner.build([task], lambda _: None)
        name = state_name("run", attempt.shard, attempt.attempt)
        data = open_staging(task.staging).read(name)
        empty = not driver.journals.content(LOG)
        opening = attempt.built.branch.opening(random.Random(1), empty=empty)
        base = driver.journals.append(LOG, opening)
        driver.journals.append(LOG, data)
        return moved_hints(attempt.built.hints, base)


def settled(driver: AppDriver[Any]) -> None:
    driver.run()
    driver.advance(2.0)  # Of transactions that are open the shard waits for the rest.
