from __future__ import annotations

import http.server
import random
import threading
from collections.abc import Iterator
from typing import BinaryIO

import pytest

from gazette.blobs import health
from gazette.blobs.blob_store import BlobInfo
from gazette.errors import Broken, GazetteError, NotAllowed, Unavailable
from gazette.testing.clock import ManualClock
from tests.facts import raises
from tests.support.memory_store import MemoryStore


class SickStore(MemoryStore):
    """Healthy, but for one operation."""

    def __init__(self, sick: str = "", url: str = "file:///x") -> None:
        super().__init__(ManualClock().now)
        self.sick = sick
        self.url = url

    def open(self, path: str) -> BinaryIO:
        if self.sick == "open":
            raise NotAllowed("may not read")
        return super().open(path)

    def put(self, path: str, source: BinaryIO, *, content_encoding: str = "") -> None:
        if self.sick == "put":
            raise Unavailable("down", bucket="b")
        if self.sick == "change":
            source.read(1)
        super().put(path, source, content_encoding=content_encoding)

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        if self.sick == "list":
            raise NotAllowed("may not list")
        if self.sick != "forget":
            yield from super().list(prefix)

    def remove(self, path: str) -> None:
        if self.sick == "remove":
            raise NotAllowed("may not delete")
        super().remove(path)

    def sign_get(self, path: str, ttl_s: float) -> str:
        if self.sick == "sign":
            raise NotAllowed("no key")
        return self.url


@pytest.fixture
def web() -> Iterator[str]:
    """Serve what `body` says."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = {"/good": b"health-check\n", "/bad": b"<html>"}.get(self.path.split("?")[0])
            self.send_response(200 if body else 403)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("sick", "error", "text"),
    [
        ("put", Unavailable, "health check PUT failed: down (bucket=b)"),
        ("open", NotAllowed, "health check GET failed: may not read"),
        ("change", Broken, "health check content mismatch"),
        ("list", NotAllowed, "health check LIST failed: may not list"),
        ("forget", Broken, "health check LIST did not find test file"),
        ("sign", NotAllowed, "health check SignGet failed: no key"),
    ],
)
def test_the_step_that_failed_is_named(sick: str, error: type[GazetteError], text: str) -> None:
    """An operator reads what the broker may not do, with the store's own words."""
    with pytest.raises(error) as raised:
        health.check(SickStore(sick))
    assert str(raised.value).startswith(text)


def test_signed_urls_are_fetched(web: str) -> None:
    """A URL of HTTP must give the object; its signature stays out of messages."""
    health.check(SickStore(url=f"{web}/good?signature=secret"))
    with raises(Broken, says="<html>"):
        health.check(SickStore(url=f"{web}/bad?signature=secret"))
    with raises(NotAllowed, says="403") as raised:
        health.check(SickStore(url=f"{web}/missing?signature=secret"))
    assert "secret" not in str(raised.value)
    with raises(Unavailable, says="Connection refused"):
        health.check(SickStore(url="http://127.0.0.1:1/?signature=secret"))


def test_deletion_is_probed_on_demand() -> None:
    """The periodic check does not need it."""
    health.check(SickStore("remove"))
    with raises(NotAllowed, says="DELETE"):
        health.probe_delete(SickStore("remove"), "a/")
    with raises(Unavailable, bucket="b", says="PUT"):
        health.probe_delete(SickStore("put"))


def test_the_schedule_of_checks() -> None:
    """Half an hour while healthy; quickly after the first failures, then ever more seldom."""
    rng = random.Random(1)
    expected = [1800, 0, 0.1, 1, 1, 10, 10, 100, 100, 100]
    for failures, interval in enumerate(expected):
        times = [health.next_check_s(failures, rng) for _ in range(100)]
        assert all(0.8 * interval <= time <= 1.2 * interval for time in times)
        assert interval == 0 or max(times) > min(times)
