"""The files of deploy/, as tests read them, and the programs that check them."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import yaml

ROOT: Final = Path(__file__).parents[1]
DEPLOY: Final = ROOT / "deploy"
IMAGE: Final = (DEPLOY / "Dockerfile").read_text()
COMPOSE: Final = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUSTOMIZE: Final = DEPLOY / "kustomize"
BASE: Final = KUSTOMIZE / "base"
APPLICATION: Final = KUSTOMIZE / "application"
CONSOLE: Final = KUSTOMIZE / "console"
MINIO: Final = KUSTOMIZE / "overlays" / "minio"
WORD_COUNT: Final = KUSTOMIZE / "overlays" / "word-count"
KUSTOMIZATIONS: Final = (BASE, APPLICATION, CONSOLE, MINIO, WORD_COUNT)
SYSTEMD: Final = DEPLOY / "systemd"
IMAGES: Final = ("gazette", "gazette-application")
"""The images that are built here."""
WORKLOADS: Final = ("Deployment", "StatefulSet", "Job")


def documents(*paths: Path) -> list[dict[str, Any]]:
    return [document for path in paths for document in yaml.safe_load_all(path.read_text())]


def manifests() -> list[dict[str, Any]]:
    """Return what the kustomizations have, as it is in their files."""
    paths = [path for directory in KUSTOMIZATIONS for path in sorted(directory.glob("*.yaml"))]
    return [
        document
        for document in documents(*paths)
        if document.get("kind", "Kustomization") != "Kustomization"
    ]


def named(kind: str, name: str, among: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return the manifest of this kind and name. Fail unless there is exactly one."""
    (manifest,) = (
        manifest
        for manifest in (manifests() if among is None else among)
        if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name)
    )
    return manifest


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def image_environment() -> dict[str, str]:
    """Return the settings of ours that the image has."""
    return dict(re.findall(r"\b((?:BROKER|CONSUMER|ETCD|LOG|DEBUG)_[A-Z_]+)=(\S+)", IMAGE))


@dataclass(frozen=True, slots=True)
class Unit:
    """A service of systemd."""

    lines: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, path: Path, instance: str = "") -> Self:
        """Read a unit, for an instance if it is a template."""
        text = path.read_text().replace("\\\n", " ").replace("%i", instance)
        return cls(tuple(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)))

    def values(self, key: str) -> list[str]:
        return [value for name, value in self.lines if name == key]

    def value(self, key: str) -> str:
        (value,) = self.values(key)
        return value

    @property
    def environment(self) -> dict[str, str]:
        words = [word for line in self.values("Environment") for word in line.split()]
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    @property
    def command(self) -> str:
        return self.value("ExecStart")


def tool(name: str) -> str | None:
    """Return the path of a program: beside this Python, where `make deploy-tools` puts it, or on PATH."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def schema_problems(manifest: dict[str, Any], version: str) -> list[str]:
    """Return what the schemas of this version of Kubernetes do not permit in a manifest."""
    validate = importlib.import_module("kubernetes_validate")
    try:
        validate.validate(manifest, version, strict=True)
    except validate.ValidationError as error:
        where = ".".join(map(str, error.path))
        return [f"{manifest['kind']} {manifest['metadata']['name']}, {where}: {error.message}"]
    return []
