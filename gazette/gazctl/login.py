"""``gazctl login`` and ``logout``: tokens of an OpenID Connect provider, for a context."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from gazette.client.oidc.documents import discover, endpoint_of, fetch, require_https
from gazette.client.oidc.token_file import SignIn, forget, locked, refused
from gazette.errors import Invalid, NotAllowed, NotFound, Unavailable
from gazette.gazctl.context import Context
from gazette.gazctl.contexts import Contexts, sign_in_path
from gazette.gazctl.flags import LoginFlags, SharedFlags
from gazette.gazctl.run_contexts import addresses_of
from gazette.runtime.tasks import BlockingPool
from gazette.runtime.timeouts import timeout

_DEVICE_GRANT: Final = "urn:ietf:params:oauth:grant-type:device_code"
_BROWSER_S: Final = 300.0
_CONNECTION_S: Final = 3.0
"""Seconds for a connection of a browser, which is on this machine."""
_HEAD_BYTES_MAX: Final = 1 << 14
_PAGE: Final = "<!doctype html><title>gazctl</title><p>{} You can close this page.</p>"

Fetch = Callable[..., Any]


async def login(context: Context) -> int:
    """Sign in at a provider, and keep the tokens for a context."""
    name, path = _place(context)
    asked = _asked(context.flags(LoginFlags), context, path)
    async with _fetching() as blocking:
        document = await blocking(discover, asked.issuer)
        answer = await (
            _by_browser(context, asked, document, blocking)
            if context.flags(LoginFlags).browser
            else _by_device(context, asked, document, blocking)
        )
        sign_in = asked.with_answer(answer, context.clock.now())
        await blocking(_keep, path, sign_in)
    context.terminal.note(f"signed in (context {name})")
    if not sign_in.refresh_token:
        context.terminal.note(
            "the provider gave no refresh token: sign in again when this one ends"
        )
    return 0


async def logout(context: Context) -> int:
    """Remove the file of a context's sign-in, after its provider has revoked the refresh token, if it can.

    Raise ``NotFound`` without a sign-in.
    """
    name, path = _place(context)
    if not path.exists():
        raise NotFound(f"context {name} has no sign-in", hint="`gazctl login` makes one.")
    async with _fetching() as blocking:
        if reason := await blocking(forget, path):
            context.terminal.note(f"the provider did not revoke the token: {reason}")
    context.terminal.note(f"signed out (context {name})")
    return 0


def _keep(path: Path, sign_in: SignIn) -> None:
    with locked(path):
        sign_in.save(path)


def _place(context: Context) -> tuple[str, Path]:
    """Return the name of the context, and the file of its sign-in. Raise ``Invalid`` if no context is in use,
    and ``NotFound`` for an unknown context."""
    contexts = Contexts.load(context.environ)
    name = context.flags(SharedFlags).context or contexts.current
    path = sign_in_path(context.environ, name)
    if not name or path is None:
        raise Invalid(
            "no context is in use",
            path="--context",
            hint="Create one by `gazctl context set NAME --broker.address=…`, and give --context=NAME.",
        )
    addresses_of(context.environ, contexts, name)
    return name, path


def _asked(flags: LoginFlags, context: Context, path: Path) -> SignIn:
    """Return the request to the provider: values of flags, else those of the last sign-in.

    Raise ``Invalid`` if neither gives the issuer and the client, or if the issuer is no URL of https.
    """
    asked = SignIn(token="", scope=flags.scope)
    with suppress(Invalid):  # Without a usable file, there was no last sign-in.
        if path.exists():
            asked = replace(SignIn.read(path), token="", refresh_token="")
    given = ("issuer", "client_id", "scope", "audience", "id_token")
    options = {name: name.replace("_", "-") for name in given}
    asked = replace(
        asked, **{name: getattr(flags, name) for name in given if context.is_given(options[name])}
    )
    for name in ("issuer", "client_id"):
        if not getattr(asked, name):
            raise Invalid("must be given the first time", path=f"--{options[name]}")
    require_https(asked.issuer, "--issuer")
    return asked


def _form(asked: SignIn, **more: str) -> dict[str, str]:
    audience = {"audience": asked.audience} if asked.audience else {}
    return {"client_id": asked.client_id, "scope": asked.scope, **audience, **more}


async def _by_device(
    context: Context, asked: SignIn, document: Mapping[str, Any], blocking: Fetch
) -> Mapping[str, Any]:
    """Return the provider's answer, once the user has confirmed a code on any device (RFC 8628).

    Raise ``NotAllowed`` if that takes too long or the provider refuses, and ``Invalid`` if it has no codes.
    """
    if "device_authorization_endpoint" not in document:
        raise Invalid(
            "the provider has no sign-in by a code", path="gazctl login", hint="Give --browser."
        )
    url = endpoint_of(document, "device_authorization_endpoint")
    status, offer = await blocking(fetch, url, _form(asked))
    device_code, user_code = offer.get("device_code"), offer.get("user_code")
    if status != 200 or not isinstance(device_code, str) or not isinstance(user_code, str):
        raise refused(status, offer)
    page = endpoint_of(offer, "verification_uri")
    context.terminal.note(f"open {page} and confirm the code {user_code[:100]}")
    interval_s, left_s = _seconds(offer, "interval", 5.0), _seconds(offer, "expires_in", 600.0)
    ends_at = context.clock.monotonic() + left_s
    form = {"grant_type": _DEVICE_GRANT, "device_code": device_code, "client_id": asked.client_id}
    token_url = endpoint_of(document, "token_endpoint")
    while (left_s := ends_at - context.clock.monotonic()) > 0:
        await context.clock.sleep(min(interval_s, left_s))
        try:
            status, answer = await blocking(fetch, token_url, form)
        except Unavailable as error:
            context.terminal.note(f"{error}; trying again")
            interval_s *= 2  # RFC 8628, section 3.5.
            continue
        if status == 200:
            return dict(answer)
        if answer.get("error") == "slow_down":
            interval_s += 5.0
        elif answer.get("error") != "authorization_pending":
            raise refused(status, answer)
    raise NotAllowed("the code was not confirmed in time", hint="Run `gazctl login` again.")


async def _by_browser(
    context: Context, asked: SignIn, document: Mapping[str, Any], blocking: Fetch
) -> Mapping[str, Any]:
    """Return the provider's answer, once a browser comes back to this process (RFC 8252, with PKCE).

    Raise ``NotAllowed`` if no browser comes back in time, or the provider refuses.
    """
    state, verifier = secrets.token_urlsafe(32), secrets.token_urlsafe(48)
    digest = hashlib.sha256(verifier.encode()).digest()
    arrived: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The wait goes on if a browser leaves, or says too much or nothing: it may come back.
        over = OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
        with closing(writer), suppress(*over):
            async with timeout(_CONNECTION_S):
                values = _query_of(await reader.readuntil(b"\r\n"))
                is_ours = hmac.compare_digest(values.get("state", "").encode(), state.encode())
                if is_ours and not arrived.done():
                    arrived.set_result(values)
                text = "gazctl goes on." if is_ours else "This is no answer to gazctl."
                body = _PAGE.format(text).encode()
                status = "200 OK" if is_ours else "400 Bad Request"
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\nConnection: close\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n".encode()
                    + body
                )
                await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=_HEAD_BYTES_MAX)
    try:
        redirect = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        pkce = {"code_challenge": challenge, "code_challenge_method": "S256"}
        query = _form(asked, response_type="code", redirect_uri=redirect, state=state, **pkce)
        url = endpoint_of(document, "authorization_endpoint")
        context.terminal.note(f"open {url}{'&' if '?' in url else '?'}{urlencode(query)}")
        try:
            async with timeout(_BROWSER_S):
                values = await arrived
        except TimeoutError:
            raise NotAllowed(
                "no browser came back in time", hint="Run `gazctl login` again."
            ) from None
    finally:
        server.close()
    if "code" not in values or values.get("iss", asked.issuer) != asked.issuer:
        raise refused(0, values)
    form = {"grant_type": "authorization_code", "code": values["code"], "redirect_uri": redirect}
    form |= {"client_id": asked.client_id, "code_verifier": verifier}
    status, answer = await blocking(fetch, endpoint_of(document, "token_endpoint"), form)
    if status != 200:
        raise refused(status, answer)
    return dict(answer)


def _query_of(line: bytes) -> dict[str, str]:
    """Return the query of a request's first line; empty for a line that is no request."""
    try:
        return dict(parse_qsl(urlsplit(line.decode("ascii").split(" ")[1]).query))
    except (ValueError, IndexError):
        return {}


@asynccontextmanager
async def _fetching() -> AsyncIterator[Fetch]:
    """Yield a function that runs another function in a thread."""
    pool = BlockingPool("sign-in", 1)
    try:
        yield pool.run
    finally:
        pool.close()


def _seconds(values: Mapping[str, Any], name: str, default: float) -> float:
    """Return a duration in a provider's answer; the default if it is absent, or not within a day."""
    value = values.get(name, default)
    is_usable = isinstance(value, int | float) and 0 < value <= 86_400
    return float(value) if is_usable else default
