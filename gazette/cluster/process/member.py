"""Settings that the processes of a cluster share: brokers, and members that run an application."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gazette.auth import KeyedAuth, MemberAuth, NoAuth
from gazette.client.rpc.channel import TlsSettings
from gazette.config.schema import duration, setting
from gazette.errors import Invalid
from gazette.http2.connection import STREAMS_MAX
from gazette.http2.frames import WINDOW_MAX
from gazette.net.http_server import TlsFiles
from gazette.net.server import ServerSettings, advertised_host
from gazette.runtime.clock import Clock


@dataclass(frozen=True, slots=True)
class ProcessFlags:
    """Flags without a group."""

    workers: int = setting(
        1, "processes to run, each a member with its own id and ports", env="GAZETTE_WORKERS"
    )


@dataclass(frozen=True, slots=True)
class MemberFlags:
    """Settings of the groups ``broker`` and ``consumer``: the identity of the process, and its ports."""

    zone: str = setting("local", "failure zone of this process")
    id: str = setting("", "member id, unique in its zone (empty: two random words)")
    host: str = setting("", "host to advertise (empty: the name of this machine)")
    port: str = setting("", "gRPC port, or unix:///path (empty: a free one)")
    http_port: str = setting("", "HTTP port, or unix:///path (empty: the gRPC port plus one)")
    bind_host: str = setting("", "address to listen on (empty: all)")
    allow_host: tuple[str, ...] = setting(
        (), "host name, as of a proxy, at which HTTP is served without keys; may be repeated"
    )
    allow_origin: tuple[str, ...] = setting(
        (), "origin whose pages may call HTTP routes; may be repeated"
    )
    server_cert_file: str = setting("", "certificate to serve TLS with (PEM)")
    server_cert_key_file: str = setting("", "key of that certificate (PEM)")
    server_ca_file: str = setting("", "CA that must have signed the certificates of callers (PEM)")
    peer_cert_file: str = setting("", "certificate to present to other members (PEM)")
    peer_cert_key_file: str = setting("", "key of that certificate (PEM)")
    peer_ca_file: str = setting("", "CA to verify other members with (PEM)")
    auth_keys: str = setting(
        "", "base64 keys, comma separated: first signs, all verify", secret=True
    )
    oidc_issuer: str = setting(
        "", "OpenID Connect provider (https://…) whose tokens are accepted too"
    )
    oidc_audience: str = setting("", "audience (aud) that tokens of the provider must name")
    oidc_claim: str = setting("groups", "claim of these tokens that has the roles of a caller")
    oidc_roles: Path | None = setting(None, "file that says what each role permits (YAML)")
    oidc_jwks_url: str = setting("", "URL of the provider's keys (empty: the provider says it)")
    max_grpc_recv_size: int = setting(4_194_304, "largest gRPC message to accept, in bytes")
    max_streams: int = setting(
        0,
        "largest number of calls that one connection may have open (0: 2,000; of a broker, 2,000 more"
        " than limit)",
    )
    watch_delay: float = duration("30ms", "time for which changes in etcd are collected before use")
    graceful_stop: float = duration("15s", "at exit, longest time for accepted calls to end")

    def server_settings(self, default_host: str) -> ServerSettings:
        """Return the settings of the process's servers. Raise ``Invalid`` for a value that cannot be used."""
        if not 0 <= self.max_streams <= WINDOW_MAX:
            raise Invalid(
                f"the number must not be negative, and at most {WINDOW_MAX}: got {self.max_streams}",
                path="max-streams",
            )
        return ServerSettings(
            host=self.host or advertised_host(self.bind_host, default_host),
            port=self.port,
            http_port=self.http_port,
            bind_host=self.bind_host,
            tls=self._tls_files(),
            max_recv_bytes=self.max_grpc_recv_size,
            graceful_stop_s=self.graceful_stop,
            streams_max=self.max_streams or STREAMS_MAX,
        )

    def auth(self, clock: Clock) -> MemberAuth:
        """Return the object that signs and verifies calls. Raise ``Invalid`` for unusable settings."""
        if not self.auth_keys:
            if self.oidc_issuer:
                raise Invalid(
                    "it needs auth-keys too: members sign calls to each other by them",
                    path="oidc-issuer",
                )
            return NoAuth()
        keys = KeyedAuth.parse(clock, self.auth_keys)
        if not self.oidc_issuer:
            return keys
        from gazette.client.oidc.verifier import OidcAuth, OidcSettings

        names = (self.oidc_issuer, self.oidc_audience, self.oidc_claim, self.oidc_jwks_url)
        return OidcAuth(keys, OidcSettings(*names, roles=self.oidc_roles))

    def peer_tls(self) -> TlsSettings | None:
        return TlsSettings.of(self.peer_ca_file, self.peer_cert_file, self.peer_cert_key_file)

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


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """The settings that brokers share with members that run an application. Times are in seconds."""

    zone: str = "local"
    id: str = "local-member"
    root: str = "/gazette/cluster"
    """etcd prefix of the cluster, without a trailing slash."""
    lease_ttl_s: float = 20.0
    watch_delay_s: float = 0.03
    """Seconds for which etcd changes are collected before they are applied as one."""
    allow_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    """Host names at which HTTP is served without keys, besides the advertised one."""
    graceful_stop_s: float = 15.0
    """Seconds that accepted calls may take to end once the member stops."""
    drain_timeout_s: float = 10.0
    """Seconds to wait for a hand-off when no other member could take over."""
    drain_timeout_max_s: float = 3_600.0
    """Seconds to wait for a hand-off to members that could take over."""
