"""The routes of the console: its files, and its answers as JSON. Each answer has a deadline."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gazette.errors import GazetteError, Invalid
from gazette.net.http_requests import Refusal, bounded_body, check_headers, single_arguments
from gazette.protocol.error_codes import code_of, http_status_of
from gazette.runtime.timeouts import timeout

log = logging.getLogger(__name__)

Arguments = Mapping[str, str]
Answer = Callable[[Arguments], Awaitable[dict[str, Any]]]
"""Makes the document of one route, from the arguments of the request."""

STATIC: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
ANSWER_S: Final = 40.0
"""Longest time of an answer. A wait for servers has a shorter limit, and its error says for what."""


def application(reads: Mapping[str, Answer], changes: Mapping[str, Answer]) -> Starlette:
    """Return the application. ``reads`` are asked by GET, ``changes`` by POST, below ``/api/``."""

    files = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in _TYPES}

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            return Response(status_code=404)
        return Response(files[name], media_type=_TYPES[Path(name).suffix])

    async def unknown(_request: Request) -> Response:
        return _json({"error": "there is no such answer", "hint": "Load the page again."}, 404)

    answers = [Route(f"/api/{name}", _route(name, reads[name]), methods=["GET"]) for name in reads]
    answers += [
        Route(f"/api/{name}", _route(name, changes[name]), methods=["POST"]) for name in changes
    ]
    return Starlette(
        routes=[
            Route("/", file, methods=["GET"]),
            Route("/static/{name}", file, methods=["GET"]),
            *answers,
            Route("/api/{rest:path}", unknown, methods=["GET", "POST"]),
        ]
    )


def _route(name: str, make: Answer) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            async with timeout(ANSWER_S):
                return _json(await make(await _arguments(request)), 200)
        except Refusal as error:
            return _json({"error": str(error), "hint": error.hint}, error.code)
        except GazetteError as error:
            return _json({"error": str(error), "hint": error.hint}, http_status_of(code_of(error)))
        except TimeoutError:
            text = f"no answer within {ANSWER_S:g} s"
            return _json({"error": text, "hint": "Ask again, or ask for less."}, 504)
        except Exception as error:
            log.exception("an answer of the console failed: %(what)s", {"what": name})
            text = f"the console failed: {type(error).__name__}: {error}"
            return _json({"error": text, "hint": "Its log says where. Please report it."}, 500)

    return answer


async def _arguments(request: Request) -> dict[str, str]:
    """Return the arguments of a query, or of a body that is a JSON object of texts."""
    check_headers(request)
    if request.method != "POST":
        return single_arguments(request)
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        # A browser would send a form of another page without asking.
        raise Refusal(415, "the body must be application/json")
    try:
        value = json.loads(await bounded_body(request))
    except ValueError as error:
        raise Invalid("the body is not JSON") from error
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise Invalid("the body is not an object of texts")
    return value


def _json(document: Any, code: int) -> Response:
    # ASCII: halves of surrogate pairs, which texts of others may have, are escapes then.
    text = json.dumps(_exact(document), separators=(",", ":"), allow_nan=False)
    return Response(text, code, media_type="application/json")


def _exact(value: Any) -> Any:
    """Return a document whose integers JavaScript can hold: greater ones are texts."""
    if isinstance(value, dict):
        return {name: _exact(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_exact, value))
    return str(value) if isinstance(value, int) and abs(value) > 1 << 53 else value
