"""The HTTP headers of a journal's place, fragments and offsets."""

from __future__ import annotations

import email.utils
from collections.abc import Mapping
from typing import Final

from gazette.broker.http.ranges import MAX_OFFSET
from gazette.protocol.fragment import Fragment
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Route
from gazette.protocol.status import Status

EXPOSED: Final = (
    "Accept-Ranges, Content-Range, ETag, Location, X-Commit-Begin, X-Commit-End, "
    "X-Commit-SHA1-Sum, X-Fragment-Last-Modified, X-Fragment-Location, X-Fragment-Name, "
    "X-Route-Token, X-Write-Head"
)
"""The response headers that pages of other origins may see."""


def read_headers(response: broker_pb2.ReadResponse) -> dict[str, str]:
    """Return the headers of the first response to a read.

    ``Content-Range`` has the form of the original, which does not know where the answer ends. Without content
    at the offset, ``Content-Range`` gives the journal's head. Other failed reads have no headers.
    """
    status = Status.from_pb(response.status)
    if status is Status.OK:
        content_range = f"bytes {response.offset}-{MAX_OFFSET}/{MAX_OFFSET}"
    elif status is Status.OFFSET_NOT_YET_AVAILABLE:
        content_range = f"bytes */{response.write_head}"
    else:
        return {}
    headers = {
        "X-Write-Head": str(response.write_head),
        "Content-Range": content_range,
        "Accept-Ranges": "bytes",
    }
    if response.HasField("fragment"):
        fragment = Fragment.from_pb(response.fragment)
        headers["X-Fragment-Name"] = fragment.content_name()
        if fragment.mod_time:
            headers["X-Fragment-Last-Modified"] = email.utils.formatdate(
                fragment.mod_time, usegmt=True
            )
        if response.fragment_url:
            headers["X-Fragment-Location"] = response.fragment_url
    return headers


def append_headers(commit: Fragment) -> dict[str, str]:
    return {
        "X-Commit-Begin": str(commit.begin),
        "X-Commit-End": str(commit.end),
        "X-Commit-SHA1-Sum": commit.sum.hex(),
        "X-Write-Head": str(commit.end),
    }


def route_headers(route: Route, http_endpoints: Mapping[str, str], path: str) -> dict[str, str]:
    """Return ``X-Route-Token``, and as ``Location`` the URL of the journal at its primary.

    ``http_endpoints`` maps gRPC endpoints of brokers to their HTTP endpoints, where these differ. A primary
    on a unix socket gets no ``Location``: clients could not follow it.
    """
    headers = {"X-Route-Token": route_token(route)}
    if endpoint := route.primary_endpoint:
        endpoint = http_endpoints.get(endpoint, endpoint)
        if endpoint.startswith(("http://", "https://")):
            headers["Location"] = f"{endpoint}{path}"
    return headers


def route_token(route: Route) -> str:
    """Return a route in the compact text form of protobuf."""
    parts = [
        f"members:<zone:{_quoted(member.zone)} suffix:{_quoted(member.suffix)} >"
        for member in route.members
    ]
    if route.primary != 0:
        parts.append(f"primary:{-1 if route.primary is None else route.primary}")
    parts += [f"endpoints:{_quoted(endpoint)}" for endpoint in route.endpoints]
    return " ".join(parts)


def _quoted(text: str) -> str:
    """Return a string in protobuf's text form. Headers must be ASCII: other bytes become octal escapes."""
    escaped: list[str] = []
    for byte in text.encode():
        char = chr(byte)
        if char in '"\\':
            escaped.append(f"\\{char}")
        elif 0x20 <= byte < 0x7F:
            escaped.append(char)
        else:
            escaped.append(f"\\{byte:03o}")
    return f'"{"".join(escaped)}"'
