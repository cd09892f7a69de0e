"""Routes whose parameters may hold any text: the path is split at each ``/``, and then decoded once."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Final
from urllib.parse import quote, unquote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from gazette.errors import Invalid

_SLASH: Final = "\udc2f"
"""Stands for an encoded ``/`` in a path. No text contains it."""


class RawPathRoute(Route):
    """A route that takes its parameters from the path as it was sent.

    A parameter may hold ``/`` as ``%2F``, ``%`` as ``%25``, and a newline as ``%0A``. Only the parameter that
    ``may_be_empty`` names may be empty.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        methods: Iterable[str],
        may_be_empty: str = "",
    ) -> None:
        super().__init__(path, endpoint, methods=list(methods))
        pattern = self.path_regex.pattern
        if may_be_empty:  # Let the group of this parameter match an empty text, too.
            group = f"(?P<{may_be_empty}>"
            pattern = pattern.replace(f"{group}[^/]+)", f"{group}[^/]*)")
        self._pattern = re.compile(pattern, re.DOTALL)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a request. Raise ``Invalid`` for a parameter that is not UTF-8."""
        if scope["type"] != "http":
            return Match.NONE, {}
        match = self._pattern.fullmatch(_cut_path(scope))
        if match is None:
            return Match.NONE, {}
        parameters = {
            name: self.param_convertors[name].convert(_text(name, value))
            for name, value in match.groupdict().items()
        }
        child: Scope = {
            "endpoint": self.endpoint,
            "path_params": {**scope.get("path_params", {}), **parameters},
        }
        allowed = not self.methods or scope["method"] in self.methods
        return (Match.FULL if allowed else Match.PARTIAL), child


def _cut_path(scope: Scope) -> str:
    """Return the decoded path, with `_SLASH` for each ``/`` that was encoded."""
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    path = raw.partition(b"?")[0].decode("latin-1").removeprefix(scope.get("root_path", ""))
    parts = [unquote(part, "utf-8", "surrogateescape") for part in path.split("/")]
    return "/".join(part.replace("/", _SLASH) for part in parts)


def _text(name: str, value: str) -> str:
    """Return a parameter with its slashes. Raise ``Invalid`` if it was not UTF-8."""
    text = value.replace(_SLASH, "/")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Invalid(
            f"the parameter {name} of the path is no UTF-8",
            path=name,
            hint="Encode the text as UTF-8, and each byte as % and two digits.",
        ) from error
    return text
