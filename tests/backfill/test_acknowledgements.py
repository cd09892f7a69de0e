"""What a shard published last, and has not acknowledged when a backfill replaces its state."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gazette import Envelope
from gazette.client.append.appender import AppendParams
from gazette.client.journals import JournalChange
from gazette.client.read.reader import ReadParams
from gazette.client.shards import ShardChange
from gazette.consumer.application import Store
from gazette.consumer.application_name import name_of
from gazette.errors import Broken, Fenced, NotAllowed, Unavailable
from gazette.history.backfill import previous_state
from gazette.history.backfill.definition import Backfill
from gazette.history.backfill.settings import HistoryEnd
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.envelope import EnvelopeDecoder
from gazette.message.framing.framing import framing_of
from gazette.message.mapping import fixed_mapping
from gazette.message.sequencer.sequencer import Sequencer
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.protocol.hints import FnodeSegments, FSMHints, Segment
from gazette.protocol.shard import ShardSpec
from gazette.recoverylog.log.log_file import Branch
from gazette.runtime import failpoints
from gazette.runtime.failpoints import armed
from gazette.runtime.tasks import TaskScope, resolved
from gazette.stores.claims import BackfillClaim
from gazette.stores.sql.store import SQLStore
from gazette.stores.state_builder import OfflineShard
from gazette.testing.consumer import LOGS
from tests.backfill.apps import Documents, Pairs, Rows, Word, Words, WordsBackfill
from tests.backfill.cluster import ALPHA, Cluster, line, shard_settings, source
from tests.backfill.test_databases import engine as engine
from tests.backfill.test_databases import postgres as postgres
from tests.facts import raises

PREFIX = "/gazette/consumers/test"
SOURCE, SHARD = "words/part-000", "built"
ONE, TWO = OUTS = ("out/one", "out/two")
MAPPINGS = [fixed_mapping(name, CONTENT_JSON_LINES) for name in OUTS]


class Publishing:
    """Publishes each word to both journals, in the transaction that counts it."""

    def consume_message(
        self, shard: Any, store: Any, envelope: Envelope[Word], publisher: Any
    ) -> None:
        super().consume_message(shard, store, envelope, publisher)  # type: ignore[misc]
        for mapping in MAPPINGS:
            publisher.publish_uncommitted(mapping, Word(word=envelope.message.word))


class PublishingWords(Publishing, Words):
    pass


class PublishingPairs(Publishing, Pairs):
    pass


class PublishingDocuments(Publishing, Documents):
    pass


class OwnStore(Store):
    """A store of an application's own: its file holds the checkpoint, and then the counts."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.file = recorder.directory / "own.state"
        self.checkpoint = Checkpoint()
        self.state: dict[str, int] = {}
        if self.file.exists():
            first, second = self.file.read_bytes().split(b"\n")
            self.checkpoint, self.state = Checkpoint.from_json(first), json.loads(second)

    def restore_checkpoint(self, shard: Any) -> Checkpoint:
        return self.checkpoint

    def start_commit(self, shard: Any, checkpoint: Checkpoint, wait_for: Any) -> Any:
        data = checkpoint.to_json() + b"\n" + json.dumps(self.state).encode()
        self.file.write_bytes(data)
        with self.recorder.group(wait_for) as group:
            group.write(group.create("/own.next"), 0, data)
            group.rename("/own.next", "/own.state")
        self.checkpoint = checkpoint
        return group.future

    def destroy(self) -> None:
        pass


class PublishingOwn(PublishingDocuments):
    def new_store(self, shard: Any, recorder: Any) -> Any:
        return OwnStore(recorder)


class PublishingRows(Publishing, Rows):
    pass


def replayed(kind: Any) -> Backfill:
    """Run a backfill that replays through the application, whose publications are old."""

    class Replayed(Backfill):
        application = kind
        discard_publications = True

        def clear(self, shard: Any, store: Any) -> None:
            store.execute("DELETE FROM words WHERE shard = :shard", {"shard": shard.id})

    return Replayed()


