"""Fixtures that every test may use. Nothing else belongs here."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from execnet import gateway_base
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.runtime.clock import SystemClock
from gazette.testing.clock import ManualClock
from gazette.testing.etcd import EtcdServer, etcd_for_tests

# Machines are shared: how long an example takes says nothing, nor how long it takes to draw it.
settings.register_profile("gazette", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gazette")


_STDERR = pytest.StashKey[int]()
"""A descriptor of standard error, which pytest captures while tests run."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(sys.stderr.fileno())
    # A shell that runs tests in the background ignores SIGINT. Processes that tests interrupt inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_SPREAD = (
    "tests/simulate/",
    *(f"tests/simulation/test_{name}" for name in ("consumer", "other_version", "simulation")),
)
"""How the names of long tests without fixtures in common begin. Processes divide the tests of their files."""


class _Scheduling(LoadFileScheduling):  # type: ignore[misc] # It has no types.
    """Give the tests of a file to one process, but those of `_SPREAD` to any."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(_SPREAD):
            return nodeid
        scope: str = super()._split_scope(nodeid)
        return scope


def _let_reports_quote_surrogates() -> None:
    """Send texts that UTF-8 cannot encode with escapes. One such report would end all workers."""
    serializer: Any = gateway_base._Serializer
    before = serializer._write_unicode_string

    def write(self: Any, text: str) -> None:
        before(self, text.encode("utf-8", "backslashreplace").decode())

    serializer._write_unicode_string = write


_let_reports_quote_surrogates()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> _Scheduling:
    return _Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long tests, so that no process is left with them at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(_SPREAD))


def _watch(item: pytest.Item) -> None:
    """End the process if the item still runs long after its timeout, and print every thread's stack.

    The timeout needs the interpreter's lock. A call that never returns would hang the whole run.
    """
    marker = item.get_closest_marker("timeout")
    option = item.config.getoption("timeout") or item.config.getini("timeout")
    limit_s = float(marker.args[0] if marker is not None and marker.args else option)
    stderr = item.config.stash[_STDERR]
    faulthandler.dump_traceback_later(limit_s + 30.0, exit=True, file=stderr)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _watch(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    _watch(item)  # pytest has cancelled it if the test failed.


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Run a real etcd, shared by all tests: do not stop, pause or compact this one."""
    with etcd_for_tests(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
async def etcd(etcd_server: EtcdServer) -> AsyncIterator[Etcd]:
    """Yield a connected client; the whole keyspace is emptied after the test."""
    settings = EtcdSettings(endpoints=(etcd_server.endpoint,))
    async with await Etcd.connect(settings, SystemClock()) as client:
        yield client
        await client.delete_prefix("")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make a self-signed certificate for localhost, and its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


def make_certificate(directory: Path) -> tuple[Path, Path]:
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        " -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    )
    subprocess.run(
        [*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True
    )
    return certificate, key
