"""Shard specifications, their algebra, and the status of replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette.errors import Invalid
from gazette.protocol.label_set import Label, LabelSet
from gazette.protocol.pb import consumer_pb2
from gazette.protocol.shard import (
    ReplicaCode,
    ReplicaStatus,
    ShardSource,
    ShardSpec,
    intersect_shard_specs,
    subtract_shard_specs,
    union_shard_specs,
)

# The machine that tests run on may be busy: time is no reason to fail.
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SPEC = ShardSpec(
    id="shard-0001",
    sources=(ShardSource("a/journal", 5), ShardSource("a/journal;with/meta")),
    recovery_log_prefix="recovery/logs",
    hint_prefix="/hints",
    hint_backups=2,
    max_txn_duration_ns=10**9,
    min_txn_duration_ns=10**6,
    hot_standbys=1,
    labels=LabelSet.of(("aa", "b")),
    ring_buffer_size=16,
    read_channel_size=32,
)

small = st.integers(0, 2)
specs = st.builds(
    ShardSpec,
    id=st.sampled_from(["shard-0001", "shard-0002"]),
    sources=st.sampled_from([(), (ShardSource("a/b/c"),), (ShardSource("a/b/c", 5),)]),
    recovery_log_prefix=st.sampled_from(["", "a", "b"]),
    hint_prefix=st.sampled_from(["", "/a", "/b"]),
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
FIELDS = tuple(name for name in ShardSpec.__slots__ if name not in ("id", "labels"))


def changed(**fields: object) -> ShardSpec:
    return replace(SPEC, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        # Case: a shard without a recovery log, whose id need not be a path.
        changed(recovery_log_prefix="", hint_prefix="", id="/x//y"),
        changed(sources=()),
        changed(hint_prefix="/"),
        # Case: a minimum above the maximum is not refused.
        changed(min_txn_duration_ns=10**10),
        changed(hint_backups=0),
        changed(min_txn_duration_ns=0, max_txn_duration_ns=1),
        changed(sources=(ShardSource("a/journal", 0),)),
    ],
)
def test_specifications_that_are_valid(spec: ShardSpec) -> None:
    spec.validate()


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (changed(id="x"), "Id: invalid length (1; expected 4 <= length <= 512)"),
        (changed(id="a b c"), "Id: not a valid token (a b c)"),
        (
            changed(recovery_log_prefix="/recovery"),
            "RecoveryLogPrefix: cannot begin with '/' (/recovery/shard-0001)",
        ),
        (
            changed(id="../../escape"),
            "RecoveryLogPrefix: must be a clean path (recovery/logs/../../escape)",
        ),
        (
            changed(recovery_log_prefix=".."),
            "RecoveryLogPrefix: cannot traverse outside its parent (../shard-0001)",
        ),
        (
            changed(recovery_log_prefix=""),
            "invalid non-empty HintPrefix with empty RecoveryLogPrefix (/hints)",
        ),
        (
            changed(hint_prefix=""),
            "HintPrefix is not an absolute, clean, non-directory path ()",
        ),
        (
            changed(hint_prefix="hints"),
            "HintPrefix is not an absolute, clean, non-directory path (hints)",
        ),
        (
            changed(hint_prefix="/hints/"),
            "HintPrefix is not an absolute, clean, non-directory path (/hints/)",
        ),
        (
            changed(hint_prefix="//hints"),
            "HintPrefix is not an absolute, clean, non-directory path (//hints)",
        ),
        (changed(hint_backups=-1), "invalid HintBackups (-1; expected >= 0)"),
        (changed(min_txn_duration_ns=-1), "invalid MinTxnDuration (-1; expected >= 0)"),
        (changed(max_txn_duration_ns=0), "invalid MaxTxnDuration (0; expected > 0)"),
        (
            changed(labels=LabelSet((Label("bb"), Label("aa")))),
            "LabelSet: Labels not in unique, sorted order (index 1; label name aa <= bb)",
        ),
        (
            changed(labels=LabelSet.of(("content-type", "a"), ("content-type", "b"))),
            (
                "LabelSet: expected single-value Label has multiple values "
                "(index 1; label content-type value b)"
            ),
        ),
        (changed(labels=LabelSet.of(("id", ""))), 'Labels cannot include label "id"'),
        (
            changed(sources=(ShardSource("x"),)),
            "Sources[0].Journal: invalid length (1; expected 4 <= length <= 512)",
        ),
        (
            changed(sources=(ShardSource("a/journal", -1),)),
            "Sources[0]: invalid MinOffset (-1; expected > 0)",
        ),
        (
            changed(sources=(ShardSource("b/journal"), ShardSource("a/journal"))),
            "Sources.Journal not in unique, sorted order (index 1; a/journal <= b/journal)",
        ),
        (
            changed(sources=(ShardSource("a/journal"), ShardSource("a/journal", 5))),
            "Sources.Journal not in unique, sorted order (index 1; a/journal <= a/journal)",
        ),
    ],
)
def test_specifications_that_are_refused(spec: ShardSpec, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        spec.validate()
    assert str(caught.value) == problem


def test_names_that_derive_from_a_specification() -> None:
    assert SPEC.recovery_log == "recovery/logs/shard-0001"
    assert changed(recovery_log_prefix="").recovery_log == ""
    assert SPEC.hint_primary_key == "/hints/shard-0001.primary"
    assert SPEC.hint_backup_keys == (
        "/hints/shard-0001.backup.0",
        "/hints/shard-0001.backup.1",
    )
    assert SPEC.labels_with_id() == LabelSet.of(("aa", "b"), ("id", "shard-0001"))


def test_disabling_and_the_process_limit_lower_replication() -> None:
    assert SPEC.desired_replication(3) == 2
    assert changed(hot_standbys=5).desired_replication(3) == 4
    assert SPEC.desired_replication(0) == 1
    assert changed(disable=True).desired_replication(3) == 0


@PROPERTY
@given(specs)
def test_the_wire_form_round_trips(spec: ShardSpec) -> None:
    wire = spec.to_pb().SerializeToString()
    assert ShardSpec.from_pb(consumer_pb2.ShardSpec.FromString(wire)) == spec


def test_sub_messages_are_on_the_wire_even_when_empty() -> None:
    assert ShardSpec("").to_pb().SerializeToString() == bytes.fromhex("32003a005200")


@PROPERTY
@given(specs, specs)
def test_the_algebra_is_that_of_its_fields(a: ShardSpec, b: ShardSpec) -> None:
    for field in FIELDS:
        x, y = getattr(a, field), getattr(b, field)
        assert getattr(union_shard_specs(a, b), field) == (x or y)
        shared = getattr(intersect_shard_specs(a, b), field)
        rest = getattr(subtract_shard_specs(a, b), field)
        assert (shared == x and not rest) if x == y else (rest == x and not shared)
    assert union_shard_specs(subtract_shard_specs(a, b), intersect_shard_specs(a, b)) == a


def test_statuses_reduce_to_the_latest_code_and_all_errors() -> None:
    idle, failed = ReplicaStatus(), ReplicaStatus(ReplicaCode.FAILED, ("one",))
    primary = ReplicaStatus(ReplicaCode.PRIMARY)
    assert idle.reduce(primary) == primary.reduce(idle) == primary
    assert failed.reduce(primary) == failed
    assert failed.reduce(ReplicaStatus(ReplicaCode.FAILED, ("two",))).errors == ("one", "two")


def test_an_empty_value_is_an_idle_replica() -> None:
    assert ReplicaStatus.from_pb(consumer_pb2.ReplicaStatus.FromString(b"")) == ReplicaStatus()


@pytest.mark.parametrize("code", ReplicaCode)
def test_errors_come_with_failure_and_only_then(code: ReplicaCode) -> None:
    status = ReplicaStatus(code, ("whoops",) if code is ReplicaCode.FAILED else ())
    status.validate()
    assert ReplicaStatus.from_pb(status.to_pb()) == status
    with pytest.raises(Invalid, match="FAILED"):
        ReplicaStatus(code, () if code is ReplicaCode.FAILED else ("whoops",)).validate()


def test_a_code_from_the_future_is_refused() -> None:
    pb = consumer_pb2.ReplicaStatus(code=77)  # type: ignore[arg-type]
    with pytest.raises(Invalid, match=r"^Code: invalid code \(77\)$"):
        ReplicaStatus.from_pb(pb)
