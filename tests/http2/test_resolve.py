"""Addresses of hosts: of a resolver that answers, refuses, fails, or hangs."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from gazette.http2.resolve import HostResolver
from gazette.runtime.tasks import TaskScope
from gazette.runtime.timeouts import timeout
from tests.support.instant_clock import eventually


class Hanging:
    """A resolver that answers once it may."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.asked = 0

    def __call__(self, host: str, _port: None, **options: Any) -> list[Any]:
        if "flags" in options:
            raise socket.gaierror(socket.EAI_NONAME, "not a number")
        self.asked += 1
        assert threading.current_thread().daemon
        assert self.may.wait(60)
        return [(0, 0, 0, "", (address, 0)) for address in ("::1", "127.0.0.1", "127.0.0.1")]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_numbers_are_their_own_addresses(address: str) -> None:
    before = threading.active_count()
    assert await HostResolver(address).find() == [address]
    assert threading.active_count() == before


async def test_the_machine_resolves_names() -> None:
    assert set(await HostResolver("localhost").find()) & {"127.0.0.1", "::1"}
    for host in ("no.such.host.invalid", "a\0b", "a" * 300):
        with pytest.raises(OSError, match=r"\w"):
            await HostResolver(host).find()


async def test_a_resolver_that_hangs_is_asked_once() -> None:
    resolver = Hanging()
    addresses = HostResolver("host", resolver)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with timeout(0.02):
                await addresses.find()
    async with TaskScope("find") as scope:
        tasks = [scope.spawn(addresses.find(), name=f"{one}") for one in range(2)]
        await asyncio.to_thread(resolver.may.set)
        await eventually(lambda: all(task.done() for task in tasks))
    assert [task.result() for task in tasks] == [["::1", "127.0.0.1"]] * 2
    assert resolver.asked == 1
    assert await addresses.find() == ["::1", "127.0.0.1"]
    assert resolver.asked == 2


def test_a_loop_that_ends_does_not_wait_for_the_resolver() -> None:
    resolver = Hanging()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with timeout(0.02):
                await HostResolver("host", resolver).find()

    asyncio.run(give_up())  # It would wait for threads of its own.
    resolver.may.set()
