"""``GET /debug/shards``: the state and the present activity of this member's shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gazette.consumer.shard.shard import Shard
from gazette.errors import Unavailable


def debug_routes(shards: Callable[[], Mapping[str, Shard]]) -> list[Route]:
    """Return the routes ``/debug/shards`` for all shards and ``/debug/shards/{id}`` for one shard.

    ``shards`` returns the shards of this member, and raises ``Unavailable`` while the member starts.
    """

    async def show(request: Request) -> Response:
        try:
            by_id = shards()
        except Unavailable as error:
            return JSONResponse({"error": str(error)}, 503)
        shard_id = request.path_params.get("shard")
        if shard_id is None:
            return JSONResponse({"shards": [describe(by_id[key]) for key in sorted(by_id)]})
        if shard_id not in by_id:
            return JSONResponse({"error": f"this member does not hold shard {shard_id}"}, 404)
        return JSONResponse(describe(by_id[shard_id]))

    return [
        Route("/debug/shards", show, methods=["GET"]),
        Route("/debug/shards/{shard:path}", show, methods=["GET"]),
    ]


def describe(shard: Shard) -> dict[str, Any]:
    """Describe one shard for JSON. Sizes are in bytes, times in seconds."""
    assignment = shard.assignment.decoded
    lag, play_back, reads = shard.lag, shard.play_back, shard.reads
    return {
        "id": shard.id,
        "slot": assignment.slot,
        "status": assignment.value.code.name,
        "errors": list(assignment.value.errors),
        "serves": shard.store is not None and not shard.ended.is_set(),
        "read_through": dict(sorted(shard.progress.read_through.items())),
        "publish_at": dict(sorted(shard.progress.publish_at.items())),
        "append_backlog_bytes": shard.append_backlog_bytes,
        "recovery_horizon_bytes": shard.horizon_bytes,
        "waits_for": shard.waits_for or None,
        "play_back": None if play_back is None else str(play_back),
        "standby_lag_bytes": None if lag is None else lag[0],
        "standby_lag_seconds": None if lag is None else round(lag[1], 3),
        "edition_age_seconds": None if reads is None else reads.staleness_s,
    }
