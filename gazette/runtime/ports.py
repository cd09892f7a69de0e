"""TCP ports for servers of tests and of local clusters, chosen before the server is started."""

from __future__ import annotations

import random
import socket
from typing import Final

_FIRST: Final = 10_000
_LAST: Final = 32_767
"""Below the ports that Linux and BSD give to outgoing connections: those are taken at any moment, and by
everybody."""
_ATTEMPTS: Final = 1_000

_rng = random.SystemRandom()
_given: set[int] = set()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now, that no outgoing connection takes by itself, and that this
    process was not given before.

    Where such a port is not found among many (or is not permitted), any that is free now.
    """
    for _ in range(_ATTEMPTS):
        port = _rng.randint(_FIRST, _LAST)
        if port not in _given and port_is_free(port, host):
            _given.add(port)
            return port
    with _socket(host) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    with _socket(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def bracketed(host: str) -> str:
    """Return a host as addresses and URLs have it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
