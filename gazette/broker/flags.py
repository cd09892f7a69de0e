"""The settings of ``gazette serve``: flags, and their values for the parts of a broker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gazette.blobs.fsspec import check_protocols
from gazette.broker.settings import BrokerSettings
from gazette.client.rpc.channel import TlsSettings
from gazette.config.groups import check_directory
from gazette.config.schema import duration, setting
from gazette.errors import Invalid
from gazette.net.http_server import TlsFiles
from gazette.net.server import ServerSettings, advertised_host


@dataclass(frozen=True, slots=True)
class ProcessFlags:
    """Flags without a group."""

    workers: int = setting(
        1, "broker processes to run, each a member with its own id and ports", env="GAZETTE_WORKERS"
    )


@dataclass(frozen=True, slots=True)
class BrokerFlags:
    """Group ``broker``. The first block is named as in the original; the second is new here."""

    zone: str = setting("local", "failure zone of this broker")
    id: str = setting("", "member id, unique in its zone (empty: two random words)")
    host: str = setting("", "host to advertise (empty: the name of this machine)")
    port: str = setting("", "gRPC port, or unix:///path (empty: a free one)")
    server_cert_file: str = setting("", "certificate to serve TLS with (PEM)")
    server_cert_key_file: str = setting("", "key of that certificate (PEM)")
    server_ca_file: str = setting("", "CA that must have signed the certificates of callers (PEM)")
    peer_cert_file: str = setting("", "certificate to present to other brokers (PEM)")
    peer_cert_key_file: str = setting("", "key of that certificate (PEM)")
    peer_ca_file: str = setting("", "CA to verify other brokers with (PEM)")
    max_grpc_recv_size: int = setting(4_194_304, "largest gRPC message to accept, in bytes")
    allow_origin: tuple[str, ...] = setting(
        (), "origin whose pages may call HTTP routes; may be repeated"
    )
    limit: int = setting(
        1024, "largest number of journals (their replicas) that this broker serves"
    )
    file_root: Path | None = setting(None, "root directory of file:// stores")
    fsspec_protocols: tuple[str, ...] = setting(
        (), "protocol NAME that fsspec+NAME:// stores may use; may be repeated (empty: none)"
    )
    file_only: bool = setting(False, "use directories of file-root in place of all stores")
    max_append_rate: int = setting(0, "upper bound of any journal's append rate, bytes per second")
    max_replication: int = setting(9, "upper bound of any journal's replication")
    min_append_rate: int = setting(
        65_536, "lower bound of a client's append rate, bytes per second"
    )
    watch_delay: float = duration("30ms", "time for which changes in etcd are collected before use")
    auth_keys: str = setting(
        "", "base64 keys, comma separated: first signs, all verify", secret=True
    )
    auto_suspend: bool = setting(False, "suspend journals without appends")

    http_port: str = setting("", "HTTP port, or unix:///path (empty: the gRPC port plus one)")
    bind_host: str = setting("", "address to listen on (empty: all)")
    allow_host: tuple[str, ...] = setting(
        (), "host name, as of a proxy, at which HTTP is served without keys; may be repeated"
    )
    spool_dir: Path | None = setting(None, "directory of spool files (empty: the temporary one)")
    drain_timeout: float = duration(
        "30s", "at exit, longest wait for a hand-off when no other broker could take over"
    )
    drain_timeout_max: float = duration("6h", "at exit, longest wait for any hand-off")
    graceful_stop: float = duration("15s", "at exit, longest time for accepted calls to end")
    persist_timeout: float = duration("5m", "at exit, longest time for the last uploads")

    def settings(self, process_id: str, root: str, lease_ttl_s: float) -> BrokerSettings:
        """Return the broker's settings. Raise ``Invalid`` for a value or directory that cannot be used."""
        # The root's content belongs to stores, some of which may be there to be read only.
        check_directory("broker.file-root", self.file_root, to_write=False)
        check_directory("broker.spool-dir", self.spool_dir)
        return BrokerSettings(
            zone=self.zone,
            id=process_id,
            root=root,
            journal_limit=self.limit,
            lease_ttl_s=lease_ttl_s,
            watch_delay_s=self.watch_delay,
            max_replication=self.max_replication,
            max_append_rate=self.max_append_rate,
            min_append_rate=self.min_append_rate,
            auto_suspend=self.auto_suspend,
            spool_dir=self.spool_dir,
            file_root=self.file_root,
            file_only=self.file_only,
            fsspec_protocols=check_protocols(self.fsspec_protocols, "broker.fsspec-protocols"),
            allow_origins=self.allow_origin,
            allow_hosts=self.allow_host,
            graceful_stop_s=self.graceful_stop,
            drain_timeout_s=self.drain_timeout,
            drain_timeout_max_s=self.drain_timeout_max,
            persist_timeout_s=self.persist_timeout,
        )

    def server_settings(self, default_host: str) -> ServerSettings:
        """Return the settings of its servers. Raise ``Invalid`` for a value that cannot be used."""
        return ServerSettings(
            host=self.host or advertised_host(self.bind_host, default_host),
            port=self.port,
            http_port=self.http_port,
            bind_host=self.bind_host,
            tls=tls_files(self.server_cert_file, self.server_cert_key_file, self.server_ca_file),
            max_recv_bytes=self.max_grpc_recv_size,
            graceful_stop_s=self.graceful_stop,
        )

    def peer_tls(self) -> TlsSettings | None:
        files = (self.peer_ca_file, self.peer_cert_file, self.peer_cert_key_file)
        if not any(files):
            return None
        ca, cert, key = (Path(one) if one else None for one in files)
        return TlsSettings(ca_file=ca, cert_file=cert, key_file=key)


def tls_files(cert_file: str, key_file: str, ca_file: str) -> TlsFiles | None:
    """Return the files to serve TLS with, or None for plain text. Raise ``Invalid`` for half of a pair."""
    if bool(cert_file) != bool(key_file):
        raise Invalid(
            "give both server-cert-file and server-cert-key-file, or neither",
            path="server-cert-file",
        )
    if not cert_file:
        if ca_file:
            raise Invalid("server-ca-file needs server-cert-file", path="server-ca-file")
        return None
    return TlsFiles(cert_file, key_file, ca_file)
