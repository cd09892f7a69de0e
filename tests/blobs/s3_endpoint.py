"""An S3 endpoint for tests: a real one over HTTP, and a proxy before it that makes it fail."""

from __future__ import annotations

import http.client
import http.server
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

BUCKET = "the-bucket"
REGION = "eu-west-1"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent/config",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent/credentials",
}
_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive", "expect"}


@dataclass
class Fault:
    """What becomes of the next ``times`` requests of ``method`` (any: ``""``) with ``part`` in them.

    With ``status``, they are answered so and the store is not asked. With ``truncate``, the
    connection breaks after that many bytes of the body of the response. With ``hold``, there is no
    answer until the test is over.
    """

    method: str = ""
    part: str = ""
    times: int = 1
    status: int = 0
    code: str = ""
    truncate: int | None = None
    hold: bool = False
    trickle: int = 0
    """The body comes in pieces of this size."""
    chunked: bool = False
    """The response does not say how long it is."""
    without: str = ""
    """A header of the request that is not passed on."""
    action: Callable[[], object] | None = None
    """Called before the store is asked."""


@dataclass
class Seen:
    """A request as the store received it."""

    method: str
    path: str
    headers: dict[str, str]
    length: int


class FaultProxy:
    """Passes HTTP on to ``target`` (host and port), but for what ``faults`` say. ``seen`` has it all."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._one_by_one = threading.Lock()
        """The store behind is not made for threads that use one object."""
        self._released = threading.Event()
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.received = 0
        """Bytes of bodies of requests."""
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.port = self._server.server_port
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def fail(self, method: str = "", part: str = "", **fault: Any) -> Fault:
        fault_ = Fault(method, part, **fault)
        with self._lock:
            self.faults.append(fault_)
        return fault_

    def heal(self) -> None:
        with self._lock:
            self.faults.clear()

    def count(self, method: str, part: str = "") -> int:
        return sum(one.method == method and part in one.path for one in self.seen)

    def take(self, seen: Seen) -> Fault | None:
        with self._lock:
            self.seen.append(seen)
            self.received += seen.length
            for fault in self.faults:
                if (
                    fault.times > 0
                    and fault.method in ("", seen.method)
                    and fault.part in seen.path
                ):
                    fault.times -= 1
                    return fault
        return None

    def forward(self, seen: Seen, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(*self._target, timeout=20)
        self._one_by_one.acquire()
        try:
            connection.request(seen.method, seen.path, body=body, headers=seen.headers)
            response = connection.getresponse()
            content = response.read()
            headers = [(k, v) for k, v in response.getheaders() if k.lower() not in _HOP]
            length = response.getheader("Content-Length")
            if seen.method == "HEAD" and response.status == 200 and length is not None:
                headers.append(("Content-Length", length))
            return response.status, headers, content
        finally:
            self._one_by_one.release()
            connection.close()

    def wait_released(self) -> None:
        self._released.wait(30)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: FaultProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 30

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:
            self.close_connection = True  # As S3 does: half a body is no object.
            return
        seen = Seen(self.command, self.path, dict(self.headers.items()), length)
        fault = self.owner.take(seen) or Fault(times=0)
        if fault.hold:
            self.owner.wait_released()
            self.close_connection = True
            return
        if fault.without:
            seen.headers = {k: v for k, v in seen.headers.items() if k != fault.without}
        if fault.action is not None:
            fault.action()
        if fault.status:
            text = f"<Error><Code>{fault.code}</Code><Message>injected</Message></Error>"
            content = b"" if self.command == "HEAD" or not fault.code else text.encode()
            status, headers = fault.status, [("Content-Type", "application/xml")]
        else:
            status, headers, content = self.owner.forward(seen, body)
        try:
            self._respond(status, headers, content, fault)
        except OSError:
            self.close_connection = True

    def _respond(
        self, status: int, headers: list[tuple[str, str]], content: bytes, fault: Fault
    ) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if fault.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif self.command != "HEAD" or status >= 400:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault.truncate is not None:
            content = content[: fault.truncate]
            self.close_connection = True
        size = fault.trickle or max(1, len(content))
        for begin in range(0, len(content), size):
            piece = content[begin : begin + size]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if fault.chunked else piece)
        if fault.chunked and fault.truncate is None:
            self.wfile.write(b"0\r\n\r\n")


@contextmanager
def s3_server() -> Iterator[tuple[str, int]]:
    """Serve a store that speaks S3, with one bucket, at a host and port."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server(
        "127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True
    )
    thread = threading.Thread(target=server.serve_forever, name="s3")
    thread.start()
    yield "127.0.0.1", server.port
    server.shutdown()
    thread.join()
    server.server_close()


def reset(target: tuple[str, int]) -> None:
    """Empty the store, but for its one bucket."""
    connection = http.client.HTTPConnection(*target, timeout=20)
    connection.request("POST", "/moto-api/reset")
    connection.getresponse().read()
    # A signature says which of the services is meant, and is not checked.
    scope = f"Credential=AKIAEXAMPLE/20240101/{REGION}/s3/aws4_request"
    headers = {"Authorization": f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host, Signature=0"}
    place = f"<LocationConstraint>{REGION}</LocationConstraint>"
    body = f"<CreateBucketConfiguration>{place}</CreateBucketConfiguration>"
    connection.request("PUT", f"/{BUCKET}", body=body, headers=headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.read()
    connection.close()


def store_url(endpoint: str, path: str = "/pre/fix/", **arguments: str) -> str:
    """Return the URL of a store in the bucket."""
    query = {"Endpoint": endpoint, "Region": REGION, **arguments}
    pairs = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
    return f"s3://{BUCKET}{path}?{pairs}"
