"""Keys of a provider: fetched by a thread, kept for a day, and asked for again no more than needed."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from gazette.auth import Capability, Claims, KeyedAuth
from gazette.client.oidc.documents import discover, fetch
from gazette.client.oidc.provider import KEPT_S, PATIENCE_S, REFRESH_S, RETRY_S
from gazette.client.oidc.verifier import OidcAuth, OidcSettings
from gazette.errors import Invalid, NotAllowed, Unavailable
from gazette.testing.clock import ManualClock
from tests.facts import raises
from tests.oidc.conftest import SECRET, auth_of
from tests.support.oidc_provider import (
    DISCOVERY,
    JWKS,
    Provider,
    SigningKey,
    fetched,
    no_more_threads,
)


def verify(auth: OidcAuth, token: str) -> Claims:
    return auth.verify(f"Bearer {token}", Capability.READ)


def test_keys_rotate(
    auth: OidcAuth, provider: Provider, keys: list[SigningKey], clock: ManualClock
) -> None:
    """A token of a new key has the keys fetched again, and is to be sent again. A withdrawn key ends."""
    old = provider.token(exp=int(clock.now()) + 10_000)
    verify(auth, old)
    clock.advance(RETRY_S)
    provider.keys = [keys[2]]
    new = provider.token()
    with raises(Unavailable, says="third"):
        verify(auth, new)
    fetched()
    verify(auth, new)
    # The token was verified before: its key is withdrawn.
    with raises(NotAllowed, says="first"):
        verify(auth, old)


def test_a_withdrawn_key_ends_without_another_one(
    auth: OidcAuth, provider: Provider, keys: list[SigningKey], clock: ManualClock
) -> None:
    token = provider.token(exp=int(clock.now()) + 10_000)
    verify(auth, token)
    provider.keys = [keys[1]]
    clock.advance(REFRESH_S)
    verify(auth, token)  # This call has the keys fetched, and does not wait.
    fetched()
    with raises(NotAllowed, says="first"):
        verify(auth, token)


def test_after_a_quiet_time_a_call_does_not_rely_on_old_keys(
    auth: OidcAuth, provider: Provider, keys: list[SigningKey], clock: ManualClock
) -> None:
    token = provider.token(exp=int(clock.now()) + 10_000)
    verify(auth, token)
    provider.keys = [keys[1]]
    clock.advance(2 * REFRESH_S)
    provider.gate.clear()
    with raises(Unavailable, says="fetched"):
        verify(auth, token)
    provider.gate.set()
    fetched()
    with raises(NotAllowed, says="first"):
        verify(auth, token)


def test_unknown_keys_have_keys_fetched_once_in_ten_seconds(
    auth: OidcAuth, provider: Provider, clock: ManualClock
) -> None:
    """However many callers there are."""
    stranger = SigningKey.rsa("stranger")
    tokens = [stranger.token(provider.claims(), kid=f"key-{index}") for index in range(20)]
    for round_ in range(1, 4):
        provider.gate.clear()
        clock.advance(RETRY_S)
        for token in tokens:
            with raises(Unavailable, says="key-"):
                verify(auth, token)
        provider.gate.set()
        fetched()
        for token in tokens:
            with raises(NotAllowed, says="key-"):
                verify(auth, token)
        assert provider.asked(JWKS) == 1 + round_
    # Case: tokens of others do not even have them fetched.
    clock.advance(RETRY_S)
    with raises(NotAllowed, says="issuer"):
        verify(auth, stranger.token(provider.claims(iss="https://other.example")))
    fetched()
    assert provider.asked(JWKS) == 4


def test_a_token_that_is_newer_than_the_last_fetch_may_have_a_newer_key(
    auth: OidcAuth, provider: Provider, keys: list[SigningKey], clock: ManualClock
) -> None:
    """Nothing has verified what it says of itself: it decides no more than the error."""
    clock.advance(RETRY_S)
    with raises(Unavailable, says="stranger"):
        verify(auth, SigningKey.ec("stranger").token(provider.claims()))
    fetched()
    provider.keys = [keys[2]]
    clock.advance(1)
    now = int(clock.now())
    for _ in range(3):
        with raises(Unavailable, says="third"):
            verify(auth, provider.token(iat=now))
    for times in ({"iat": now - 60}, {"iat": now + 60}, {"iat": "now"}, {"iat": None}):
        with raises(NotAllowed, says="third"):
            verify(auth, provider.token(**times))
    assert provider.asked(JWKS) == 2
    clock.advance(RETRY_S)
    with raises(Unavailable, says="third"):
        verify(auth, provider.token(iat=now))
    fetched()
    verify(auth, provider.token(iat=now))


class BusyClock(ManualClock):
    """Does something else at the first look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.once: list[Callable[[], None]] = []

    def monotonic(self) -> float:
        while self.once:
            self.once.pop()()
        return super().monotonic()


