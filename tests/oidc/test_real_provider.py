"""A provider of others, `oidc-provider` of npm: the way from `gazctl login` to a call, and `gazctl logout`.

npm install --prefix /some/directory oidc-provider
OIDC_PROVIDER_MODULES=/some/directory/node_modules python -m pytest tests/oidc/test_real_provider.py
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from gazette.auth import KeyedAuth
from gazette.client.oidc.verifier import OidcAuth, OidcSettings
from gazette.cluster.etcd.client import Etcd
from gazette.gazctl.perform import run_in_loop
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture
from tests.gazctl.runner import Runner, Streams
from tests.support.instant_clock import eventually
from tests.support.oidc_provider import fetched

MODULES: Final = os.environ.get("OIDC_PROVIDER_MODULES", "")
NODE: Final = shutil.which("node") or ""
SCRIPT: Final = Path(__file__).parents[1] / "support" / "oidc_provider.mjs"
ROLES: Final = "roles: [{role: operators, cap: [LIST]}]"

pytestmark = pytest.mark.skipif(
    not MODULES or not NODE, reason="without oidc-provider of npm: set OIDC_PROVIDER_MODULES"
)


@pytest.fixture(scope="module")
def issuer() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with subprocess.Popen(
        [NODE, str(SCRIPT), str(port)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert any("listening" in line for line in process.stdout)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path, issuer: str) -> AsyncIterator[BrokerFixture]:
    roles = tmp_path / "roles.yaml"
    roles.write_text(ROLES)
    keys = KeyedAuth(SystemClock(), (b"k" * 32,))
    auth = OidcAuth(keys, OidcSettings(issuer, "gazette", roles=roles))
    fetched()
    async with await BrokerFixture.start(etcd, tmp_path, auth=auth) as broker:
        yield broker


async def confirm(url: str, code: str) -> None:
    """Do what a user does at the pages of the provider."""
    async with httpx.AsyncClient(follow_redirects=True) as browser:
        page = await browser.get(url)
        while (form := _form_of(page)) is not None:
            action, fields = form
            if "user_code" in fields and not fields["user_code"]:
                fields["user_code"] = code
            page = await browser.post(str(page.url.join(action)), data=fields)
        assert page.status_code == 200, page.text


def _form_of(page: httpx.Response) -> tuple[str, dict[str, str]] | None:
    """Return the action and the fields of the form of a page that asks for something."""
    form = re.search(r'<form[^>]*action="([^"]*)"[^>]*>(.*?)</form>', page.text, re.DOTALL)
    if form is None:
        return None
    inputs = re.findall(r"<input[^>]*>", form[2])
    named = {
        name[1]: value[1] if (value := re.search(r'value="([^"]*)"', text)) else ""
        for text in inputs
        if (name := re.search(r'name="([^"]*)"', text))
    }
    return form[1], named


@pytest.mark.parametrize("client", ["rs256", "es256"])
@pytest.mark.parametrize("flow", ["device", "browser"])
async def test_sign_in_at_a_real_provider(
    broker: BrokerFixture, issuer: str, tmp_path: Path, client: str, flow: str
) -> None:
    gazctl = Runner({"HOME": str(tmp_path)})
    await gazctl.ok("context", "set", "here", f"--broker.address={broker.endpoint}")
    await gazctl.ok("context", "use", "here")
    assert (await gazctl("journals", "list")).code == 1
    streams, scope = Streams(), TaskScope("login")
    words = ["login", f"--issuer={issuer}", f"--client-id={client}"]
    words += ["--browser"] if flow == "browser" else []
    running = scope.spawn(run_in_loop(words, gazctl.environ, streams.terminal), name="login")
    await eventually(lambda: running.done() or "\n" in streams.err.getvalue())
    assert not running.done(), streams.err.getvalue()
    shown = streams.err.getvalue().split()
    if flow == "device":
        await confirm(shown[1], shown[-1])
    else:
        assert parse_qs(urlsplit(shown[1]).query)["code_challenge"]
        async with httpx.AsyncClient(follow_redirects=True) as browser:
            page = await browser.get(shown[1])
        assert "gazctl goes on" in page.text
    async with asyncio.timeout(30):
        assert await running == 0, streams.err.getvalue()
    await scope.stop(1.0)
    await gazctl.ok("journals", "list")
    assert (await gazctl("journals", "append", "-l", "name=a/b")).code == 1
    # Case: the provider renews the token.
    path = tmp_path / ".config" / "gazette" / "sign-ins" / "here.json"
    before = json.loads(path.read_text())
    path.write_text(json.dumps({**before, "renew_at": 0}))
    await gazctl.ok("journals", "list")
    after = json.loads(path.read_text())
    assert after["token"] != before["token"]
    # Case: after the end, the refresh token is worth nothing.
    await gazctl.ok("logout")
    after["renew_at"] = 0
    path.write_text(json.dumps(after))
    ended = await gazctl("journals", "list")
    assert (ended.code, "invalid_grant" in ended.err) == (1, True)
