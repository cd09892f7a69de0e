"""The source of gRPC channels, so that tests can put a network of their own between processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import grpc
import grpc.aio


class Transport(Protocol):
    """Makes channels. Passed to constructors; the default is the network."""

    @property
    def ends_silent_calls(self) -> bool:
        """True if a call ends within a minute after the peer falls silent, without a check by the caller."""
        ...

    def channel(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None,
        options: Sequence[tuple[str, Any]],
    ) -> grpc.aio.Channel:
        """Make a channel to a gRPC target; without TLS if ``credentials`` is None. Does not connect."""
        ...


class GrpcTransport:
    """The machine's network, by gRPC."""

    __slots__ = ()

    @property
    def ends_silent_calls(self) -> bool:
        return False  # Pings are minutes apart, see `ChannelSettings`.

    def channel(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None,
        options: Sequence[tuple[str, Any]],
    ) -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, credentials, options=options)


NETWORK: Final[Transport] = GrpcTransport()
