"""Folding events: a table of what can be odd, and an oracle for everything else."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.cluster.etcd.values import KeyValue, WatchEvent
from gazette.cluster.keyspace.fold import fold, load
from gazette.cluster.keyspace.key_values import DecodedKeyValue
from gazette.errors import Bug
from tests.facts import raises


def decode(kv: KeyValue) -> int:
    return int(kv.value)


def kv(key: str, value: str, create: int, mod: int, version: int) -> KeyValue:
    return KeyValue(key.encode(), value.encode(), create, mod, version)


def put(key: str, value: str, create: int, mod: int, version: int) -> WatchEvent:
    return WatchEvent(kv(key, value, create, mod, version))


def delete(key: str, mod: int) -> WatchEvent:
    return WatchEvent(KeyValue(key.encode(), b"", 0, mod, 0), deleted=True)


def entries(*kvs: KeyValue) -> list[DecodedKeyValue]:
    return [DecodedKeyValue(item.key.decode(), item, decode(item)) for item in kvs]


KNOWN = kv("k", "1", 5, 7, 3)
NEIGHBOURS = (kv("a", "10", 1, 1, 1), kv("z", "20", 2, 2, 1))


@pytest.mark.parametrize(
    ("before", "event", "after", "problem", "applied"),
    [
        # The ordinary.
        (None, put("k", "1", 9, 9, 1), (1, 9), None, None),
        (KNOWN, put("k", "2", 5, 9, 4), (2, 9), None, None),
        (KNOWN, delete("k", 9), None, None, None),
        # The odd.
        (None, put("k", "x", 9, 9, 1), None, "does not decode", False),
        (None, put("k", "1", 8, 9, 1), (1, 9), "after its creation", True),
        (None, put("k", "1", 9, 9, 2), (1, 9), "after its creation", True),
        (None, put("k", "x", 8, 9, 2), None, "does not decode", False),
        (KNOWN, put("k", "x", 5, 9, 4), (1, 7), "revision 7 stays", False),
        (KNOWN, put("k", "2", 5, 7, 3), (1, 7), "not newer", False),
        (KNOWN, put("k", "2", 5, 6, 2), (1, 7), "not newer", False),
        (KNOWN, put("k", "2", 9, 9, 1), (2, 9), "created again", True),
        (KNOWN, put("k", "2", 5, 9, 6), (2, 9), "version 6 follows 3", True),
        (None, delete("k", 9), None, "unknown key", False),
    ],
)
def test_every_kind_of_event(
    before: KeyValue | None,
    event: WatchEvent,
    after: tuple[int, ...] | None,
    problem: str | None,
    applied: bool | None,
) -> None:
    current = entries(*sorted((*NEIGHBOURS, *([before] if before else [])), key=lambda i: i.key))
    copy = list(current)
    folded = fold(current, [[event]], decode)
    assert current == copy
    found = {e.key: (e.decoded, e.raw.mod_revision) for e in folded.key_values}
    assert found.pop("a") == (10, 1)
    assert found.pop("z") == (20, 2)
    assert found.pop("k", None) == after
    assert not found
    if problem is None:
        assert not folded.anomalies
    else:
        [anomaly] = folded.anomalies
        assert problem in anomaly.problem
        assert (anomaly.applied, anomaly.key) == (applied, "k")


def test_a_value_that_never_decoded_is_taken_up_once_it_does() -> None:
    bad = fold([], [[put("k", "x", 9, 9, 1)]], decode)
    good = fold(bad.key_values, [[put("k", "2", 9, 10, 2)]], decode)
    assert [e.decoded for e in good.key_values] == [2]
    assert [a.applied for a in good.anomalies] == [True]


def test_events_of_several_responses_are_merged_by_key_and_revision() -> None:
    responses = [
        [put("b", "1", 10, 10, 1), put("a", "1", 11, 11, 1), put("b", "2", 10, 12, 2)],
        [delete("b", 13), put("c", "1", 14, 14, 1)],
        [put("b", "3", 15, 15, 1), put("a", "2", 11, 16, 2)],
    ]
    folded = fold([], responses, decode)
    assert [(e.key, e.decoded, e.raw.version) for e in folded.key_values] == [
        ("a", 2, 2),
        ("b", 3, 1),
        ("c", 1, 1),
    ]
    assert folded.anomalies == ()


def test_a_key_that_is_not_utf_8_is_ignored_wherever_it_sorts() -> None:
    current = entries(kv("\U00010000", "1", 1, 1, 1), kv("\uffff", "2", 2, 2, 1))
    current.sort(key=lambda e: e.raw.key)
    odd = WatchEvent(KeyValue(b"\xf0", b"1", 9, 9, 1))
    odder = WatchEvent(KeyValue(b"\xff", b"1", 10, 10, 1))
    gone = WatchEvent(KeyValue(b"\xff", b"", 0, 11, 0), deleted=True)
    fine = put("\U00010000", "3", 1, 12, 2)
    folded = fold(current, [[odd, odder, gone, fine]], decode)
    assert [e.decoded for e in folded.key_values] == [2, 3]
    assert [a.applied for a in folded.anomalies] == [False, False, False]
    assert load([odder.kv], decode).key_values == []

    # Case: as text it would come after its neighbour, as bytes it comes before.
    odd = WatchEvent(KeyValue(b"\x80", b"1", 9, 9, 1))
    current = entries(kv("\u07ff", "1", 1, 1, 1))
    folded = fold(current, [[odd, put("\u07ff", "2", 1, 10, 2)]], decode)
    assert [e.decoded for e in folded.key_values] == [2]


def test_a_bug_of_the_decoder_is_not_taken_for_a_bad_value() -> None:
    def broken(kv: KeyValue) -> int:
        raise Bug("ours")

    with pytest.raises(Bug, match="ours"):
        fold([], [[put("k", "1", 9, 9, 1)]], broken)


def test_disorder_in_what_is_loaded_is_a_bug() -> None:
    with raises(Bug, key="a", after="b"):
        load([kv("b", "1", 1, 1, 1), kv("a", "1", 1, 1, 1)], decode)
    with raises(Bug, key="a", after="a"):
        load([kv("a", "1", 1, 1, 1), kv("a", "1", 1, 1, 1)], decode)
    # Case: a part of the keys, and the entry before it.
    (last,) = entries(kv("b", "1", 1, 1, 1))
    with raises(Bug, key="b", after="b"):
        load([kv("b", "1", 1, 1, 1)], decode, after=last)


def test_loading_skips_what_does_not_decode() -> None:
    loaded = load([kv("a", "1", 1, 1, 1), kv("b", "x", 2, 4, 2), kv("c", "3", 3, 3, 1)], decode)
    assert [e.key for e in loaded.key_values] == ["a", "c"]
    assert [(a.key, a.mod_revision, a.applied) for a in loaded.anomalies] == [("b", 4, False)]


def test_loading_again_keeps_what_decoded_before() -> None:
    previous = entries(kv("b", "2", 2, 2, 1), kv("c", "3", 3, 3, 1))
    loaded = load([kv("b", "x", 2, 4, 2), kv("c", "x", 5, 5, 1)], decode, previous)
    # Case: `b` is the key it was; `c` is another one of the same name.
    assert [(e.key, e.decoded, e.raw.mod_revision) for e in loaded.key_values] == [("b", 2, 2)]
    assert len(loaded.anomalies) == 2


# --- against an oracle


@dataclass
class Oracle:
    """A dict in place of etcd: what it holds, and the events that it would report."""

    revision: int = 0
    kvs: dict[str, KeyValue] = field(default_factory=dict)
    events: list[WatchEvent] = field(default_factory=list)

    def write(self, key: str, value: int | None) -> None:
        before = self.kvs.get(key)
        if value is None:
            if before is not None:
                self.revision += 1
                del self.kvs[key]
                self.events.append(delete(key, self.revision))
            return
        self.revision += 1
        create = before.create_revision if before else self.revision
        version = before.version + 1 if before else 1
        self.kvs[key] = kv(key, str(value), create, self.revision, version)
        self.events.append(WatchEvent(self.kvs[key]))

    def expected(self) -> list[DecodedKeyValue]:
        return entries(*(self.kvs[key] for key in sorted(self.kvs)))


WRITES = st.lists(
    st.tuples(
        st.sampled_from(["a", "a#", "a/b", "b", "é", "\U00010000", "\uffff"]),
        st.none() | st.integers(0, 9),
    ),
    max_size=40,
)


@given(WRITES, st.data())
def test_any_history_in_any_batches_folds_to_what_etcd_holds(
    writes: Any, data: st.DataObject
) -> None:
    oracle = Oracle()
    for key, value in writes:
        oracle.write(key, value)
    events = oracle.events
    # Cut the history into responses, and the responses into steps.
    cut = st.sets(st.integers(0, len(events)))
    cuts = sorted({0, len(events)} | data.draw(cut, "responses"))
    responses = [events[a:b] for a, b in pairwise(cuts)]
    steps = sorted({0, len(responses)} | data.draw(st.sets(st.integers(0, len(responses)))))
    current: list[DecodedKeyValue] = []
    for begin, end in pairwise(steps):
        folded = fold(current, responses[begin:end], decode)
        assert folded.anomalies == ()
        current = folded.key_values
    assert current == oracle.expected()
    assert load([e.raw for e in oracle.expected()], decode).key_values == current


@given(WRITES, st.integers(0, 40))
def test_replayed_events_change_nothing(writes: Any, begin: int) -> None:
    oracle = Oracle()
    for key, value in writes:
        oracle.write(key, value)
    expected = oracle.expected()
    puts = [e for e in oracle.events[begin:] if not e.deleted and oracle.kvs.get(text(e)) == e.kv]
    assert fold(expected, [puts], decode).key_values == expected


def text(event: WatchEvent) -> str:
    return event.kv.key.decode()
