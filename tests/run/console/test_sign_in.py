"""A console that presents the tokens of `gazctl login`."""

from __future__ import annotations

import json
from pathlib import Path

from gazette.testing.broker import BrokerFixture
from tests.gazctl.runner import Runner
from tests.gazctl.test_login import guarded, kept, key, log_in, provider, with_context
from tests.run.console.conftest import Console
from tests.run.console.test_cluster_view import until
from tests.support.oidc_provider import Provider

__all__ = ["guarded", "key", "provider"]


async def test_a_console_has_the_rights_of_a_sign_in_until_it_ends(
    guarded: BrokerFixture, provider: Provider, tmp_path: Path, console: Console
) -> None:
    gazctl = Runner({"HOME": str(tmp_path)})
    await with_context(gazctl, guarded.endpoint)
    async with console("--context=here") as page:
        assert "token" in await page.error("cluster")
    assert (await log_in(gazctl, provider)).code == 0
    async with console("--context=here") as page:
        seen = await until(page, "cluster", lambda seen: seen["members"])
        assert seen["members"][0]["id"] == "broker-one"
        assert (await page("session"))["context"] == "here"
    # Case: the token has ended, and the provider renews it no more.
    path = kept(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "expires_at": 0, "renew_at": 0}))
    provider.answers["/token"] = 400, {"error": "invalid_grant"}
    async with console("--context=here") as page:
        assert "gazctl login" in await page.error("cluster")
