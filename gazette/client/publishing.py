"""Protocols of publishers that `Client.publisher` makes. `gazette.message.publishing` implements them."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from gazette.client.append.appender import AppendResult


class TransactionalPublisher(Protocol):
    """A publisher of a program that is no shard: `gazette.message.publishing.ClientPublisher`."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None: ...

    async def publish(self, output: Any, message: Any, *, key: Any = None) -> AppendResult:
        """Publish one message, which is committed when this returns. Return its offsets."""
        ...

    def transaction(self) -> PublishingTransaction:
        """Return a transaction: its messages become visible together when its block ends, or never."""
        ...

    async def close(self) -> None:
        """End the publisher. What is not committed never becomes visible."""
        ...


class PublishingTransaction(Protocol):
    """A transaction of a `TransactionalPublisher`. Use it once, as ``async with``."""

    @property
    def offsets(self) -> Mapping[str, int]:
        """Once it is committed: by journal, the offset behind it."""
        ...

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None: ...

    async def publish(self, output: Any, message: Any, *, key: Any = None) -> None:
        """Publish a message, which becomes visible with the others."""
        ...
