"""A real Chromium, driven by Debian's ``chromium-driver`` over its own protocol: no package is needed."""

from __future__ import annotations

import shutil
import subprocess
from types import TracebackType
from typing import Any, Final, Self

import httpx

from gazette.errors import Unavailable
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port

_FLAGS: Final = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_POLL_S: Final = 0.05
_START_S: Final = 20.0
_SEEN_S: Final = 30.0
CLOCK: Final = SystemClock()


def missing_browser() -> str:
    """Return the packages that are missing; empty if all are there."""
    programs = {"chromium": "chromium", "chromedriver": "chromium-driver"}
    return " ".join(package for name, package in programs.items() if shutil.which(name) is None)


class Browser:
    """A browser with one window. Use as ``async with``."""

    def __init__(self) -> None:
        port = free_port()
        self._process = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0)
        self._session = ""

    async def __aenter__(self) -> Self:
        options = {"args": [*_FLAGS, "--window-size=1280,900"]}
        always = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        deadline = CLOCK.monotonic() + _START_S
        while True:
            try:
                await self._http.get("/status")
            except httpx.TransportError:
                if CLOCK.monotonic() > deadline:
                    raise
                await CLOCK.sleep(_POLL_S)
            else:
                break
        made = await self._post("/session", {"capabilities": {"alwaysMatch": always}})
        self._session = f"/session/{made['sessionId']}"
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        await self._http.delete(self._session)
        await self._http.aclose()
        self._process.terminate()
        self._process.wait()

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = await self._http.post(path, json=body)
        value = answer.json()["value"]
        if answer.status_code != 200:
            raise Unavailable(f"chromedriver: {value['message'][:500]}")
        return value

    async def open(self, url: str) -> None:
        await self._post(f"{self._session}/url", {"url": url})

    async def narrow(self, width: int) -> None:
        """Show the page as on a phone of that many pixels."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 2, "mobile": True}
        body = {"cmd": "Emulation.setDeviceMetricsOverride", "params": size}
        await self._post(f"{self._session}/goog/cdp/execute", body)

    async def prefer(self, scheme: str) -> None:
        """Have the user prefer a colour scheme, ``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        body = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": [feature]}}
        await self._post(f"{self._session}/goog/cdp/execute", body)

    async def run(self, script: str, *arguments: object) -> Any:
        """Run the body of a function of JavaScript on the page, and return its result."""
        return await self._post(
            f"{self._session}/execute/sync", {"script": script, "args": list(arguments)}
        )

    async def text(self) -> str:
        """Return the text of the page as a reader sees it."""
        return str(await self.run("return document.body.innerText"))

    async def until_seen(self, *words: str) -> str:
        """Wait until the page shows all words. Return its text; raise ``Unavailable`` after some seconds."""
        deadline = CLOCK.monotonic() + _SEEN_S
        while True:
            text = await self.text()
            missing = [word for word in words if word not in text]
            if not missing:
                return text
            if CLOCK.monotonic() > deadline:
                raise Unavailable(f"the page does not show {missing}:\n{text[:3000]}")
            await CLOCK.sleep(_POLL_S)

    async def click(self, selector: str, text: str = "") -> None:
        """Press the first element of a selector that has a text."""
        script = """
            const all = [...document.querySelectorAll(arguments[0])];
            const one = all.find((element) => element.textContent.includes(arguments[1]));
            if (one) one.dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true }));
            return Boolean(one);
        """
        assert await self.run(script, selector, text), (selector, text)

    async def problems(self) -> list[str]:
        """Return what the browser logged since the last call: errors of scripts, and refused loads."""
        entries = await self._post(f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]
