"""The cases of gRPC's interop tests, called by our client on a server of others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import grpc
import grpc.aio

from gazette.http2.grpc_client import Http2Channel
from gazette.http2.metadata import EOF
from tools.conformance.interop import INITIAL, PROTO, SERVICE, TRAILING

_SPECIAL: Final = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"
_REQUEST_BYTES: Final = (27_182, 8, 1_828, 45_904)
_RESPONSE_BYTES: Final = (31_415, 9, 2_653, 58_979)


class InteropCalls:
    """The calls of each case. A case raises if its answer is not as specified."""

    def __init__(self, channel: Http2Channel) -> None:
        self._pb: Any = grpc.protos(PROTO)
        pb = self._pb

        def of(make: Any, method: str, response: Any, service: str = SERVICE) -> Any:
            path = f"/{service}/{method}"
            return make(path, lambda message: message.SerializeToString(), response.FromString)

        self._empty = of(channel.unary_unary, "EmptyCall", pb.Nothing)
        self._unary = of(channel.unary_unary, "UnaryCall", pb.OneResponse)
        self._input = of(channel.stream_unary, "StreamingInputCall", pb.InputResponse)
        self._output = of(channel.unary_stream, "StreamingOutputCall", pb.OneResponse)
        self._duplex = of(channel.stream_stream, "FullDuplexCall", pb.OneResponse)
        self._no_method = of(channel.unary_unary, "UnimplementedCall", pb.Nothing)
        self._no_service = of(
            channel.unary_unary,
            "UnimplementedCall",
            pb.Nothing,
            "grpc.testing.UnimplementedService",
        )

    def cases(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """Return the cases by their specified names."""
        return {
            "empty_unary": self.empty_unary,
            "large_unary": self.large_unary,
            "client_streaming": self.client_streaming,
            "server_streaming": self.server_streaming,
            "ping_pong": self.ping_pong,
            "empty_stream": self.empty_stream,
            "timeout_on_sleeping_server": self.timeout_on_sleeping_server,
            "cancel_after_begin": self.cancel_after_begin,
            "cancel_after_first_response": self.cancel_after_first_response,
            "status_code_and_message": self.status_code_and_message,
            "special_status_message": self.special_status_message,
            "custom_metadata": self.custom_metadata,
            "unimplemented_method": self.unimplemented_method,
            "unimplemented_service": self.unimplemented_service,
        }

    async def empty_unary(self) -> None:
        _equal(await self._empty(self._pb.Nothing()), self._pb.Nothing())

    async def large_unary(self) -> None:
        _equal(len((await self._unary(self._one(314_159, 271_828))).body.content), 314_159)

    async def client_streaming(self) -> None:
        call = self._input()
        for length in _REQUEST_BYTES:
            await call.write(self._pb.InputRequest(body=self._body(length)))
        await call.done_writing()
        _equal((await call).bytes, sum(_REQUEST_BYTES))

    async def server_streaming(self) -> None:
        got = [len(one.body.content) async for one in self._output(self._many(*_RESPONSE_BYTES))]
        _equal(got, list(_RESPONSE_BYTES))

    async def ping_pong(self) -> None:
        call = self._duplex()
        for sent, asked in zip(_REQUEST_BYTES, _RESPONSE_BYTES, strict=True):
            await call.write(self._many(asked, content=sent))
            _equal(len((await call.read()).body.content), asked)
        await call.done_writing()
        _equal(await call.read(), EOF)
        _equal(await call.code(), grpc.StatusCode.OK)

    async def empty_stream(self) -> None:
        call = self._duplex()
        await call.done_writing()
        _equal(await call.read(), EOF)

    async def timeout_on_sleeping_server(self) -> None:
        call = self._duplex(timeout=0.001)
        await _fails(call.read(), grpc.StatusCode.DEADLINE_EXCEEDED)

    async def cancel_after_begin(self) -> None:
        call = self._input()
        call.cancel()
        _equal(await call.code(), grpc.StatusCode.CANCELLED)

    async def cancel_after_first_response(self) -> None:
        call = self._duplex()
        await call.write(self._many(_RESPONSE_BYTES[0], content=_REQUEST_BYTES[0]))
        await call.read()
        call.cancel()
        _equal(await call.code(), grpc.StatusCode.CANCELLED)

    async def status_code_and_message(self) -> None:
        await self._fails_as_asked("test status message")

    async def special_status_message(self) -> None:
        await self._fails_as_asked(_SPECIAL)

    async def custom_metadata(self) -> None:
        metadata = ((INITIAL, "test_initial_metadata_value"), (TRAILING, b"\xab\xab\xab"))
        unary = self._unary(self._one(314_159, 271_828), metadata=metadata)
        await unary
        duplex = self._duplex(metadata=metadata)
        await duplex.write(self._many(_RESPONSE_BYTES[0]))
        await duplex.done_writing()
        while await duplex.read() is not EOF:
            pass
        for call in (unary, duplex):
            _equal(dict(await call.initial_metadata())[INITIAL], metadata[0][1])
            _equal(dict(await call.trailing_metadata())[TRAILING], metadata[1][1])

    async def unimplemented_method(self) -> None:
        await _fails(self._no_method(self._pb.Nothing()), grpc.StatusCode.UNIMPLEMENTED)

    async def unimplemented_service(self) -> None:
        await _fails(self._no_service(self._pb.Nothing()), grpc.StatusCode.UNIMPLEMENTED)

    async def _fails_as_asked(self, text: str) -> None:
        status = self._pb.Status(code=grpc.StatusCode.UNKNOWN.value[0], text=text)
        unary = self._unary(self._pb.OneRequest(status=status))
        await _fails(unary, grpc.StatusCode.UNKNOWN, text)
        duplex = self._duplex()
        await duplex.write(self._pb.StreamRequest(status=status))
        await duplex.done_writing()
        await _fails(duplex.read(), grpc.StatusCode.UNKNOWN, text)

    def _one(self, response_bytes: int, content: int) -> Any:
        return self._pb.OneRequest(response_bytes=response_bytes, body=self._body(content))

    def _many(self, *sizes: int, content: int = 0) -> Any:
        responses = [self._pb.Size(bytes=one) for one in sizes]
        return self._pb.StreamRequest(responses=responses, body=self._body(content))

    def _body(self, length: int) -> Any:
        return self._pb.Body(content=bytes(length))


async def run_case(case: Callable[[], Awaitable[None]], limit_s: float) -> str:
    """Run a case. Return the reason for which it failed, and an empty text if it passed."""
    try:
        async with asyncio.timeout(limit_s):
            await case()
    except (AssertionError, TimeoutError, grpc.aio.AioRpcError) as error:
        return repr(error)
    return ""


def _equal(got: Any, expected: Any) -> None:
    if got != expected:
        raise AssertionError(f"got {got!r}, expected {expected!r}")


async def _fails(waiting: Awaitable[Any], code: grpc.StatusCode, text: str | None = None) -> None:
    try:
        await waiting
    except grpc.aio.AioRpcError as error:
        _equal(error.code(), code)
        if text is not None:
            _equal(error.details(), text)
    else:
        raise AssertionError(f"the call went well, expected {code}")
