"""Ports that are chosen before a server is started."""

from __future__ import annotations

import socket

import pytest

from gazette.runtime import ports
from gazette.runtime.ports import free_port, port_is_free


def test_no_outgoing_connection_is_given_such_a_port() -> None:
    # Regression: a member could not listen, because a connection had got its port meanwhile.
    assert all(10_000 <= free_port() <= 32_767 for _ in range(50))


def test_a_port_is_given_once() -> None:
    given = [free_port() for _ in range(50)]
    assert len(set(given)) == 50


def test_a_port_in_use_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not port_is_free(port)
        # Case: there is no other in the range.
        monkeypatch.setattr(ports, "_FIRST", port)
        monkeypatch.setattr(ports, "_LAST", port)
        assert free_port() != port
