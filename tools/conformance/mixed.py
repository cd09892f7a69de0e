"""A cluster of two brokers of ours and one of others. Programs of both sides use it through each broker."""

from __future__ import annotations

import asyncio
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Final

import httpx

from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.client.read.fragment_reader import FragmentAccess
from gazette.client.read.reader import ReadParams
from gazette.errors import Broken
from gazette.run.dev.cluster import Broker, ClusterSettings, LocalCluster
from gazette.run.dev.processes import await_ready
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import journal_spec
from tools.conformance.programs import Programs

_CLOCK: Final = SystemClock()
_WAIT_S: Final = 60.0
_JOURNALS: Final = tuple(f"mixed/part-{n}" for n in range(12))
_LARGE: Final = 8 << 20


class Mixed:
    """The cluster, and what was appended to each journal."""

    def __init__(self, ours: LocalCluster, other: Broker, programs: Programs) -> None:
        self.ours = ours
        self.other = other
        self.programs = programs
        self.expected = dict.fromkeys(_JOURNALS, b"")

    @property
    def brokers(self) -> list[Broker]:
        return [*self.ours.brokers, self.other]

    def client(self, broker: Broker) -> Client:
        access = FragmentAccess(file_root=self.ours.directory / "fragments")
        return Client(broker.grpc_url, clock=_CLOCK, fragments=access)

    async def gazctl(self, broker: Broker, *arguments: str, content: bytes = b"") -> bytes:
        """Run the gazctl of the others. Raise ``Broken`` if it fails."""
        process = await asyncio.create_subprocess_exec(
            self.programs.directory / "gazctl",
            *arguments,
            f"--broker.address={broker.grpc_url}",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "HOME": str(self.ours.directory)},
        )
        async with asyncio.timeout(_WAIT_S):
            output, errors = await process.communicate(content)
        if process.returncode:
            raise Broken(f"gazctl {' '.join(arguments)}: {errors.decode(errors='replace')}")
        return output

    async def create(self) -> None:
        specs = [journal_spec(name, replication=3, stores=("file:///",)) for name in _JOURNALS]
        async with self.client(self.brokers[0]) as client:
            await client.apply_journals([JournalChange(upsert=one) for one in specs])
            for name in _JOURNALS:
                await self._append(client, name, b"first.")
        listed = await self.gazctl(self.other, "journals", "list", "--format=json")
        if any(name.encode() not in listed for name in _JOURNALS):
            raise Broken(f"gazctl of {self.programs.name} lists not all journals")

    async def _append(self, client: Client, journal: str, content: bytes) -> None:
        async with asyncio.timeout(_WAIT_S):
            await client.append(AppendParams(journal), content)
        self.expected[journal] += content

    async def primaries(self) -> dict[str, list[str]]:
        """Return the journals that each broker leads, by its address."""
        async with self.client(self.brokers[0]) as client:
            listed = await client.list_journals()
        led: dict[str, list[str]] = {}
        for one in listed.journals:
            if one.route.primary is not None:
                led.setdefault(one.route.endpoints[one.route.primary], []).append(one.spec.name)
        return led

    async def append_by_each(self) -> None:
        """Append small and large contents through each broker: by our client, their gazctl, and HTTP."""
        for broker in self.brokers:
            async with self.client(broker) as client:
                for name in _JOURNALS:
                    await self._append(client, name, b"small by ours.")
                await self._append(client, _JOURNALS[0], os.urandom(_LARGE))
            for name in _JOURNALS[:4]:
                content = b"small by theirs."
                await self.gazctl(
                    broker, "journals", "append", "-l", f"name={name}", content=content
                )
                self.expected[name] += content
            async with httpx.AsyncClient(follow_redirects=True, timeout=_WAIT_S) as http:
                for name in _JOURNALS:
                    url = f"{broker.grpc_url}/{name}"  # The port that is advertised.
                    answer = await http.put(url, content=b"by http.")
                    if answer.status_code != 204:
                        raise Broken(f"PUT {url}: {answer.status_code} {answer.text}")
                    self.expected[name] += b"by http."
                    location = httpx.URL(answer.headers["location"])
                    answer = await http.get(location, params={"offset": "0"})
                    if answer.content != self.expected[name]:
                        raise Broken(
                            f"GET {location}: {len(answer.content)} bytes, {answer.status_code}"
                        )

    async def read_by_each(self) -> None:
        """Read each journal through each running broker, by our client and by their gazctl."""
        for broker in self.brokers:
            if not broker.process.running:
                continue
            async with self.client(broker) as client:
                for name, expected in self.expected.items():
                    read = b""
                    async with (
                        asyncio.timeout(_WAIT_S),
                        client.retry_reader(ReadParams(name)) as reader,
                    ):
                        while len(read) < len(expected):
                            read += await reader.read()
                    self._compare(name, read)
            for name in _JOURNALS:
                read = await self.gazctl(broker, "journals", "read", "-l", f"name={name}")
                self._compare(name, read)

    def _compare(self, name: str, found: bytes) -> None:
        expected = self.expected[name]
        if found != expected:
            raise Broken(
                f"{name}: {len(found)} bytes, of {len(expected)}, are not what was appended"
            )

    async def go_on_without(self, broker: Broker) -> None:
        """Kill a broker. Replicas move to the others once its lease has ended, and appends go on."""
        await broker.process.kill()
        rest = [one for one in self.brokers if one is not broker]
        async with self.client(rest[0]) as client:
            listed = await client.list_journals()
            await client.apply_journals(
                [
                    JournalChange(
                        upsert=replace(one.spec, replication=2),
                        expect_mod_revision=one.mod_revision,
                    )
                    for one in listed.journals
                ]
            )
            for name in _JOURNALS:
                await self._append(client, name, b"after a kill.")


async def mixed(programs: Programs, directory: Path) -> None:
    """Run the checks, and print each that is done. Raise ``GazetteError`` for the first that fails."""
    settings = ClusterSettings(directory / "mixed", brokers=2, zones=2)
    ours = LocalCluster(settings, _CLOCK)
    theirs = LocalCluster(replace(settings, original=programs.directory), _CLOCK)
    theirs.etcd = ours.etcd
    broker = None
    try:
        await ours.start()
        broker = theirs._new_broker(2)
        await broker.process.start()
        await await_ready(
            broker.process, broker.http_port, _CLOCK, settings.ready_timeout_s, host=broker.host
        )
        await _check(Mixed(ours, broker, programs))
    finally:
        if broker is not None:
            await broker.process.kill()
        await ours.stop()


async def _check(cluster: Mixed) -> None:
    name = cluster.programs.name
    await cluster.create()
    led = await cluster.primaries()
    theirs = len(led.get(cluster.other.grpc_url, ()))
    print(f"  {len(_JOURNALS)} journals with three replicas: {name} leads {theirs}")
    if not 0 < theirs < len(_JOURNALS):
        raise Broken("one kind of broker leads all journals: the test shows nothing")
    await cluster.append_by_each()
    print(f"  appended by each broker: our client, gazctl of {name}, HTTP on the advertised port")
    await cluster.read_by_each()
    print(f"  read by each broker, by our client and by gazctl of {name}: the same bytes")
    await cluster.go_on_without(cluster.other)
    await cluster.read_by_each()
    print(f"  killed the broker of {name}: ours go on, and have the same bytes")
    print(f"mixed cluster with {name}: passed", flush=True)
