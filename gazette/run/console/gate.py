"""The gate of the console: the key of its address, its cookie, and the headers of its answers.

A process or a page that reaches the port would act with the token of the console's user. So each request
needs a cookie, and a request for data also a header with a secret: browsers send cookies to servers at other
ports of a host. Only the printed address gives both. `HttpGuard` has refused requests of other pages before.
"""

from __future__ import annotations

import secrets
from hmac import compare_digest
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

READY_PATH: Final = "/debug/ready"
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_CLOSED: Final = "This page needs the key of the console"
_OPEN: Final = "Open the address that the console printed when it started: it has the key."
_ENTERED: Final = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="key" content="{secret}">
<link rel="icon" href="/static/icon.svg"><script type="module" src="/static/enter.js"></script>
<title>Gazette</title><p>The page needs JavaScript.</p>"""
SECRET_HEADER: Final = "X-Gazette-Console"  # noqa: S105 - a name


class ConsoleGate:
    """An ASGI application that passes requests with the cookie to ``app``, and refuses all others.

    ``name`` is the name of the cookie. It has the port, since consoles of one host share their cookies.
    """

    def __init__(self, app: ASGIApp, key: str, name: str) -> None:
        self._app = app
        self._key = key
        self._name = name
        self._session = secrets.token_urlsafe(32)
        self._secret = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        request = Request(scope)
        answer = self._answer(request)
        await (self._app if answer is None else answer)(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        """Return the gate's own answer; None if the request may pass."""
        path = request.url.path
        if path == READY_PATH:
            return PlainTextResponse("ready\n")
        if path == "/" and request.method == "GET" and "key" in request.query_params:
            if not _equal(request.query_params["key"], self._key):
                return PlainTextResponse(f"This key is not that of this console. {_OPEN}\n", 403)
            # Not a redirect: a browser that came from another site would not send the cookie then.
            entered = HTMLResponse(_ENTERED.format(secret=self._secret))
            entered.set_cookie(self._name, self._session, httponly=True, samesite="strict")
            return entered
        is_open = _equal(request.cookies.get(self._name, ""), self._session)
        if path.startswith("/api/"):
            is_open &= _equal(request.headers.get(SECRET_HEADER, ""), self._secret)
        if not is_open:
            if path.startswith("/api/"):
                return JSONResponse({"error": _CLOSED, "hint": _OPEN, "closed": True}, 401)
            return PlainTextResponse(f"{_CLOSED}. {_OPEN}\n", 401)
        site = request.headers.get("sec-fetch-site", "same-origin")
        if path.startswith("/api/") and site not in ("same-origin", "none"):
            # A page of another port of this host has the cookie, too.
            return JSONResponse({"error": "another page asked", "hint": _OPEN}, 403)
        return None


def _equal(given: str, expected: str) -> bool:
    return compare_digest(given.encode(), expected.encode())
