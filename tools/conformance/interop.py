"""The service that the interop tests of gRPC call, as handlers for a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from gazette.runtime.clock import Clock

SERVICE: Final = "grpc.testing.TestService"
PROTO: Final = "tools/conformance/interop.proto"
INITIAL: Final = "x-grpc-test-echo-initial"
TRAILING: Final = "x-grpc-test-echo-trailing-bin"

CASES: Final = (
    "empty_unary",
    "large_unary",
    "client_streaming",
    "server_streaming",
    "ping_pong",
    "empty_stream",
    "timeout_on_sleeping_server",
    "cancel_after_begin",
    "cancel_after_first_response",
    "status_code_and_message",
    "special_status_message",
    "custom_metadata",
    "unimplemented_method",
    "unimplemented_service",
    "pick_first_unary",
    "rpc_soak",
    "channel_soak",
)
"""The cases of grpc-go's client, without those of Google's credentials and of load reports (ORCA)."""


class TestService:
    """Answers with the bytes, the status and the metadata that its caller asks for."""

    __test__ = False

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # The compiler of `grpcio-tools`, which is installed for development, makes the messages.
        self._pb: Any = grpc.protos(PROTO)

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Return the methods of the service. Others are unimplemented, as the tests expect."""
        pb = self._pb

        def of(make: Any, method: Any, request: Any) -> Any:
            return make(method, request.FromString, lambda answer: answer.SerializeToString())

        streams = grpc.stream_stream_rpc_method_handler
        methods = {
            "EmptyCall": of(grpc.unary_unary_rpc_method_handler, self._empty, pb.Nothing),
            "UnaryCall": of(grpc.unary_unary_rpc_method_handler, self._unary, pb.OneRequest),
            "StreamingInputCall": of(
                grpc.stream_unary_rpc_method_handler, self._input, pb.InputRequest
            ),
            "StreamingOutputCall": of(
                grpc.unary_stream_rpc_method_handler, self._output, pb.StreamRequest
            ),
            "FullDuplexCall": of(streams, self._duplex, pb.StreamRequest),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _empty(self, request: Any, context: Any) -> Any:
        await self._echo_metadata(context)
        return request

    async def _unary(self, request: Any, context: Any) -> Any:
        await self._echo_metadata(context)
        await self._end_if_asked(request, context)
        server = SERVICE if request.with_server else ""
        return self._pb.OneResponse(body=self._body(request.response_bytes), server=server)

    async def _input(self, requests: Any, context: Any) -> Any:
        del context
        total = 0
        async for request in requests:
            total += len(request.body.content)
        return self._pb.InputResponse(bytes=total)

    async def _output(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self._end_if_asked(request, context)
        for size in request.responses:
            await self._clock.sleep(size.interval_us / 1e6)
            yield self._pb.OneResponse(body=self._body(size.bytes))

    async def _duplex(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        await self._echo_metadata(context)
        async for request in requests:
            async for response in self._output(request, context):
                yield response

    def _body(self, length: int) -> Any:
        return self._pb.Body(content=bytes(length))

    @staticmethod
    async def _echo_metadata(context: Any) -> None:
        given = dict(context.invocation_metadata())
        if INITIAL in given:
            await context.send_initial_metadata(((INITIAL, given[INITIAL]),))
        if TRAILING in given:
            context.set_trailing_metadata(((TRAILING, given[TRAILING]),))

    @staticmethod
    async def _end_if_asked(request: Any, context: Any) -> None:
        if request.status.code:
            code = next(one for one in grpc.StatusCode if one.value[0] == request.status.code)
            await context.abort(code, request.status.text)
