"""What others keep in etcd is decoded, also where it would be refused if it was applied here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gazette.broker.key_space import broker_decoder, decode_journal
from gazette.client.append.appender import AppendParams
from gazette.cluster.etcd.client import Etcd, Op
from gazette.cluster.etcd.values import KeyValue
from gazette.errors import Invalid
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import Suspend, SuspendLevel
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import EMPTY_ROUTE
from gazette.protocol.text.duration import HOUR, MINUTE, SECOND
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.facts import logged, raises


@pytest.mark.parametrize(
    "template", ["{{ .From .Another .Version }}", "{{ if", '{{ define "x" }}{{ end }}', "a b"]
)
def test_a_template_that_fails_here_does_not_hide_its_journal(template: str) -> None:
    spec = journal_spec("a/journal")
    spec = replace(spec, fragment=replace(spec.fragment, path_postfix_template=template))
    with pytest.raises(Invalid, match="PathPostfixTemplate"):
        spec.validate()
    assert decode_journal("a/journal", spec.to_pb().SerializeToString()) == spec


def test_a_journal_under_the_key_of_another_is_ignored() -> None:
    value = journal_spec("a/journal").to_pb().SerializeToString()
    with raises(Invalid, says="an/other"):
        decode_journal("an/other", value)


def test_a_journal_that_is_invalid_here_is_served_as_far_as_possible(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each part is as near as can be to what was meant. It is reported once, when it is decoded."""
    pb = journal_spec("a/journal").to_pb()
    pb.replication = 77
    pb.labels.labels.add(name="zz", value="1")
    pb.labels.labels.add(name="aa", value="2")
    pb.labels.labels.add(name="name", value="an/other")
    pb.fragment.length = 5
    pb.fragment.compression_codec = 99  # type: ignore[assignment]
    pb.fragment.stores[:] = ["new+scheme://bucket/"]
    pb.fragment.refresh_interval.seconds = 0
    pb.fragment.flush_interval.seconds = 1
    pb.flags = 3
    pb.max_append_rate = -1
    pb.suspend.level = 9  # type: ignore[assignment]
    pb.suspend.offset = 12
    spec = decode_journal("a/journal", pb.SerializeToString())
    assert spec.replication == 5
    assert [(one.name, one.value) for one in spec.labels.labels] == [("aa", "2"), ("zz", "1")]
    assert spec.fragment.length == 1024
    assert spec.fragment.codec is Codec.NONE
    assert spec.fragment.stores == ("new+scheme://bucket/",)
    assert (spec.fragment.refresh_interval_ns, spec.fragment.flush_interval_ns) == (SECOND, MINUTE)
    assert (spec.may_read, spec.may_write) == (False, False)
    assert spec.max_append_rate == 0
    assert spec.suspend == Suspend(SuspendLevel.NONE, 12)
    problem = logged(caplog, "what")["problem"]
    assert problem.startswith("Fragment.CompressionCodec: ")
    assert len(caplog.records) == 1


def test_durations_beyond_64_bits_are_the_greatest_that_fit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A message holds ten thousand years, 64 bits of nanoseconds hold 292."""
    pb = journal_spec("a/journal").to_pb()
    pb.fragment.retention.seconds = 10_000 * 366 * 86_400
    pb.fragment.flush_interval.seconds = -(1 << 63)
    pb.fragment.refresh_interval.seconds = (1 << 63) - 1
    pb.fragment.refresh_interval.nanos = -(1 << 31)
    spec = decode_journal("a/journal", pb.SerializeToString())
    fragment = journal_spec("a/journal").fragment
    assert spec.fragment == replace(
        fragment,
        retention_ns=(1 << 63) - 1,
        flush_interval_ns=0,
        refresh_interval_ns=24 * HOUR,
    )
    assert spec.to_pb().fragment.retention.seconds == (1 << 63) // SECOND
    assert "out of range" in logged(caplog, "problem")["problem"]


def test_compression_that_a_file_store_cannot_have_is_plain_gzip() -> None:
    pb = journal_spec("a/journal").to_pb()
    pb.fragment.compression_codec = broker_pb2.GZIP_OFFLOAD_DECOMPRESSION
    spec = decode_journal("a/journal", pb.SerializeToString())
    assert spec.fragment.codec is Codec.GZIP


@pytest.mark.parametrize("name", ["../escape", "a/journal;meta", "no", "a//b"])
def test_a_name_that_is_none_stays_hidden(name: str) -> None:
    """It would lead out of the store's directory, or be taken for another journal."""
    pb = journal_spec("a/journal").to_pb()
    pb.name = name
    with pytest.raises(Invalid, match="Name"):
        decode_journal(name, pb.SerializeToString())


def decode(key: str, value: bytes) -> Any:
    return broker_decoder("/root", 3)(KeyValue(f"/root/{key}".encode(), value, 1, 1, 1)).value


def test_members_and_assignments_that_are_invalid_here_stay() -> None:
    member = broker_pb2.BrokerSpec(journal_limit=1 << 20)
    member.process_spec.id.zone, member.process_spec.id.suffix = "a", "b1"
    member.process_spec.endpoint = "no endpoint"
    spec = decode("members/a#b1", member.SerializeToString()).spec
    assert (spec.journal_limit, spec.endpoint) == (1 << 17, "")
    # Case: assignments, which would be made again if they vanished.
    route = broker_pb2.Route(primary=7)
    for value in (b"\xff\xff", route.SerializeToString()):
        assert decode("assign/a/journal#a#b1#0", value) == EMPTY_ROUTE


async def test_brokers_serve_and_list_a_journal_that_is_invalid_here(
    etcd: Etcd, tmp_path: Path
) -> None:
    """Such as one with a refresh interval of 14 days. It is listed as it was stored."""
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        pb = journal_spec("a/journal", replication=1).to_pb()
        pb.fragment.refresh_interval.seconds = 14 * 86_400
        root = broker.service.settings.root
        await etcd.txn((), (Op.put(f"{root}/items/a/journal", pb.SerializeToString()),))
        await broker.settled("a/journal")
        await broker.client.append(AppendParams("a/journal"), b"content")
        (listed,) = (await broker.client.list_journals()).journals
        assert listed.spec.fragment.refresh_interval_ns == 14 * 24 * HOUR
