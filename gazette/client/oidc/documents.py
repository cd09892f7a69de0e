"""Fetch the JSON of a provider, within bounds of time and bytes, and read it strictly."""

from __future__ import annotations

import base64
import binascii
import concurrent.futures
import http.client
import io
import json
import re
import socket
import threading
import urllib.request
from collections.abc import Mapping
from typing import Any, Final, cast
from urllib.parse import SplitResult, unquote, urlencode, urlsplit

from gazette.errors import Invalid, Unavailable
from gazette.runtime.clock import SystemClock
from gazette.runtime.tls import tls_context
from gazette.version import __version__

FETCH_S: Final = 10.0
"""Seconds for one answer of a provider, from the name of its host to its last byte."""
DOCUMENT_BYTES_MAX: Final = 1 << 18
_LATER: Final = (408, 429)
_DISCOVERY: Final = "/.well-known/openid-configuration"
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_BASE64URL: Final = re.compile(r"[A-Za-z0-9_-]*")
_resolving: Final[dict[tuple[str, int], concurrent.futures.Future[list[Any]]]] = {}
"""Look-ups of host names that are in progress, by host and port."""
_resolving_lock: Final = threading.Lock()


def require_https(url: str, path: str) -> str:
    """Return ``url``. Raise ``Invalid`` unless it is an https URL, or an http URL of this machine."""
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
    """Return the discovery document of a provider. Blocking.

    Raise ``Unavailable`` if there is no valid answer, or if the document names another issuer.
    """
    url = issuer.rstrip("/") + _DISCOVERY
    _, document = fetch(url)
    if document.get("issuer") != issuer:
        raise Unavailable(f"{url} is of another issuer, {str(document.get('issuer'))[:200]}")
    return document


def endpoint_of(document: Mapping[str, Any], name: str) -> str:
    """Return an endpoint of a discovery document. Raise ``Unavailable`` if it is absent or unsafe."""
    url = document.get(name)
    if not isinstance(url, str):
        raise Unavailable(f"the provider has no {name}")
    try:
        return require_https(url, name)
    except Invalid as error:
        raise Unavailable(f"the {name} of the provider is {error.message}") from error


def fetch(
    url: str, form: Mapping[str, str] | None = None, within_s: float = FETCH_S
) -> tuple[int, dict[str, Any]]:
    """Return the status of an answer, and its JSON object. Blocking. See `answer_of`.

    The status is 200; after a POST of ``form`` it may be 400 to 499. Raise ``Unavailable`` for any other
    answer, and for 408 and 429, since the provider may accept the form later.
    """
    status, reason, data = answer_of(url, form, within_s)
    is_refusal = form is not None and 400 <= status < 500 and status not in _LATER
    if status != 200 and not is_refusal:
        raise Unavailable(f"{url} answers {status} {reason}")
    if len(data) > DOCUMENT_BYTES_MAX:
        raise Unavailable(f"{url} answers more than {DOCUMENT_BYTES_MAX} bytes")
    try:
        return status, strict_object(data)
    except ValueError as error:
        raise Unavailable(f"{url} answers {status} and no JSON object: {error}") from error


