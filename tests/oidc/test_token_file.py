"""Tokens of files: presented, read again when they change, and renewed before they end."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gazette.auth import Capability, Claims, StaticToken
from gazette.client.flags import BrokerClientFlags
from gazette.client.oidc.token_file import LOOK_S, SignIn, TokenFile, locked, renew
from gazette.client.rpc.credentials import Credentials
from gazette.errors import Invalid, NotAllowed, Unavailable
from gazette.testing.clock import ManualClock
from tests.facts import raises
from tests.support.oidc_provider import Provider, base64url, no_more_threads, threads_ended

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


@pytest.mark.parametrize(
    ("payload", "expires_in", "is_id_token", "lives_s"),
    [
        ({"iat": -500, "exp": -400}, 90, False, 90),
        # Case: the provider does not say it. Its clock is behind ours.
        ({"iat": -500, "exp": -400}, None, False, 100),
        ({"iat": -500, "exp": -400}, True, False, 100),
        ({"exp": 100}, None, False, 100),
        # Case: what the provider says is of the access token.
        ({"iat": 0, "exp": 100}, 90, True, 100),
        ({}, 90, True, 90),
    ],
)
def test_how_long_a_token_lives(
    provider: Provider,
    path: Path,
    clock: ManualClock,
    payload: dict[str, int],
    expires_in: object,
    is_id_token: bool,
    lives_s: float,
) -> None:
    times = {name: int(clock.now()) + seconds for name, seconds in payload.items()}
    token = provider.token(**{"iat": None, "exp": None, **times})
    answer = {"access_token": token, "id_token": token, "expires_in": expires_in}
    before = replace(SignIn.read(path), id_token=is_id_token)
    sign_in = before.with_answer(answer, clock.now())
    assert sign_in.expires_at == clock.now() + lives_s
    assert sign_in.renew_at == clock.now() + lives_s / 2 + max(0, lives_s / 2 - 60)
    assert sign_in.refresh_token == "again-1"


@pytest.mark.parametrize("lifetime", [None, "600", 0, -1, True, 1e12, 10**400, 1e300, [], {}])
def test_a_lifetime_that_means_nothing_is_short(
    path: Path, clock: ManualClock, lifetime: object
) -> None:
    exp = json.dumps(lifetime).replace("1e+300", "1e999")
    payload = base64url(b'{"exp": ' + exp.encode() + b"}")
    tokens = ("x.e30.y", f"x.{payload}.y")
    for token in tokens:
        answer = {"access_token": token, "expires_in": lifetime}
        sign_in = SignIn.read(path).with_answer(answer, clock.now())
        assert clock.now() < sign_in.renew_at < sign_in.expires_at <= clock.now() + 300
        sign_in.save(path)
        assert SignIn.read(path) == sign_in


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
        json.dumps({"token": "a", "id_token": "no"}).encode(),
        json.dumps({"token": "a", "renew_at": True}).encode(),
        b'{"token": "a", "expires_at": 1e999}',
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


def test_a_sign_in_that_could_not_be_read_again_is_not_kept(
    provider: Provider, path: Path, clock: ManualClock
) -> None:
    provider.answers[TOKEN] = gives(provider, refresh_token="x" * 262_000)
    before = path.read_bytes()
    clock.advance(600)
    with raises(Invalid, says="262144"):
        renew(path, clock)
    assert path.read_bytes() == before


@pytest.mark.parametrize("status", [408, 429])
@pytest.mark.parametrize("body", [b"<html>", {"error": "slow_down"}])
def test_a_provider_that_wants_to_be_asked_later_does_not_refuse(
    provider: Provider, path: Path, clock: ManualClock, status: int, body: Any
) -> None:
    provider.answers[TOKEN] = status, body
    clock.advance(600)
    with raises(Unavailable, says=str(status)):
        renew(path, clock)


def test_a_token_that_has_ended_and_cannot_be_renewed(path: Path, clock: ManualClock) -> None:
    SignIn("ended", expires_at=clock.now() + 10).save(path)
    signer = TokenFile(path, clock)
    assert sign(signer) == "ended"
    clock.advance(10)
    with raises(NotAllowed, says="ended", advises="gazctl login"):
        sign(signer)


def test_a_failure_before_a_new_sign_in_is_forgotten(
    provider: Provider, path: Path, clock: ManualClock
) -> None:
    provider.answers[TOKEN] = 400, {"error": "invalid_grant"}
    signer = TokenFile(path, clock)
    clock.advance(600)
    for error in (Unavailable, NotAllowed):
        with raises(error):
            sign(signer)
        renewed()
    sign_in = SignIn("", issuer=provider.issuer, client_id="gazctl")
    answer = {"access_token": "second", "refresh_token": "again-2", "expires_in": 600}
    sign_in.with_answer(answer, clock.now()).save(path)
    clock.advance(LOOK_S)
    assert sign(signer) == "second"
    clock.advance(600)
    provider.gate.clear()
    with raises(Unavailable, says="renewed"):
        sign(signer)


def test_one_renewal_at_a_time_waits_for_another_process(
    provider: Provider, path: Path, clock: ManualClock
) -> None:
    provider.answers[TOKEN] = gives(provider)
    signer = TokenFile(path, clock)
    clock.advance(550)
    others = set(threading.enumerate())  # A renewal of an earlier test may be among them.
    with locked(path):
        for _ in range(5):
            assert sign(signer) == "first"
            clock.advance(6)
        names = [thread.name for thread in threading.enumerate() if thread not in others]
        assert names.count("token-renewal") == 1
        with raises(Unavailable, says="another process"):
            renew(path, clock, wait_s=0.0)
    renewed()
    assert sign(signer) == "token-1"


def test_a_lock_is_no_link(
    provider: Provider, path: Path, clock: ManualClock, tmp_path: Path
) -> None:
    """A token that is not due needs no lock: a home may be read-only."""
    provider.answers[TOKEN] = gives(provider)
    other = tmp_path / "other"
    other.write_text("other")
    path.with_suffix(".lock").symlink_to(other)
    assert renew(path, clock).token == "first"
    clock.advance(550)
    with raises(Unavailable, says="kept"):
        renew(path, clock)
    assert other.read_text() == "other"
    assert provider.asked(TOKEN) == 0


def test_a_lock_ends_before_its_copies(path: Path) -> None:
    """A child of a fork has one, and may live long."""
    with locked(path):
        files = Path("/proc/self/fd").iterdir()
        [number] = [int(file.name) for file in files if file.resolve().suffix == ".lock"]
        copy = os.dup(number)
    with locked(path, wait_s=0.0):
        os.close(copy)


@contextmanager
def files_limited(limit: int) -> Iterator[None]:
    """Let this process write no file that is longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_refresh_token_is_not_used_without_a_place_for_the_next(
    provider: Provider, path: Path, clock: ManualClock
) -> None:
    provider.answers[TOKEN] = gives(provider)
    clock.advance(550)
    with files_limited(1 << 14), raises(Unavailable, says="kept"):
        renew(path, clock)
    assert provider.asked(TOKEN) == 0
    assert sorted(file.name for file in path.parent.iterdir()) == ["a.json", "a.lock"]
    assert renew(path, clock).token == "token-1"


