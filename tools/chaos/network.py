"""The network of a cluster on one machine, with links that can be cut.

Every broker advertises the address of a `Gateway`, which knows which process has connected: each pair of
processes has a `Link` of its own. Linux only (it looks into ``/proc``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import struct
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Final

from gazette.errors import GazetteError
from gazette.runtime.tasks import TaskScope

_CHUNK: Final = 64 << 10
_CONNECTION: Final = r"^ *\d+: \w+:{:04X} \w+:{:04X} \w+ \S+ \S+ \w+ +\d+ +\d+ (\d+) "
CLIENT: Final = "client"
"""Name of the end of a link that is not a process of the cluster."""


class LinkState(Enum):
    OPEN = "open"
    HELD = "held"
    """Nothing arrives, and neither end learns of it: connections stay, and new ones are accepted."""
    REFUSED = "refused"
    """Connections are reset, and new ones are reset at once."""


class Link:
    """The connections between two processes, in both directions."""

    def __init__(self) -> None:
        self.state = LinkState.OPEN
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()

    def set(self, state: LinkState) -> None:
        """Set the state of the link. Held bytes arrive when the link opens again; reset ones never do."""
        self.state = state
        if state is LinkState.OPEN:
            self._open.set()
        else:
            self._open.clear()
        if state is LinkState.REFUSED:
            for writer in self._writers:
                _reset(writer)

    async def carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int
    ) -> None:
        """Forward one connection until it ends."""
        self._writers.add(writer)
        upstream: asyncio.StreamWriter | None = None
        try:
            if self.state is LinkState.REFUSED:
                return
            await self._open.wait()
            upstream_reader, upstream = await asyncio.open_connection(host, port)
            self._writers.add(upstream)
            async with TaskScope("connection") as scope:
                scope.spawn(self._forward(reader, upstream), name="there")
                scope.spawn(self._forward(upstream_reader, writer), name="back")
        except (OSError, _Ended):
            return
        finally:
            for one in (writer, upstream):
                if one is not None:
                    self._writers.discard(one)
                    _reset(one)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(_CHUNK):
            await self._open.wait()
            writer.write(chunk)
            await writer.drain()
        raise _Ended("end of stream")


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection so that the other side sees an error, and nothing of it remains here."""
    with contextlib.suppress(OSError):  # It has ended.
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


class _Ended(GazetteError):
    """One side of a connection has ended, so the other side ends, too."""


class Gateway:
    """Listens in place of a process, and forwards each connection over the link of the process that connects.

    ``link_to`` returns that link for the connection's source port and the gateway's port. ``is_up`` says
    whether the process behind the gateway runs. ``port`` is known once the gateway has started.
    """

    def __init__(
        self,
        name: str,
        target: tuple[str, int],
        link_to: Callable[[int, int], Link],
        is_up: Callable[[], bool],
    ) -> None:
        self._target = target
        self._is_up = is_up
        self._link_to = link_to
        self._scope = TaskScope(f"gateway of {name}")
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._accepted, host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._scope.stop()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._is_up():
            _reset(writer)
            return
        port = writer.get_extra_info("peername")[1]
        link = self._link_to(port, self.port)
        self._scope.spawn(link.carry(reader, writer, *self._target), name=f"connection of {port}")


class Network:
    """The links of a cluster. ``pids`` says which processes there are now, by name."""

    def __init__(self, pids: Callable[[], dict[str, int]]) -> None:
        self._pids = pids
        self._links: dict[frozenset[str], Link] = {}
        self._gateways: list[Gateway] = []

    def link(self, one: str, other: str) -> Link:
        """Return the link between two processes, or a process and ``CLIENT``; also of a process to itself."""
        return self._links.setdefault(frozenset((one, other)), Link())

    async def gateway(
        self, name: str, target: tuple[str, int], host: str, port: int, *, of: str = ""
    ) -> Gateway:
        """Return a gateway in front of ``name``. With ``of``, every connection counts as that process's."""

        def link_to(source_port: int, own_port: int) -> Link:
            return self.link(name, of or self._owner(source_port, own_port))

        gateway = Gateway(name, target, link_to, lambda: bool(of) or name in self._pids())
        await gateway.start(host, port)
        self._gateways.append(gateway)
        return gateway

    def heal(self) -> None:
        for link in self._links.values():
            if link.state is not LinkState.OPEN:
                link.set(LinkState.OPEN)

    async def stop(self) -> None:
        for gateway in self._gateways:
            await gateway.stop()

    def _owner(self, local_port: int, remote_port: int) -> str:
        """Return the process that connected from one port to another."""
        if found := _socket_of(local_port, remote_port):
            for name, pid in self._pids().items():
                if found in _sockets(pid):
                    return name
        return CLIENT


def _socket_of(local_port: int, remote_port: int) -> str:
    """Return the name that ``/proc`` gives the socket of a connection; empty if it is gone already."""
    wanted = re.compile(_CONNECTION.format(local_port, remote_port), re.MULTILINE)
    for table in ("tcp", "tcp6"):
        if found := wanted.search(Path("/proc/net", table).read_text()):
            return f"socket:[{found[1]}]"
    return ""


def _sockets(pid: int) -> Iterable[str]:
    with contextlib.suppress(OSError):  # It has ended.
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # It was closed.
                yield os.readlink(f"/proc/{pid}/fd/{name}")
