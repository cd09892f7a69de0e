"""Settings of clients: how a program reaches brokers and consumers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gazette.config.schema import Schema, duration, setting

if TYPE_CHECKING:
    from gazette.auth import Signer
    from gazette.client.client import Client
    from gazette.client.rpc.channel import TlsSettings
    from gazette.client.shards import ShardClient
    from gazette.runtime.clock import Clock

# Methods import the classes that they make: a program may read its settings only to print them.


@dataclass(frozen=True, slots=True)
class ClientFlags:
    """Settings of every group of a client."""

    address: str = setting(
        "http://localhost:8080",
        "endpoint of a member or of a balancer; or several, separated by commas, of which "
        "one that answers is used",
    )
    cert_file: str = setting("", "certificate to present to servers (PEM)")
    cert_key_file: str = setting("", "key of that certificate (PEM)")
    trusted_ca_file: str = setting("", "certificates to verify servers with (PEM)")
    auth_keys: str = setting("", "base64 keys to sign tokens with", secret=True)
    auth_token: str = setting("", "token to present as it is", secret=True)
    auth_token_file: str = setting(
        "", "file with the token to present; it is read again when it changes", secret=True
    )
    cache_size: int = setting(
        1024,
        "number of routes to remember; 0 sends every call to the address",
        name="cache.size",
        ini="Size",
    )
    cache_ttl: float = duration(
        "1m", "time for which a route is remembered", name="cache.ttl", ini="TTL"
    )

    def tls(self) -> TlsSettings | None:
        from gazette.client.rpc.channel import TlsSettings

        return TlsSettings.of(self.trusted_ca_file, self.cert_file, self.cert_key_file)

    def signer(self, clock: Clock) -> Signer:
        """Return a signer from the first of these settings that is given: token, file of a token, keys.
        Raise ``Invalid`` for malformed keys, and for a file without a token."""
        from gazette.auth import KeyedAuth, NoAuth, StaticToken

        if self.auth_token:
            return StaticToken(self.auth_token)
        if self.auth_token_file:
            from gazette.client.oidc.token_file import TokenFile

            return TokenFile(Path(self.auth_token_file), clock)
        return KeyedAuth.parse(clock, self.auth_keys) if self.auth_keys else NoAuth()


@dataclass(frozen=True, slots=True)
class BrokerClientFlags(ClientFlags):
    """Group ``broker``: how to reach the brokers."""

    file_root: Path | None = setting(
        None, "directory of file:// stores, to read fragments without a broker"
    )
    fsspec_protocols: tuple[str, ...] = setting(
        (), "protocol of fsspec+NAME:// stores to open here; may be repeated (empty: none)"
    )

    def client(self, zone: str, clock: Clock) -> Client:
        """Return a client of the brokers. Call this on the event loop. Raise ``Invalid`` for a wrong flag."""
        from gazette.client.client import Client
        from gazette.client.read.fragment_reader import FragmentAccess

        return Client(
            self.address,
            zone=zone,
            tls=self.tls(),
            signer=self.signer(clock),
            route_cache_size=self.cache_size,
            route_ttl_s=self.cache_ttl,
            fragments=FragmentAccess(file_root=self.file_root),
            clock=clock,
        )


def broker_flags_of(environ: Mapping[str, str], address: str = "") -> BrokerClientFlags:
    """Return the settings in the environment (``BROKER_ADDRESS``, …). An ``address`` that is not empty
    replaces the environment's address. Raise ``Invalid`` with the name of a wrong variable.
    """
    loaded = Schema("client", {"broker": BrokerClientFlags}).load([], environ)
    flags = loaded.group(BrokerClientFlags)
    return replace(flags, address=address) if address else flags


@dataclass(frozen=True, slots=True)
class ConsumerClientFlags(ClientFlags):
    """Group ``consumer``, of programs that are not members: how to reach the members of a consumer."""

    def client(self, zone: str, clock: Clock) -> ShardClient:
        """Return a client of the consumers, on the event loop. Raise ``Invalid`` for a wrong flag."""
        from gazette.client.shards import ShardClient

        return ShardClient(
            self.address,
            zone=zone,
            tls=self.tls(),
            signer=self.signer(clock),
            route_cache_size=self.cache_size,
            route_ttl_s=self.cache_ttl,
            clock=clock,
        )
