"""``gazctl login`` and ``logout``: tokens of a provider, for the commands of a context."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from gazette.auth import KeyedAuth
from gazette.client.oidc.token_file import renew
from gazette.client.oidc.verifier import OidcAuth, OidcSettings
from gazette.cluster.etcd.client import Etcd
from gazette.gazctl.perform import run_in_loop
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.runtime.timeouts import timeout
from gazette.testing.broker import BrokerFixture
from tests.gazctl.runner import Result, Runner, Streams
from tests.support.instant_clock import eventually
from tests.support.oidc_provider import DISCOVERY, Provider, SigningKey, fetched

CLOCK: Final = SystemClock()
CODE: Final = {"device_code": "d", "user_code": "ABCD-EFGH", "interval": 0.01, "expires_in": 30}


@pytest.fixture(scope="module")
def key() -> SigningKey:
    return SigningKey.ec("first")


@pytest.fixture
def provider(key: SigningKey) -> Iterator[Provider]:
    with Provider(CLOCK, [key]).serving() as provider:
        provider.answers["/device"] = 200, {**CODE, "verification_uri": f"{provider.issuer}/code"}
        provider.answers["/token"] = lambda form: tokens(provider, form)
        yield provider


def tokens(provider: Provider, form: dict[str, str], **more: Any) -> tuple[int, Any]:
    """Return what the provider gives; a refresh token is good once."""
    count = provider.asked("/token")
    if form["grant_type"] == "refresh_token" and form["refresh_token"] != f"again-{count - 1}":
        return 400, {"error": "invalid_grant"}
    return 200, {
        "access_token": provider.token(jti=str(count)),
        "id_token": provider.token(aud="gazctl"),
        "refresh_token": f"again-{count}",
        "expires_in": 600,
        **more,
    }


@pytest.fixture
async def guarded(etcd: Etcd, tmp_path: Path, provider: Provider) -> AsyncIterator[BrokerFixture]:
    roles = tmp_path / "roles.yaml"
    roles.write_text("roles: [{role: operators, cap: [LIST]}]")
    settings = OidcSettings(provider.issuer, "gazette", roles=roles)
    auth = OidcAuth(KeyedAuth(CLOCK, (b"k" * 32,)), settings)
    fetched()
    async with await BrokerFixture.start(etcd, tmp_path, auth=auth) as broker:
        yield broker


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def gazctl(home: Path) -> Runner:
    return Runner({"HOME": str(home)})


def kept(home: Path, name: str = "here") -> Path:
    return home / ".config" / "gazette" / "sign-ins" / f"{name}.json"


async def with_context(gazctl: Runner, address: str = "http://127.0.0.1:1") -> None:
    await gazctl.ok("context", "set", "here", f"--broker.address={address}")
    await gazctl.ok("context", "use", "here")


async def log_in(gazctl: Runner, provider: Provider, *more: str) -> Result:
    return await gazctl("login", f"--issuer={provider.issuer}", "--client-id=gazctl", *more)


async def answer_to(url: str, data: bytes) -> bytes:
    """Return all bytes that come back until the connection is closed."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(data)
    async with timeout(30):
        answer = await reader.read()
    writer.close()
    return answer


async def test_from_nothing_to_a_list(
    gazctl: Runner, guarded: BrokerFixture, provider: Provider, home: Path
) -> None:
    await with_context(gazctl, guarded.endpoint)
    refused = await gazctl("journals", "list")
    assert refused.code == 1
    pending = iter([(400, {"error": "authorization_pending"}), (503, {}), (429, {})])
    provider.answers["/token"] = lambda form: next(pending, None) or tokens(provider, form)
    done = await log_in(gazctl, provider)
    assert done.code == 0, done
    assert f"{provider.issuer}/code" in done.err
    assert "ABCD-EFGH" in done.err
    [form] = [form for path, form in provider.requests if path == "/device"]
    assert form == {"client_id": "gazctl", "scope": "openid offline_access"}
    assert kept(home).stat().st_mode & 0o777 == 0o600
    await gazctl.ok("journals", "list")
    # Case: another address gets it only beside the name of the context.
    address = f"--broker.address={guarded.endpoint}"
    assert (await gazctl("journals", "list", address)).code == 1
    assert (await gazctl("journals", "list", address, "--context=here")).code == 0
    # Case: nor does an address of a settings file, beside another address of the context.
    await gazctl.ok("context", "set", "bare", "--consumer.address=http://127.0.0.1:1")
    kept(home, "bare").write_bytes(kept(home).read_bytes())
    file = Path("gazctl.ini")
    file.write_text(f"[broker]\nAddress = {guarded.endpoint}\n")
    assert (await gazctl("journals", "list", "--context=bare")).code == 1
    file.unlink()
    # Case: the token of a flag goes before it.
    assert (await gazctl("journals", "list", "--broker.auth-token=x")).code == 1
    # Case: it is renewed when it is due.
    asked = provider.asked("/token")
    sign_in = json.loads(kept(home).read_text())
    kept(home).write_text(json.dumps({**sign_in, "renew_at": 0, "expires_at": 0}))
    await gazctl.ok("journals", "list")
    assert provider.asked("/token") == asked + 1
    # Case: the provider refuses.
    kept(home).write_text(json.dumps({**sign_in, "renew_at": 0, "refresh_token": "x"}))
    ended = await gazctl("journals", "list")
    assert ended.code == 1
    assert "invalid_grant" in ended.err
    assert "gazctl login" in ended.err
    # Case: nothing can renew it.
    kept(home).write_text(json.dumps({**sign_in, "expires_at": 0, "refresh_token": ""}))
    ended = await gazctl("journals", "list")
    assert (ended.code, "gazctl login" in ended.err) == (1, True)


