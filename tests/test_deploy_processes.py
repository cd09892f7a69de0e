"""The units of systemd and the services of compose in deploy/, started as processes of this machine.

Each gets its own command, environment and directories, at ports that are free here.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import httpx
import pytest

from gazette.cluster.etcd.server import find_etcd
from gazette.run.dev.processes import ChildProcess, await_ready
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from tests.blobs.s3_endpoint import reset, s3_server
from tests.deployment import COMPOSE, DEPLOY, ROOT, SYSTEMD, Unit, image_environment
from tests.run.console.conftest import enter

CLOCK: Final = SystemClock()
OURS: Final = re.compile(r"(BROKER|CONSUMER|ETCD|LOG|DEBUG|GAZETTE|GAZCTL|AWS)_")
WORD: Final = b'{"word":"gazette"}\n'
READY_S: Final = 120.0
END_S: Final = 120.0
GAZCTL: Final = (sys.executable, "-m", "gazette.gazctl.main")
GAZETTE: Final = (sys.executable, "-m", "gazette.main")


def environment(own: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not OURS.match(name)}
    return {**inherited, "PYTHONPATH": str(ROOT), **own}


class Deployment:
    """Processes that were started, in their order."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.processes: dict[str, ChildProcess] = {}

    async def start(
        self, name: str, command: Sequence[str], own: Mapping[str, str], directory: Path
    ) -> ChildProcess:
        log = self.logs / f"{name}.log"
        there = ["env", "--chdir", str(directory), *command]
        process = ChildProcess(name, there, log, environment(own), CLOCK)
        self.processes[name] = process
        await process.start()
        return process

    async def end(self, *names: str) -> None:
        """Send SIGTERM to these processes together. Require that each leaves in good order."""
        processes = [self.processes.pop(name) for name in names]
        ended = await asyncio.gather(*(process.stop(END_S) for process in processes))
        for process, has_ended in zip(processes, ended, strict=True):
            assert has_ended, process.log_tail()
            assert process.exit_code == 0, (process.name, process.exit_code, process.log_tail())


@asynccontextmanager
async def deployment(logs: Path) -> AsyncIterator[Deployment]:
    running = Deployment(logs)
    try:
        yield running
    finally:
        for process in reversed(running.processes.values()):
            await process.kill()


