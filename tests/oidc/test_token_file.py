"""Tokens of files: presented, read again when they change, and renewed before they end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gazette.auth import Capability, Claims, StaticToken
from gazette.client.flags import BrokerClientFlags
from gazette.client.oidc.token_file import LOOK_S, SignIn, TokenFile, renew
from gazette.client.rpc.credentials import Credentials
from gazette.errors import Invalid, NotAllowed, Unavailable
from gazette.testing.clock import ManualClock
from tests.facts import raises
from tests.support.oidc_provider import Provider, threads_ended

TOKEN = "/token"


def sign(signer: TokenFile) -> str:
    return signer.sign(Claims(Capability.READ), 60.0)


def renewed() -> None:
    threads_ended("token-renewal")


@pytest.fixture
def path(provider: Provider, clock: ManualClock, tmp_path: Path) -> Path:
    """Return a file of a sign-in whose token lives for ten minutes."""
    path = tmp_path / "sign-ins" / "a.json"
    sign_in = SignIn("", issuer=provider.issuer, client_id="gazctl")
    answer = {"access_token": "first", "refresh_token": "again-1", "expires_in": 600}
    sign_in.with_answer(answer, clock.now()).save(path)
    return path


def gives(provider: Provider, **more: Any) -> Callable[[dict[str, str]], tuple[int, Any]]:
    """Return an answer with a token that counts; a refresh token is taken once."""

    def answer(form: dict[str, str]) -> tuple[int, Any]:
        count = provider.asked(TOKEN)
        if form.get("refresh_token") != f"again-{count}" or form.get("client_id") != "gazctl":
            return 400, {"error": "invalid_grant", "error_description": "it was used"}
        tokens = {"access_token": f"token-{count}", "refresh_token": f"again-{count + 1}"}
        return 200, {**tokens, "expires_in": 600, **more}

    return answer


def test_a_file_is_private(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert "first" not in repr(SignIn.read(path))
    assert "again" not in repr(SignIn.read(path))


def test_a_token_is_renewed_before_it_ends(
    provider: Provider, path: Path, clock: ManualClock
) -> None:
    """A thread does it: calls go on with the last token."""
    provider.answers[TOKEN] = gives(provider)
    signer = TokenFile(path, clock)
    clock.advance(539)
    assert sign(signer) == "first"
    clock.advance(1)
    provider.gate.clear()
    assert sign(signer) == sign(signer) == "first"
    provider.gate.set()
    renewed()
    assert sign(signer) == "token-1"
    assert provider.asked(TOKEN) == 1
    # Case: another process, and this one again.
    assert sign(TokenFile(path, clock)) == "token-1"
    clock.advance(540)
    sign(signer)
    renewed()
    assert sign(signer) == "token-2"


def test_credentials_present_the_newest_token(
    provider: Provider, path: Path, clock: ManualClock
) -> None:
    """However short its life is, and whatever lifetime a call asks for."""
    provider.answers[TOKEN] = gives(provider)
    credentials = Credentials(TokenFile(path, clock), clock)
    claims = Claims(Capability.READ)
    assert credentials.metadata(claims) == (("authorization", "Bearer first"),)
    clock.advance(560)
    credentials.metadata(claims)
    renewed()
    assert credentials.metadata(claims) == (("authorization", "Bearer token-1"),)


def test_a_token_that_has_ended_is_not_sent(
    provider: Provider, path: Path, clock: ManualClock
) -> None:
    signer = TokenFile(path, clock)
    provider.answers[TOKEN] = 503, {}
    clock.advance(600)
    with raises(Unavailable, says="renewed"):
        sign(signer)
    renewed()
    with raises(Unavailable, says="503"):
        sign(signer)
    provider.answers[TOKEN] = 400, {"error": "invalid_grant", "error_description": "over\x1b[2J"}
    clock.advance(10)
    provider.gate.clear()
    with raises(Unavailable, says="503"):
        sign(signer)
    provider.gate.set()
    renewed()
    with raises(NotAllowed, says="invalid_grant over\\x1b[2J", advises="gazctl login"):
        sign(signer)
    # Case: the user has signed in again.
    sign_in = SignIn("new", issuer=provider.issuer, expires_at=clock.now() + 60)
    sign_in.save(path)
    clock.advance(LOOK_S)
    assert sign(signer) == "new"


def test_processes_do_not_use_a_refresh_token_twice(
    provider: Provider, path: Path, clock: ManualClock
) -> None:
    provider.answers[TOKEN] = gives(provider)
    clock.advance(600)
    got: list[str] = []
    threads = [
        threading.Thread(target=lambda: got.append(renew(path, clock).token)) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == ["token-1"] * 5


def test_a_token_says_itself_when_it_ends(
    provider: Provider, path: Path, clock: ManualClock
) -> None:
    token = provider.token(exp=int(clock.now()) + 100)
    sign_in = SignIn.read(path).with_answer(
        {"access_token": token, "expires_in": 9_999}, clock.now()
    )
    assert sign_in.expires_at == int(clock.now()) + 100
    assert sign_in.renew_at == sign_in.expires_at - 50
    assert sign_in.refresh_token == "again-1"


@pytest.mark.parametrize("lifetime", [None, "600", 0, -1, True, 1e300, [], {}])
def test_a_lifetime_that_means_nothing_is_short(
    path: Path, clock: ManualClock, lifetime: object
) -> None:
    answer = {"access_token": "x.e30.y", "expires_in": lifetime}
    sign_in = SignIn.read(path).with_answer(answer, clock.now())
    assert clock.now() < sign_in.renew_at < sign_in.expires_at <= clock.now() + 300


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"access_token": ""},
        {"access_token": 1},
        {"access_token": "a\r\nb: c"},
        {"id_token": "x"},
    ],
)
def test_an_answer_without_a_token(path: Path, clock: ManualClock, answer: dict[str, Any]) -> None:
    with raises(Unavailable, says="access_token"):
        SignIn.read(path).with_answer(answer, clock.now())


def test_a_plain_token_of_a_file(tmp_path: Path, clock: ManualClock) -> None:
    """Another program keeps it current: it is read again, and not renewed."""
    path = tmp_path / "token"
    path.write_text("one.two.three\n")
    signer = BrokerClientFlags(auth_token_file=str(path)).signer(clock)
    assert signer.sign(Claims(0), 60) == "one.two.three"
    path.write_text("four")
    assert signer.sign(Claims(0), 60) == "one.two.three"
    clock.advance(LOOK_S)
    assert signer.sign(Claims(0), 60) == "four"
    path.unlink()
    clock.advance(LOOK_S)
    assert signer.sign(Claims(0), 60) == "four"
    # Case: a token that is given goes before it.
    flags = BrokerClientFlags(auth_token="given", auth_token_file=str(path))
    assert isinstance(flags.signer(clock), StaticToken)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"two words",
        b"\xff",
        b"a\x00b",
        b"{",
        b"{}",
        json.dumps({"token": 1}).encode(),
        json.dumps({"token": "a", "renew_at": "b"}).encode(),
        json.dumps({"token": "a", "more": 1}).encode(),
        json.dumps({"token": "a", "refresh_token": "b", "issuer": "http://x.example"}).encode(),
        b'{"token": "a", "token": "b"}',
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, clock: ManualClock, text: bytes) -> None:
    path = tmp_path / "token"
    with raises(Invalid, path=str(path)):
        TokenFile(path, clock)
    path.write_bytes(text)
    with raises(Invalid, path=str(path)):
        TokenFile(path, clock)
