"""Summaries that are kept: whatever of them is there, and whatever became of it, the same is read."""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gazette.blobs.registry import BlobSettings, BlobStores, default_constructors
from gazette.errors import NotAllowed
from gazette.fragment.listing import list_fragments
from gazette.history.columns import Malformed, MessageFormat
from gazette.history.first_pass import fold_by_threads
from gazette.history.merge import FoldedSnapshot
from gazette.history.read import committed, read_columns
from gazette.history.snapshot import JournalSnapshot, Piece, Snapshot, cover
from gazette.history.snapshot_builder import Selection, take_snapshot
from gazette.history.source import NO_SUMMARIES, Access, OpenAccess
from gazette.history.summary import Summary
from gazette.history.summary_store import DIRECTORY, SummaryStore
from gazette.labels import CONTENT_CSV, CONTENT_PROTO_FIXED
from gazette.message.envelope import Envelope
from gazette.message.framing.frames import MalformedMessage
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid
from gazette.protocol.checkpoint import SourceCheckpoint
from gazette.protocol.fragment import ZERO_SUM, Codec, Fragment
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.runtime.clock import SystemClock
from gazette.testing.stored import json_line, write_journal
from tests.facts import raises
from tests.fuzzing import examples
from tests.history.test_histories import JOURNAL, Item, histories, sequenced
from tests.support.memory_store import MemoryStore

URL: Final = "memory://store/"
State = Literal["none", "cold", "warm", "partly", "damaged"]


class CountingStore(MemoryStore):
    """A store that knows what was read of its fragments."""

    def __init__(self) -> None:
        super().__init__(lambda: 1_700_000_000.0)
        self.read: list[str] = []
        self.refuses = ""

    def open(self, path: str) -> BinaryIO:
        if not path.startswith(DIRECTORY):
            self.read.append(path)
        elif "read" in self.refuses:
            raise NotAllowed("not for you", file=path)
        return super().open(path)

    def put(self, path: str, source: BinaryIO, *, content_encoding: str = "") -> None:
        if "write" in self.refuses:
            raise NotAllowed("read only", file=path)
        super().put(path, source, content_encoding=content_encoding)

    @property
    def kept(self) -> list[str]:
        return sorted(f"{DIRECTORY}/{info.path}" for info in self.list(f"{DIRECTORY}/"))


def opened(store: MemoryStore, summaries: str = "") -> OpenAccess:
    access = Access.of(direct=True, summaries=summaries)
    constructors = {**default_constructors(BlobSettings(Path("/"))), "memory": lambda _: store}
    return OpenAccess(access, constructors=constructors)


