"""The programs of the pages on publishing and on tables, run as they are printed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gazette.client.append.appender import AppendParams
from gazette.cluster.etcd.client import Etcd
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.protocol.label_set import LabelSet
from gazette.testing.broker import BrokerFixture, journal_spec

DOCS = Path(__file__).parents[2] / "docs"
LABELS = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
ADDRESS = "http://localhost:8080"
ORDERS = b'{"customer":"a","amount":3}\n{"customer":"b","amount":5}\n{"customer":"a","amount":2}\n'


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(
        rf"^```{kind}\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE
    )


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        names = ("first/words", "orders/part-000")
        await broker.create(*(journal_spec(name, labels=LABELS) for name in names))
        await broker.client.append(AppendParams("orders/part-000"), ORDERS)
        yield broker


async def printed(broker: BrokerFixture, program: str) -> str:
    """Run a program of a page with the address of this broker. Return what it printed."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program.replace(ADDRESS, broker.endpoint)),
        env={**os.environ, "BROKER_ADDRESS": broker.endpoint},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await child.communicate()
    assert child.returncode == 0, output.decode()
    return output.decode()


async def test_what_one_page_publishes_the_other_reads(broker: BrokerFixture) -> None:
    script, service, declared = blocks("publishing.md", "python")
    await printed(broker, script)
    publishing = f"{script.partition('with open_publisher')[0]}\n{service}"
    call = 'import asyncio\nasyncio.run(publish([Word(word="that"), Word(word="is")]))\n'
    await printed(broker, f"{publishing}\n{call}")
    imports = "import msgspec\nfrom gazette import Application, Source\n"
    imports += "from gazette.stores.sqlite import SQLiteStore\n"
    check = "print(Orders.orders.uuid, Order(uuid='mine').uuid)"
    assert await printed(broker, f"{imports}{declared}\n{check}") == "_meta.uuid mine\n"
    table, *_ = blocks("tables.md", "python")
    shown = await printed(broker, table)
    assert re.findall(r'"(\w+)"', shown.partition("word:")[2]) == [
        *("to", "be", "or", "not"),
        *("that", "is"),
    ]


async def test_orders_are_read_in_batches_and_by_other_libraries(broker: BrokerFixture) -> None:
    _, batches, *_ = blocks("tables.md", "python")
    assert await printed(broker, f"{batches}\nprint(total)") == "10\n"
    await printed(broker, blocks("publishing.md", "python")[0])
    expected = {"pandas": "2", "polars": "be", "duckdb": "customer"}
    libraries = blocks("tables.md", "py")
    assert len(libraries) == len(expected)
    for library, program in zip(expected, libraries, strict=True):
        # Neither polars nor duckdb is a dependency, not even for development.
        if importlib.util.find_spec(library) is None:
            continue
        imports = "from gazette import read_batches, read_table\n"
        show = "" if library == "duckdb" else "\nprint(words)"
        assert expected[library] in await printed(broker, f"{imports}{program}{show}")
