"""Shard specifications as a YAML list with what they share in common."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette.errors import Invalid
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ShardSource, ShardSpec
from gazette.protocol.shard_list import ShardEntry, ShardList

# The machine that tests run on may be busy: time is no reason to fail.
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

YAML = """\
common:
  recovery_log_prefix: recovery/logs
  hint_prefix: /hints
  hint_backups: 2
  max_txn_duration: 1s
  min_txn_duration: 1ms
  hot_standbys: 1
  labels:
  - name: name-1
    value: val-1
  disable_wait_for_ack: true
  ring_buffer_size: 16
  read_channel_size: 32
shards:
- comment: This is a comment
  delete: true
  id: shard-A
  sources:
  - journal: journal/A
    min_offset: 5
  labels:
  - name: name-2
    value: val-2
  revision: 123
- id: shard-B
  sources:
  - journal: journal/B
  disable: true
  labels:
  - name: name-3
    value: val-3
  revision: 456
"""
SHARED = ShardSpec(
    "",
    recovery_log_prefix="recovery/logs",
    hint_prefix="/hints",
    hint_backups=2,
    max_txn_duration_ns=10**9,
    min_txn_duration_ns=10**6,
    hot_standbys=1,
    disable_wait_for_ack=True,
    ring_buffer_size=16,
    read_channel_size=32,
)

small = st.integers(0, 2)
specs = st.builds(
    ShardSpec,
    id=st.just(""),
    sources=st.sampled_from([(), (ShardSource("a/b/c"),), (ShardSource("a/b/c", 5),)]),
    recovery_log_prefix=st.sampled_from(["", "a", "no"]),
    hint_prefix=st.sampled_from(["", "/a"]),
    hint_backups=small,
    max_txn_duration_ns=small,
    min_txn_duration_ns=small,
    disable=st.booleans(),
    hot_standbys=small,
    labels=st.sets(st.tuples(st.sampled_from(["aa", "bb"]), st.sampled_from("xy"))).map(
        lambda pairs: LabelSet.of(*pairs)
    ),
    disable_wait_for_ack=st.booleans(),
    ring_buffer_size=small,
    read_channel_size=small,
)
lists = st.dictionaries(
    st.sampled_from(["shard-1", "shard-2", "shard-3"]),
    st.builds(
        ShardEntry,
        spec=specs,
        comment=st.sampled_from(["", "why"]),
        delete=st.sampled_from([None, True, False]),
        revision=st.integers(-1, 2),
    ),
).map(
    lambda entries: ShardList(
        shards=tuple(
            replace(entry, spec=replace(entry.spec, id=shard_id))
            for shard_id, entry in sorted(entries.items())
        )
    )
)


def test_a_list_is_read_pushed_down_hoisted_and_written() -> None:
    shards = ShardList.parse(YAML)
    shards.validate()
    pushed = shards.push_down()
    assert pushed.common == ShardSpec("")
    assert pushed.shards == (
        ShardEntry(
            replace(
                SHARED,
                id="shard-A",
                sources=(ShardSource("journal/A", 5),),
                labels=LabelSet.of(("name-1", "val-1"), ("name-2", "val-2")),
            ),
            comment="This is a comment",
            delete=True,
            revision=123,
        ),
        ShardEntry(
            replace(
                SHARED,
                id="shard-B",
                sources=(ShardSource("journal/B"),),
                disable=True,
                labels=LabelSet.of(("name-1", "val-1"), ("name-3", "val-3")),
            ),
            revision=456,
        ),
    )
    for entry in pushed.shards:
        entry.spec.validate()
    assert pushed.hoist() == shards
    assert pushed.hoist().to_yaml() == YAML


@PROPERTY
@given(lists)
def test_hoisting_is_undone_and_yaml_round_trips(shards: ShardList) -> None:
    hoisted = shards.hoist()
    assert hoisted.push_down() == shards
    assert ShardList.parse(hoisted.to_yaml()) == hoisted


def test_zero_overrides_what_is_common_where_it_is_written() -> None:
    text = """
        common: {disable: true, hot_standbys: 2, hint_prefix: /hints, max_txn_duration: 1s}
        shards:
        - {id: shard-A, disable: false, hot_standbys: 0, hint_prefix: ""}
        - {id: shard-B, disable: null}
    """
    first, second = ShardList.parse(text).push_down().shards
    common = ShardSpec("", disable=True, hot_standbys=2, hint_prefix="/hints")
    common = replace(common, max_txn_duration_ns=1_000_000_000)
    assert first.spec == ShardSpec("shard-A", max_txn_duration_ns=1_000_000_000)
    assert second.spec == replace(common, id="shard-B")
    # Case: hoisted and written again, it says the same.
    for listed in (ShardList(shards=(first, second)), ShardList(shards=(first, second)).hoist()):
        again = ShardList.parse(listed.to_yaml()).push_down()
        assert again.shards == (first, second)


def test_a_listing_becomes_a_list() -> None:
    shards = ShardList.of([(replace(SHARED, id="shard-B"), 7), (replace(SHARED, id="shard-A"), 5)])
    assert shards.common == SHARED
    assert [(entry.spec.id, entry.revision) for entry in shards.shards] == [
        ("shard-A", 5),
        ("shard-B", 7),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("common: {delete: true}", "line 1: unknown field delete"),
        ("common: {id: shard-A}", "line 1: unknown field id"),
        ("shards:\n- {id: shard-A, soruces: []}", "line 2: unknown field soruces"),
        ("shards:\n- {id: shard-A, sources: [{jurnal: a}]}", "line 2: unknown field jurnal"),
        ("shard: []", "line 1: unknown field shard"),
        ("shards: [{hint_backups: 2147483648}]", "line 1: the integer is out of range"),
        ("shards: [{hot_standbys: -1}]", "line 1: the integer is out of range"),
        ("shards: [{max_txn_duration: soon}]", "line 1: time: invalid duration"),
    ],
)
def test_yaml_that_is_refused(text: str, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        ShardList.parse(text)
    assert str(caught.value).startswith(problem)


def test_shards_are_ordered_by_id() -> None:
    with pytest.raises(
        Invalid, match=r"expected Shards to be ordered \(ind 1; shard-B vs shard-A\)"
    ):
        ShardList.parse("shards: [{id: shard-B}, {id: shard-A}]").validate()


def test_an_empty_document_is_an_empty_list() -> None:
    assert ShardList.parse("") == ShardList.parse("common:\nshards:\n") == ShardList()
    assert ShardList().to_yaml() == "common: {}\nshards: []\n"