async def done(
    command: Sequence[str], own: Mapping[str, str], directory: Path, given: bytes = b""
) -> str:
    """Run a command that must succeed. Return its output."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=directory,
        env=environment(own),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate(given)
    assert process.returncode == 0, errors.decode()
    return output.decode()


async def count_at(port: int, number: int) -> None:
    """Return when a member answers that it has seen the word so often. It never has seen it more often."""
    url = f"http://127.0.0.1:{port}/counts/gazette"
    async with asyncio.timeout(READY_S):
        while (seen := await asyncio.to_thread(answer, url)) != number:
            assert seen < number
            await CLOCK.sleep(0.05)


def answer(url: str) -> int:
    with urllib.request.urlopen(url, timeout=60.0) as response:
        number: int = json.load(response)["n"]
    return number


async def use_and_end(
    running: Deployment, publish: Callable[[], Awaitable[str]], members: Mapping[str, int]
) -> None:
    """Publish a word before and after one of two members leaves, and ask for its count. End the others."""
    (first, first_port), (second, second_port) = members.items()
    await publish()
    await count_at(first_port, 1)
    await count_at(second_port, 1)
    await running.end(first)
    await publish()
    await count_at(second_port, 2)
    await running.end(second)
    await running.end(*(name for name in running.processes if name.startswith("broker")))


def page_line(beginning: str) -> str:
    """Return the one command of docs/deploying.md that begins so."""
    page = (ROOT / "docs" / "deploying.md").read_text()
    (line,) = re.findall(rf"^    ({re.escape(beginning)}.*)$", page, re.MULTILINE)
    command: str = line
    return command


def moved(text: str, ports: Mapping[str, int], places: Mapping[str, str]) -> str:
    """Return a text with other ports and directories."""
    text = re.sub(r"\b[0-9]{4}\b", lambda port: str(ports.get(port[0], port[0])), text)
    for place, other in places.items():
        text = text.replace(place, other)
    return text


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_units_of_systemd_are_a_cluster_with_an_application(tmp_path: Path) -> None:
    numbers = [
        "2379",
        "2380",
        "8081",
        "8082",
        "8083",
        "8181",
        "8182",
        "8183",
        "9001",
        "9002",
        "9101",
        "9102",
    ]
    ports = {number: free_port() for number in numbers}
    places = {
        "/var/lib": str(tmp_path / "lib"),
        "/var/cache": str(tmp_path / "cache"),
        "${STATE_DIRECTORY}": str(tmp_path / "lib/gazette/etcd"),
        "/usr/bin/etcd": find_etcd(),
        "/opt/gazette/bin/gazette": shlex.join(GAZETTE),
        "/opt/gazette/bin/gazctl": shlex.join(GAZCTL),
        "/opt/gazette/bin/python": sys.executable,
        "/opt/application": str(DEPLOY / "application"),
    }

    async def start(running: Deployment, name: str) -> None:
        template, _, instance = name.partition("@")
        path = SYSTEMD / f"{template}{'@' if instance else ''}.service"
        unit = Unit.read(path, instance)
        for kind in ("lib", "cache"):
            key = {"lib": "StateDirectory", "cache": "CacheDirectory"}[kind]
            for directory in (word for line in unit.values(key) for word in line.split()):
                (tmp_path / kind / directory).mkdir(parents=True, exist_ok=True)
        own = {key: moved(value, ports, places) for key, value in unit.environment.items()}
        directory = moved((unit.values("WorkingDirectory") or ["/"])[0], ports, places)
        command = shlex.split(moved(unit.command, ports, places))
        label = name.removeprefix("gazette-")
        process = await running.start(label, command, own, Path(directory))
        for group in ("BROKER", "CONSUMER"):
            if f"{group}_HTTP_PORT" in own:
                await await_ready(process, int(own[f"{group}_HTTP_PORT"]), CLOCK, READY_S)

    target = Unit.read(SYSTEMD / "gazette.target")
    names = [
        word.removesuffix(".service") for line in target.values("Wants") for word in line.split()
    ]
    assert names[0] == "gazette-etcd"
    async with deployment(tmp_path / "logs") as running:
        for name in names:
            await start(running, name)
        apply = moved(page_line("/opt/gazette/bin/python app.py apply"), ports, places)
        said = await done(shlex.split(apply), {}, DEPLOY / "application")
        assert "+ journal word-count/words/part-000  2 replicas" in said
        produce = page_line('echo \'{"word":"gazette"}\' | /opt/gazette/bin/gazctl').partition(
            "| "
        )[2]
        line = shlex.split(moved(produce, ports, places))
        members = {"application@1": ports["9101"], "application@2": ports["9102"]}
        await use_and_end(running, lambda: done(line, {}, tmp_path, WORD), members)
    # The last brokers stored what only they had.
    stored = [path for path in (tmp_path / "lib/gazette/fragments").rglob("*") if path.is_file()]
    assert any("word-count/words/part-000/" in str(path) for path in stored), stored


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_services_of_compose_are_a_cluster_with_an_application(tmp_path: Path) -> None:
    services = COMPOSE["services"]
    own_ports = {"8080", "8081"}
    with s3_server() as store:
        hosts = {"minio:9000": f"127.0.0.1:{store[1]}", "etcd:2379": f"127.0.0.1:{free_port()}"}
        for name in services:
            if name.startswith(("broker-", "application-")):
                hosts |= {f"{name}:{port}": f"127.0.0.1:{free_port()}" for port in own_ports}

        def here(text: str) -> str:
            for host, other in hosts.items():
                text = text.replace(f"//{host}", f"//{other}")
            return text.replace("//0.0.0.0:2379", f"//{hosts['etcd:2379']}")

        def settings(name: str) -> dict[str, str]:
            """Return the environment in the container of a service, with other ports and directories."""
            own = image_environment() | services[name].get("environment", {})
            group = "BROKER" if name.startswith("broker-") else "CONSUMER"
            for key, port in (("PORT", "8080"), ("HTTP_PORT", "8081")):
                assert own[f"{group}_{key}"] == port
                if f"{name}:{port}" in hosts:
                    own[f"{group}_{key}"] = hosts[f"{name}:{port}"].rpartition(":")[2]
            for key in ("BROKER_SPOOL_DIR", "CONSUMER_SCRATCH_DIR"):
                own[key] = str(tmp_path / name / own[key].lstrip("/"))
                Path(own[key]).mkdir(parents=True, exist_ok=True)
            # Its name in the network of compose.
            own[f"{group}_HOST"] = "127.0.0.1"
            return {key: here(value) for key, value in own.items()}

        def command(name: str) -> list[str]:
            service = services[name]
            words = service.get("entrypoint", ["gazette"]) + service.get("command", [])
            programs = {"python": [sys.executable], "gazette": [*GAZETTE], "gazctl": [*GAZCTL]}
            return [*programs[words[0]], *map(here, words[1:] or ["serve"])]

        def mounted(word: str) -> str:
            return word.replace("/journals.yaml", str(DEPLOY / "journals.yaml"))

        reset(store)
        make_bucket(store, "gazette")
        data = tmp_path / "etcd"
        etcd = [here(word).replace("/data", str(data)) for word in services["etcd"]["command"]]
        async with deployment(tmp_path / "logs") as running:
            peers = f"http://127.0.0.1:{free_port()}"
            at = [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"]
            at += [f"--initial-cluster=default={peers}"]
            await running.start("etcd", [find_etcd(), *etcd[1:], *at], {}, tmp_path)
            members = {}
            for name in sorted(services, key=lambda name: name.startswith("application-")):
                if name.startswith(("broker-", "application-")):
                    own = settings(name)
                    process = await running.start(name, command(name), own, DEPLOY / "application")
                    http = int(hosts[f"{name}:8081"].rpartition(":")[2])
                    await await_ready(process, http, CLOCK, READY_S)
                    if name.startswith("application-"):
                        members[name] = http
            journals = [mounted(word) for word in command("journals")]
            await done(journals, settings("journals"), tmp_path)
            said = await done(
                command("declarations"), settings("declarations"), DEPLOY / "application"
            )
            assert "+ journal word-count/words/part-000  3 replicas" in said
            port = free_port()
            words = [word.replace("8090", str(port)) for word in command("console")]
            own = settings("console")
            process = await running.start("console", words, own, tmp_path)
            await await_ready(process, port, CLOCK, READY_S)
            await console_shows(port, own["GAZETTE_UI_KEY"], brokers=3, members=2)
            await running.end("console")
            line = page_line('echo \'{"word":"gazette"}\' | docker compose').partition(" gazctl ")[
                2
            ]
            own = settings("application-b")
            produce = [*GAZCTL, *shlex.split(line)]
            await use_and_end(running, lambda: done(produce, own, tmp_path, WORD), members)


async def console_shows(port: int, key: str, *, brokers: int, members: int) -> None:
    """Return when a console that is entered by the key lists so many brokers and members."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as http:
        await enter(http, f"/?key={key}")
        async with asyncio.timeout(READY_S):
            while True:
                seen = (await http.get("/api/cluster")).json()
                kinds = [member["kind"] for member in seen["members"]]
                if (kinds.count("broker"), kinds.count("consumer")) == (brokers, members):
                    return
                await CLOCK.sleep(0.2)


