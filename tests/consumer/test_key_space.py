"""What others keep in etcd about shards is decoded, also where it would be refused if it was applied here."""

from __future__ import annotations

from typing import Any

import pytest

from gazette.cluster.etcd.values import KeyValue
from gazette.consumer.key_space import consumer_decoder
from gazette.errors import Invalid
from gazette.protocol.pb import consumer_pb2
from gazette.protocol.shard import ReplicaCode
from gazette.protocol.text.duration import SECOND
from tests.facts import logged


def decode(key: str, value: bytes) -> Any:
    found: Any = consumer_decoder("/root", 3)(KeyValue(f"/root/{key}".encode(), value, 1, 1, 1))
    return found.value


def test_a_shard_that_is_invalid_here_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    pb = consumer_pb2.ShardSpec(id="a-shard", hint_backups=-1)
    for journal in ("b/source", "a/source", "b/source"):
        pb.sources.add(journal=journal)
    pb.labels.labels.add(name="zz")
    pb.labels.labels.add(name="aa")
    spec = decode("items/a-shard", pb.SerializeToString()).spec
    assert [one.journal for one in spec.sources] == ["a/source", "b/source"]
    assert [one.name for one in spec.labels.labels] == ["aa", "zz"]
    assert (spec.hint_backups, spec.max_txn_duration_ns) == (0, SECOND)
    spec.validate()
    assert "a-shard" in logged(caplog, "problem")["what"]


def test_durations_beyond_64_bits_are_the_greatest_that_fit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pb = consumer_pb2.ShardSpec(id="a-shard")
    pb.max_txn_duration.seconds = 10_000 * 366 * 86_400
    pb.min_txn_duration.seconds = -(1 << 63)
    spec = decode("items/a-shard", pb.SerializeToString()).spec
    assert (spec.min_txn_duration_ns, spec.max_txn_duration_ns) == (0, (1 << 63) - 1)
    spec.validate()
    assert "out of range" in logged(caplog, "problem")["problem"]


def test_a_shard_with_names_that_lead_nowhere_is_kept_and_fails_when_it_starts() -> None:
    pb = consumer_pb2.ShardSpec(id="a-shard", recovery_log_prefix="logs", hint_prefix="../hints")
    pb.max_txn_duration.seconds = 1
    spec = decode("items/a-shard", pb.SerializeToString()).spec
    with pytest.raises(Invalid, match="HintPrefix"):
        spec.validate()


def test_a_status_that_is_unknown_here_is_that_of_an_idle_replica() -> None:
    """An assignment that vanished would be made a second time."""
    newer = consumer_pb2.ReplicaStatus(code=250)  # type: ignore[arg-type]
    for value in (b"\xff\xff", newer.SerializeToString()):
        assert decode("assign/a-shard#a#m1#0", value).code is ReplicaCode.IDLE
    failed = consumer_pb2.ReplicaStatus(code=consumer_pb2.ReplicaStatus.FAILED)
    assert decode("assign/a-shard#a#m1#0", failed.SerializeToString()).code is ReplicaCode.FAILED


def test_a_member_without_a_valid_endpoint_is_kept() -> None:
    pb = consumer_pb2.ConsumerSpec(shard_limit=4)
    pb.process_spec.id.zone, pb.process_spec.id.suffix = "a", "m1"
    pb.process_spec.endpoint = "no endpoint"
    spec = decode("members/a#m1", pb.SerializeToString()).spec
    assert (spec.shard_limit, spec.endpoint) == (4, "")
