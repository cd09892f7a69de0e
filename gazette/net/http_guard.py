"""Requests that an HTTP server always refuses, because a foreign web page can send them.

A browser sends requests of any page to servers that only its user can reach. Three rules stop them:

1. Without keys, ``Host`` must be loopback, the host that the server advertises, the address that the client
   is connected to, or a name that the operator allows. A page that points its own name at this server (DNS
   rebinding) sends its own name there.
2. A method that may change something must not come from a page of another origin, unless the operator allows
   that origin. Browsers name the origin by ``Sec-Fetch-Site``, or else by ``Origin``.
3. JSON must come as ``application/json`` (`json_gateway.parse_body`): browsers ask before they send it.

A request whose framing two readers may understand differently is refused, too, and its connection is closed.
`strict_lines` does the same for lines that end with LF alone.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)

_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_AUTHORITY: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{0,5}))?")
_ABSOLUTE: Final = re.compile(rb"(?i:https?)://([^/?#]*)(.*)", re.DOTALL)
_ORIGIN: Final = re.compile(r"(https?)://(.+)")
_DEFAULT_PORTS: Final = {"http": "80", "https": "443"}
_CLOSE: Final = {"Connection": "close"}


@dataclass(frozen=True, slots=True)
class GuardRules:
    """The rules of a server. With ``hosts`` None, any ``Host`` is served, since callers need tokens.

    Pages of ``origins`` may send requests that change something.
    """

    hosts: frozenset[str] | None
    origins: frozenset[str] = frozenset()

    @staticmethod
    def of(
        *, keyless: bool, endpoint: str = "", hosts: Iterable[str] = (), origins: Iterable[str] = ()
    ) -> GuardRules:
        """Make rules for the server that advertises ``endpoint``.

        ``hosts`` are further names without a port, besides loopback and own addresses.
        """
        own_host = urlsplit(endpoint).hostname or ""
        allowed = frozenset(_folded(host) for host in (own_host, *hosts)) if keyless else None
        return GuardRules(allowed, frozenset(origins))


@dataclass(frozen=True, slots=True)
class _Refusal:
    code: int
    text: str
    close: bool = False


class HttpGuard:
    """An ASGI application that refuses by ``rules``, and passes all other requests to ``app``."""

    def __init__(self, app: ASGIApp, rules: GuardRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
        target = _origin_form(scope)  # The scope with a path, and the authority.
        refusal = (
            _Refusal(400, "the request target is not a path", close=True)
            if target is None
            else _framing_refusal(scope, headers)
            or self._host_refusal(scope, target[1], headers)
            or self._origin_refusal(scope, headers)
        )
        if refusal is None:
            assert target is not None
            # A client that leaves while its body is read is no fault of this server.
            with suppress(ClientDisconnect):
                await self._app(target[0], receive, send)
            return
        log.warning(
            "an HTTP request was refused: %(reason)s (Host %(host)s)",
            {"reason": refusal.text, "host": repr(",".join(headers.get("host", ()))[:80])},
            extra={"cause": f"refused {refusal.code} {refusal.text[:20]}"},
        )
        answer_headers = {"X-Content-Type-Options": "nosniff", **(_CLOSE if refusal.close else {})}
        answer = PlainTextResponse(f"{refusal.text}\n", refusal.code, answer_headers)
        await answer(scope, receive, send)

    def _host_refusal(
        self, scope: Scope, authority: str | None, headers: Mapping[str, list[str]]
    ) -> _Refusal | None:
        """Return the refusal by rule 1, or None. ``authority`` is the host in the target, if there is one."""
        allowed = self._rules.hosts
        own_address = scope.get("server") or ("", None)
        if allowed is None or own_address[1] is None:  # A unix socket: no page can name it.
            return None
        host_headers = headers.get("host", [])
        if len(host_headers) != 1:
            return _Refusal(400, "exactly one Host header is required", close=True)
        for named in (host_headers[0], *([authority] if authority is not None else [])):
            host = _host_of(named)
            if host is None:
                return _Refusal(400, "the Host header is not a host", close=True)
            if not (host in allowed or _is_loopback(host) or host == _folded(str(own_address[0]))):
                return _Refusal(
                    403,
                    "this host name is not served without keys: use localhost, an address of this server, or"
                    " a name that it allows (--broker.allow-host, --consumer.allow-host)",
                )
        return None

    def _origin_refusal(self, scope: Scope, headers: Mapping[str, list[str]]) -> _Refusal | None:
        """Return the refusal by rule 2; None if the request does not break this rule."""
        if scope["method"] in _SAFE_METHODS:
            return None
        origins = headers.get("origin", [])
        if origins and all(origin in self._rules.origins for origin in origins):
            return None
        if sites := headers.get("sec-fetch-site"):
            foreign = any(site not in ("same-origin", "none") for site in sites)
        else:
            hosts = headers.get("host", [])
            foreign = any(not _is_own(origin, hosts, scope["scheme"]) for origin in origins)
        if foreign:
            return _Refusal(
                403,
                "a page of another origin may not send this request: start the server with that origin"
                " (--broker.allow-origin, --consumer.allow-origin)",
            )
        return None


def _origin_form(scope: Scope) -> tuple[Scope, str | None] | None:
    """Return the scope with a path, and the authority of an absolute target; None for another form."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    if raw.startswith(b"/") or (raw == b"*" and scope["method"] == "OPTIONS"):
        return scope, None
    match = _ABSOLUTE.fullmatch(raw)
    if match is None:
        return None
    path_parts = str(scope["path"]).split("/", 3)
    rewritten: dict[str, Any] = {
        **scope,
        "raw_path": match[2] or b"/",
        "path": f"/{path_parts[3]}" if len(path_parts) > 3 else "/",
    }
    return rewritten, match[1].decode("latin-1")