def make_bucket(store: tuple[str, int], name: str) -> None:
    """Do what the service `buckets` does."""
    url = f"http://{store[0]}:{store[1]}/{name}"
    # A signature says which of the services is meant, and is not checked.
    scope = "Credential=gazette/20240101/us-east-1/s3/aws4_request"
    headers = {"Authorization": f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host, Signature=0"}
    request = urllib.request.Request(url, method="PUT", headers=headers)
    with urllib.request.urlopen(request, timeout=20.0) as response:
        assert response.status == 200


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="without systemd-analyze")
def test_units_are_what_systemd_takes(tmp_path: Path) -> None:
    assert verified(tmp_path, lambda text: text) == ""
    assert "Unknown key" in verified(tmp_path, lambda text: text.replace("KillMode", "KilMode"))


def verified(directory: Path, change: Callable[[str], str]) -> str:
    """Return what systemd finds wrong in the units. Their programs need not be on this machine."""
    names = []
    for path in sorted(SYSTEMD.iterdir()):
        text = re.sub(
            r"^(ExecStart=)\S+", r"\1/bin/true", change(path.read_text()), flags=re.MULTILINE
        )
        (directory / path.name).write_text(text)
        names.append(path.name.replace("@", "@1"))
    done = subprocess.run(
        ["systemd-analyze", "verify", *names],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{directory}:"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_units_fit_together() -> None:
    """Each unit that the target wants exists, is a part of the target, and stops before those it needs."""
    target = Unit.read(SYSTEMD / "gazette.target")
    names = [word for line in target.values("Wants") for word in line.split()]
    order: list[str] = []
    for name in names:
        template, _, instance = name.removesuffix(".service").partition("@")
        unit = Unit.read(SYSTEMD / f"{template}{'@' if instance else ''}.service", instance)
        assert unit.value("PartOf") == "gazette.target"
        after = {word for line in unit.values("After") for word in line.split()}
        assert after - {"network.target"} == {
            other for other in order if other.partition("@")[0] != template
        }, name
        order.append(name)
        if instance:
            # With workers, a second SIGTERM would end the drain.
            assert unit.value("KillMode") == "mixed"
            assert unit.value("RestartPreventExitStatus") == "2"
            (host,) = (
                value for key, value in unit.environment.items() if key.endswith("_BIND_HOST")
            )
            assert host == "127.0.0.1"
    brokers = [name for name in names if "broker" in name]
    member = Unit.read(SYSTEMD / "gazette-application@.service", "1").environment
    ports = [
        Unit.read(SYSTEMD / "gazette-broker@.service", name.partition("@")[2][0]).environment
        for name in brokers
    ]
    assert member["BROKER_ADDRESS"].split(",") == [
        f"http://127.0.0.1:{own['BROKER_PORT']}" for own in ports
    ]
