"""Fixtures of the tests of blob stores: an S3 endpoint, and what makes it fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.blobs.s3_endpoint import CREDENTIALS, FaultProxy, reset, s3_server


@pytest.fixture(scope="session")
def s3_target() -> Iterator[tuple[str, int]]:
    with s3_server() as target:
        yield target


@pytest.fixture
def s3_proxy(s3_target: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Yield the endpoint, with one empty bucket. Credentials for it are in the environment."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    reset(s3_target)
    with FaultProxy(s3_target) as proxy:
        yield proxy
