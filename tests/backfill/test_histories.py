"""Any history, cut anywhere: a backfilled state and the live tail are a full replay."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gazette.backfill.build import run_task
from gazette.backfill.plan import tasks_of
from gazette.backfill.staging import open_staging, state_name
from gazette.history.access import Access
from gazette.history.read import fold_locally
from gazette.history.take import Selection, take_snapshot
from gazette.labels import CONTENT_JSON_LINES
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.hints import FSMHints
from gazette.protocol.shard import ShardSource
from gazette.recoverylog.log_file import moved_hints
from gazette.stores.sqlite import SQLiteStore
from gazette.testing.app_driver import AppDriver, MemoryJournals
from gazette.testing.recovery import LOG
from gazette.testing.stored import write_journal
from tests.backfill.apps import Words, WordsBackfill
from tests.backfill.cluster import history, line

STORE = "file:///fragments/"
JOURNALS = ("words/one", "words/two")
LAST = bytes([1, 0, 0, 0, 0, 9])
LOG_PREFIX, SHARD = LOG.rsplit("/", 1)


def state_of(driver: AppDriver[SQLiteStore]) -> tuple[list[Any], Checkpoint]:
    store = driver.store
    content = store.query("SELECT word, n FROM counts ORDER BY word")
    ((data,),) = store.query("SELECT checkpoint FROM gazette_checkpoint")
    return content, Checkpoint.from_bytes(data)


def build(
    root: Path, driver: AppDriver[SQLiteStore], ends: dict[str, int], run_bytes: int
) -> FSMHints:
    """Build the shard's state up to ``ends``, append it to the driver's log, and give its hints."""
    access = Access.of(file_root=root, direct=True)
    selection = Selection(
        journals=JOURNALS,
        stores=(STORE,),
        content_type=CONTENT_JSON_LINES,
        begin={one.journal: one.min_offset for one in driver.spec.sources},
        end=ends,
    )
    with access.open() as opened:
        snapshot = take_snapshot(opened, selection)
    folded = fold_locally(access, snapshot, run_bytes=run_bytes)
    (task,) = tasks_of(
        WordsBackfill(),
        "",
        [driver.spec],
        folded,
        access,
        staging=str(root / "staging"),
        run_id="run",
        fqn=lambda shard: "",
        overwrite=False,
        scratch=root,
    )
    attempt = run_task(task)
    name = state_name("run", attempt.shard, attempt.attempt)
    data = open_staging(task.staging).read(name)
    opening = attempt.built.branch.opening(random.Random(1), empty=not driver.journals.content(LOG))
    base = driver.journals.append(LOG, opening)
    driver.journals.append(LOG, data)
    return moved_hints(attempt.built.hints, base)


@settings(max_examples=25, report_multiple_bugs=False)
@given(
    seed=st.integers(0, 1 << 32),
    counts=st.tuples(st.integers(0, 60), st.integers(1, 60)),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    per_fragment=st.integers(1, 30),
    lost=st.integers(0, 2),
    run_bytes=st.sampled_from([1, 500, 1 << 20]),
    torn=st.booleans(),
    old=st.booleans(),
)
def test_a_backfilled_state_and_its_tail_are_a_full_replay(
    seed: int,
    counts: tuple[int, int],
    cuts: tuple[float, float],
    per_fragment: int,
    lost: int,
    run_bytes: int,
    torn: bool,
    old: bool,
) -> None:
    """Several producers, duplicates, roll-backs, open transactions, lost fragments, a snapshot that
    ends within a message, and an old state of the shard or none: rows and checkpoint are equal."""
    rng = random.Random(seed)
    journals = MemoryJournals()
    ends: dict[str, int] = {}
    sources: list[ShardSource] = []
    with tempfile.TemporaryDirectory(prefix="gazette-backfill-test-") as directory:
        root = Path(directory)
        for name, count, cut in zip(JOURNALS, counts, cuts, strict=True):
            lines = [*history(rng, count), line(LAST, 1 << 40, word="last")]
            pieces = [
                b"".join(lines[n : n + per_fragment]) for n in range(0, len(lines), per_fragment)
            ]
            gone = min(lost, len(pieces) - 1)
            begin = sum(map(len, pieces[:gone]))
            sources.append(ShardSource(name, begin))
            write_journal(root, STORE, name, pieces[gone:], begin=begin)
            journals.append(name, b"".join(pieces))
            kept = lines[gone * per_fragment :]
            before = kept[: round(cut * (len(kept) - 1))]
            # Not beyond what there is: a torn end is one within the next message.
            ends[name] = begin + sum(map(len, before)) + (3 if torn else 0)

        def driver(name: str, **fields: Any) -> AppDriver[SQLiteStore]:
            made = AppDriver(
                Words(),
                root / name,
                JOURNALS,
                journals=journals if name == "replay" else MemoryJournals(),
                **fields,
            )
            made.spec = replace(
                made.spec,
                id=SHARD,
                recovery_log_prefix=LOG_PREFIX,
                hint_prefix="/hints",
                sources=tuple(sources),
            )
            return made

        replayed = driver("replay")
        backfilled = driver("backfilled")
        if old:
            for name in JOURNALS:
                backfilled.journals.append(name, journals.content(name)[: ends[name]])
            backfilled.run()
            backfilled.advance(2.0)
            backfilled.crash()
        backfilled.hints = build(root, backfilled, ends, run_bytes)
        for name in JOURNALS:
            done = len(backfilled.journals.content(name))
            backfilled.journals.append(name, journals.content(name)[done:])
        with replayed, backfilled:
            for one in (replayed, backfilled):
                one.run()
                one.advance(2.0)  # Of transactions that are open the shard waits for the rest.
            expected, found = state_of(replayed), state_of(backfilled)
            assert found[0] == expected[0]
            assert found[1] == expected[1]