async def read(cluster: Cluster, journal: str) -> bytes:
    head = (await cluster.broker.client.append(AppendParams(journal), b"")).commit.end
    content = b""
    params = ReadParams(journal, block=True, end_offset=head)
    async with cluster.broker.client.retry_reader(params) as reader:
        while piece := await reader.read():
            content += piece
    assert len(content) == head
    return content


def sequenced(journal: str, content: bytes) -> Sequencer[Any]:
    """Return a sequencer that has queued some messages, up to what commits first."""
    decoder: EnvelopeDecoder[Any] = EnvelopeDecoder(
        journal, framing_of(CONTENT_JSON_LINES, Word), 0
    )
    decoder.feed(content)
    sequencer: Sequencer[Any] = Sequencer({}, 1 << 12)
    batch = decoder.decode()
    index = 0
    while index < len(batch) and sequencer.drain is None:
        index = sequencer.queue_batch(batch, index)
    return sequencer


async def published(cluster: Cluster, journal: str) -> tuple[list[str], int]:
    """Return the words that a read-committed reader sees, and the number of
    producers with an open transaction.
    """
    decoder: EnvelopeDecoder[Any] = EnvelopeDecoder(
        journal, framing_of(CONTENT_JSON_LINES, Word), 0
    )
    decoder.feed(await read(cluster, journal))
    sequencer: Sequencer[Any] = Sequencer({}, 1 << 12)
    words: list[str] = []
    while batch := decoder.decode():
        index = 0
        while index < len(batch):
            index = sequencer.queue_batch(batch, index)
            while found := sequencer.dequeue(1 << 12):
                words += [one.message.word for one in found if not one.is_ack]
    sources = sequencer.checkpoint().values()
    producers = [state for found in sources for state in found.producers.values()]
    return words, sum(state.begin is not None for state in producers)


async def all_published(cluster: Cluster) -> list[tuple[list[str], int]]:
    return [await published(cluster, name) for name in OUTS]


async def ended(
    start: Callable[[Any], Any], application: Any, points: str, *, log: bool = True
) -> Cluster:
    """Return a cluster whose shard has consumed a word, and had to stop at these points of the next ones."""
    cluster: Cluster = await start(application)
    await cluster.broker.create(source(SOURCE), *map(source, OUTS))
    await cluster.create(shard_settings(SHARD, SOURCE, log=log))
    await cluster.append(SOURCE, [line(ALPHA, 1, word="first")])
    await cluster.enable(SHARD)
    await cluster.consumer.read_to_heads(SHARD)
    with armed(points):
        await cluster.append(SOURCE, [line(ALPHA, 2, word="second")])
        waited = [
            one
            for one in failpoints.armed_points
            if isinstance(one, failpoints._Armed) and one.when
        ]
        while any(one.seen < (one.when or 0) for one in waited):
            await cluster.broker.client.clock.sleep(0.02)
        await cluster.disable(SHARD)
    return cluster


def before_acknowledging(*journals: str) -> str:
    """Stop a transaction after its message is appended, and before its acknowledgement is."""
    return ";".join(f"append.begin({name})=delay:3600@2" for name in journals)


FIRST, BOTH = (["first"], 0), (["first", "second"], 0)
OPEN = (["first"], 1)


@pytest.mark.parametrize("kind", [PublishingWords, PublishingPairs, PublishingDocuments])
@pytest.mark.parametrize("journals", [OUTS, (TWO,)], ids=["none of it", "half of it"])
async def test_what_a_former_state_owes_is_acknowledged(
    start: Any, kind: Any, journals: tuple[str, ...]
) -> None:
    if kind is PublishingPairs:
        pytest.importorskip("rocksdict")
    cluster = await ended(start, kind(), before_acknowledging(*journals))
    assert await all_published(cluster) == [OPEN if one in journals else BOTH for one in OUTS]
    report = await cluster.backfill(replayed(kind), overwrite=True)
    assert report.acknowledged == len(OUTS)
    assert await all_published(cluster) == [BOTH, BOTH]
    # Case: the shard goes on, and publishes what is new, only.
    await cluster.append(SOURCE, [line(ALPHA, 3, word="third")])
    await cluster.enable(SHARD)
    await cluster.consumer.read_to_heads(SHARD)
    assert await all_published(cluster) == [(["first", "second", "third"], 0)] * 2


