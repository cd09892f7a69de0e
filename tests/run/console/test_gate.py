"""The port of the console gives nothing to callers without its key."""

from __future__ import annotations

import re
from pathlib import Path

import httpx

from gazette.run.console.gate import SECRET_HEADER
from gazette.run.console.server import STATIC
from gazette.testing.broker import BrokerFixture
from tests.run.console.conftest import KEY, Console, Page, enter

BYTES_MAX = 300 << 10


async def test_nothing_is_answered_without_the_key(console: Console, broker: BrokerFixture) -> None:
    async with console(f"--broker.address={broker.endpoint}", entered=False) as page:
        for path in (
            "/",
            "/static/main.js",
            "/api/session",
            "/api/cluster",
            "/?key=wrong",
            "/?key=",
        ):
            answer = await page.http.get(path)
            assert answer.status_code in (401, 403), path
            assert "console" in answer.text
        assert (await page.http.get("/debug/ready")).text == "ready\n"

        entered = await enter(page.http, f"/?key={KEY}")
        cookie = entered.headers["set-cookie"]
        assert KEY not in cookie
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert (await page.http.get("/")).status_code == 200
        assert (await page("session"))["addresses"] == {"broker": broker.endpoint}
        # A server at another port of this host gets the cookie, but not the secret.
        for headers in ({SECRET_HEADER: ""}, {SECRET_HEADER: "wrong"}):
            assert (await page.http.get("/api/session", headers=headers)).status_code == 401


async def test_pages_of_other_origins_and_names_are_refused(page: Page) -> None:
    """Cases: DNS rebinding, another port of this host, a form of another page."""
    rebound = await page.http.get("/api/session", headers={"Host": "evil.example"})
    assert rebound.status_code == 403
    other_port = {"Sec-Fetch-Site": "same-site"}
    assert (await page.http.get("/api/session", headers=other_port)).status_code == 403
    posted = await page.http.post(
        "/api/suspend", json={}, headers={"Origin": "http://evil.example"}
    )
    assert posted.status_code == 403
    # Changes are not offered unless the operator allows them.
    assert (await page.http.post("/api/suspend", json={"name": "a"})).status_code == 404


async def test_every_answer_has_the_headers_that_stop_scripts(page: Page) -> None:
    for path in ("/", "/static/main.js", "/api/session", "/api/none", "/static/none"):
        headers = (await page.http.get(path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


async def test_arguments_and_bodies_that_make_no_sense_are_sentences(
    console: Console, broker: BrokerFixture
) -> None:
    async with console(f"--broker.address={broker.endpoint}", "--allow-changes") as page:
        assert "twice" in (await page.http.get("/api/journals?page=1&page=2")).json()["error"]
        assert "page" in await page.error("journals", page="x")
        assert "no such answer" in await page.error("nothing")

        async def sent(body: bytes, kind: str = "application/json") -> httpx.Response:
            headers = {"Content-Type": kind}
            return await page.http.post("/api/suspend", content=body, headers=headers)

        assert (await sent(b"{}", "text/plain")).status_code == 415
        assert "not JSON" in (await sent(b"{")).json()["error"]
        assert "object of texts" in (await sent(b'{"name": 1}')).json()["error"]


def test_the_page_is_small_and_takes_nothing_from_elsewhere() -> None:
    files = {path.name: path.read_text() for path in STATIC.iterdir()}
    assert sum(len(text.encode()) for text in files.values()) < BYTES_MAX
    for name, text in files.items():
        others = set(re.findall(r"https?://[^\s\"'`]+", text))
        assert others <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text
        ), name
        assert not re.search(r"\bstyle=|\bonclick=|<script>|<style>", text), name


def test_the_first_view_asks_for_all_modules_at_once() -> None:
    preloaded = re.findall(
        r"modulepreload\" href=\"/static/([\w.]+)", (STATIC / "index.html").read_text()
    )
    modules = {path.name for path in STATIC.glob("*.js")} - {"enter.js", "main.js"}
    assert (set(preloaded), len(preloaded)) == (modules, len(modules))


def test_the_wheel_has_the_files_of_the_page() -> None:
    """Everything below ``gazette/`` is in the wheel, unless Git ignores it."""
    root = Path(__file__).parents[3]
    assert root in STATIC.parents
    assert {"index.html", "style.css", "main.js"} <= {path.name for path in STATIC.iterdir()}
