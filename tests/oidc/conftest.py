"""A provider, and a verifier of its tokens whose clock stands still."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from gazette.auth import KeyedAuth
from gazette.client.oidc.verifier import OidcAuth, OidcSettings
from gazette.runtime.clock import Clock
from gazette.testing.clock import ManualClock
from tests.support.oidc_provider import Provider, SigningKey, fetched

SECRET: Final = b"s" * 32
ROLES: Final = """\
roles:
  - {role: operators, cap: [LIST, APPLY, READ, APPEND]}
  - {role: orders, cap: [LIST, READ], sel: "name:prefix=orders/"}
  - {role: sales, cap: [LIST, READ, APPEND], sel: "name in (sales/all)"}
  - {role: brokers, cap: [REPLICATE]}
"""


@pytest.fixture(scope="session")
def keys() -> list[SigningKey]:
    return [SigningKey.rsa("first"), SigningKey.ec("second"), SigningKey.rsa("third")]


@pytest.fixture
def provider(keys: list[SigningKey], clock: ManualClock) -> Iterator[Provider]:
    with Provider(clock, keys[:2]).serving() as provider:
        yield provider


@pytest.fixture
def roles(tmp_path: Path) -> Path:
    path = tmp_path / "roles.yaml"
    path.write_text(ROLES)
    return path


def auth_of(provider: Provider, roles: Path, clock: Clock, **more: str) -> OidcAuth:
    """Return a verifier that has had the time to fetch keys."""
    settings = OidcSettings(provider.issuer, "gazette", roles=roles, **more)
    auth = OidcAuth(KeyedAuth(clock, (SECRET,)), settings)
    fetched()
    return auth


@pytest.fixture
def auth(provider: Provider, roles: Path, clock: ManualClock) -> OidcAuth:
    return auth_of(provider, roles, clock)
