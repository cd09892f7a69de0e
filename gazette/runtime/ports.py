"""TCP ports for servers of tests and of local clusters, chosen before the server is started."""

from __future__ import annotations

import random
import socket
import sys
from typing import Final

_FIRST: Final = 10_000
_LAST: Final = 32_767
"""Ports above are for outgoing connections on Linux and BSD: any process may take one at any time."""
_ATTEMPTS: Final = 1_000

_rng = random.SystemRandom()
_given: dict[int, int | None] = {}
"""Ports that ``free_port`` returned, each with the descriptor that reserves the port (None: not on Linux)."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free now, and that no later connection takes by chance.

    The port is not in the range of outgoing connections, and differs from all that this process got before.
    On Linux, this function gives the port to no other process while this process lives. If 1,000 attempts
    find no such port, or the system forbids to reserve it, return any port that is free now.
    """
    for _ in range(_ATTEMPTS):
        port = _rng.randint(_FIRST, _LAST)
        if port not in _given and port_is_free(port, host) and _reserve(port):
            return port
    with _socket(host) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return True if a server could listen there now."""
    with _socket(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def bracketed(host: str) -> str:
    """Return a host in the form of addresses and URLs: IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _reserve(port: int) -> bool:
    """Reserve a port against other processes, until this process ends. Return False if another process has
    it."""
    if sys.platform != "linux":
        _given[port] = None
        return True
    # A name in the abstract namespace ends with its process. A lock file would outlive it.
    reservation = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        reservation.bind(f"\0gazette-port-{port}")
    except OSError:
        reservation.close()
        return False
    _given[port] = reservation.detach()  # The socket is open until the process ends.
    return True


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
