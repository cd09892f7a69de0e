"""The other end of a connection, in the terms of gRPC. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_SECURITY: Final = "transport_security_type"
_NAME: Final = "x509_common_name"
_NAMES: Final = "x509_subject_alternative_name"


@dataclass(frozen=True, slots=True)
class Peer:
    """A caller's address, and the properties of its certificate."""

    address: str = "unknown:"
    properties: Mapping[str, list[bytes]] = field(default_factory=dict)

    @property
    def identity_key(self) -> str | None:
        """Name of the property that identifies the caller; None if no certificate was verified."""
        return next((name for name in (_NAMES, _NAME) if self.properties.get(name)), None)


UNKNOWN: Final = Peer()


def peer_of(extra_info: Callable[[str], Any]) -> Peer:
    """Return the peer of an asyncio transport, from its ``get_extra_info``."""
    tls = extra_info("ssl_object")
    address = _address(extra_info("peername"))
    return Peer(address, {} if tls is None else _properties(tls.getpeercert() or {}))


def _address(name: Any) -> str:
    if not isinstance(name, tuple):
        return "unix:"
    host, port = name[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _properties(certificate: Mapping[str, Any]) -> dict[str, list[bytes]]:
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    properties = {
        _SECURITY: [b"ssl"],
        _NAME: [text.encode() for name, text in subject if name == "commonName"],
        _NAMES: [text.encode() for _, text in certificate.get("subjectAltName", ())],
    }
    return {name: values for name, values in properties.items() if values}
