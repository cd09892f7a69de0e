"""JSON of a provider: fetched within bounds of time and bytes, and read strictly."""

from __future__ import annotations

import base64
import binascii
import http.client
import json
import re
import socket
import threading
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote, urlencode, urlsplit

from gazette.errors import Invalid, Unavailable
from gazette.runtime.tls import tls_context
from gazette.version import __version__

FETCH_S: Final = 10.0
"""Seconds for one answer of a provider, from the request to its last byte."""
DOCUMENT_BYTES_MAX: Final = 1 << 18
_DISCOVERY: Final = "/.well-known/openid-configuration"
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_BASE64URL: Final = re.compile(r"[A-Za-z0-9_-]*")


def require_https(url: str, path: str) -> str:
    """Return ``url``. Raise ``Invalid`` for a URL that is neither https nor http of this machine."""
    try:
        parts = urlsplit(url)
        is_safe = parts.scheme == "https" or (
            parts.scheme == "http" and parts.hostname in _LOOPBACK
        )
        if not is_safe or not parts.hostname or parts.port == 0 or "@" in parts.netloc:
            raise ValueError("not a URL of https")
        if not url.isascii() or not url.isprintable() or " " in url or parts.fragment:
            raise ValueError("a URL has no such characters")
    except ValueError as error:
        raise Invalid(
            f'not a URL of https: "{url[:200]}"',
            path=path,
            hint="Give https://HOST/PATH. Only a provider on this machine may have http.",
        ) from error
    return url


def discover(issuer: str) -> dict[str, Any]:
    """Return what a provider says of itself. Blocking.

    Raise ``Unavailable`` if there is no such answer, or if another issuer answers.
    """
    url = issuer.rstrip("/") + _DISCOVERY
    _, document = fetch(url)
    if document.get("issuer") != issuer:
        raise Unavailable(f"{url} is of another issuer, {str(document.get('issuer'))[:200]}")
    return document


def endpoint_of(document: Mapping[str, Any], name: str) -> str:
    """Return an endpoint that `discover` has returned. Raise ``Unavailable`` if it is absent or unsafe."""
    url = document.get(name)
    if not isinstance(url, str):
        raise Unavailable(f"the provider has no {name}")
    try:
        return require_https(url, name)
    except Invalid as error:
        raise Unavailable(f"the {name} of the provider is {error.message}") from error


def fetch(url: str, form: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """Return the status of an answer, 200 or 400 to 499 for a form, and its JSON object. Blocking.

    With ``form``, send it by POST. Redirects are not followed. TLS is verified. The environment's proxy is
    used. Raise ``Unavailable`` for any other answer, and without one within `FETCH_S`.
    """
    parts = urlsplit(url)
    headers = {"Accept": "application/json", "User-Agent": f"pygazette/{__version__}"}
    body = None
    if form is not None:
        headers["Content-Type"] = "application/x-www-form-urlencoded"
        body = urlencode(form)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection = _connection(parts.scheme, parts.hostname or "", parts.port)
        connection.connect()
        # A limit for each read alone would let a peer send a byte now and then, without end.
        timer = threading.Timer(FETCH_S, _cut, [connection.sock])
        timer.daemon = True
        timer.start()
        try:
            connection.request("GET" if form is None else "POST", target, body, headers)
            with connection.getresponse() as response:
                data = response.read(DOCUMENT_BYTES_MAX + 1)
        finally:
            timer.cancel()
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise Unavailable(f"{parts.netloc} does not answer: {reason}") from error
    if response.status != 200 and (form is None or not 400 <= response.status < 500):
        raise Unavailable(f"{url} answers {response.status} {response.reason}")
    if len(data) > DOCUMENT_BYTES_MAX:
        raise Unavailable(f"{url} answers more than {DOCUMENT_BYTES_MAX} bytes")
    try:
        return response.status, strict_object(data)
    except ValueError as error:
        raise Unavailable(f"{url} answers {response.status} and no JSON object: {error}") from error


def _connection(scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
    if scheme == "http":  # Of this machine: no proxy.
        return http.client.HTTPConnection(host, port, timeout=FETCH_S)
    proxy = (
        "" if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get("https", "")
    )
    if not proxy:
        return http.client.HTTPSConnection(host, port, timeout=FETCH_S, context=tls_context())
    parts = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    connection = http.client.HTTPSConnection(
        parts.hostname or "", parts.port or 3128, timeout=FETCH_S, context=tls_context()
    )
    headers = {}
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(user).decode()}"
    connection.set_tunnel(host, port, headers)
    return connection


def _cut(sock: socket.socket) -> None:
    with suppress(OSError):  # It was closed meanwhile.
        sock.shutdown(socket.SHUT_RDWR)


def strict_object(data: bytes) -> dict[str, Any]:
    """Return a JSON object. Raise ``ValueError`` for other data, a repeated name, NaN and Infinity."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")  # noqa: TRY004 - as for all other faults
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name is repeated")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def base64url(text: Any) -> bytes:
    """Return the bytes of base64url without padding. Raise ``ValueError`` for any other form of them."""
    if not isinstance(text, str) or not _BASE64URL.fullmatch(text):
        raise ValueError("not base64url")
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error as error:
        raise ValueError(f"not base64url: {error}") from error
    if base64.urlsafe_b64encode(data).rstrip(b"=").decode() != text:
        raise ValueError("not the shortest base64url")
    return data
