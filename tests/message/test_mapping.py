"""Mappings of messages to partitions, against the vectors of the original."""

from __future__ import annotations

import inspect
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.errors import NotFound
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.key_hash import bytes_of_key, fnv32a, fnv32a_of_all
from gazette.message.mapping import (
    Partition,
    Partitions,
    PartitionWatch,
    fixed_mapping,
    modulo_mapping,
    random_mapping,
    rendezvous_mapping,
)
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSet


def partitions_of(count: int) -> Partitions:
    return Partitions(
        Partition(f"a/topic/part-{number:03d}", CONTENT_JSON_LINES) for number in range(count)
    )


def number_of(partition: Partition) -> int:
    return int(partition.journal[-3:])


def by_text(message: Any) -> Any:
    return message


def test_fnv32a_is_the_published_one() -> None:
    assert fnv32a(b"") == 0x811C9DC5
    assert fnv32a(b"a") == 0xE40C292C
    assert fnv32a(b"foobar") == 0xBF9CF968


@given(
    st.lists(st.binary(max_size=40) | st.text(max_size=20), max_size=60)
    | st.lists(st.text(max_size=9), min_size=16, max_size=60)
    | st.lists(st.binary(min_size=3, max_size=3), min_size=16, max_size=60)
)
def test_hashes_of_many_keys_are_those_of_each(keys: list[str | bytes]) -> None:
    assert fnv32a_of_all(keys).tolist() == [fnv32a(bytes_of_key(key)) for key in keys]


@pytest.mark.parametrize("others", [0, 60])
def test_a_long_key_takes_as_long_as_by_itself(others: int) -> None:
    long = "n" * (1 << 18)
    keys = [long, *(f"key {n}" for n in range(others))]
    begin = time.process_time()
    expected = fnv32a(long.encode())
    alone = time.process_time()
    assert fnv32a_of_all(keys)[0] == expected
    assert time.process_time() - alone < 8 * (alone - begin)


@pytest.mark.parametrize(
    ("key", "number"), [("It always", 119), ("seems", 54), ("impossible", 308)]
)
def test_modulo_maps_as_the_original(key: str, number: int) -> None:
    current = partitions_of(443)
    assert number_of(modulo_mapping(lambda: current, by_text)(key)) == number
    assert number_of(modulo_mapping(lambda: current, str.encode)(key)) == number


@pytest.mark.parametrize(
    ("key", "number"), [("It always", 21), ("seems", 179), ("it is done.", 337)]
)
def test_rendezvous_maps_as_the_original(key: str, number: int) -> None:
    small, large = partitions_of(400), partitions_of(500)
    current = small
    mapping = rendezvous_mapping(lambda: current, by_text)
    assert number_of(mapping(key)) == number
    assert number_of(mapping(key)) == number
    # Case: of a hundred more partitions, these keys get none.
    current = large
    if key == "it is done.":
        assert number_of(mapping(key)) == number


def test_rendezvous_equals_its_definition_and_moves_little() -> None:
    rng = random.Random(3)
    before, after = partitions_of(20), partitions_of(21)
    current = before
    mapping = rendezvous_mapping(lambda: current, by_text)
    keys = [rng.randbytes(4) for _ in range(500)]
    first = [mapping(key) for key in keys]
    for key, partition in zip(keys, first, strict=True):
        weights = [fnv32a(p.journal.encode()) ^ fnv32a(key) for p in before.all]
        assert partition is before.all[weights.index(max(weights))]
    current = after
    moved = [(a, b) for a, b in zip(first, map(mapping, keys), strict=True) if a != b]
    assert {b.journal for _, b in moved} == {"a/topic/part-020"}


def test_mappings_remember_a_bounded_number_of_keys() -> None:
    """And follow another snapshot, whatever they remember."""
    current = partitions_of(3)
    for make in (modulo_mapping, rendezvous_mapping):
        mapping = make(lambda: current, by_text)
        for number in range(1 << 17):
            mapping(b"%d" % number)
        assert len(inspect.getclosurevars(mapping).nonlocals["choices"]) <= 1 << 16
    before, mapping = current, modulo_mapping(lambda: current, by_text)
    assert mapping(b"seems") is before.all[fnv32a(b"seems") % 3]
    current = partitions_of(4)
    assert mapping(b"seems") is current.all[fnv32a(b"seems") % 4]


def test_random_maps_evenly() -> None:
    current = partitions_of(4)
    mapping = random_mapping(lambda: current, random.Random(1))
    counts = Counter(mapping(None).journal for _ in range(4000))
    assert len(counts) == 4
    assert min(counts.values()) > 800


def test_without_partitions_there_is_no_mapping() -> None:
    empty = Partitions(())
    for mapping in (
        random_mapping(lambda: empty, random.Random(1)),
        modulo_mapping(lambda: empty, by_text),
        rendezvous_mapping(lambda: empty, by_text),
    ):
        with pytest.raises(NotFound) as caught:
            mapping("key")
        assert caught.value.hint
    assert fixed_mapping("a/journal", "text/csv")("key") == Partition("a/journal", "text/csv")


def spec(name: str, content_type: str = CONTENT_JSON_LINES) -> JournalSpec:
    return JournalSpec(
        name,
        1,
        LabelSet.of((CONTENT_TYPE, content_type)) if content_type else LabelSet(()),
        FragmentSpec(1024, Codec.NONE, (), 10**9, 0, 0, ""),
    )


@dataclass
class Listed:
    spec: JournalSpec


@dataclass
class Snapshot:
    journals: tuple[Listed, ...]


async def test_a_watch_gives_immutable_snapshots() -> None:
    seen = []

    async def snapshots() -> AsyncIterator[Any]:
        yield Snapshot(())
        seen.append(watch())
        yield Snapshot((Listed(spec("b/journal", "text/csv")), Listed(spec("a/journal", ""))))
        seen.append(watch())
        yield Snapshot((Listed(spec("a/journal", "")), Listed(spec("b/journal", "text/csv"))))
        seen.append(watch())

    watch = PartitionWatch(snapshots())
    assert watch().all == ()
    await watch.run()
    await watch.ready()
    assert seen[0].all == ()
    assert seen[1].all == (Partition("a/journal", ""), Partition("b/journal", "text/csv"))
    # Case: nothing changed that matters to mappings, so what they know stays.
    assert seen[2] is seen[1]
