"""gRPC and HTTP of a broker on the one port that it advertises: what docs/migrating.md describes.

A broker of the original names that port, in ``Location``, for a journal that ours lead.
"""

from __future__ import annotations

from pathlib import Path

import httpx

from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.cluster.etcd.client import Etcd
from gazette.testing.broker import BrokerFixture, journal_spec


async def test_a_broker_serves_both_on_the_port_that_it_advertises(
    etcd: Etcd, tmp_path: Path
) -> None:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec("a/journal"))
        async with Client(broker.endpoint) as client, httpx.AsyncClient() as http:
            await client.append(AppendParams("a/journal"), b"content")
            response = await http.get(f"{broker.endpoint}/a/journal")
            assert (response.status_code, response.content) == (206, b"content")
            ready = await http.get(f"{broker.endpoint}/debug/ready")
            assert ready.status_code == 200
