"""Groups of settings that brokers and consumers share: etcd, log, debug."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gazette.config.schema import duration, setting
from gazette.errors import Invalid

if TYPE_CHECKING:
    from gazette.cluster.etcd.client import EtcdSettings
    from gazette.protocol.ids import ProcessId

LOG_LEVELS: Final = ("trace", "debug", "info", "warn", "warning", "error", "fatal", "panic")
LOG_FORMATS: Final = ("text", "json", "color")
_KEEPALIVE_MIN_S: Final = 6.0
"""etcd ends a connection with pings less than 5 s apart (``--grpc-keepalive-min-time``)."""


@dataclass(frozen=True, slots=True)
class EtcdFlags:
    """Group ``etcd``."""

    address: str = setting(
        "http://localhost:2379", "etcd endpoints, separated by commas: http://, https:// or unix://"
    )
    cert_file: str = setting("", "client certificate for etcd (PEM)")
    cert_key_file: str = setting("", "key of the client certificate (PEM)")
    trusted_ca_file: str = setting("", "certificates to verify etcd with (PEM)")
    user: str = setting("", "etcd user, if etcd uses authentication")
    password: str = setting("", "password of the etcd user", secret=True)
    lease: float = duration(
        "20s", "time to live of this member's lease", env="ETCD_LEASE_TTL", ini="LeaseTTL"
    )
    prefix: str = setting("/gazette/cluster", "etcd prefix that the members of a cluster share")

    def settings(self) -> EtcdSettings:
        from gazette.cluster.etcd.client import EtcdSettings

        endpoints = tuple(part.strip() for part in self.address.split(",") if part.strip())
        try:
            return EtcdSettings(
                endpoints=endpoints,
                cert_file=self.cert_file,
                key_file=self.cert_key_file,
                ca_file=self.trusted_ca_file,
                user=self.user,
                password=self.password,
                keepalive_s=max(_KEEPALIVE_MIN_S, self.lease / 4),
            )
        except Invalid as error:
            flag = "address" if error.path == "endpoints" else error.path.replace("_", "-")
            raise Invalid(
                error.message, path=f"--etcd.{flag}", hint=error.hint, **error.facts
            ) from error


@dataclass(frozen=True, slots=True)
class LogFlags:
    """Group ``log``."""

    level: str = setting("warn", "least severity to log", choices=LOG_LEVELS)
    format: str = setting("text", "form of log lines", choices=LOG_FORMATS)


@dataclass(frozen=True, slots=True)
class DebugFlags:
    """Group ``debug``."""

    port: str = setting("", "extra port for diagnostics (/debug/*, /metrics)")
    private: bool = setting(False, "serve diagnostics on the extra port only")


def member_id(group: str, zone: str, name: str) -> ProcessId:
    """Return the id of a process from the flags ``zone`` and ``id`` of a group. For a malformed flag, raise
    ``Invalid`` with the name of the flag."""
    from gazette.protocol.ids import ProcessId, validate_token

    for flag, value, length_min, length_max in (("zone", zone, 1, 32), ("id", name, 4, 128)):
        try:
            validate_token(value, length_min, length_max)
        except Invalid as error:
            raise Invalid(
                error.message,
                path=f"--{group}.{flag}",
                hint=f"Use {length_min} to {length_max} letters, digits, and - _ + / . as in "
                f"--{group}.{flag}={'eu-west-1a' if flag == 'zone' else 'member-1'}",
            ) from error
    return ProcessId(zone, name)


def check_directory(name: str, path: Path | None, *, to_write: bool = True) -> None:
    """Raise ``Invalid`` unless ``path`` is a directory that this user can write to, or None.

    Without ``to_write``, the user need only be able to read it. The error has the setting's ``name``.
    """
    if path is None:
        return
    if not path.is_dir():
        missing = not path.exists()
        raise Invalid(
            f"{path} {'does not exist' if missing else 'is not a directory'}",
            path=f"--{name}",
            hint=f"Create it: mkdir -p {path}" if missing else "Name a directory.",
        )
    if not os.access(path, os.X_OK | (os.W_OK if to_write else os.R_OK)):
        raise Invalid(
            f"user {os.getuid()} cannot {'write to' if to_write else 'read'} {path}",
            path=f"--{name}",
            hint=f"Make the user its owner: chown {os.getuid()} {path}",
        )
