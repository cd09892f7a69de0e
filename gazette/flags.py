"""The groups of settings that brokers and consumers share: etcd, log, debug."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gazette.config import duration, setting

if TYPE_CHECKING:
    from gazette.etcd import EtcdSettings

LOG_LEVELS: Final = ("trace", "debug", "info", "warn", "warning", "error", "fatal", "panic")
LOG_FORMATS: Final = ("text", "json", "color")


@dataclass(frozen=True, slots=True)
class EtcdFlags:
    """Group ``etcd``."""

    address: str = setting(
        "http://localhost:2379", "etcd endpoints, separated by commas: http://, https:// or unix://"
    )
    cert_file: str = setting("", "client certificate for etcd (PEM)")
    cert_key_file: str = setting("", "key of the client certificate (PEM)")
    trusted_ca_file: str = setting("", "certificates to verify etcd with (PEM)")
    user: str = setting("", "etcd user, where etcd has authentication on")
    password: str = setting("", "password of the etcd user", secret=True)
    lease: float = duration("20s", "time to live of this member's lease", env="ETCD_LEASE_TTL")
    prefix: str = setting("/gazette/cluster", "etcd prefix that the members of a cluster share")

    def settings(self) -> EtcdSettings:
        from gazette.etcd import EtcdSettings

        endpoints = tuple(one.strip() for one in self.address.split(",") if one.strip())
        return EtcdSettings(
            endpoints=endpoints,
            cert_file=self.cert_file,
            key_file=self.cert_key_file,
            ca_file=self.trusted_ca_file,
            user=self.user,
            password=self.password,
            keepalive_s=max(1.0, self.lease / 4),
        )


@dataclass(frozen=True, slots=True)
class LogFlags:
    """Group ``log``."""

    level: str = setting("warn", "least severity that is logged", choices=LOG_LEVELS)
    format: str = setting("text", "form of log lines", choices=LOG_FORMATS)


@dataclass(frozen=True, slots=True)
class DebugFlags:
    """Group ``debug``."""

    port: str = setting("", "extra port for diagnostics (/debug/*, /metrics)")
    private: bool = setting(False, "serve diagnostics on the extra port only")
