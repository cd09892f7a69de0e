"""A real etcd for tests, with a fast start, fast leases and fast elections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gazette.cluster.etcd.server import EtcdServer, ServerTls, find_etcd

__all__ = ["EtcdServer", "ServerTls", "etcd_for_tests", "find_etcd"]

# The shortest lease that etcd grants is 1.5 election timeouts, rounded up to a second. With etcd's
# defaults that is two seconds, and an election takes up to one second.
_QUICK = ("--heartbeat-interval=10", "--election-timeout=100")


def etcd_for_tests(directory: str | Path, **options: Any) -> EtcdServer:
    """Return an ``EtcdServer`` that is not started yet, on a free loopback port and without fsync.

    It grants leases of one second and more. ``options`` are options of ``EtcdServer``.
    """
    arguments = (*_QUICK, *options.pop("arguments", ()))
    return EtcdServer(directory, **{"durable": False, **options}, arguments=arguments)