def answer_of(
    url: str, form: Mapping[str, str] | None = None, within_s: float = FETCH_S
) -> tuple[int, str, bytes]:
    """Return the status, the reason and the first bytes of an answer with any status. Blocking.

    Follow no redirects, verify TLS, use the environment's proxy. Raise ``Unavailable`` if the answer takes
    longer than ``within_s`` seconds, from the look-up of the host to the last byte.
    """
    parts, ends_at, body = urlsplit(url), SystemClock.monotonic() + within_s, b""
    headers = {"Host": parts.netloc, "Accept": "application/json", "Accept-Encoding": "identity"}
    headers |= {"User-Agent": f"pygazette/{__version__}", "Connection": "close"}
    if form is not None:
        body = urlencode(form).encode()
        headers |= {"Content-Type": "application/x-www-form-urlencoded"}
        headers |= {"Content-Length": str(len(body))}
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    request = f"{'GET' if form is None else 'POST'} {target}"
    try:
        with (
            _opened(parts, ends_at) as sock,
            _answered(sock, ends_at, request, headers, body) as response,
        ):
            return response.status, response.reason, response.read(DOCUMENT_BYTES_MAX + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise Unavailable(f"{parts.netloc} does not answer: {reason}") from error


def _opened(parts: SplitResult, ends_at: float) -> socket.socket:
    """Return a socket to the host of a URL: with TLS, and by the environment's proxy."""
    host, port = parts.hostname or "", parts.port or 443
    if parts.scheme == "http":  # A URL of this machine needs no proxy.
        return _connected(host, parts.port or 80, ends_at)
    proxies = {} if urllib.request.proxy_bypass(host) else urllib.request.getproxies()
    url = proxies.get("https", "")
    proxy = urlsplit(url if "//" in url else f"//{url}")
    place = (proxy.hostname or "", proxy.port or 3128) if url else (host, port)
    sock = _connected(*place, ends_at)
    try:
        if url:
            _tunnel(sock, proxy, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", ends_at)
        sock.settimeout(_left_s(ends_at))  # This bounds the whole handshake.
        return tls_context().wrap_socket(sock, server_hostname=host)
    except BaseException:
        sock.close()
        raise


def _connected(host: str, port: int, ends_at: float) -> socket.socket:
    """Return a socket to one of the host's addresses. Each address gets an equal part of the time left."""
    addresses = _addresses(host, port, ends_at)
    failure = OSError("it has no address")
    for index, (family, type_, protocol, _, address) in enumerate(addresses):
        sock = socket.socket(family, type_, protocol)
        try:
            sock.settimeout(_left_s(ends_at) / (len(addresses) - index))
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure


def _addresses(host: str, port: int, ends_at: float) -> list[Any]:
    """Return the addresses of a host. A thread for each host asks, since a resolver takes no deadline."""
    place = host, port
    with _resolving_lock:
        if (answer := _resolving.get(place)) is None:
            answer = concurrent.futures.Future()
            work = (place, answer)
            threading.Thread(
                target=_resolve, args=work, name=f"resolve {host}", daemon=True
            ).start()
            _resolving[place] = answer
    try:
        return answer.result(_left_s(ends_at))
    except TimeoutError as error:
        raise OSError(f"no address of {host} came from the resolver in time") from error


def _resolve(place: tuple[str, int], answer: concurrent.futures.Future[list[Any]]) -> None:
    try:
        answer.set_result(socket.getaddrinfo(*place, type=socket.SOCK_STREAM))
    except Exception as error:  # noqa: BLE001 - a caller would wait in vain
        answer.set_exception(error)
    with _resolving_lock:
        del _resolving[place]


def _tunnel(sock: socket.socket, proxy: SplitResult, target: str, ends_at: float) -> None:
    """Have a proxy connect to a host. Raise ``OSError`` if it refuses."""
    headers = {"Host": target}
    if proxy.username is not None:
        user = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(user).decode()}"
    with _answered(sock, ends_at, f"CONNECT {target}", headers) as response:
        if response.status != 200:
            raise OSError(f"the proxy answers {response.status} {response.reason}")


def _answered(
    sock: socket.socket, ends_at: float, request: str, headers: Mapping[str, str], body: bytes = b""
) -> http.client.HTTPResponse:
    """Send a request, and return its answer once the answer's head has arrived."""
    lines = [f"{request} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    rest = "\r\n".join([*lines, "", ""]).encode("ascii") + body
    while rest:
        sock.settimeout(_left_s(ends_at))
        rest = rest[sock.send(rest) :]
    method = request.partition(" ")[0]
    response = http.client.HTTPResponse(cast("Any", _Timed(sock, ends_at)), method=method)
    try:
        response.begin()
    except BaseException:
        response.close()
        raise
    return response


class _Timed(io.RawIOBase):
    """The bytes that a socket receives until the moment ``ends_at``.

    Each read waits only for the time that is left. With a limit for each read alone, a peer could send a byte
    now and then, without end. A timer in another thread must not close the socket instead: a read would then
    go on below TLS, in plain bytes.
    """

    def __init__(self, sock: socket.socket, ends_at: float) -> None:
        self._sock = sock
        self._ends_at = ends_at

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return what `http.client` reads from."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(_left_s(self._ends_at))
        return self._sock.recv_into(buffer)


def _left_s(ends_at: float) -> float:
    """Return the seconds that are left. Raise ``TimeoutError`` if none are left."""
    left_s = ends_at - SystemClock.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


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
    """Return the bytes of base64url without padding. Raise ``ValueError`` for any other text.

    Each sequence of bytes has one valid text. Refuse any other text that would decode to the same bytes.
    """
    if not isinstance(text, str) or not _BASE64URL.fullmatch(text):
        raise ValueError("not base64url")
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error as error:
        raise ValueError(f"not base64url: {error}") from error
    if base64.urlsafe_b64encode(data).rstrip(b"=").decode() != text:
        raise ValueError("not the shortest base64url")
    return data
