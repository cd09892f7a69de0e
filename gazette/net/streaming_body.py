"""Responses whose body is sent in parts, and may fail on its way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping

import grpc.aio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gazette.errors import Broken, Closed, GazetteError
from gazette.runtime.tasks import TaskScope

log = logging.getLogger(__name__)


class StreamedBody(Response):
    """A response that sends each part of ``parts`` as it arrives, and ends when the client is gone.

    When ``parts`` raises a ``GazetteError`` or the error of a gRPC call, the connection is closed without the
    end of the body. So a client that sees the end of the body has all of it.
    """

    def __init__(
        self,
        parts: AsyncIterator[bytes | memoryview],
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
    ) -> None:
        self.status_code = status_code
        self.media_type = media_type
        self.background = None
        self._parts = parts
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with TaskScope("http body") as tasks:
            sending = tasks.spawn(self._send(send, str(scope.get("path", ""))), name="send")
            disconnection = tasks.spawn(_disconnected(receive), name="gone")
            await asyncio.wait({sending, disconnection}, return_when=asyncio.FIRST_COMPLETED)
            tasks.cancel()

    async def _send(self, send: Send, path: str) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        try:
            async for part in self._parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except grpc.aio.AioRpcError as error:
            _cut_off(path, Broken(error.details() or error.code().name))
            return
        except GazetteError as error:
            _cut_off(path, error)
            return
        except asyncio.CancelledError:
            # A gRPC call also raises this error when its channel is closed: then this task is not cancelled.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            _cut_off(path, Closed("the channel to the serving process was closed"))
            return
        except OSError:  # The client is gone.
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _cut_off(path: str, error: GazetteError) -> None:
    log.warning(
        "the body of %(path)s was cut off: %(error)s",
        {"path": path, "error": error},
        extra={"cause": f"body {type(error).__name__}"},
    )


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