async def test_a_second_sign_in_is_as_the_first(
    gazctl: Runner, provider: Provider, home: Path
) -> None:
    await with_context(gazctl)
    assert (
        await log_in(gazctl, provider, "--id-token", "--scope=openid", "--audience=it")
    ).code == 0
    first = json.loads(kept(home).read_text())
    await gazctl.ok("login")
    second = json.loads(kept(home).read_text())
    forms = [form for path, form in provider.requests if path == "/device"]
    assert forms == [{"client_id": "gazctl", "scope": "openid", "audience": "it"}] * 2
    assert (first["id_token"], second["id_token"]) == (True, True)
    payload = first["token"].split(".")[1]
    assert json.loads(base64.urlsafe_b64decode(payload + "=="))["aud"] == "gazctl"


async def test_sign_out(gazctl: Runner, provider: Provider, home: Path) -> None:
    await with_context(gazctl)
    for answer, says in (
        ((200, b""), ""),
        ((200, b"<html>" * 100_000), ""),
        ((401, {"error": "invalid_client"}), "401 Unauthorized invalid_client"),
        ((503, b""), "503"),
    ):
        assert (await log_in(gazctl, provider)).code == 0
        provider.answers["/revoke"] = answer
        count = provider.asked("/token")
        done = await gazctl.ok("logout")
        assert provider.requests[-1] == (
            "/revoke", {"token": f"again-{count}", "client_id": "gazctl"}
        )  # fmt: skip
        assert says in done.err
        assert ("did not revoke" in done.err) is bool(says)
        assert not kept(home).exists()
    assert (await gazctl("logout")).code == 1
    # Case: a provider that revokes no tokens.
    assert (await log_in(gazctl, provider)).code == 0
    document = {name: url for name, url in provider.document.items() if "revocation" not in name}
    provider.answers[DISCOVERY] = (200, document)
    done = await gazctl.ok("logout")
    assert "The token stays valid until 20" in done.err
    del provider.answers[DISCOVERY]
    # Case: a context that is deleted leaves no token.
    assert (await log_in(gazctl, provider)).code == 0
    await gazctl.ok("context", "delete", "here")
    assert not kept(home).exists()


@pytest.mark.parametrize("words", [("logout",), ("context", "delete", "here"), ("login",)])
async def test_a_renewal_meanwhile_does_not_bring_a_sign_in_back(
    gazctl: Runner, provider: Provider, home: Path, words: tuple[str, ...]
) -> None:
    await with_context(gazctl)
    assert (await log_in(gazctl, provider)).code == 0
    sign_in = json.loads(kept(home).read_text())
    kept(home).write_text(json.dumps({**sign_in, "renew_at": 0}))
    entered, ended = threading.Event(), threading.Event()

    def slowly(form: dict[str, str]) -> tuple[int, Any]:
        status, answer = tokens(provider, form)
        if form["grant_type"] == "refresh_token":
            entered.set()
            ended.wait(0.5)
            return status, {**answer, "refresh_token": "renewed"}
        return status, {**answer, "refresh_token": "again"}

    provider.answers["/token"] = slowly
    thread = threading.Thread(target=renew, args=(kept(home), CLOCK))
    thread.start()
    assert entered.wait(30)
    await gazctl.ok(*words)
    ended.set()
    thread.join()
    if words == ("login",):
        assert json.loads(kept(home).read_text())["refresh_token"] == "again"
    else:
        assert not kept(home).exists()
    if words == ("logout",):
        assert provider.requests[-1] == ("/revoke", {"token": "renewed", "client_id": "gazctl"})


