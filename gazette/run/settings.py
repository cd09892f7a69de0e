"""Flags of `gazette run`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gazette.cluster.process.groups import LOG_LEVELS
from gazette.config.schema import duration, setting
from gazette.consumer.declare.specs import DEVELOPMENT, REPLICAS_MAX, SpecSettings
from gazette.errors import Invalid
from gazette.runtime.numbers import counted

flag: Any = partial(setting, flag_only=True)


@dataclass(frozen=True, slots=True)
class RunFlags:
    """Flags without a group."""

    dir: Path | None = flag(Path(".gazette"), "directory of all state, which a restart finds again")
    workers: int = flag(0, "number of processes of the application (0: one more than --standbys)")
    standbys: int = flag(0, "number of hot standbys of each shard")
    reload: bool = flag(False, "start the application again when one of its files changes")
    port: int = flag(9000, "gRPC port of the first process, HTTP is the next; 0: any free ports")
    brokers: int = flag(1, "number of brokers to start")
    broker_port: int = flag(
        8080, "gRPC port of the first broker, HTTP is the next; 0: any free ports"
    )
    store: tuple[str, ...] = flag(
        (), "URL of the blob store of new journals, with --broker.address; may be repeated"
    )
    replication: int = flag(0, "brokers with a replica of a new journal (0: at most 3 of all)")
    more_partitions: bool = flag(
        False, "raise numbers of partitions, though keys move to other shards"
    )
    changed_key: bool = flag(
        False, "take another key, though messages of a key are in several shards"
    )
    lease: float = duration(
        "10s", "time after which a process that does not answer is given up", flag_only=True
    )
    report: float = duration("10s", "interval of lines about what is consumed", flag_only=True)
    log_level: str = flag("warn", "least severity to log", choices=LOG_LEVELS)
    ui: bool = flag(True, "serve the console, and print its address")

    def member_count(self) -> int:
        """Return the number of processes. Raise ``Invalid`` if it is out of range, or too small for the
        standbys."""
        if self.standbys < 0:
            raise Invalid(f"{self.standbys} standbys (expected >= 0)", path="--standbys")
        count = self.workers or self.standbys + 1
        if not 1 <= count <= 64:
            raise Invalid(f"{count} processes (expected 1 to 64)", path="--workers")
        if count <= self.standbys:
            raise Invalid(
                f"{counted(self.standbys, 'standby')} of each shard and its primary need {self.standbys + 1} "
                f"processes, and not {count}",
                path="--workers",
                hint=f"Give --workers {self.standbys + 1}, or leave it out.",
            )
        return count

    def spec_settings(self, *, embedded: bool) -> SpecSettings:
        """Return the settings of new specifications. Raise ``Invalid`` for too many replicas, or no store."""
        if embedded:
            replication = self.replication or min(self.brokers, REPLICAS_MAX)
            if replication > self.brokers:
                raise Invalid(
                    f"{replication} replicas need as many brokers, and not {self.brokers}",
                    path="--replication",
                    hint=f"Give --brokers {replication}.",
                )
            return replace(DEVELOPMENT, replication=replication, hot_standbys=self.standbys)
        return SpecSettings(
            stores=self.store,
            replication=self.replication or REPLICAS_MAX,
            hot_standbys=self.standbys,
        )


@dataclass(frozen=True, slots=True)
class RunBrokerFlags:
    """Group ``broker``."""

    address: str = flag("", "brokers that run already (empty: start some on this machine)")


@dataclass(frozen=True, slots=True)
class RunEtcdFlags:
    """Group ``etcd``."""

    address: str = flag("", "etcd that runs already, with --broker.address")
