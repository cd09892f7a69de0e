"""Finding decoded keys by bisection."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gazette.cluster.etcd.values import KeyValue
from gazette.cluster.keyspace.key_values import DecodedKeyValue, find, prefixed

KEYS = st.text(st.sampled_from("/#ab\uffff\U00010000"), max_size=4)


def entry(key: str) -> DecodedKeyValue:
    return DecodedKeyValue(key, KeyValue(key.encode(), b"", 1, 1, 1), None)


@given(st.sets(KEYS), KEYS)
def test_bisection_finds_what_a_scan_finds(keys: set[str], key: str) -> None:
    kvs = [entry(k) for k in sorted(keys)]
    assert [kv.key for kv in prefixed(kvs, key)] == [k for k in sorted(keys) if k.startswith(key)]
    found = find(kvs, key)
    assert (found.key if found else None) == (key if key in keys else None)


@given(KEYS, KEYS)
def test_texts_order_as_their_bytes(a: str, b: str) -> None:
    assert (a < b) == (a.encode() < b.encode())
