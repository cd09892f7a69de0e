"""Headers and arguments of any HTTP request. If one changes the meaning of the request, it is honoured or
refused.

Headers that are not named here have no effect: they are about connection, client or form of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import parse_qsl

from starlette.requests import Request

from gazette.errors import Invalid

BODY_BYTES_MAX: Final = 1 << 20
_SINGLE: Final = ("authorization", "content-range", "expect", "if-range", "range")
_OVERRIDES: Final = ("x-http-method", "x-http-method-override", "x-method-override")


class Refusal(Invalid):
    """A request that gets an answer with its own status ``code`` and ``headers``."""

    def __init__(
        self,
        code: int,
        message: str,
        headers: Mapping[str, str] | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(message, **facts)
        self.code = code
        self.headers = headers


def check_headers(request: Request) -> None:
    """Raise ``Invalid`` or `Refusal` for headers that cannot be honoured in any request."""
    for name in _SINGLE:
        if len(request.headers.getlist(name)) > 1:
            raise Invalid(f"the header {name} is given twice")
    for name in _OVERRIDES:
        if name in request.headers:
            raise Invalid(f"the header {name} is not supported", hint="Send that method itself.")
    expectation = request.headers.get("expect", "100-continue").strip().lower()
    if expectation != "100-continue":
        raise Refusal(417, f"cannot meet the expectation {expectation}")


def content_encoding(request: Request, accepted: Mapping[str, str]) -> str:
    """Return the encoding of the body: the value in ``accepted``; empty if the body has no encoding.

    Raise `Refusal` with 415 for another encoding, with the names in ``accepted``.
    """
    encoding = ",".join(request.headers.getlist("content-encoding")).strip().lower()
    if encoding in ("", "identity"):
        return ""
    if encoding in accepted:
        return accepted[encoding]
    names = ", ".join([*dict.fromkeys(accepted.values()), "identity"])
    raise Refusal(
        415,
        f"a body with Content-Encoding {encoding} is not decoded (expected one of: {names})",
        {"Accept-Encoding": names},
    )


async def bounded_body(request: Request) -> bytes:
    """Return the body. Raise ``Invalid`` for more than `BODY_BYTES_MAX` bytes."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise Invalid(
                f"request body is too large (expected <= {BODY_BYTES_MAX} bytes)", path="body"
            )
    return bytes(body)


def single_arguments(request: Request) -> dict[str, str]:
    """Return the arguments of the query by name. Raise ``Invalid`` for an argument that is given twice."""
    arguments: dict[str, str] = {}
    for name, value in parse_qsl(request.url.query, keep_blank_values=True):
        if name in arguments:
            raise Invalid(f"the query argument {name} is given twice")
        arguments[name] = value
    return arguments
