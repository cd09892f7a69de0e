"""Every metric of the original is there under its name, with its labels, and moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from gazette.client.append.appender import AppendParams
from gazette.client.journals import FragmentsParams
from gazette.client.read.reader import ReadParams
from gazette.cluster.etcd.client import Etcd
from gazette.protocol.fragment import Codec
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import ConsumerFixture, shard_spec
from tests.consumer.apps import SHARD, SOURCE, Tally, append, frame, source_spec
from tools.simulation.remote_store import RemoteDatabase

JOURNAL: Final = "a/journal"
GRPC: Final = frozenset({"grpc_type", "grpc_service", "grpc_method"})

BROKER: Final[dict[str, frozenset[str]]] = {
    "gazette_journal_server_started_totals": frozenset({"operation"}),
    "gazette_journal_server_completed_totals": frozenset({"operation", "status"}),
    "gazette_write_head": frozenset({"journal"}),
    "gazette_spool_commits_total": frozenset(),
    "gazette_spool_commit_bytes_total": frozenset(),
    "gazette_spool_rollbacks_total": frozenset(),
    "gazette_spool_rollback_bytes_total": frozenset(),
    "gazette_spool_disk_waits_total": frozenset(),
    "gazette_spool_completed_total": frozenset(),
    "gazette_spool_persisted_total": frozenset(),
    "gazette_store_active": frozenset(),
    "gazette_store_operation_duration_seconds_count": frozenset({"store", "operation", "status"}),
    "gazette_store_operation_duration_seconds_bucket": frozenset(
        {"store", "operation", "status", "le"}
    ),
    "gazette_store_operation_total": frozenset({"store", "operation", "status"}),
    "gazette_store_put_bytes_total": frozenset({"store", "encoding"}),
    "gazette_store_list_items_count_count": frozenset({"store"}),
    "gazette_store_health_check_total": frozenset({"store", "status"}),
    "gazette_allocator_assignment_added_total": frozenset(),
    "gazette_allocator_assignment_packed_total": frozenset(),
    "gazette_allocator_assignment_removed_total": frozenset(),
    "gazette_allocator_converge_total": frozenset(),
    "gazette_allocator_max_flow_runtime_seconds_count": frozenset(),
    "gazette_allocator_desired_replication_slots": frozenset(),
    "gazette_allocator_items": frozenset(),
    "gazette_allocator_members": frozenset(),
    "gazette_append_bytes_total": frozenset({"journal"}),
    "gazette_read_bytes_total": frozenset({"journal"}),
    "gazette_fragment_open_total": frozenset({"journal", "codec"}),
    "gazette_fragment_open_bytes_total": frozenset({"journal", "codec"}),
    "gazette_fragment_open_content_length_total": frozenset({"journal", "codec"}),
    "gazette_read_fragment_bytes_total": frozenset({"journal", "codec"}),
    "gazette_discard_fragment_bytes_total": frozenset({"journal", "codec"}),
    "grpc_server_started_total": GRPC,
    "grpc_server_handled_total": GRPC | {"grpc_code"},
    "grpc_server_msg_received_total": GRPC,
    "grpc_server_msg_sent_total": GRPC,
    "grpc_server_handling_seconds_count": GRPC,
    "grpc_client_started_total": GRPC,
    "grpc_client_handled_total": GRPC | {"grpc_code"},
    "grpc_client_msg_received_total": GRPC,
    "grpc_client_msg_sent_total": GRPC,
    "grpc_client_handling_seconds_count": GRPC,
}
CONSUMER: Final[dict[str, frozenset[str]]] = {
    "gazette_shard_up": frozenset({"shard", "status"}),
    "gazette_shard_transactions_total": frozenset({"shard"}),
    "gazette_shard_read_messages_total": frozenset({"shard"}),
    "gazette_shard_read_bytes_total": frozenset({"shard"}),
    "gazette_shard_read_head": frozenset({"shard", "journal"}),
    "gazette_shard_phase_seconds_total": frozenset({"shard", "phase", "type"}),
    "gazette_recoverylog_recovered_bytes_total": frozenset(),
    "gazette_sequencer_queued": frozenset({"journal", "flag", "outcome"}),
    "gazette_consumer_tx_count_total": frozenset(),
    "gazette_consumer_tx_messages_total": frozenset(),
    "gazette_consumer_tx_seconds_total": frozenset(),
    "gazette_consumer_tx_consume_seconds_total": frozenset(),
    "gazette_consumer_tx_stalled_seconds_total": frozenset(),
    "gazette_consumer_tx_flush_seconds_total": frozenset(),
    "gazette_consumer_tx_sync_seconds_total": frozenset(),
    "gazette_consumer_consumed_bytes_total": frozenset(),
    "gazette_consumer_read_head": frozenset({"journal"}),
}


async def exported(url: str, path: str) -> dict[str, list[Any]]:
    """Return samples by their names."""
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{url}{path}")).text
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def check(found: dict[str, list[Any]], wanted: dict[str, frozenset[str]]) -> None:
    missing = sorted(set(wanted) - set(found))
    assert not missing
    for name, labels in wanted.items():
        assert all(frozenset(sample.labels) == labels for sample in found[name]), name


async def test_a_broker_exports_what_the_original_does(etcd: Etcd, tmp_path: Path) -> None:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        spec = journal_spec(JOURNAL, codec=Codec.GZIP, length=1024)
        await broker.create(spec)
        for _ in range(3):
            await broker.client.append(AppendParams(JOURNAL), b"x" * 2000)
        while not any((broker.file_root / "fragments" / JOURNAL).glob("*.gz")):
            await broker.service.context.clock.sleep(0.01)
        await read_stored(broker)
        found = await exported(broker.http, "/debug/metrics")
        check(found, BROKER)
        (head,) = (one for one in found["gazette_write_head"] if one.labels["journal"] == JOURNAL)
        assert head.value == 6000
        methods = {one.labels["grpc_method"] for one in found["grpc_server_handled_total"]}
        assert {"Append", "Apply"} <= methods
        calls = {
            (one.labels["grpc_type"], one.labels["grpc_method"], one.labels["grpc_code"])
            for one in found["grpc_client_handled_total"]
        }
        assert ("client_stream", "Append", "OK") in calls


async def read_stored(broker: BrokerFixture) -> None:
    """Read a fragment from the store, as a client does that may."""
    while True:
        found = list(await broker.client.list_fragments(FragmentsParams(JOURNAL)))
        if any(one.fragment.mod_time for one in found):
            break
        await broker.service.context.clock.sleep(0.05)
    reader = broker.client.retry_reader(
        ReadParams(JOURNAL, 100, end_offset=1500, do_not_proxy=True)
    )
    while await reader.read(1 << 16):
        pass
    reader.close()


async def test_a_consumer_exports_what_the_original_does(etcd: Etcd, tmp_path: Path) -> None:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(source_spec())
        application = Tally(RemoteDatabase())
        async with await ConsumerFixture.start(
            etcd, broker, application, tmp_path, lease_ttl_s=60.0
        ) as member:
            await member.create(shard_spec(SHARD, SOURCE, log=False))
            end = await append(broker, frame("a", 1))
            await member.read_through(SHARD, {SOURCE: end})
            while not (await exported(member.http, "/metrics")).get("gazette_sequencer_queued"):
                await broker.service.context.clock.sleep(0.02)
            check(await exported(member.http, "/debug/metrics"), CONSUMER)