def test_a_key_that_is_fetched_while_its_token_is_looked_at(
    keys: list[SigningKey], roles: Path
) -> None:
    clock = BusyClock()
    with Provider(clock, keys[:1]).serving() as provider:
        auth = auth_of(provider, roles, clock)
        provider.keys = [keys[2]]
        provider.gate.clear()
        clock.advance(RETRY_S)
        with raises(Unavailable, says="third"):
            verify(auth, provider.token())
        clock.once = [fetched, provider.gate.set]
        verify(auth, provider.token())


ASKS_A_DEAF_RESOLVER = """
import socket, threading, time
from gazette.client.oidc.documents import fetch
from gazette.errors import Unavailable

deaf = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
deaf.bind(("127.0.0.1", 53))
begun = time.monotonic()
for _ in range(3):
    try:
        fetch("https://provider.example/keys", within_s=0.5)
    except Unavailable as error:
        print(error)
assert time.monotonic() - begun < 4
assert sum(thread.name.startswith("resolve ") for thread in threading.enumerate()) == 1
"""


@pytest.mark.skipif(
    subprocess.run(["sh", "-c", "unshare -rmn true"], check=False, capture_output=True).returncode
    != 0,
    reason="this machine lets no process have a network of its own",
)
def test_a_resolver_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    commands = f"""
        ip link set lo up && mount --bind {tmp_path}/resolv.conf /etc/resolv.conf
        exec {sys.executable} -c '{ASKS_A_DEAF_RESOLVER}'
    """
    done = subprocess.run(
        ["unshare", "-rmn", "sh", "-c", commands], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    sentence = (
        "provider.example does not answer: no address of provider.example came from the resolver"
    )
    assert done.stdout.count(sentence) == 3, done.stdout


def test_a_fetch_that_does_not_end_is_not_waited_for(
    auth: OidcAuth, provider: Provider, keys: list[SigningKey], clock: ManualClock
) -> None:
    """What it brings at last does not replace what is newer."""
    late, entered = threading.Event(), threading.Event()
    rounds = iter([{"keys": [keys[0].jwk]}])

    def answer(_form: dict[str, str]) -> tuple[int, Any]:
        if (first := next(rounds, None)) is not None:
            entered.set()
            late.wait(30)
            return 200, first
        return 200, {"keys": [keys[2].jwk]}

    provider.answers[JWKS] = answer
    token = keys[2].token(provider.claims(exp=int(clock.now()) + 10_000))
    clock.advance(RETRY_S)
    for wait_s in (0, PATIENCE_S - 1):
        clock.advance(wait_s)
        with raises(Unavailable, says="third"):
            verify(auth, token)
    assert entered.wait(30)
    assert provider.asked(JWKS) == 2
    clock.advance(1)
    stuck = threading.enumerate()
    with contextlib.suppress(Unavailable):
        verify(auth, token)
    for thread in threading.enumerate():
        if thread.name == "oidc-keys" and thread not in stuck:
            thread.join(30)
    verify(auth, token)
    assert any(thread.name == "oidc-keys" for thread in stuck if thread.is_alive())
    late.set()
    fetched()
    verify(auth, token)
    assert provider.asked(JWKS) == 3


def test_keys_are_fetched_later_if_there_is_no_thread_now(
    provider: Provider, roles: Path, clock: ManualClock
) -> None:
    settings = OidcSettings(provider.issuer, "gazette", roles=roles)
    with no_more_threads():
        auth = OidcAuth(KeyedAuth(clock, (SECRET,)), settings)
        with raises(Unavailable, says="thread"):
            verify(auth, provider.token())
    clock.advance(RETRY_S)
    with raises(Unavailable, says="try again"):  # The fetch that has begun may end at any moment.
        verify(auth, provider.token())
    fetched()
    verify(auth, provider.token())


def test_a_provider_that_is_away_at_the_start(
    keys: list[SigningKey], roles: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Shared keys work meanwhile. Each of the provider's tokens is refused for now, with the reason."""
    provider = Provider(clock, keys[:1])
    with provider.serving():
        pass
    with caplog.at_level(logging.WARNING):
        auth = auth_of(provider, roles, clock)
    assert provider.issuer in caplog.text
    for _ in range(3):
        clock.advance(RETRY_S)
        with raises(Unavailable, says="refused"):
            verify(auth, provider.token())
        fetched()
    assert len(caplog.records) == 1
    verify(auth, auth.sign(Claims(Capability.READ), 60))
    with provider.serving():
        clock.advance(RETRY_S)
        with raises(Unavailable):
            verify(auth, provider.token())
        fetched()
        verify(auth, provider.token())


def test_a_provider_that_is_away_later(
    keys: list[SigningKey], roles: Path, clock: ManualClock
) -> None:
    """Keys that are known are used for a day."""
    provider = Provider(clock, keys[:1])
    with provider.serving():
        auth = auth_of(provider, roles, clock)
    for _ in range(3):
        clock.advance(KEPT_S / 4)
        for _ in range(2):
            try:
                verify(auth, provider.token())
            except Unavailable:  # Until the fetch has failed, keys are not known to be the newest.
                fetched()
        verify(auth, provider.token())
    with raises(Unavailable, says="first-other"):
        verify(auth, provider.keys[0].token(provider.claims(), kid="first-other"))
    clock.advance(KEPT_S / 4)
    fetched()
    with raises(Unavailable, says="refused"):
        verify(auth, provider.token())


def rsa_entry(**more: Any) -> dict[str, Any]:
    entry = {**SigningKey.rsa("first").jwk, **more}
    return {name: value for name, value in entry.items() if value is not None}


WEAK: Final = SigningKey.rsa("first", 1024)
HOSTILE: Final[dict[str, tuple[int, Any]]] = {
    "no keys": (200, {}),
    "keys of another type": (200, {"keys": {"kid": "first"}}),
    "a list": (200, []),
    "text": (200, b"<html>"),
    "nothing": (200, b""),
    "no UTF-8": (200, b'{"keys": "\xff"}'),
    "deep": (200, b'{"keys":' + b"[" * 100_000),
    "huge": (200, json.dumps({"keys": [rsa_entry()]}).encode() + b" " * (1 << 19)),
    "a huge number": (200, b'{"keys": [' + b"9" * 10_000 + b"]}"),
    "repeated": (200, b'{"keys": [], "keys": []}'),
    "an error": (500, {"keys": [rsa_entry()]}),
    "elsewhere": (302, {"keys": [rsa_entry()]}),
    "not found": (404, {"keys": [rsa_entry()]}),
    "entries of other types": (200, {"keys": [None, 1, "x", [], {}]}),
    "secrets": (200, {"keys": [{"kty": "oct", "kid": "first", "alg": "HS256", "k": "AAAA"}]}),
    "a weak key": (200, {"keys": [WEAK.jwk]}),
    "an oversized key": (200, {"keys": [rsa_entry(n="_" * 2_000)]}),
    "an exponent of 1": (200, {"keys": [rsa_entry(e="AQ")]}),
    "a huge exponent": (200, {"keys": [rsa_entry(e="_" * 300)]}),
    "an even modulus": (200, {"keys": [rsa_entry(n="_" * 341 + "g")]}),
    "an absent modulus": (200, {"keys": [rsa_entry(n=None)]}),
    "a modulus that is a number": (200, {"keys": [rsa_entry(n=5)]}),
    "a modulus with padding": (200, {"keys": [rsa_entry(n=WEAK.jwk["n"] + "==")]}),
    "for encryption": (200, {"keys": [rsa_entry(use="enc")]}),
    "for signing only": (200, {"keys": [rsa_entry(key_ops=["sign"])]}),
    "operations of another type": (200, {"keys": [rsa_entry(key_ops="verify")]}),
    "another algorithm": (200, {"keys": [rsa_entry(alg="RS512")]}),
    "RSA for HS256": (200, {"keys": [rsa_entry(alg="HS256")]}),
    "a kid that is a number": (200, {"keys": [rsa_entry(kid=1)]}),
    "a point off the curve": (200, {"keys": [{**SigningKey.ec("first").jwk, "x": "A" * 43}]}),
    "a short point": (200, {"keys": [{**SigningKey.ec("first").jwk, "x": "AAAA"}]}),
    "a curve by another name": (200, {"keys": [{**SigningKey.ec("first").jwk, "crv": "P-384"}]}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_sets_of_keys_change_nothing(
    auth: OidcAuth, provider: Provider, clock: ManualClock, what: str
) -> None:
    """Keys that are known go on to work, and a new token is refused for now, with a reason."""
    verify(auth, provider.token())
    provider.answers[JWKS] = HOSTILE[what]
    clock.advance(REFRESH_S)
    verify(auth, provider.token())
    fetched()
    assert provider.asked(JWKS) == 2
    verify(auth, provider.token())
    with raises(Unavailable, says="new"):
        verify(auth, SigningKey.rsa("new").token(provider.claims()))


def test_keys_of_others_beside_ours(
    provider: Provider, keys: list[SigningKey], roles: Path, clock: ManualClock
) -> None:
    """A set may have keys for other things, and two for one name: a token of such a name is refused."""
    twins = [SigningKey.rsa("twin").jwk, SigningKey.rsa("twin").jwk]
    others = [{"kty": "OKP", "kid": "first", "crv": "Ed25519", "x": "AAAA"}, None]
    provider.answers[JWKS] = 200, {"keys": [*others, *twins, keys[0].jwk, keys[1].jwk]}
    auth = auth_of(provider, roles, clock)
    verify(auth, provider.token())
    for kid in ("twin", None):
        with raises(NotAllowed):
            verify(auth, keys[0].token(provider.claims(), kid=kid))
    # Case: of keys without names, the only one for the algorithm.
    verify(auth, keys[1].token(provider.claims(), kid=None))


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"issuer": "https://other.example"}, "other.example"),
        ({"jwks_uri": None}, "jwks_uri"),
        ({"jwks_uri": "http://keys.example/"}, "jwks_uri"),
        ({"jwks_uri": "file:///etc/passwd"}, "jwks_uri"),
        ({"jwks_uri": "https://a@keys.example/"}, "jwks_uri"),
        ({"jwks_uri": "https://keys.example:99999/"}, "jwks_uri"),
        ({"jwks_uri": "https://keys.example/\r\nX: y"}, "jwks_uri"),
        ({"jwks_uri": ["https://keys.example/"]}, "jwks_uri"),
    ],
)
def test_what_a_provider_says_of_itself(
    provider: Provider, roles: Path, clock: ManualClock, document: dict[str, Any], says: str
) -> None:
    provider.answers[DISCOVERY] = 200, {**provider.document, **document}
    auth = auth_of(provider, roles, clock)
    with raises(Unavailable, says=says):
        verify(auth, provider.token())
    assert provider.asked(JWKS) == 0
    # Case: the address of the keys is given.
    verify(auth_of(provider, roles, clock, jwks_url=provider.issuer + JWKS), provider.token())


