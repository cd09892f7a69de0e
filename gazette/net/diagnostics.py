"""The HTTP routes under ``/debug``: readiness, metrics and stacks."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gazette.runtime import metrics

_DEPTH_MAX: Final = 100


def diagnostic_routes(not_ready: Callable[[], str]) -> list[Route]:
    """Return the routes. ``not_ready`` returns why the process cannot serve now; empty if it can.

    - ``/debug/ready``: 200, or 503 with the reason;
    - ``/debug/metrics`` and ``/metrics``: all metrics, as Prometheus reads them;
    - ``/debug/stacks``: the stacks of all tasks and threads.
    """

    async def ready(_request: Request) -> Response:
        reason = not_ready()
        return PlainTextResponse(f"{reason or 'ready'}\n", 503 if reason else 200)

    async def render(_request: Request) -> Response:
        return Response(metrics.render(), media_type=metrics.CONTENT_TYPE)

    async def stacks(_request: Request) -> Response:
        return PlainTextResponse(_stacks())

    return [
        Route("/debug/ready", ready, methods=["GET", "HEAD"]),
        Route("/debug/metrics", render, methods=["GET"]),
        Route("/metrics", render, methods=["GET"]),
        Route("/debug/stacks", stacks, methods=["GET"]),
    ]


def awaiting_frames(awaited: object) -> Iterator[FrameType]:
    """Yield the frames of a suspended coroutine and of all coroutines that it awaits, the outermost first.

    ``Task.get_stack`` has only the first frame. Coroutines of gRPC are included.
    """
    for _ in range(_DEPTH_MAX):
        if awaited is None:
            return
        if type(awaited).__name__ == "coroutine_wrapper":
            # Coroutines of gRPC are Cython objects in wrappers. A wrapper refers to its coroutine only.
            awaited = next(iter(gc.get_referents(awaited)), None)
            continue
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if isinstance(frame, FrameType):
            yield frame
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)


def _stacks() -> str:
    parts: list[str] = []
    for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name()):
        parts.append(f"task {task.get_name()}")
        for frame in awaiting_frames(task.get_coro()):
            summary = traceback.StackSummary.extract(iter([(frame, frame.f_lineno or 0)]))
            parts.extend(line.rstrip() for line in summary.format())
        parts.append("")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, ident)}")
        parts.extend(line.rstrip() for line in traceback.format_stack(frame))
        parts.append("")
    return "\n".join(parts)
