"""A real Prometheus with the rules of ``deploy/monitoring``, on a minute of a second."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx
import yaml

from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port

MONITORING: Final = Path(__file__).parents[2] / "deploy" / "monitoring"
DOCS: Final = "https://docs.example"
SETTINGS: Final = {"gazette:broker_limit": 2, "gazette:recovery_horizon_max_bytes": 100}
_INTERVAL: Final = "500ms"
_POLL_S: Final = 0.2
_LOOPBACK: Final = "127.0.0.1"


def quickened(rules: str) -> str:
    """Return rules whose durations are a sixtieth, with ``SETTINGS``."""
    parsed = yaml.safe_load(rules)
    for rule in (rule for group in parsed["groups"] for rule in group["rules"]):
        for field in {"expr", "for"} & rule.keys():
            rule[field] = re.sub(
                r"\b(\d+)([mh])\b",
                lambda match: match[1] + {"m": "s", "h": "m"}[match[2]],
                rule[field],
            )
        if rule.get("record") in SETTINGS:
            rule["expr"] = f"vector({SETTINGS[rule['record']]})"
    return yaml.safe_dump(parsed)


class Prometheus:
    """Prometheus with exporters, as ``deploy/monitoring/prometheus.yaml`` configures it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._address = f"{_LOOPBACK}:{free_port()}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._clock = SystemClock()

    def __enter__(self) -> Self:
        config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
        config["global"] |= {"scrape_interval": _INTERVAL, "evaluation_interval": _INTERVAL}
        config["global"]["external_labels"]["gazette_docs"] = DOCS
        addresses = {
            "blackbox-exporter:9115": f"{_LOOPBACK}:{free_port()}",
            "node-exporter:9100": f"{_LOOPBACK}:{free_port()}",
        }
        text = yaml.safe_dump(config)
        for name, address in addresses.items():
            assert name in text
            text = text.replace(name, address)
        self._write("prometheus.yaml", text)
        self._write("alerts.yaml", quickened((MONITORING / "alerts.yaml").read_text()))
        self._write("blackbox.yaml", yaml.safe_dump({"modules": {"http_2xx": {"prober": "http"}}}))
        self.scrape()
        blackbox, node = addresses.values()
        self._start("prometheus-blackbox-exporter", "--config.file=blackbox.yaml", blackbox)
        self._start("prometheus-node-exporter", "--collector.disable-defaults", node)
        self._start("prometheus", "--config.file=prometheus.yaml", self._address)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            process.wait(60)

    def scrape(
        self,
        brokers: Sequence[str] = (),
        applications: Sequence[str] = (),
        spark: Sequence[str] = (),
    ) -> None:
        """Have these members and drivers scraped from now on, and no others. All are URLs of HTTP ports."""
        files = {"brokers.yaml": brokers, "applications.yaml": applications, "spark.yaml": spark}
        for name, urls in files.items():
            targets = [url.removeprefix("http://") for url in urls]
            self._write(name, yaml.safe_dump([{"targets": targets}] if targets else []))

    async def scraped(self, url: str, times: int = 3) -> None:
        """Wait until a member was scraped some times."""
        target = url.removeprefix("http://")
        while not await self.query(
            f'sum_over_time(up{{job=~"gazette-(brokers|applications)", instance="{target}"}}[1m]) >= {times}'
        ):
            await self._clock.sleep(_POLL_S)

    async def fires(self, name: str, **labels: str) -> dict[str, str]:
        """Wait until the alert fires with these labels. Return its annotations."""
        while not (alerts := await self._firing(name, labels)):
            await self._clock.sleep(_POLL_S)
        annotations: dict[str, str] = alerts[0]["annotations"]
        return annotations

    async def ends(self, name: str, **labels: str) -> None:
        """Wait until no such alert has fired for a second in which each scrape succeeded.

        A scrape that fails ends alerts, too.
        """
        silent = 0
        while silent < 1 / _POLL_S:
            missed = await self.query("up == 0")
            silent = 0 if missed or await self._firing(name, labels) else silent + 1
            await self._clock.sleep(_POLL_S)

    async def is_silent(self, name: str, **labels: str) -> bool:
        """Return True if no such alert fires."""
        return not await self._firing(name, labels)

    async def query(self, expression: str) -> list[Any]:
        """Return the samples of an expression, as of now."""
        data = await self._get("query", query=expression)
        samples: list[Any] = data["result"]
        return samples

    async def _firing(self, name: str, labels: dict[str, str]) -> list[dict[str, Any]]:
        wanted = {"alertname": name, **labels}.items()
        return [
            alert
            for alert in (await self._get("alerts"))["alerts"]
            if alert["state"] == "firing" and wanted <= alert["labels"].items()
        ]

    async def _get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer, also of a Prometheus that has just started."""
        async with httpx.AsyncClient(base_url=f"http://{self._address}") as http:
            while True:
                assert all(process.poll() is None for process in self._processes)
                try:
                    answer = await http.get(f"/api/v1/{path}", params=parameters, timeout=30)
                except httpx.ConnectError:
                    await self._clock.sleep(_POLL_S)
                    continue
                if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    assert answer.status_code == httpx.codes.OK, answer.text
                    return answer.json()["data"]
                await self._clock.sleep(_POLL_S)

    def _start(self, program: str, option: str, address: str) -> None:
        path = shutil.which(program)
        assert path is not None, program
        options = [option, f"--web.listen-address={address}"]
        if program == "prometheus":
            options += ["--storage.tsdb.path=data", "--log.level=warn"]
        elif "node" in program:
            options += ["--collector.filesystem"]
        else:
            options += ["--timeout-offset=0.1"]  # The default is as long as a scrape may take here.
        with (self._directory / f"{program}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [path, *options], cwd=self._directory, stdout=log, stderr=subprocess.STDOUT
                )
            )

    def _write(self, name: str, text: str) -> None:
        """Replace a file in one step: Prometheus watches some of them."""
        new = self._directory / f"{name}.new"
        new.write_text(text)
        new.rename(self._directory / name)
