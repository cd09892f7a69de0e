"""Ports that are chosen before a server is started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from gazette.runtime import ports
from gazette.runtime.ports import free_port, port_is_free


def test_no_outgoing_connection_is_given_such_a_port() -> None:
    # Regression: a member could not listen, because a connection had got its port meanwhile.
    assert all(10_000 <= free_port() <= 32_767 for _ in range(50))


def test_a_port_is_given_once() -> None:
    given = [free_port() for _ in range(50)]
    assert len(set(given)) == 50


@pytest.mark.skipif(sys.platform != "linux", reason="reserved on Linux only")
def test_no_other_process_is_given_a_port() -> None:
    # Regression: two workers of the tests chose the same port, and neither had begun to listen.
    port = free_port()
    script = (
        "from gazette.runtime import ports\n"
        f"ports._FIRST = {port}\nports._LAST = {port + 1}\n"
        "print([ports.free_port() for _ in range(5)])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert port not in json.loads(result.stdout)


def test_a_port_in_use_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not port_is_free(port)
        # Case: there is no other in the range.
        monkeypatch.setattr(ports, "_FIRST", port)
        monkeypatch.setattr(ports, "_LAST", port)
        assert free_port() != port
