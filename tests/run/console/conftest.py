"""Fixtures of the tests of the console: a broker, and a console that asks it."""

from __future__ import annotations

import io
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gazette.cluster.etcd.client import Etcd
from gazette.gazctl.context import Context
from gazette.gazctl.io.terminal import Terminal
from gazette.run.console.command import UiFlags, load, serving
from gazette.run.console.gate import SECRET_HEADER
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import BrokerFixture

KEY = "a-key"


@dataclass
class Page:
    """A browser's view of a console: a client with its cookie, and what the console said at its end."""

    http: httpx.AsyncClient
    url: str
    notes: io.StringIO = field(default_factory=io.StringIO)

    async def __call__(self, route: str, **arguments: object) -> dict[str, Any]:
        """Return an answer that has to succeed."""
        answer = await self.ask(route, **arguments)
        assert answer.status_code == 200, (route, answer.text)
        document: dict[str, Any] = answer.json()
        return document

    async def ask(self, route: str, **arguments: object) -> httpx.Response:
        return await self.http.get(
            f"/api/{route}", params={k: str(v) for k, v in arguments.items()}
        )

    async def error(self, route: str, **arguments: object) -> str:
        """Return the sentence of an answer that has to fail, with what to do."""
        answer = await self.ask(route, **arguments)
        assert answer.status_code >= 400, (route, answer.text)
        document = answer.json()
        assert document["hint"]
        return f"{document['error']} {document['hint']}"


async def enter(http: httpx.AsyncClient, address: str) -> httpx.Response:
    """Open the printed address as a browser does: take its cookie, and the secret of its page."""
    answer = await http.get(address)
    if secret := re.search(r"name=\"key\" content=\"([^\"]+)", answer.text):
        http.headers[SECRET_HEADER] = secret[1]
    return answer


Console = Callable[..., AbstractAsyncContextManager[Page]]
"""Start a console with flags, as its command does."""


@pytest.fixture
def console(tmp_path: Path) -> Console:
    @asynccontextmanager
    async def start(*argv: str, entered: bool = True) -> AsyncIterator[Page]:
        environ = {"HOME": str(tmp_path)}
        loaded, in_use = load([*argv, "--port=0"], environ)
        notes = io.StringIO()
        terminal = Terminal(io.BytesIO(), io.BytesIO(), notes)
        context = Context(loaded, environ, terminal, SystemClock(), random.Random(1), in_use)
        scratch = tmp_path / "ui"
        scratch.mkdir(0o700, exist_ok=True)
        async with serving(context, loaded.group(UiFlags), KEY, scratch) as url:
            async with httpx.AsyncClient(base_url=url, timeout=60.0) as http:
                if entered:
                    assert (await enter(http, f"/?key={KEY}")).status_code == 200
                yield Page(http, url, notes)

    return start


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        yield broker


@pytest.fixture
async def page(console: Console, broker: BrokerFixture) -> AsyncIterator[Page]:
    async with console(f"--broker.address={broker.endpoint}") as page:
        yield page