async def test_by_a_browser(gazctl: Runner, provider: Provider, home: Path) -> None:
    """A page that does not know the state of this sign-in is refused, and changes nothing."""
    await with_context(gazctl)
    streams = Streams()
    words = ["login", f"--issuer={provider.issuer}", "--client-id=gazctl", "--browser"]
    scope = TaskScope("login")
    running = scope.spawn(run_in_loop(words, gazctl.environ, streams.terminal), name="login")
    await eventually(lambda: running.done() or "\n" in streams.err.getvalue())
    url = urlsplit(streams.err.getvalue().split()[1])
    asked = {name: values[0] for name, values in parse_qs(url.query).items()}
    assert (asked["response_type"], asked["code_challenge_method"]) == ("code", "S256")
    async with httpx.AsyncClient() as browser:
        back = asked["redirect_uri"]
        assert urlsplit(back).hostname == "127.0.0.1"
        for query in ("", "?code=evil", "?code=evil&state=guess"):
            assert (await browser.get(f"{back}{query}")).status_code == 400
        for line in (b"HELLO\r\n", b"GET http://[ HTTP/1.1\r\n", b"\xff\r\n"):
            assert b" 400 " in await answer_to(back, line)
        # Case: it says nothing.
        assert await answer_to(back, b"") == b""
        assert not running.done()
        right = await browser.get(f"{back}?code=c&state={asked['state']}")
        assert right.status_code == 200
    assert await running == 0
    await scope.stop(1.0)
    [form] = [form for path, form in provider.requests if path == "/token"]
    digest = hashlib.sha256(form["code_verifier"].encode()).digest()
    assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == asked["code_challenge"]
    assert (form["code"], form["redirect_uri"]) == ("c", back)
    assert kept(home).exists()


@pytest.mark.parametrize(
    ("answers", "code", "says"),
    [
        ({"/token": (400, {"error": "access_denied"})}, 1, "access_denied"),
        (
            {"/token": (401, {"error": "invalid_client", "error_description": "no\x1b[2J"})},
            1,
            "no\\x1b",
        ),
        ({"/token": (200, {})}, 1, "access_token"),
        ({"/device": (400, {"error": "unauthorized_client"})}, 1, "unauthorized_client"),
        (
            {"/device": (200, {**CODE, "verification_uri": "javascript:alert(1)"})},
            1,
            "verification_uri",
        ),
        ({"/device": (200, {**CODE, "device_code": 1})}, 1, "200"),
        ({"/device": (200, b"<html>")}, 1, "JSON"),
    ],
)
async def test_a_provider_that_does_not_give_a_token(
    gazctl: Runner, provider: Provider, home: Path, answers: dict[str, Any], code: int, says: str
) -> None:
    await with_context(gazctl)
    provider.answers |= answers
    done = await log_in(gazctl, provider)
    assert done.code == code
    assert says in done.err
    assert "Traceback" not in done.err
    assert not kept(home).exists()


@pytest.mark.parametrize("interval_s", [0.01, 3600])
async def test_a_code_that_nobody_confirms(
    gazctl: Runner, provider: Provider, interval_s: float
) -> None:
    await with_context(gazctl)
    page = {"verification_uri": f"{provider.issuer}/code"}
    offer = {**CODE, **page, "expires_in": 0.05, "interval": interval_s}
    provider.answers["/device"] = 200, offer
    provider.answers["/token"] = 400, {"error": "authorization_pending"}
    async with timeout(60):
        done = await log_in(gazctl, provider)
    assert done.code == 1
    assert "gazctl login" in done.err


async def test_what_must_be_given(gazctl: Runner, provider: Provider) -> None:
    first = await log_in(gazctl, provider)
    assert first.code == 2
    assert re.search("--context", first.err)
    await with_context(gazctl)
    for words, says in (
        (["--client-id=x"], "--issuer"),
        ([f"--issuer={provider.issuer}"], "--client-id"),
        (["--issuer=http://login.example", "--client-id=x"], "https"),
        ([f"--issuer={provider.issuer}", "--client-id=x", "--context=other"], "other"),
    ):
        done = await gazctl("login", *words)
        assert done.code in (1, 2)
        assert says in done.err
    document = {name: value for name, value in provider.document.items() if "device" not in name}
    provider.answers["/.well-known/openid-configuration"] = 200, document
    done = await log_in(gazctl, provider)
    assert (done.code, "--browser" in done.err) == (2, True)
