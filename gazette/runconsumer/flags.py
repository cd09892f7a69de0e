"""Settings of a consumer process: its flags, and the settings of its parts that they give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gazette.client.rpc.channel import TlsSettings
from gazette.config.groups import check_directory
from gazette.config.schema import duration, setting
from gazette.consumer.settings import ConsumerSettings
from gazette.errors import Invalid
from gazette.net.http_server import TlsFiles
from gazette.net.server import ServerSettings, advertised_host


@dataclass(frozen=True, slots=True)
class ProcessFlags:
    """Flags without a group."""

    workers: int = setting(
        1, "processes to run, each a member with its own id and ports", env="GAZETTE_WORKERS"
    )


@dataclass(frozen=True, slots=True)
class ConsumerFlags:
    """Group ``consumer``. The first block is named as in the original; the second is ours."""

    zone: str = setting("local", "failure zone of this process")
    id: str = setting("", "member id, unique in its zone (empty: two random words)")
    host: str = setting("", "host to advertise (empty: the name of this machine)")
    port: str = setting("", "gRPC port, or unix:///path (empty: a free one)")
    server_cert_file: str = setting("", "certificate to serve TLS with (PEM)")
    server_cert_key_file: str = setting("", "key of that certificate (PEM)")
    server_ca_file: str = setting("", "CA that must have signed the certificates of callers (PEM)")
    peer_cert_file: str = setting("", "certificate to present to other members (PEM)")
    peer_cert_key_file: str = setting("", "key of that certificate (PEM)")
    peer_ca_file: str = setting("", "CA to verify other members with (PEM)")
    max_grpc_recv_size: int = setting(4_194_304, "largest gRPC message to accept, in bytes")
    allow_origin: tuple[str, ...] = setting(
        (), "origin whose pages may call HTTP routes; may be repeated"
    )
    limit: int = setting(32, "largest number of shards (their replicas) that this process serves")
    max_hot_standbys: int = setting(3, "largest number of hot standbys of a shard")
    watch_delay: float = duration("30ms", "time for which changes in etcd are collected before use")
    auth_keys: str = setting(
        "", "base64 keys, comma separated: first signs, all verify", secret=True
    )

    http_port: str = setting("", "HTTP port, or unix:///path (empty: the gRPC port plus one)")
    bind_host: str = setting("", "address to listen on (empty: all)")
    allow_host: tuple[str, ...] = setting(
        (), "host name, as of a proxy, at which HTTP is served without keys; may be repeated"
    )
    scratch_dir: Path | None = setting(
        None, "directory of shards' files while they run (empty: the temporary directory)"
    )
    application: str = setting(
        "", "name of the application in etcd and in its states (empty: that of its class)"
    )
    adopt_from: str = setting(
        "", "former name of the application; its etcd prefix and states are taken over"
    )
    hint_prefix: tuple[str, ...] = setting(
        (),
        "etcd prefix below which hints of shards are written; may be repeated (empty: "
        "/gazette/hints, and hints below the prefix of the members)",
    )
    hints_interval: float = duration("5m", "interval at which recovery hints are stored")
    stall_timeout: float = duration("60s", "time without bytes after which play-back fails")
    max_restarts: int = setting(
        0, "number of restarts of a failed shard within ten minutes, unless its label says"
    )
    append_memory: int = setting(
        256 << 20, "bytes of memory for pending appends; more goes to files"
    )
    query_timeout: float = duration("60s", "longest time that a query waits for a shard's primary")
    drain_timeout: float = duration(
        "10s", "at exit, longest wait for a hand-off when no other member could take over"
    )
    drain_timeout_max: float = duration("1h", "at exit, longest wait for any hand-off")
    graceful_stop: float = duration("15s", "at exit, longest time for accepted calls to end")

    def settings(self, process_id: str, root: str, lease_ttl_s: float) -> ConsumerSettings:
        """Return the member's settings. Raise ``Invalid``."""
        check_directory("consumer.scratch-dir", self.scratch_dir)
        return ConsumerSettings(
            zone=self.zone,
            id=process_id,
            root=root,
            application=self.application,
            adopt_from=self.adopt_from,
            shard_limit=self.limit,
            max_hot_standbys=self.max_hot_standbys,
            lease_ttl_s=lease_ttl_s,
            watch_delay_s=self.watch_delay,
            allow_origins=self.allow_origin,
            allow_hosts=self.allow_host,
            scratch_directory=self.scratch_dir,
            hint_prefixes=self.hint_prefix,
            hints_interval_s=self.hints_interval,
            stall_timeout_s=self.stall_timeout,
            max_restarts=self.max_restarts,
            append_memory_bytes=self.append_memory,
            query_timeout_s=self.query_timeout,
            graceful_stop_s=self.graceful_stop,
            drain_timeout_s=self.drain_timeout,
            drain_timeout_max_s=self.drain_timeout_max,
        )

    def server_settings(self, default_host: str) -> ServerSettings:
        """Return the server's settings. Raise ``Invalid``."""
        return ServerSettings(
            host=self.host or advertised_host(self.bind_host, default_host),
            port=self.port,
            http_port=self.http_port,
            bind_host=self.bind_host,
            tls=self._tls_files(),
            max_recv_bytes=self.max_grpc_recv_size,
            graceful_stop_s=self.graceful_stop,
        )

    def _tls_files(self) -> TlsFiles | None:
        if bool(self.server_cert_file) != bool(self.server_cert_key_file):
            raise Invalid(
                "give both server-cert-file and server-cert-key-file, or neither",
                path="server-cert-file",
            )
        if not self.server_cert_file:
            if self.server_ca_file:
                raise Invalid("server-ca-file needs server-cert-file", path="server-ca-file")
            return None
        return TlsFiles(self.server_cert_file, self.server_cert_key_file, self.server_ca_file)

    def peer_tls(self) -> TlsSettings | None:
        files = (self.peer_ca_file, self.peer_cert_file, self.peer_cert_key_file)
        if not any(files):
            return None
        ca, cert, key = (Path(one) if one else None for one in files)
        return TlsSettings(ca_file=ca, cert_file=cert, key_file=key)