class Stored:
    """A journal in the fragments of a store, with its messages as envelopes."""

    def __init__(self, items: list[Item], cuts: set[int], rng: random.Random, torn: float) -> None:
        self.store = CountingStore()
        self.envelopes: list[Envelope[int]] = []
        content = b""
        for number, item in enumerate(items):
            producer = bytes([1, 0, 0, 0, 0, item.producer])
            uuid = build_uuid(producer, item.clock, item.flags)
            line = json_line({"n": number, "text": "x" * rng.randint(0, 9)}, uuid)
            begin, content = len(content), content + line
            self.envelopes.append(
                Envelope(JOURNAL, begin, len(content), number, producer, item.clock, item.flags)
            )
        self.end = len(content)
        ends = {self.envelopes[cut].begin for cut in cuts if cut < len(items)}
        ends = {at + rng.randint(1, 40) if rng.random() < torn else at for at in ends}
        bounds = sorted({0, *(at for at in ends if at < self.end), self.end})
        self.fragments = [self.stored(content, *span) for span in itertools.pairwise(bounds)]

    def stored(self, content: bytes, begin: int, end: int) -> Fragment:
        held = content[begin:end]
        digest = hashlib.sha1(held, usedforsecurity=False).digest()
        fragment = Fragment(JOURNAL, begin, end, digest, backing_store=URL, mod_time=1)
        self.store.put(fragment.content_path(), io.BytesIO(held))
        return fragment

    def snapshot(
        self, begin: int, end: int, prior: SourceCheckpoint | None, malformed: Malformed = "fail"
    ) -> Snapshot:
        shape = MessageFormat(malformed=malformed)
        producers = {} if prior is None else prior.producers
        empty = JournalSnapshot(JOURNAL, shape, begin, end, (), producers)
        pieces = [Piece(one.begin, one.end, one) for one in self.fragments]
        held = cover(pieces, empty.pieces_begin, end)
        return Snapshot((JournalSnapshot(JOURNAL, shape, begin, end, held, producers),))

    def folded(self, snapshot: Snapshot, run_bytes: int, summaries: str = "") -> FoldedSnapshot:
        with opened(self.store, summaries) as access:
            return fold_by_threads(access, snapshot, run_bytes=run_bytes, threads=1)

    def committed(self, folded: FoldedSnapshot) -> list[int]:
        found: list[int] = []
        with opened(self.store, NO_SUMMARIES) as access:
            for run in folded.runs:
                for batch, mask in committed((run,), read_columns(access, run.run)):
                    found += batch.columns.begins[mask].tolist()
        return found

    def damage(self, rng: random.Random, share: float) -> None:
        """Cut, change, exchange or remove some of the summaries."""
        kept = self.store.kept
        for path in kept:
            if rng.random() >= share:
                continue
            content = self.store.open(path).read()
            at = rng.randrange(len(content))
            other = self.store.open(rng.choice(kept)).read()
            changed = rng.choice(
                [
                    content[:at],
                    content[:at]
                    + bytes([content[at] ^ (1 << rng.randrange(8))])
                    + content[at + 1 :],
                    other,
                    b"",
                    content + b"more",
                    bytes(len(content)),
                ]
            )
            self.store.put(path, io.BytesIO(changed))


class Reading(NamedTuple):
    """A stored journal, of which the messages from ``middle`` up to ``last`` are read in runs."""

    items: list[Item]
    middle: int
    last: int
    cuts: set[int]
    run_bytes: int
    torn: float
    malformed: Malformed
    seed: int

    def expected(self, rng: random.Random) -> Expected:
        """Store the journal, and read the messages by one sequencer."""
        journal = Stored(self.items, self.cuts, rng, self.torn)
        count = len(self.items)
        middle, last = min(self.middle, count), max(min(self.middle, count), min(self.last, count))
        begin = journal.envelopes[middle].begin if middle < count else journal.end
        end = max(begin, journal.envelopes[last - 1].end if last else 0)
        prior = sequenced(journal.envelopes, None, 0, begin)[1] if middle else None
        want, checkpoint = sequenced(journal.envelopes, prior, begin, end)
        snapshot = journal.snapshot(begin, end, prior, self.malformed)
        return Expected(journal, snapshot, [e for e in want if not e.is_ack], checkpoint)


class Expected(NamedTuple):
    """A stored journal, the part of it to read, and the messages and checkpoint that result."""

    journal: Stored
    snapshot: Snapshot
    messages: list[Envelope[Any]]
    checkpoint: SourceCheckpoint


readings = st.builds(
    Reading,
    items=histories,
    middle=st.integers(0, 40),
    last=st.integers(0, 60),
    cuts=st.sets(st.integers(1, 60)),
    run_bytes=st.sampled_from([1, 300, 1000, 100_000]),
    torn=st.sampled_from([0.0, 0.0, 0.3]),
    malformed=st.sampled_from(["fail", "skip", "null"]),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=examples(200), deadline=None)
