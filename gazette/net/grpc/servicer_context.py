"""The context of a call for services of applications, like `grpc.aio.ServicerContext`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from gazette.http2.metadata import Metadata
from gazette.http2.peer import Peer

log = logging.getLogger(__name__)


class ServicerContext:
    """Methods of a context that our own handlers do not use. Loop-bound.

    Answers are never compressed: gRPC permits a server to ignore a request for compression.
    """

    __slots__ = ("_callbacks", "_trailing", "ends_at")

    def __init__(self) -> None:
        self.ends_at: float | None = None
        """Time of the loop at which the caller gives up; None: never."""
        self._trailing: Metadata = ()
        self._callbacks: list[Callable[[Any], None]] | None = []
        """Functions to call at the end of the call; None after that."""

    @property
    def caller(self) -> Peer:
        """The caller's end of the connection."""
        raise NotImplementedError

    def peer(self) -> str:
        """Return the caller's address: ``ipv4:1.2.3.4:5678``, ``ipv6:[::1]:5678`` or ``unix:``."""
        return self.caller.address

    def auth_context(self) -> Mapping[str, list[bytes]]:
        """Return the properties of the caller's certificate, by gRPC's names; empty for no certificate."""
        return self.caller.properties

    def peer_identity_key(self) -> str | None:
        """Return the key in ``auth_context`` of the caller's identity; None for no certificate."""
        return self.caller.identity_key

    def peer_identities(self) -> list[bytes] | None:
        """Return the caller's identities; None if the caller has no certificate."""
        key = self.caller.identity_key
        return None if key is None else self.caller.properties[key]

    def time_remaining(self) -> float | None:
        """Return the seconds until the caller gives up; None: never."""
        if self.ends_at is None:
            return None
        return max(0.0, self.ends_at - asyncio.get_running_loop().time())

    def set_compression(self, compression: Any) -> None:
        """Do nothing: answers are not compressed."""

    def disable_next_message_compression(self) -> None:
        """Do nothing: answers are not compressed."""

    def trailing_metadata(self) -> Metadata:
        """Return the metadata that was given to ``set_trailing_metadata``."""
        return self._trailing

    def done(self) -> bool:
        """Return True once the call has ended, or its caller has gone."""
        return self._callbacks is None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` with this context once the call has ended, or now if the call has ended."""
        if self._callbacks is None:
            callback(self)
        else:
            self._callbacks.append(callback)

    def _call_back(self) -> None:
        """Call the callbacks of the end, and log their errors. May be repeated."""
        callbacks, self._callbacks = self._callbacks or (), None
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                log.exception("a callback at the end of a call has failed")
