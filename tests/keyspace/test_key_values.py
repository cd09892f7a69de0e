"""Finding decoded keys by bisection."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gazette.cluster.etcd.values import KeyValue
from gazette.cluster.keyspace.key_values import (
    DecodedKeyValue,
    differences,
    find,
    prefixed,
)

KEYS = st.text(st.sampled_from("/#ab\uffff\U00010000"), max_size=4)


def entry(key: str, revision: int = 1) -> DecodedKeyValue:
    return DecodedKeyValue(key, KeyValue(key.encode(), b"", 1, revision, 1), None)


@given(st.sets(KEYS), KEYS)
def test_bisection_finds_what_a_scan_finds(keys: set[str], key: str) -> None:
    kvs = [entry(k) for k in sorted(keys)]
    assert [kv.key for kv in prefixed(kvs, key)] == [k for k in sorted(keys) if k.startswith(key)]
    found = find(kvs, key)
    assert (found.key if found else None) == (key if key in keys else None)


@given(KEYS, KEYS)
def test_texts_order_as_their_bytes(a: str, b: str) -> None:
    assert (a < b) == (a.encode() < b.encode())


@given(
    st.dictionaries(st.integers(0, 40), st.integers(1, 2), max_size=40),
    st.dictionaries(st.integers(0, 40), st.integers(1, 2), max_size=40),
)
def test_differences_are_those_of_dictionaries(before: dict[int, int], now: dict[int, int]) -> None:
    old, new = ([entry(f"{key:02}", kvs[key]) for key in sorted(kvs)] for kvs in (before, now))
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    by_key = {kv.key: kv for kv in old}, {kv.key: kv for kv in new}
    names = [f"{key:02}" for key in changed]
    assert [(a, b) for a, b, _ in differences(old, new)] == [
        (by_key[0].get(name), by_key[1].get(name)) for name in names
    ]
    # The index is where the entry is, or where it would be.
    assert [index for _, _, index in differences(old, new)] == [
        sum(kv.key < name for kv in new) for name in names
    ]