def _framing_refusal(scope: Scope, headers: Mapping[str, list[str]]) -> _Refusal | None:
    """Return the refusal of a request whose end two readers may see at different places; else None."""
    if "transfer-encoding" not in headers:
        return None
    if "content-length" in headers:
        return _Refusal(400, "both Content-Length and Transfer-Encoding were given", close=True)
    if scope["http_version"] == "1.0":
        return _Refusal(400, "HTTP/1.0 has no Transfer-Encoding", close=True)
    return None


def _host_of(authority: str) -> str | None:
    """Return the host of ``host[:port]``, folded; None for another form."""
    match = _AUTHORITY.fullmatch(authority.strip(" \t"))
    if match is None:
        return None
    if match[1].startswith("["):
        try:
            ipaddress.IPv6Address(match[1][1:-1])
        except ValueError:
            return None
    return _folded(match[1])


def _folded(host: str) -> str:
    """Return a host in the form for comparisons: the shortest form of an address, or a name in lower case."""
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return host.lower().removesuffix(".")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def is_loopback(host: str) -> bool:
    """Return True for ``localhost`` and for loopback addresses, with or without brackets."""
    return _is_loopback(_folded(host))


def _is_loopback(folded: str) -> bool:
    if folded == "localhost":
        return True
    try:
        return ipaddress.ip_address(folded).is_loopback
    except ValueError:
        return False


def _is_own(origin: str, hosts: list[str], scheme: str) -> bool:
    """Return True if an origin is the server itself, by the single ``Host`` of the request."""
    match = _ORIGIN.fullmatch(origin)
    if match is None or len(hosts) != 1:
        return False
    own_origin = _with_port(hosts[0], _DEFAULT_PORTS[scheme])
    return own_origin is not None and own_origin == _with_port(match[2], _DEFAULT_PORTS[match[1]])


def _with_port(authority: str, default: str) -> tuple[str, str] | None:
    """Return host and port of ``host[:port]``, with the ``default`` port; None for another form."""
    host, match = _host_of(authority), _AUTHORITY.fullmatch(authority)
    return None if host is None or match is None else (host, match[2] or default)
