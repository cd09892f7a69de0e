"""An OpenID Connect provider on this machine, whose every answer a test can replace."""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils

from gazette.runtime.clock import Clock, SystemClock

DISCOVERY = "/.well-known/openid-configuration"
JWKS = "/keys"


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def number(value: int, length: int = 0) -> str:
    return base64url(value.to_bytes(length or (value.bit_length() + 7) // 8))


@dataclass(frozen=True)
class SigningKey:
    """A key pair of the provider."""

    kid: str
    private: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey

    @classmethod
    def rsa(cls, kid: str, bits: int = 2048) -> SigningKey:
        return cls(kid, rsa.generate_private_key(65537, bits))

    @classmethod
    def ec(cls, kid: str, curve: ec.EllipticCurve | None = None) -> SigningKey:
        return cls(kid, ec.generate_private_key(curve or ec.SECP256R1()))

    @property
    def algorithm(self) -> str:
        return "RS256" if isinstance(self.private, rsa.RSAPrivateKey) else "ES256"

    @cached_property
    def jwk(self) -> dict[str, Any]:
        entry = {"kid": self.kid, "alg": self.algorithm, "use": "sig"}
        if isinstance(self.private, rsa.RSAPrivateKey):
            public = self.private.public_key().public_numbers()
            return {**entry, "kty": "RSA", "n": number(public.n), "e": number(public.e)}
        point = self.private.public_key().public_numbers()
        size = (point.curve.key_size + 7) // 8
        name = "P-256" if size == 32 else f"P-{point.curve.key_size}"
        return {
            **entry,
            "kty": "EC",
            "crv": name,
            "x": number(point.x, size),
            "y": number(point.y, size),
        }

    def sign(self, message: bytes) -> bytes:
        if isinstance(self.private, rsa.RSAPrivateKey):
            return self.private.sign(message, padding.PKCS1v15(), hashes.SHA256())
        r, s = utils.decode_dss_signature(self.private.sign(message, ec.ECDSA(hashes.SHA256())))
        return r.to_bytes(32) + s.to_bytes(32)

    def token(self, payload: Any, **header: Any) -> str:
        """Return a token. ``payload`` is a value, or the bytes of one. A header of None is left out."""
        fields = {"alg": self.algorithm, "kid": self.kid, "typ": "JWT", **header}
        head = json.dumps({name: value for name, value in fields.items() if value is not None})
        body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        signed = f"{base64url(head.encode())}.{base64url(body)}"
        return f"{signed}.{base64url(self.sign(signed.encode()))}"


Answer = tuple[int, Any]


@dataclass
class Provider:
    """``answers`` has what is answered at a path: a status and a value, bytes, or a function of the form."""

    clock: Clock = field(default_factory=SystemClock)
    keys: list[SigningKey] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    port: int = 0
    tls: tuple[Path, Path] | None = None
    """Files of a certificate and its key."""
    gate: threading.Event = field(default_factory=threading.Event)
    """Requests wait for it."""

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def issuer(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    def asked(self, path: str) -> int:
        """Return how often a path was asked for."""
        return sum(1 for asked, _ in self.requests if asked == path)

    def claims(self, **more: Any) -> dict[str, Any]:
        """Return claims of a right token. Those of None are left out."""
        now = int(self.clock.now())
        claims = {
            "iss": self.issuer,
            "aud": "gazette",
            "sub": "someone",
            "iat": now - 10,
            "exp": now + 600,
            "groups": ["operators"],
            **more,
        }
        return {name: value for name, value in claims.items() if value is not None}

    def token(self, **more: Any) -> str:
        return self.keys[0].token(self.claims(**more))

    @property
    def document(self) -> dict[str, Any]:
        return {
            "issuer": self.issuer,
            "jwks_uri": self.issuer + JWKS,
            "token_endpoint": f"{self.issuer}/token",
            "device_authorization_endpoint": f"{self.issuer}/device",
            "authorization_endpoint": f"{self.issuer}/authorize",
            "revocation_endpoint": f"{self.issuer}/revoke",
        }

    def answer(self, path: str, form: dict[str, str]) -> Answer:
        if (answer := self.answers.get(path)) is not None:
            replaced: Answer = answer(form) if callable(answer) else answer
            return replaced
        if path == DISCOVERY:
            return 200, self.document
        if path == JWKS:
            return 200, {"keys": [key.jwk for key in self.keys]}
        return 404, {}

    @contextmanager
    def serving(self) -> Iterator[Provider]:
        """Serve during the block, at the port of the last time."""
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.gate.wait(30)
                length = int(self.headers.get("Content-Length", 0))
                form = dict(parse_qsl(self.rfile.read(length).decode()))
                path = urlsplit(self.path).path
                provider.requests.append((path, form))
                status, value = provider.answer(path, form)
                body = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", f"{provider.issuer}/moved")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                """Write nothing."""

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                """Take no notice of clients that leave."""

        with Server(("127.0.0.1", self.port), Handler) as server:
            server.daemon_threads = True
            if self.tls is not None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(*self.tls)
                server.socket = context.wrap_socket(
                    server.socket, server_side=True, do_handshake_on_connect=False
                )
            self.port = server.server_address[1]
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield self
            finally:
                self.gate.set()
                server.shutdown()
                thread.join()


def threads_ended(*names: str) -> None:
    """Wait until no thread with one of these names runs."""
    for thread in threading.enumerate():
        if thread.name in names:
            thread.join(30)
            assert not thread.is_alive()


def fetched() -> None:
    """Wait until no keys are being fetched."""
    threads_ended("oidc-keys")


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Let this process begin no thread during the block: its stack would not fit into memory."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)