async def test_what_it_never_committed_is_rolled_back(start: Any) -> None:
    """And the history has to end before it: the live shard is to publish what is unpublished."""
    points = f"append.begin({LOGS}/{SHARD})=delay:3600@1"
    cluster = await ended(start, PublishingWords(), points)
    assert await all_published(cluster) == [OPEN, OPEN]
    backfill = replayed(PublishingWords)
    first = len(line(ALPHA, 1, word="first"))
    for dry_run in (True, False):
        job = cluster.job(backfill, overwrite=True, run_id="beyond")
        with raises(NotAllowed, says=f"{SOURCE} up to {first}", advises="--offsets") as raised:
            await job.run(dry_run=dry_run)
        assert f"--offsets='{{\"{SOURCE}\": {first}}}'" in raised.value.hint
    before = HistoryEnd({SOURCE: 0})
    with raises(NotAllowed, says=f"{SOURCE} up to {first}", advises="--offsets"):
        await cluster.backfill(backfill, overwrite=True, end=before)
    assert not cluster.staging.exists(), "something was built"
    await cluster.backfill(backfill, overwrite=True, end=HistoryEnd({SOURCE: first}), enable=True)
    await cluster.consumer.read_to_heads(SHARD)
    assert await all_published(cluster) == [BOTH, BOTH]


def test_a_state_that_ends_in_the_midst_of_a_transaction_is_refused() -> None:
    """The shard had consumed, and published, the first of two messages when it committed last."""
    lines = [line(ALPHA, 1, CONTINUE_TXN, "a"), line(ALPHA, 2, CONTINUE_TXN, "b")]
    content = b"".join([*lines, line(ALPHA, 3, ACK_TXN)])
    sequencer = sequenced(SOURCE, content)
    before = Checkpoint(sequencer.checkpoint())
    assert len(sequencer.dequeue(1)) == 1
    sequencer.consumed()
    amidst = Checkpoint(sequencer.checkpoint())
    end = before.sources[SOURCE].read_through
    assert amidst.sources[SOURCE].read_through == end == len(b"".join(lines))

    def judge(checkpoint: Checkpoint, *, publishes: bool = True) -> None:
        shard = shard_settings(SHARD, SOURCE)
        states = {SHARD: previous_state.PreviousState(checkpoint)}
        previous_state.require_published(states, {SHARD: shard}, {SOURCE: end}, publishes=publishes)
        previous_state.require_whole(states, {SHARD: before}, publishes=publishes)

    judge(before)
    judge(amidst, publishes=False)
    for checkpoint, publishes in (
        (amidst, True),
        (replace(amidst, ack_intents={ONE: b"intent"}), False),
    ):
        with raises(NotAllowed, "producer", begin=0, says="words/part-000"):
            judge(checkpoint, publishes=publishes)


async def test_publications_may_be_given_up(start: Any) -> None:
    points = f"append.begin({LOGS}/{SHARD})=delay:3600@1"
    cluster = await ended(start, PublishingWords(), points)
    report = await cluster.backfill(
        replayed(PublishingWords), overwrite=True, forget_publications=True
    )
    assert report.acknowledged == len(OUTS)
    assert await all_published(cluster) == [FIRST, FIRST]


