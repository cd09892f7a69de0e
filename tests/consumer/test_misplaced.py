"""Messages in a partition that their key does not belong to: counted, failed, skipped or republished."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from gazette import (
    Application,
    DeferToNextTransaction,
    ListPage,
    Message,
    Output,
    PoisonPolicy,
    ShardRequest,
    Source,
    gather_route,
    list_route,
    shard_route,
)
from gazette.client.append.appender import AppendParams
from gazette.consumer.contract.key_check import KeyCheck, KeyChecks, Misplaced
from gazette.errors import Invalid
from gazette.message.envelope import Envelope
from gazette.message.key_hash import fnv32a
from gazette.stores.json_file import JSONFileStore
from gazette.testing.app_driver import AppDriver
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import log_spec, shard_spec
from tests.consumer.apps import Start, source_spec
from tests.facts import logged, raises

WORDS = [f"word-{n:02d}" for n in range(13)]
PARTS = ["words/part-000", "words/part-001"]
SHARDS = ["shard-000", "shard-001"]
LETTERS = "dead/letters"
FQN = "/driver/items/driven-shard"


class Word(Message):
    word: str


class Totals(JSONFileStore[dict[str, int]]):
    pass


class Counting(Application[Totals]):
    words = Source("words", Word, partitions=2, key="word")

    def new_store(self, shard: Any, recorder: Any) -> Totals:
        return Totals(recorder, dict[str, int], dict)

    def consume_message(self, shard: Any, store: Totals, envelope: Any, publisher: Any) -> None:
        word = envelope.message.word
        store.state[word] = store.state.get(word, 0) + 1

    @shard_route("/counts/{word}", key="word")
    def count(self, store: Totals, request: ShardRequest) -> int:
        return store.read().get(request.path["word"], 0)

    @gather_route("/total", combine=sum)
    def total(self, store: Totals, request: ShardRequest) -> int:
        return sum(store.read().values())

    @list_route("/counts")
    def counts(self, store: Totals, page: ListPage) -> Iterable[tuple[str, int]]:
        after = "" if page.after is None else page.after
        return [one for one in sorted(store.read().items()) if one[0] > after][: page.limit]


class Republishing(Counting):
    words = Source("words", Word, partitions=2, key="word", misplaced="republish")


class Failing(Counting):
    words = Source("words", Word, partitions=2, key="word", misplaced="fail")


class Skipping(Failing):
    def poison_policy(self, shard: Any) -> PoisonPolicy:
        return PoisonPolicy(LETTERS, malformed_only=True)


def number(word: str) -> int:
    return fnv32a(word.encode()) % 2


OWN = [word for word in WORDS if number(word) == 0]
OTHERS = [word for word in WORDS if number(word) == 1]


@pytest.fixture
def published(tmp_path: Path) -> Iterator[Any]:
    """Return a function that has an application consume all words, of which some are misplaced."""
    with ExitStack() as stack:
        yield partial(_consumed, stack, tmp_path)


def _consumed(stack: ExitStack, directory: Path, application: Counting) -> AppDriver[Any]:
    driver = stack.enter_context(AppDriver(application, directory, [PARTS[0]]))
    driver.publish(PARTS[0], *(Word(word=word) for word in WORDS))
    driver.run()
    return driver


def counted() -> float:
    """Return how many misplaced messages this process has counted."""
    labels = {"shard": FQN, "journal": PARTS[0], "policy": "count"}
    return REGISTRY.get_sample_value("gazette_shard_misplaced_messages_total", labels) or 0.0


def test_a_misplaced_message_is_counted_and_named(
    published: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before = counted()
    driver = published(Counting())
    assert driver.store.state == dict.fromkeys(WORDS, 1)
    assert counted() == before + len(OTHERS)
    error = logged(caplog, "shard", reason="consumed a message of another partition")["error"]
    assert OTHERS[0] in str(error)
    assert error.facts["journal"] == PARTS[0]


def test_a_misplaced_message_is_republished_once(published: Any) -> None:
    """And not consumed here, whatever becomes of the process."""
    driver = published(Republishing())
    assert driver.store.state == dict.fromkeys(OWN, 1)
    driver.crash()
    driver.run()
    assert driver.store.state == dict.fromkeys(OWN, 1)
    assert [one.word for one in driver.committed(PARTS[1], Word)] == OTHERS


def test_a_misplaced_message_fails_the_shard(published: Any) -> None:
    with raises(Misplaced, "begin", "end", journal=PARTS[0], says=OTHERS[0]):
        published(Failing())


def test_a_misplaced_message_goes_the_way_of_poison(published: Any) -> None:
    driver = published(Skipping())
    assert driver.store.state == dict.fromkeys(OWN, 1)
    letters = driver.committed(LETTERS, dict)
    assert [one["reason"] for one in letters] == ["misplaced"] * len(OTHERS)
    assert [one["shard"] for one in letters] == [letters[0]["shard"]] * len(OTHERS)


@pytest.mark.parametrize("misplaced", ["count", "fail", "republish"])
@pytest.mark.parametrize("key", ["word", lambda message: message.word])
def test_acknowledgements_belong_to_each_partition(
    misplaced: Any, key: Any, tmp_path: Path
) -> None:
    """They have no key."""

    class Acknowledged(Counting):
        deliver_acks = True
        words = Source("words", Word, partitions=2, key=key, misplaced=misplaced)

        def __init__(self) -> None:
            self.acknowledgements = 0

        def consume_message(self, shard: Any, store: Totals, envelope: Any, publisher: Any) -> None:
            if envelope.is_ack:
                self.acknowledgements += 1
            else:
                super().consume_message(shard, store, envelope, publisher)

    application, before = Acknowledged(), counted()
    with AppDriver(application, tmp_path, [PARTS[0]]) as driver:
        for word in OWN:
            driver.publish_pending(PARTS[0], Word(word=word))
            driver.acknowledge()
        driver.run()
        assert driver.store.state == dict.fromkeys(OWN, 1)
    assert application.acknowledgements
    assert counted() == before


class Deferring(Republishing):
    """Defers every third message once."""

    def __init__(self) -> None:
        self.deferred: set[str] = set()
        self.consumed = 0

    def begin_transaction(self, shard: Any, store: Totals) -> None:
        self.consumed = 0

    def consume_message(self, shard: Any, store: Totals, envelope: Any, publisher: Any) -> None:
        word = envelope.message.word
        if self.consumed and word in OWN[::2] and word not in self.deferred:
            self.deferred.add(word)
            raise DeferToNextTransaction("later")
        self.consumed += 1
        super().consume_message(shard, store, envelope, publisher)


def test_deferred_messages_are_republished_once(published: Any) -> None:
    driver = published(Deferring())
    assert driver.store.state == dict.fromkeys(OWN, 1)
    assert [one.word for one in driver.committed(PARTS[1], Word)] == OTHERS


class Passing(Counting):
    """Publishes each word to an output, which is the mapping itself."""

    passed = Output("passed", Word, partitions=2, key="word")

    def consume_message(self, shard: Any, store: Totals, envelope: Any, publisher: Any) -> None:
        publisher.publish_uncommitted(self.passed, Word(word=envelope.message.word))


def test_an_application_publishes_to_its_output(published: Any) -> None:
    driver = published(Passing())
    for place, words in enumerate((OWN, OTHERS)):
        assert [one.word for one in driver.committed(f"passed/part-00{place}", Word)] == words


class Batched(Republishing):
    def consume_messages(self, shard: Any, store: Totals, batch: Any, publisher: Any) -> None:
        for envelope in batch:
            self.consume_message(shard, store, envelope, publisher)


def test_batches_have_no_misplaced_message(published: Any) -> None:
    driver = published(Batched())
    assert driver.store.state == dict.fromkeys(OWN, 1)
    assert [one.word for one in driver.committed(PARTS[1], Word)] == OTHERS


def test_policies_are_checked_at_the_start() -> None:
    with raises(Invalid, path="Source('words').misplaced", advises="republish"):
        Source("words", Word, key="word", misplaced="move")  # type: ignore[arg-type]

    @dataclass
    class Plain:
        word: str

    with raises(Invalid, path="Source('words').misplaced", advises="uuid"):
        Source("words", Plain, key="word", misplaced="republish")


@pytest.mark.parametrize("application", [Counting, Republishing])
async def test_thirteen_messages_without_a_key_are_thirteen_in_queries(
    start: Start, broker: BrokerFixture, application: Any
) -> None:
    """Appended as raw bytes to any partition, as by HTTP. A route by key finds them once they are moved."""
    await broker.create(*map(source_spec, PARTS), *map(log_spec, SHARDS))
    for at, word in enumerate(WORDS):
        content = json.dumps({"uuid": "", "word": word}).encode() + b"\n"
        await broker.client.append(AppendParams(PARTS[at % 2]), content)
    member = await start(application())
    await member.create(*map(shard_spec, SHARDS, PARTS))
    async with httpx.AsyncClient(base_url=member.http) as http:
        for _ in range(2):  # What one shard republishes is read by the other.
            for shard in SHARDS:
                await member.read_to_heads(shard)
        assert (await http.get("/total")).json() == len(WORDS)
        found = [(await http.get(f"/counts/{word}")).json() for word in WORDS]
        assert (found == [1] * len(WORDS)) == (application is Republishing)


async def test_a_list_reports_a_key_that_two_shards_have(
    start: Start, broker: BrokerFixture
) -> None:
    await broker.create(*map(source_spec, PARTS), *map(log_spec, SHARDS))
    for part in PARTS:
        for word in ("both", "also") if part == PARTS[0] else ("both",):
            content = json.dumps({"uuid": "", "word": word}).encode() + b"\n"
            await broker.client.append(AppendParams(part), content)
    member = await start(Counting())
    await member.create(*map(shard_spec, SHARDS, PARTS))
    for shard in SHARDS:
        await member.read_to_heads(shard)
    async with httpx.AsyncClient(base_url=member.http) as http:
        page = (await http.get("/counts")).json()
    assert [item["key"] for item in page["items"]] == ["also", "both", "both"]
    assert page["duplicates"] == [{"key": "both", "shards": SHARDS}]


@given(
    words=st.lists(st.text(max_size=3), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    count=st.integers(1, 5),
)
@settings(max_examples=200)
def test_the_check_of_batches_is_that_of_each_message(
    words: list[str], cuts: list[int], count: int
) -> None:
    source = Source("words", Word, partitions=count, key="word")
    place = source.key_place("words/part-000")
    assert place is not None
    check = KeyCheck(place)
    bounds = [0, *sorted(cuts), len(words)]
    for begin, end in pairwise(bounds):
        batch = [
            Envelope("words/part-000", 0, 1, Word(word=word), b"", 0, 0)
            for word in words[begin:end]
        ]
        expected = [at for at, one in enumerate(batch) if fnv32a(one.message.word.encode()) % count]
        assert check.misplaced(batch) == expected


@pytest.mark.parametrize(
    ("application", "consumed"), [(Counting, WORDS), (Republishing, OWN), (Failing, None)]
)
def test_a_replay_consumes_what_the_shard_has_consumed(application: Any, consumed: Any) -> None:
    checks = KeyChecks(application().key_place)
    batch = [
        Envelope(journal, 0, 1, Word(word=word), b"", 0, 0)
        for journal in (PARTS[0], "others/part-000")
        for word in WORDS
    ]
    if consumed is None:
        with raises(Misplaced, journal=PARTS[0], says=OTHERS[0]):
            checks.consumed(batch)
    else:
        assert [one.message.word for one in checks.consumed(batch)] == [*consumed, *WORDS]