def test_a_sign_in_that_cannot_be_saved_is_kept_in_memory(
    provider: Provider, path: Path, clock: ManualClock
) -> None:
    gift, limits = gives(provider), ExitStack()

    def answer(form: dict[str, str]) -> tuple[int, Any]:
        status, value = gift(form)
        if provider.asked(TOKEN) == 1:
            value["access_token"] = "long" * 10_000
            limits.enter_context(files_limited(1 << 14))
        return status, value

    provider.answers[TOKEN] = answer
    signer = TokenFile(path, clock)
    clock.advance(550)
    with limits:
        sign(signer)
        renewed()
        assert sign(signer) == "long" * 10_000
        clock.advance(LOOK_S)
        assert sign(signer) == "long" * 10_000
        renewed()
    assert SignIn.read(path).token == "first"
    # Case: it can be saved later.
    clock.advance(LOOK_S)
    sign(signer)
    renewed()
    assert sign(signer) == SignIn.read(path).token == "long" * 10_000
    assert provider.asked(TOKEN) == 1
    clock.advance(550)
    sign(signer)
    renewed()
    assert sign(signer) == SignIn.read(path).token == "token-2"


def test_a_token_is_renewed_later_if_there_is_no_thread_now(
    provider: Provider, path: Path, clock: ManualClock
) -> None:
    provider.answers[TOKEN] = gives(provider)
    signer = TokenFile(path, clock)
    clock.advance(600)
    with no_more_threads(), raises(Unavailable, says="thread"):
        sign(signer)
    clock.advance(10)
    with raises(Unavailable):
        sign(signer)
    renewed()
    assert sign(signer) == "token-1"
