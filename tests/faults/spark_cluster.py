"""A standalone cluster of Spark (a master, two workers) and drivers of backfills on it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyspark

from gazette.history.spark.java import ensure_java
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from tests.faults.gated import GATES_ENV

ROOT = Path(__file__).parents[2]
HOSTS = ("127.0.0.2", "127.0.0.3")
"""Speculation takes another host: two workers on one are not two places."""
EXECUTOR = "CoarseGrainedExecutorBackend"
CLOCK = SystemClock()
POLL_S = 0.1
STOP_S = 60
_SMALL = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
_CONNECT = {"SPARK_CONNECT_MODE_ENABLED", "SPARK_LOCAL_REMOTE", "SPARK_REMOTE"}
_DAEMON = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": _SMALL}


async def until(condition: Callable[[], Any], driver: Driver | None = None) -> Any:
    """Wait for it, as long as the driver runs. The test's timeout is its bound."""
    while not (found := condition()):
        if driver is not None and driver.process.returncode is not None:
            code = driver.process.returncode
            raise AssertionError(
                f"the driver ended before that (code {code}):\n{driver.output()[-4000:]}"
            )
        await CLOCK.sleep(POLL_S)
    return found


@dataclass
class Driver:
    """A process of ``gazctl shards backfill --master``, in a process group of its own."""

    process: asyncio.subprocess.Process
    log: Path

    def output(self) -> str:
        return self.log.read_text("utf-8", "replace")

    async def kill(self) -> None:
        """Send SIGKILL to the driver and its JVM."""
        os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()

    async def ended(self, code: int = 0) -> str:
        """Return its output, once it has ended with this code."""
        found = await self.process.wait()
        assert found == code, f"exit code {found}, and not {code}:\n{self.output()[-6000:]}"
        return self.output()


@dataclass
class Standalone:
    """The processes of the cluster."""

    directory: Path
    environ: dict[str, str]
    url: str = ""
    workers: list[Any] = field(default_factory=list)
    _processes: list[Any] = field(default_factory=list)
    _drivers: list[Driver] = field(default_factory=list)

    def start(self) -> None:
        port = free_port()
        self.url = f"spark://127.0.0.1:{port}"
        deploy = "org.apache.spark.deploy"
        listen = ("--host", "127.0.0.1", "--port", str(port), "--webui-port", "0")
        self._spawn("master", "127.0.0.1", f"{deploy}.master.Master", *listen)

    def start_workers(self) -> None:
        """Start the workers once the master is there: they give up if it is not for a minute."""
        deploy = "org.apache.spark.deploy"
        for host in HOSTS:
            work = ("-c", "1", "-m", "700m", "-d", str(self.directory / f"work-{host}"))
            at = ("--host", host, "--webui-port", "0")
            self.workers.append(
                self._spawn(f"worker-{host}", host, f"{deploy}.worker.Worker", *at, *work, self.url)
            )

    def _spawn(self, name: str, host: str, *arguments: str) -> Any:
        spark_class = Path(pyspark.__file__).parent / "bin" / "spark-class"
        with (self.directory / f"{name}.log").open("wb") as log:
            process = psutil.Popen(
                [str(spark_class), *arguments],
                env={**self.environ, **_DAEMON, "SPARK_LOCAL_IP": host},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)
        return process

    def is_ready(self) -> bool:
        """Return True if both workers have registered. Start them when the master is there.

        Raise ``AssertionError`` with its log when a process has died.
        """
        for process in self._processes:
            if process.poll() is not None:
                logs = sorted(self.directory.glob("*.log"))
                raise AssertionError("\n".join(log.read_text()[-2000:] for log in logs))
        text = (self.directory / "master.log").read_text()
        if not self.workers and "New state: ALIVE" in text:
            self.start_workers()
        return text.count("Registering worker") >= len(HOSTS)

    def conf(self, name: str, gates: Path) -> Path:
        """Write a directory of configuration for a driver whose tasks see ``gates``."""
        conf = self.directory / f"conf-{gates.parent.name}-{name}"
        conf.mkdir(parents=True, exist_ok=True)
        (conf / "spark-defaults.conf").write_text(
            "spark.speculation true\n"
            "spark.speculation.interval 200ms\n"
            "spark.speculation.quantile 0.1\n"
            "spark.speculation.multiplier 1.1\n"
            "spark.speculation.minTaskRuntime 1s\n"
            "spark.executor.memory 512m\n"
            "spark.executor.cores 1\n"
            f"spark.executor.extraJavaOptions {_SMALL}\n"
            "spark.driver.memory 512m\n"
            f"spark.driver.extraJavaOptions {_SMALL}\n"
            "spark.driver.host 127.0.0.1\n"
            "spark.driver.bindAddress 127.0.0.1\n"
            f"spark.executorEnv.{GATES_ENV} {gates}\n"
            f"spark.executorEnv.PYTHONPATH {ROOT}\n"
        )
        return conf

    async def driver(self, name: str, gates: Path, *flags: str) -> Driver:
        """Start ``gazctl shards backfill`` on the cluster; what it runs sees ``gates``."""
        conf = self.conf(name, gates)
        log = conf / "driver.log"
        with log.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gazette.gazctl.main", "shards", "backfill"),
                "tests.faults.gated:GatedBackfill",
                f"--master={self.url}",
                *flags,
                env={**self.environ, "SPARK_CONF_DIR": str(conf)},
                cwd=ROOT,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        driver = Driver(process, log)
        self._drivers.append(driver)
        return driver

    def executors(self) -> list[Any]:
        """Return the processes of executors that run."""
        return [
            child
            for worker in self.workers
            for child in _children(worker)
            if any(EXECUTOR in word for word in _command(child))
        ]

    def stopped(self) -> list[Any]:
        """Return processes of executors that stand still, by SIGSTOP."""
        return [
            child
            for executor in self.executors()
            for child in _children(executor)
            if _is_stopped(child)
        ]

    def close(self) -> None:
        for driver in self._drivers:
            with suppress(ProcessLookupError):
                os.killpg(driver.process.pid, signal.SIGKILL)
        for process in reversed(self._processes):
            for child in _children(process):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
            process.wait(STOP_S)


def _children(process: Any) -> list[Any]:
    with suppress(psutil.NoSuchProcess):
        found: list[Any] = process.children(recursive=True)
        return found
    return []


def _command(process: Any) -> list[str]:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        found: list[str] = process.cmdline()
        return found
    return []


def _is_stopped(process: Any) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


@contextmanager
def standalone(directory: Path) -> Iterator[Standalone]:
    """Run a cluster of its own, with the Java that `ensure_java` finds."""
    # A session of Spark Connect in this process sets variables that would make its children sessions of it.
    inherited = {name: value for name, value in os.environ.items() if name not in _CONNECT}
    environ = {
        **inherited,
        "JAVA_HOME": str(ensure_java(os.environ)),
        "SPARK_NO_DAEMONIZE": "1",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }
    cluster = Standalone(directory, environ)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
