"""The source of gRPC channels. Tests can replace it by a simulated network between processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import grpc
import grpc.aio


class Transport(Protocol):
    """Makes channels whose calls are like `client_call`. As an argument, None means the real network."""

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
        """Make a channel to a gRPC target; without TLS if ``credentials`` is None. Do not connect."""
        ...