@pytest.mark.parametrize(
    "issuer",
    [
        "",
        "x",
        "http://login.example",
        "ftp://login.example",
        "https://",
        "https://a b/",
        "https://u@h/",
    ],
)
def test_an_issuer_has_https(
    provider: Provider, roles: Path, clock: ManualClock, issuer: str
) -> None:
    with raises(Invalid, path="oidc-jwks-url"):
        auth_of(provider, roles, clock, jwks_url=issuer or "x")
    with raises(Invalid, path="oidc-issuer"):
        OidcAuth(KeyedAuth(clock, (SECRET,)), OidcSettings(issuer, "gazette", roles=roles))


LIMIT_S: Final = 1.0


@contextmanager
def listening(answer: bytes, drip: bytes = b"") -> Iterator[str]:
    """Serve one connection: send these bytes one after the other, and then ``drip`` now and then."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def serve() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(answer)
                while not ended.wait(0.02 if drip else 60):
                    connection.sendall(drip)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            ended.set()
            socket.create_connection(server.getsockname()).close()  # In case that no client came.
            thread.join()


@pytest.mark.parametrize(
    ("answer", "drip"),
    [
        (b"", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n{", b" "),
        (b"HTTP/1.1 200 OK\r\na: b", b"c"),
        (b"HTTP/1.1 100 Continue\r\n", b"\r\nHTTP/1.1 100 Continue\r\n"),
    ],
)
def test_a_provider_that_hangs_is_given_up(answer: bytes, drip: bytes) -> None:
    with listening(answer, drip) as url:
        with raises(Unavailable, says=url.removeprefix("http://")):
            fetch(url, within_s=LIMIT_S)


def test_a_provider_that_begins_nothing_is_given_up() -> None:
    """It accepts no connection, or hangs before TLS."""
    with listening(b"") as url, raises(Unavailable, says="timed out"):
        fetch(url.replace("http", "https"), within_s=LIMIT_S)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as others:
        for _ in range(3):
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(server.getsockname())
        with raises(Unavailable, says="timed out"):
            fetch(f"http://127.0.0.1:{server.getsockname()[1]}", within_s=LIMIT_S)


@pytest.mark.parametrize(
    ("answer", "drip"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b""),
    ],
)
def test_a_proxy_that_hangs_is_given_up(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, drip: bytes
) -> None:
    with listening(answer, drip) as url:
        monkeypatch.setenv("https_proxy", url)
        with raises(Unavailable, says="timed out"):
            fetch("https://login.example/", within_s=LIMIT_S)


def test_a_proxy_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(b"HTTP/1.1 407 No\r\n\r\n") as url:
        monkeypatch.setenv("https_proxy", url)
        with raises(Unavailable, says="407 No"):
            fetch("https://login.example/")


def test_no_other_thread_cuts_a_connection() -> None:
    """It would take TLS from under a read, and plain bytes of the network would count as keys."""
    threads: list[threading.Thread] = []

    def answer(_form: dict[str, str]) -> tuple[int, Any]:
        threads.extend(threading.enumerate())
        return 200, {}

    with Provider(answers={JWKS: answer}).serving() as provider:
        fetch(provider.issuer + JWKS)
    assert threads
    assert not any(isinstance(thread, threading.Timer) for thread in threads)


@pytest.mark.parametrize(
    "answer", [b"x\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n"]
)
def test_what_is_no_http(answer: bytes) -> None:
    with listening(answer) as url, raises(Unavailable):
        fetch(url)


def test_certificates_are_verified(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Provider(tls=certificate).serving() as provider:
        with raises(Unavailable, says="CERTIFICATE_VERIFY_FAILED"):
            discover(provider.issuer)
        assert provider.requests == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        assert discover(provider.issuer) == provider.document
        with raises(Unavailable, says="localhost"):
            discover(provider.issuer.replace("127.0.0.1", "localhost"))


@contextmanager
def proxy(port: int, heads: list[bytes]) -> Iterator[str]:
    """Serve one connection as a proxy that connects to ``port``, whatever it is asked for."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pump(source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65_536):
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)

        def serve() -> None:
            client, _ = server.accept()
            with client, socket.create_connection(("127.0.0.1", port)) as target:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += client.recv(65_536)
                heads.append(head)
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                back = threading.Thread(target=pump, args=(target, client))
                back.start()
                pump(client, target)
                back.join()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://me:a%40b@127.0.0.1:{server.getsockname()[1]}"
        finally:
            thread.join()


def test_a_proxy_of_the_environment_is_used(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets no more than the name of the host, and what is its own."""
    heads: list[bytes] = []
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    with Provider(tls=certificate).serving() as provider:
        with proxy(provider.port, heads) as url:
            monkeypatch.setenv("https_proxy", url)
            # Case: an answer through the tunnel, of the host that was asked for.
            _, document = fetch(f"https://localhost{DISCOVERY}")
        assert document == provider.document
        assert heads[0].startswith(b"CONNECT localhost:443 HTTP/1.")
        assert b"Proxy-Authorization: Basic bWU6YUBi\r\n" in heads[0]
        assert b"well-known" not in heads[0]
        # Case: not for this host.
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert discover(provider.issuer) == provider.document