@given(reading=readings, state=st.sampled_from(["none", "cold", "warm", "partly", "damaged"]))
@example(
    # A transaction from before the checkpoint, in a fragment with an acknowledgement of the same producer.
    reading=Reading(
        [Item(0, 1, ACK_TXN), Item(0, 2, 1), Item(0, 3, 1), Item(1, 1, 0), Item(0, 4, ACK_TXN)],
        middle=3,
        last=5,
        cuts={3},
        run_bytes=1,
        torn=0.0,
        malformed="fail",
        seed=1,
    ),
    state="warm",
)
def test_what_is_kept_changes_nothing(reading: Reading, state: State) -> None:
    """From any checkpoint to any end, with any summaries of other readers: what one sequencer makes."""
    rng = random.Random(reading.seed)
    journal, snapshot, messages, checkpoint = reading.expected(rng)

    if state in ("warm", "partly", "damaged"):
        # Others have read all of it, or up to some fragments' ends, in runs of another size.
        for until in {journal.end, *(f.end for f in journal.fragments if rng.random() < 0.3)}:
            size = rng.choice([reading.run_bytes, 1, 700, 100_000])
            journal.folded(journal.snapshot(0, until, None, rng.choice(["fail", "skip"])), size)
    if state == "partly":
        for path in journal.store.kept:
            if rng.random() < 0.5:
                journal.store.remove(path)
    if state == "damaged":
        journal.damage(rng, 0.6)

    for _ in range(2):
        folded = journal.folded(
            snapshot, reading.run_bytes, NO_SUMMARIES if state == "none" else ""
        )
        assert folded.sources[JOURNAL] == checkpoint
        assert journal.committed(folded) == sorted(e.begin for e in messages)


# -- what is read, and what is kept


PUBLISHED: Final = [
    item
    for n in range(1, 41)
    for item in (Item(0, 3 * n, CONTINUE_TXN), Item(1, n, OUTSIDE_TXN), Item(0, 3 * n + 1, ACK_TXN))
]


@pytest.fixture
def journal() -> Stored:
    """Return a journal of twelve fragments."""
    return Stored(PUBLISHED, set(range(10, 120, 10)), random.Random(1), 0.0)


def all_of(journal: Stored) -> Snapshot:
    return journal.snapshot(0, journal.end, None)


def test_a_first_pass_reads_what_is_new(journal: Stored) -> None:
    """And nothing else, however runs were formed."""
    names = [one.content_path() for one in journal.fragments]
    before = journal.snapshot(0, journal.fragments[9].end, None)
    want = journal.folded(all_of(journal), 1000, NO_SUMMARIES)
    journal.store.read.clear()
    journal.folded(before, 1000)
    assert journal.store.read == names[:10]
    assert len(journal.store.kept) > 10
    for run_bytes in (1000, 1, 1 << 20):
        assert journal.folded(all_of(journal), run_bytes).sources == want.sources
    assert journal.store.read == names
    assert journal.folded(all_of(journal), 1000) == want


def test_runs_are_the_same_behind_what_was_pruned(journal: Stored) -> None:
    """So their own summaries are found, and not only those of their fragments."""
    journal.folded(all_of(journal), 2000)
    pieces = [
        path
        for path in journal.store.kept
        if f"{path.rpartition('/')[2][:33]}-"
        in {f"{one.begin:016x}-{one.end:016x}-" for one in journal.fragments}
    ]
    for path in pieces:
        journal.store.remove(path)
    journal.store.read.clear()
    begin = journal.fragments[2].begin
    journal.fragments = journal.fragments[2:]
    runs = journal.folded(journal.snapshot(begin, journal.end, None), 2000).runs
    assert len(runs) > 2
    # Those of the first run, which lost a fragment, and of the last, which may still grow.
    read = [piece.fragment for run in (runs[0], runs[-1]) for piece in run.run.pieces]
    assert journal.store.read == [one.content_path() for one in read if one is not None]