async def test_a_state_that_is_committed_to_meanwhile_is_read_again(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an owner unknown to the run: what counts is what the log holds at the fence."""
    cluster = await ended(start, PublishingWords(), before_acknowledging(TWO))
    spec = await cluster.spec(SHARD)
    job = cluster.job(replayed(PublishingWords), overwrite=True)
    read: list[str] = []
    reading = job._cutover._read

    async def counted(spec: ShardSpec) -> Any:
        read.append(spec.id)
        return await reading(spec)

    monkeypatch.setattr(job._cutover, "_read", counted)
    note = job._records.note_appending

    async def noted(*arguments: Any) -> None:
        await note(*arguments)
        strange = Branch(7, 5).opening(random.Random(1), empty=False)
        await cluster.broker.client.append(AppendParams(spec.recovery_log), strange)

    monkeypatch.setattr(job._records, "note_appending", noted)
    await job.run()
    assert read == [SHARD, SHARD]
    assert await all_published(cluster) == [BOTH, BOTH]


@pytest.mark.parametrize(
    "point",
    ["fenced", "acknowledging", "acknowledging@2", "acknowledged", "publishing", "published"],
)
async def test_wherever_the_driver_ends_nothing_of_it_is_lost(start: Any, point: str) -> None:
    """The run is resumed; or (at the end) the shard goes on with the state that it had."""
    cluster = await ended(start, PublishingWords(), before_acknowledging(*OUTS))
    name, _, when = point.partition("@")
    dying = f"backfill.{name}=error@{when or 1}"
    backfill = replayed(PublishingWords)
    with armed(dying), pytest.raises(Unavailable, match="failpoint"):
        await cluster.backfill(backfill, overwrite=True)
    expected = {
        "fenced": [OPEN, OPEN],
        "acknowledging": [OPEN, OPEN],
        "acknowledging@2": [BOTH, OPEN],
    }
    assert await all_published(cluster) == expected.get(point, [BOTH, BOTH])
    if point in ("fenced", "acknowledging@2"):
        # Case: no run resumes it.
        await cluster.enable(SHARD)
        await cluster.append(SOURCE, [line(ALPHA, 3, word="third")])
        await cluster.consumer.read_to_heads(SHARD)
        assert await all_published(cluster) == [(["first", "second", "third"], 0)] * 2
        return
    report = await cluster.backfill(backfill, overwrite=True)
    assert report.resumed
    assert await all_published(cluster) == [BOTH, BOTH]


async def test_a_database_has_the_new_checkpoint_owe_it(start: Any, engine: Any) -> None:
    """Also through a second backfill, before the shard has run."""
    cluster = await ended(start, PublishingRows(), before_acknowledging(*OUTS), log=False)
    assert await all_published(cluster) == [OPEN, OPEN]
    for run_id in ("one", "two"):
        await cluster.backfill(
            replayed(PublishingRows), overwrite=True, run_id=run_id, prefix=PREFIX
        )
        assert await all_published(cluster) == [OPEN, OPEN]
    await cluster.enable(SHARD)
    await cluster.append(SOURCE, [line(ALPHA, 3, word="third")])
    await cluster.consumer.read_to_heads(SHARD)
    assert await all_published(cluster) == [(["first", "second", "third"], 0)] * 2


def test_a_database_owes_what_was_committed_until_its_row_was_locked(engine: Any) -> None:
    """By an owner unknown to the run, after the claim was made."""
    shard: Any = OfflineShard(
        shard_settings(SHARD, SOURCE, log=False), "fqn", lambda: resolved(None)
    )
    owner, attempt = SQLStore(Rows.url), SQLStore(Rows.url)
    try:
        owner.restore_checkpoint(shard)
        fence = attempt.held(shard).fence
        assert attempt.claim(shard, BackfillClaim(fence, "token")).checkpoint.ack_intents == {}
        late = Checkpoint(ack_intents={ONE: b"intent"})
        owner.start_commit(shard, late, ()).result(10)
        new = Checkpoint({SOURCE: SourceCheckpoint(5)})
        attempt.start_commit(shard, new, ()).result(10)
        assert attempt.held(shard).checkpoint == replace(new, ack_intents={ONE: b"intent"})
        # Case: and no owner can commit to it any more.
        with pytest.raises(Fenced):
            owner.start_commit(shard, late, ()).result(10)
    finally:
        owner.destroy()
        attempt.destroy()


async def test_a_state_that_cannot_be_read_is_replaced_only_on_request(start: Any) -> None:
    cluster = await ended(start, PublishingWords(), before_acknowledging(*OUTS))
    # Its hints are of another shard's log.
    spec = await cluster.spec(SHARD)
    strange = Segment(author=7, first_seq_no=1, first_offset=0, first_checksum=0, last_seq_no=1)
    wrong = FSMHints(spec.recovery_log, live_nodes=(FnodeSegments(1, (strange,)),))
    change = ShardChange(upsert=spec, expect_mod_revision=-1, primary_hints=wrong)
    await cluster.consumer.shards.apply_shards([change])
    backfill = replayed(PublishingWords)
    with raises(NotAllowed, log="recovery/test/built") as raised:
        await cluster.backfill(backfill, overwrite=True)
    assert "--forget-publications" in raised.value.hint
    assert not cluster.staging.exists(), "something was built"
    report = await cluster.backfill(backfill, overwrite=True, forget_publications=True)
    assert report.acknowledged == 0
    await cluster.enable(SHARD)
    await cluster.append(SOURCE, [line(ALPHA, 3, word="third")])
    await cluster.consumer.read_to_heads(SHARD)
    assert await all_published(cluster) == [(["first", "third"], 1)] * 2


async def test_a_full_disk_is_no_reason_to_forget_anything(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await ended(start, PublishingWords(), before_acknowledging(*OUTS))

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(previous_state, "ShardState", full)
    with raises(Broken, says="Errno 28") as raised:
        await cluster.backfill(replayed(PublishingWords), overwrite=True, forget_publications=True)
    assert "--scratch-dir" in raised.value.hint
    assert not cluster.staging.exists(), "something was built"


async def test_a_journal_that_is_gone_owes_nothing(start: Any) -> None:
    cluster = await ended(start, PublishingWords(), before_acknowledging(*OUTS))
    deletion = JournalChange(delete=ONE, expect_mod_revision=-1)
    await cluster.broker.client.apply_journals([deletion])
    report = await cluster.backfill(replayed(PublishingWords), overwrite=True)
    assert report.acknowledged == 1
    assert await published(cluster, TWO) == BOTH


async def test_former_states_are_read_at_the_same_time(start: Any) -> None:
    """One log takes for ever to be played back. The states of the other shards are read meanwhile."""
    cluster: Cluster = await start(Words())
    await cluster.broker.create(source(SOURCE))
    shards = ["shard-a", "shard-b", "shard-c"]
    await cluster.create(*(shard_settings(one, SOURCE) for one in shards))
    await cluster.append(SOURCE, [line(ALPHA, 1, word="first")])
    for one in shards:
        await cluster.enable(one)
        await cluster.consumer.read_to_heads(one)
        await cluster.disable(one)
    job = cluster.job(WordsBackfill(), overwrite=True)
    with armed(f"recovery.playing({LOGS}/shard-a)=delay:3600"):
        async with TaskScope("run") as scope:
            scope.spawn(job.run(), name="run")
            while job.progress.done < 2:
                await cluster.broker.client.clock.sleep(0.02)
            assert (job.progress.step, job.progress.total) == ("reading former states", 3)
            scope.cancel()
    assert not list(cluster.scratch.iterdir()), "a cancelled run leaves no file"


async def test_the_former_state_may_be_of_another_store(start: Any) -> None:
    """An application that keeps its state in SQLite from now on, and had a JSON file."""
    cluster = await ended(start, PublishingDocuments(), before_acknowledging(*OUTS))
    # Case: it belongs to another application, unless it is said that it is the same one.
    with raises(NotAllowed, shard="built"):
        await cluster.backfill(WordsBackfill(), overwrite=True, run_id="other")
    await cluster.backfill(
        WordsBackfill(), overwrite=True, application=name_of(PublishingDocuments())
    )
    assert await all_published(cluster) == [BOTH, BOTH]


async def test_the_former_state_may_be_of_a_store_of_ones_own(
    start: Any,
) -> None:
    """Whose files only the application knows."""
    cluster = await ended(start, PublishingOwn(), before_acknowledging(*OUTS))
    await cluster.backfill(replayed(PublishingOwn), overwrite=True)
    assert await all_published(cluster) == [BOTH, BOTH]
    # Case: and the application's store is another by now.
    await cluster.append(SOURCE, [line(ALPHA, 3, word="third")])
    with raises(NotAllowed, log="recovery/test/built"):
        await cluster.backfill(WordsBackfill(), overwrite=True, run_id="other")
