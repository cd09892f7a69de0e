"""Checks a Spark master before Java is started: its URL, and whether a process there answers.

Spark itself reports these faults only after a minute, by a stack trace.
"""

from __future__ import annotations

import re
import socket
from typing import Final
from urllib.parse import urlsplit

from gazette.errors import Invalid, Unavailable
from gazette.runtime.numbers import is_digits

_LOCAL: Final = re.compile(r"local(\[(\*|[0-9]+)(\s*,\s*[0-9]+)?\])?|local-cluster\[[0-9, ]+\]")
_OTHERS: Final = re.compile(r"yarn|k8s://.+")
_STANDALONE: Final = "spark://"
CONNECT: Final = "sc://"
"""Scheme of servers of Spark Connect."""
_CONNECT_PORT: Final = 15002
_CONNECT_S: Final = 10.0


def addresses_of(master: str) -> tuple[tuple[str, int], ...]:
    """Return host and port of each standalone master, or of a server of Spark Connect.

    Return an empty tuple for other kinds of masters. Raise ``Invalid`` for a malformed URL.
    """
    if _LOCAL.fullmatch(master) or _OTHERS.fullmatch(master):
        return ()
    if master.startswith(CONNECT):
        try:
            server = urlsplit(master.partition(";")[0])
            if server.hostname and not server.username:
                return ((server.hostname, server.port or _CONNECT_PORT),)
        except ValueError:
            pass  # The port is not a number.
    addresses = []
    if master.startswith(_STANDALONE):
        for address in master.removeprefix(_STANDALONE).split(","):
            host, _, port = address.rpartition(":")
            if not host or not is_digits(port) or not 0 < int(port) < 1 << 16:
                break
            addresses.append((host.strip("[]"), int(port)))
        else:
            return tuple(addresses)
    raise Invalid(
        f"not a master of Spark ({master!r})",
        path="--master",
        hint="local[*] for this machine, spark://host:7077 for a cluster; or yarn, k8s://…; or "
        "sc://host for a server of Spark Connect.",
    )


def require_reachable(master: str) -> None:
    """Raise ``Unavailable`` unless a standalone master, or a server of Spark Connect, accepts connections.

    Block for up to 10 s for each address. Raise ``Invalid`` for a malformed URL.
    """
    reasons: list[str] = []
    for host, port in addresses_of(master):
        try:
            with socket.create_connection((host, port), _CONNECT_S):
                return
        except OSError as error:
            reasons.append(f"{host}:{port}: {error.strerror or error}")
    if reasons:
        raise Unavailable(
            f"cannot reach Spark at {'; '.join(reasons)}",
            hint="Check that it runs there. The log of a master has its URL, spark://host:port. "
            "Spark Connect listens at port 15002 unless configured otherwise.",
        )