def test_a_transaction_over_batches_reads_no_fragment_again() -> None:
    """Messages that were pending at a checkpoint are found from summaries of whole fragments."""
    items = [
        Item(0, 1, OUTSIDE_TXN),
        *(Item(0, n, CONTINUE_TXN) for n in range(2, 8)),
        Item(1, 5, OUTSIDE_TXN),
        *(Item(0, n, CONTINUE_TXN) for n in range(8, 12)),
        Item(0, 12, ACK_TXN),
    ]
    journal = Stored(items, {4, 8, 10}, random.Random(3), 0.0)
    journal.folded(all_of(journal), 1)
    journal.store.read.clear()
    for at in (4, 8, 10):
        begin = journal.envelopes[at].begin
        prior = sequenced(journal.envelopes, None, 0, begin)[1]
        folded = journal.folded(journal.snapshot(begin, journal.end, prior), 1)
        assert folded.replays == {}
        assert journal.store.read == []
        want, _ = sequenced(journal.envelopes, prior, begin, journal.end)
        assert journal.committed(folded) == sorted(one.begin for one in want if not one.is_ack)
        assert len(want) > 8
        journal.store.read.clear()


@pytest.mark.parametrize("refuses", ["write", "read", "read write"])
def test_a_store_that_may_only_be_read(
    journal: Stored, refuses: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The same is read, and the reason why it takes so long is logged once."""
    want = journal.folded(all_of(journal), 1000, NO_SUMMARIES)
    journal.store.refuses = refuses
    assert journal.folded(all_of(journal), 1000) == want
    assert journal.store.kept == []
    (record,) = caplog.records
    assert "option summaries" in record.getMessage()
    assert URL in record.getMessage()


def test_summaries_of_another_place(journal: Stored, tmp_path: Path) -> None:
    """Nothing is written to fragments that are read only: the job has its own directory of summaries."""
    journal.store.refuses = "write"
    journal.folded(all_of(journal), 1000, f"file://{tmp_path}/")
    assert len([*(tmp_path / DIRECTORY / JOURNAL).iterdir()]) > 12
    journal.store.read.clear()
    journal.folded(all_of(journal), 1000, f"file://{tmp_path}/")
    assert journal.store.read == []


def test_what_a_name_binds(journal: Stored) -> None:
    """Another decoding has names of its own, and so have other bytes, and another begin."""
    kept = SummaryStore(journal.store, URL)
    piece = Piece(journal.fragments[0].begin, journal.fragments[0].end, journal.fragments[0])
    journal.folded(journal.snapshot(0, piece.end, None), 1)
    plain = MessageFormat()
    assert kept.get(JOURNAL, plain, [piece]) is not None
    assert kept.get(JOURNAL, MessageFormat(malformed="null"), [piece]) is not None
    assert kept.get("a/nother", plain, [piece]) is None
    assert kept.get(JOURNAL, MessageFormat(uuid_field="id"), [piece]) is None
    assert kept.get(JOURNAL, MessageFormat(CONTENT_CSV), [piece]) is None
    assert piece.fragment is not None
    for changed in (
        replace(piece, begin=piece.begin + 1),
        replace(piece, end=piece.end - 1),
        replace(piece, fragment=None),
        replace(piece, fragment=replace(piece.fragment, sum=bytes(19) + b"x")),
        replace(piece, fragment=replace(piece.fragment, sum=ZERO_SUM)),
    ):
        assert kept.get(JOURNAL, plain, [changed]) is None
    # Where and how the fragment is stored is not a part of it.
    moved = replace(
        piece.fragment, codec=Codec.GZIP, path_postfix="a=b", backing_store="file:///x/"
    )
    assert kept.get(JOURNAL, plain, [replace(piece, fragment=moved)]) is not None


def test_a_damaged_summary_is_not_used(journal: Stored) -> None:
    """Neither with any bit changed, nor cut, nor that of another fragment under its name."""
    kept = SummaryStore(journal.store, URL)
    journal.folded(journal.snapshot(0, journal.fragments[1].end, None), 1)
    first, second = journal.store.kept
    piece = Piece(journal.fragments[0].begin, journal.fragments[0].end, journal.fragments[0])
    content = journal.store.open(first).read()
    damaged = [journal.store.open(second).read(), content[:-1], content + b"x", b""]
    for at in range(len(content)):
        damaged.append(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
    for one in damaged:
        journal.store.put(first, io.BytesIO(one))
        assert kept.get(JOURNAL, MessageFormat(), [piece]) is None
    journal.store.put(first, io.BytesIO(content))
    assert kept.get(JOURNAL, MessageFormat(), [piece]) is not None


def test_a_class_whose_code_finds_the_uuid_is_not_named(journal: Stored) -> None:
    shape = MessageFormat(CONTENT_PROTO_FIXED, message=f"{__name__}:Own")
    kept = SummaryStore(journal.store, URL)
    piece = Piece(journal.fragments[0].begin, journal.fragments[0].end, journal.fragments[0])
    kept.put(JOURNAL, shape, [piece], Summary({}, piece.begin, piece.begin, 0, 0, 0))
    assert journal.store.kept == []


class Own:
    """A message that finds its UUID by code, which no name binds."""


def test_treatments_of_malformed_messages_do_not_mix() -> None:
    """A line that is no message counts in each treatment as it would without summaries."""
    journal = Stored([Item(0, 1, 0)], set(), random.Random(0), 0.0)
    content = b"what?\n"
    journal.fragments.append(
        journal.stored(bytes(journal.end) + content, journal.end, journal.end + 6)
    )
    journal.end += 6
    rows: dict[Malformed, int] = {"skip": 1, "null": 2}
    for malformed, other in itertools.permutations(rows):
        for _ in range(2):
            for one in (malformed, other):
                folded = journal.folded(journal.snapshot(0, journal.end, None, one), 1)
                assert folded.rows == rows[one]
        with raises(MalformedMessage, journal=JOURNAL):
            journal.folded(all_of(journal), 1)


def test_the_format_is_of_this_version(journal: Stored) -> None:
    """A change of any of these needs another VERSION, or old summaries would be taken for new ones."""
    journal.folded(journal.snapshot(0, journal.fragments[0].end, None), 1)
    (path,) = journal.store.kept
    name = ".gazette-summaries/a/journal/0000000000000000-00000000000002af-"
    assert path == f"{name}7a2ab4594b01d0c8f80fd84cf191928082a09bf6"
    content = journal.store.open(path).read()
    assert (
        hashlib.sha256(content).hexdigest()
        == "86cc6434ff43dbb1ebe24429c85141f98adaf2cad46b664cd60997297439db42"
    )


async def test_brokers_do_not_see_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are beside the journals' directories: a listing neither takes them for fragments nor warns."""
    fragments = write_journal(tmp_path, "file:///fragments/", JOURNAL, [b'{"a":1}\n', b'{"a":2}\n'])
    access = Access.of(file_root=tmp_path, direct=True, summaries="")
    selection = Selection(journals=(JOURNAL,), stores=("file:///fragments/",))

    def fold() -> None:
        with access.open() as opened:
            fold_by_threads(opened, take_snapshot(opened, selection), run_bytes=1, threads=1)

    await asyncio.to_thread(fold)
    assert len([*(tmp_path / "fragments" / DIRECTORY / JOURNAL).iterdir()]) == 2
    stores = BlobStores(BlobSettings(tmp_path), SystemClock())
    for name in (JOURNAL, JOURNAL.partition("/")[0]):
        spec = JournalSpec(
            name, labels=LabelSet.of(), fragment=FragmentSpec(stores=("file:///fragments/",))
        )
        listed = await list_fragments(stores, spec, [JOURNAL])
        assert [one.begin for one in listed] == [one.begin for one in fragments if name == JOURNAL]
    stores.close()
    if caplog.records:
        # The journal that has the other one below it warns of that one's fragments alone.
        assert DIRECTORY not in caplog.text
