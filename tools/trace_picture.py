"""Draw the spans of one message: ``python -m tools.trace_picture docs/pictures/trace.svg``.

Two brokers and a member of the application of docs/tracing.md run in this process, on a real etcd. The spans
of one order are drawn as recorded. With ``--endpoint http://localhost:4318``, a collector gets them, too.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

import httpx
from opentelemetry import trace
from opentelemetry.propagate import extract, inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gazette import Application, Message, ShardRequest, shard_route
from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.mapping import fixed_mapping
from gazette.message.publishing.client_publisher import ClientPublisher
from gazette.protocol.label_set import LabelSet
from gazette.runtime.clock import SystemClock
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import ConsumerFixture, log_spec, shard_spec
from gazette.testing.etcd import etcd_for_tests

TRACER: Final = trace.get_tracer("orders")
ORDERS, COUNTED, SHARD = "shop/orders", "shop/counted", "orders-000"
SVG = "http://www.w3.org/2000/svg"
ALIKE = Path(__file__).parents[1] / "docs" / "pictures" / "transaction.svg"
WIDTH, LEFT, RIGHT, ROW, TOP = 400, 12, 12, 40, 34


class Order(Message):
    item: str = ""
    traceparent: str = ""


class Orders(Application[SQLiteStore]):
    message_type = Order

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        return SQLiteStore(recorder, "CREATE TABLE IF NOT EXISTS orders (item TEXT)")

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        order = envelope.message
        with TRACER.start_as_current_span(
            "order counted", extract({"traceparent": order.traceparent})
        ):
            store.execute("INSERT INTO orders VALUES (?)", (order.item,))
            publisher.publish_uncommitted(fixed_mapping(COUNTED, CONTENT_JSON_LINES), order)

    @shard_route("/orders/{shard}")
    def count(self, store: SQLiteStore, request: ShardRequest) -> int:
        return int(store.query("SELECT count(*) FROM orders")[0][0])


async def run(exporter: InMemorySpanExporter) -> Sequence[ReadableSpan]:
    """Publish one order, and query it. Return the spans since then."""
    json = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(etcd_for_tests(directory / "etcd"))
        settings = EtcdSettings(endpoints=(server.endpoint,))
        etcd = await stack.enter_async_context(await Etcd.connect(settings, SystemClock()))
        brokers = [
            await stack.enter_async_context(
                await BrokerFixture.start(
                    etcd, directory, zone=zone, id=f"broker-{zone}", lease_ttl_s=60.0
                )
            )
            for zone in ("a", "b")
        ]
        client = brokers[0].client
        specs = (journal_spec(name, replication=2, labels=json) for name in (ORDERS, COUNTED))
        await brokers[0].create(*specs, log_spec(SHARD, replication=2))
        member = await stack.enter_async_context(
            await ConsumerFixture.start(etcd, brokers[0], Orders(), directory, lease_ttl_s=60.0)
        )
        await member.create(shard_spec(SHARD, ORDERS))
        publisher = await stack.enter_async_context(ClientPublisher(client))
        http = await stack.enter_async_context(httpx.AsyncClient())
        await publisher.publish(ORDERS, Order(item="pen"))  # Sessions begin.
        await member.read_to_heads(SHARD)
        exporter.clear()
        with TRACER.start_as_current_span("order"):
            headers: dict[str, str] = {}
            inject(headers)
            await publisher.publish(ORDERS, Order(item="ink", **headers))
        await member.read_to_heads(SHARD)
        await http.get(f"{member.http}/orders/{SHARD}")
    return exporter.get_finished_spans()


def rows_of(spans: Sequence[ReadableSpan]) -> list[tuple[str, int, int, str]]:
    """Return label, begin, end and class of what is drawn, in order of time."""
    order = next(span for span in spans if span.name == "order")
    rows = []
    for span in spans:
        if (
            span.start_time is None
            or span.end_time is None
            or span.start_time < (order.start_time or 0)
        ):
            continue
        attributes = span.attributes or {}
        journal = str(attributes.get("gazette.journal", ""))
        if span.name.endswith("/Append") and span.kind is trace.SpanKind.SERVER and journal:
            offsets = f"{attributes.get('gazette.begin')} to {attributes.get('gazette.end')}"
            rows.append((f"Append {journal}, {offsets}", span.start_time, span.end_time, "journal"))
        elif span.name == "transaction" and attributes["gazette.messages"]:
            rows.append(
                (
                    f"transaction of {attributes['gazette.shard']!s}",
                    span.start_time,
                    span.end_time,
                    "state",
                )
            )
        elif span.name in ("consuming", "stalled", "preparing", "committing", "acknowledging"):
            if span.end_time - span.start_time > 10_000:
                rows.append((span.name, span.start_time, span.end_time, "step"))
        elif span.name in ("order", "order counted") or span.name.startswith("GET "):
            rows.append((span.name, span.start_time, span.end_time, "turn"))
    return sorted(rows, key=lambda row: (row[1], -row[2]))


def picture(rows: Sequence[tuple[str, int, int, str]]) -> str:
    begin, end = min(row[1] for row in rows), max(row[2] for row in rows)
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)
    height = TOP + ROW * len(rows) + 12
    # All pictures look alike.
    style = ALIKE.read_text().partition("<style>")[2].partition("</style>")[0]
    size = f' viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="{SVG}" role="img" aria-labelledby="title desc"{size}>',
        '  <title id="title">The spans of one order</title>',
        f'  <desc id="desc">Spans in the order of their beginnings, over {(end - begin) / 1e6:.0f} ms: '
        + "; ".join(f"{escape(label)} takes {(e - b) / 1e6:.1f} ms" for label, b, e, _ in rows)
        + ".</desc>",
        f"  <style>{style}</style>",
        f'  <rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}"/>',
        f'  <text x="{LEFT}" y="22" class="quiet">{(end - begin) / 1e6:.0f} ms in all</text>',
    ]
    for index, (label, first, last, look) in enumerate(rows):
        y, x = TOP + ROW * index, LEFT + (first - begin) * scale
        width = max(2.0, (last - first) * scale)
        lines.append(
            f'  <text x="{LEFT}" y="{y + 14}">{escape(label)}, {(last - first) / 1e6:.1f} ms</text>'
        )
        lines.append(
            f'  <rect class="{look}" x="{x:.1f}" y="{y + 20}" width="{width:.1f}" height="12"/>'
        )
    return "\n".join((*lines, "</svg>", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument(
        "--endpoint", help="OTLP over HTTP: needs opentelemetry-exporter-otlp-proto-http"
    )
    flags = parser.parse_args()
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource.create({"service.name": "orders"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    if flags.endpoint:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # type: ignore[import-not-found]
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        otlp = OTLPSpanExporter(f"{flags.endpoint}/v1/traces")
        provider.add_span_processor(BatchSpanProcessor(otlp))
    trace.set_tracer_provider(provider)
    flags.path.write_text(picture(rows_of(asyncio.run(run(exporter)))))
    provider.shutdown()


if __name__ == "__main__":
    main()
