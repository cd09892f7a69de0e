"""Spans of an append and a read, from a client through brokers to the blob store, in one trace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.propagate import inject
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gazette.client.append.appender import AppendParams
from gazette.cluster.etcd.client import Etcd
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.publishing.client_publisher import ClientPublisher
from gazette.protocol.label_set import LabelSet
from gazette.runtime import tracing
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import ConsumerFixture, log_spec, shard_spec

JOURNAL = "a/journal"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Install an SDK as a program does. It is the process's, and can be set
    once only: put it back by force.
    """
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


def test_without_an_sdk_nothing_is_traced() -> None:
    assert not tracing.active()
    with tracing.span("nothing", journal="x"):
        assert not trace.get_current_span().is_recording()


async def test_an_append_is_one_trace_from_client_to_store(
    etcd: Etcd, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    async with (
        await BrokerFixture.start(
            etcd, tmp_path, zone="a", id="broker-one", lease_ttl_s=60.0
        ) as one,
        await BrokerFixture.start(
            etcd, tmp_path, zone="b", id="broker-two", lease_ttl_s=60.0
        ) as two,
    ):
        await one.create(journal_spec(JOURNAL, replication=2, length=1024))
        await two.settled(JOURNAL)
        spans.clear()
        with trace.get_tracer("test").start_as_current_span("mine") as mine:
            await one.client.append(AppendParams(JOURNAL), b"x" * 2000)
            await one.client.append(AppendParams(JOURNAL), b"y" * 2000)
        trace_id = mine.get_span_context().trace_id
        while not any((one.file_root / "fragments" / JOURNAL).glob("*")):
            await one.service.context.clock.sleep(0.01)
        async with httpx.AsyncClient() as http:
            await http.get(f"{one.http}/{JOURNAL}")
    finished = spans.get_finished_spans()
    ours = [one for one in finished if one.context.trace_id == trace_id]
    by_id = {one.context.span_id: one for one in ours}
    names = {(one.name, one.kind.name) for one in ours}
    assert ("protocol.Journal/Append", "CLIENT") in names
    assert ("protocol.Journal/Append", "SERVER") in names
    assert ("replicate", "INTERNAL") in names
    # The server's span is a child of the client's, over the wire.
    server = next(one for one in ours if one.kind is trace.SpanKind.SERVER)
    assert server.parent is not None
    assert by_id[server.parent.span_id].kind is trace.SpanKind.CLIENT
    assert (server.attributes or {})["gazette.journal"] == JOURNAL
    everything = {one.name for one in finished}
    assert {"persist", "protocol.Journal/Read"} <= everything
    read = next(one for one in finished if one.name == "protocol.Journal/Read")
    assert (read.attributes or {})["rpc.system"] == "grpc"


async def test_a_failed_call_is_marked(
    etcd: Etcd, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        async with httpx.AsyncClient() as http:
            response = await http.post(f"{broker.http}/v1/journals/read", json={"journal": "x"})
        assert response.status_code == 400
    client = next(
        one
        for one in spans.get_finished_spans()
        if one.name.endswith("Read") and one.kind is trace.SpanKind.CLIENT
    )
    assert (client.attributes or {})["rpc.grpc.status_code"] == "UNKNOWN"
    assert not client.status.is_ok


def on_the_page() -> dict[str, Any]:
    """Return the names that the code of docs/tracing.md defines."""
    page = (Path(__file__).parents[1] / "docs" / "tracing.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    return names


async def test_a_message_is_followed_by_its_offsets(
    etcd: Etcd, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    """Through the append, the transaction that consumed it, and a query, as docs/tracing.md says."""
    page, json = on_the_page(), LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(
            journal_spec("shop/orders", labels=json),
            journal_spec("shop/counted", labels=json),
            log_spec("a-shard"),
        )
        async with await ConsumerFixture.start(
            etcd, broker, page["Orders"](), tmp_path, lease_ttl_s=60.0
        ) as consumer:
            await consumer.create(shard_spec("a-shard", "shop/orders"))
            async with ClientPublisher(broker.client) as publisher:
                await page["publish_order"](publisher, "pen")
            await consumer.read_to_heads("a-shard")
            with trace.get_tracer("test").start_as_current_span("mine") as mine:
                headers: dict[str, str] = {}
                inject(headers)
                async with httpx.AsyncClient() as http:
                    await http.get(f"{consumer.http}/orders/a-shard", headers=headers)
    finished = spans.get_finished_spans()
    servers = [one for one in finished if one.kind is trace.SpanKind.SERVER]
    attributes_of = [dict(one.attributes or {}) for one in servers]
    appends = [one for one in attributes_of if "gazette.end" in one]
    message = next(one for one in appends if one["gazette.journal"] == "shop/orders")
    assert message["gazette.begin"] == 0
    transaction = next(
        one
        for one in finished
        if one.name == "transaction" and (one.attributes or {})["gazette.messages"] == 1
    )
    attributes = dict(transaction.attributes or {})
    assert attributes["gazette.shard"] == "a-shard"
    assert attributes["gazette.read_through"] == (f"shop/orders={message['gazette.end']}",)
    ends = [
        int(str(one["gazette.end"])) for one in appends if one["gazette.journal"] == "shop/counted"
    ]
    assert attributes["gazette.published"] == (f"shop/counted={max(ends)}",)
    phases = [one for one in finished if one.parent == transaction.context]
    assert [one.name for one in sorted(phases, key=lambda one: one.start_time or 0)] == [
        "consuming",
        "stalled",
        "preparing",
        "committing",
        "acknowledging",
    ]
    assert min(one.start_time or 0 for one in phases) == transaction.start_time
    assert max(one.end_time or 0 for one in phases) == transaction.end_time
    order, counted = (
        next(one for one in finished if one.name == name) for name in ("order", "order counted")
    )
    assert counted.parent is not None
    assert counted.parent.span_id == order.context.span_id
    query = next(one for one in finished if one.name == "GET /orders/{shard}")
    assert query.parent is not None
    assert query.parent.span_id == mine.get_span_context().span_id
    assert (query.attributes or {})["http.route"] == "/orders/{shard}"
