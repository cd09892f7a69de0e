"""deploy/: files that parse, that name settings which exist, and that fit together.

Images are not built and nothing is started here.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gazette.broker.flags import BrokerFlags
from gazette.broker.main import schema
from gazette.broker.settings import BrokerSettings
from gazette.gazctl.commands import COMMANDS, schema_of
from gazette.gazctl.journals.apply import parse_changes

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
BASE = DEPLOY / "kustomize" / "base"
MINIO = DEPLOY / "kustomize" / "overlays" / "minio"
JOURNALS = [DEPLOY / "journals.yaml", MINIO / "journals.yaml"]

OURS = ("BROKER_", "CONSUMER_", "ETCD_", "LOG_", "DEBUG_", "GAZETTE_", "GAZCTL_")
SERVE_ENVIRONMENT = {option.env for option in schema().options}
GAZCTL_ENVIRONMENT = {option.env for command in COMMANDS for option in schema_of(command).options}


def documents(*paths: Path) -> list[dict[str, Any]]:
    return [one for path in paths for one in yaml.safe_load_all(path.read_text())]


def manifests() -> list[dict[str, Any]]:
    found = documents(*sorted(BASE.glob("*.yaml")), *sorted(MINIO.glob("*.yaml")))
    return [one for one in found if one.get("kind", "Kustomization") != "Kustomization"]


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = (
        one for one in manifests() if one["kind"] == kind and one["metadata"]["name"] == name
    )
    return found


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = workload["spec"]["template"]["spec"]
    return found


def environments() -> Iterator[tuple[str, set[str], str]]:
    """Yield (where, names of ours, command line) of everything that runs our image."""
    for name, service in COMPOSE["services"].items():
        if service.get("image") == "gazette":
            words = service.get("entrypoint", ["gazette", "serve"])
            yield f"compose {name}", set(service.get("environment", {})), shlex.join(words)
    for one in manifests():
        if one["kind"] not in ("Deployment", "StatefulSet", "Job"):
            continue
        for container in pod(one)["containers"]:
            if container["image"] == "gazette":
                names = {entry["name"] for entry in container.get("env", ())}
                yield one["metadata"]["name"], names, " ".join(container["command"])


def test_settings_are_those_that_programs_have() -> None:
    seen = 0
    for where, names, command in environments():
        known = GAZCTL_ENVIRONMENT if "gazctl" in command else SERVE_ENVIRONMENT
        ours = {name for name in names if name.startswith(OURS)}
        assert ours <= known, where
        seen += len(ours)
        flags = {option.flag for option in schema().options}
        flags |= {option.flag for one in COMMANDS for option in schema_of(one).options}
        assert set(re.findall(r"--[a-z.-]+", command)) <= flags, where
    assert seen > 15
    image = (DEPLOY / "Dockerfile").read_text()
    named = re.findall(r"\b((?:BROKER|ETCD|LOG|DEBUG)_[A-Z_]+)=", image)
    assert named
    assert set(named) <= SERVE_ENVIRONMENT
    # What comments advise is there, too.
    for path in (DEPLOY / "compose.yaml", BASE / "broker.yaml"):
        for flag in re.findall(r"--broker\.[a-z-]*[a-z]", path.read_text()):
            assert flag in {option.flag for option in schema().options}, flag


def test_the_effective_settings_of_every_broker_can_be_loaded() -> None:
    image = dict(
        re.findall(r"\b(BROKER_[A-Z_]+|LOG_[A-Z]+)=(\S+)", (DEPLOY / "Dockerfile").read_text())
    )
    for name, service in COMPOSE["services"].items():
        if name.startswith("broker-"):
            loaded = schema().load([], image | service["environment"])
            flags = loaded.group(BrokerFlags)
            assert (flags.id, flags.port, flags.http_port) == (name, "8080", "8081")
            assert flags.zone.startswith("zone-")


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_journals_are_valid(path: Path) -> None:
    changes = parse_changes(path.read_text())
    assert [change.upsert.name for change in changes if change.upsert] == ["examples/events"]
    # Applying them again, at the next start, is no conflict.
    assert all(change.expect_mod_revision == -1 for change in changes)


def test_both_sets_of_journals_are_the_same() -> None:
    one, two = (documents(path) for path in JOURNALS)
    assert one == two


def test_brokers_are_given_the_time_that_they_take_to_leave() -> None:
    """The grace period covers the drain, the calls, the replicas and the last uploads."""
    spec = pod(named("Deployment", "gazette"))
    settings = BrokerSettings()
    longest = (
        settings.drain_timeout_max_s + 2 * settings.graceful_stop_s + settings.persist_timeout_s
    )
    assert spec["terminationGracePeriodSeconds"] >= longest
    for name, service in COMPOSE["services"].items():
        if name.startswith("broker-"):
            minutes = int(re.fullmatch(r"(\d+)m", service["stop_grace_period"])[1])  # type: ignore[index]
            alone = 2 * settings.graceful_stop_s + settings.persist_timeout_s
            assert minutes * 60 >= alone + settings.drain_timeout_s


def test_keys_are_required_and_ports_are_not_published() -> None:
    """Without the secret of keys no pod starts; a development machine publishes to itself only."""
    seen = 0
    for one in manifests():
        if one["kind"] in ("Deployment", "StatefulSet", "Job"):
            for container in pod(one)["containers"]:
                for entry in container.get("env", ()):
                    secret = entry.get("valueFrom", {}).get("secretKeyRef", {})
                    if secret.get("name") == "gazette-auth":
                        assert not secret.get("optional"), one["metadata"]["name"]
                        seen += 1
    assert seen == 2
    for name, service in COMPOSE["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name


def test_probes_and_ports_are_of_the_http_server() -> None:
    (broker,) = pod(named("Deployment", "gazette"))["containers"]
    env = {entry["name"]: entry.get("value") for entry in broker["env"]}
    ports = {port["name"]: str(port["containerPort"]) for port in broker["ports"]}
    assert ports == {"grpc": env["BROKER_PORT"], "http": env["BROKER_HTTP_PORT"]}
    assert broker["readinessProbe"]["httpGet"] == {"path": "/debug/ready", "port": "http"}
    # Not ready is no reason to be killed: a broker that drains is not.
    for probe in ("livenessProbe", "startupProbe"):
        assert broker[probe]["httpGet"]["path"] != "/debug/ready"
    service = named("Service", "gazette")
    assert {port["name"]: str(port["port"]) for port in service["spec"]["ports"]} == ports
    mounts = {mount["name"]: mount["mountPath"] for mount in broker["volumeMounts"]}
    assert mounts["spools"] == env["BROKER_SPOOL_DIR"]
    image = (DEPLOY / "Dockerfile").read_text()
    assert f"http://127.0.0.1:{ports['http']}/debug/ready" in image


def test_selectors_select_what_is_there() -> None:
    labels = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"]
        for one in manifests()
        if one["kind"] in ("Deployment", "StatefulSet")
    }
    for one in manifests():
        if one["kind"] in ("Service", "PodDisruptionBudget"):
            selector = one["spec"]["selector"].get("matchLabels", one["spec"]["selector"])
            assert selector.items() <= labels[one["metadata"]["name"]].items()
    for name in ("gazette", "etcd"):
        assert named("PodDisruptionBudget", name)["spec"]["maxUnavailable"] == 1


def test_etcd_members_know_each_other() -> None:
    etcd = named("StatefulSet", "etcd")
    (container,) = pod(etcd)["containers"]
    (cluster,) = (
        word.partition("=")[2]
        for word in container["command"]
        if word.startswith("--initial-cluster=")
    )
    count = etcd["spec"]["replicas"]
    assert cluster == ",".join(f"etcd-{n}=http://etcd-{n}.etcd:2380" for n in range(count))
    (broker,) = pod(named("Deployment", "gazette"))["containers"]
    (address,) = (one["value"] for one in broker["env"] if one["name"] == "ETCD_ADDRESS")
    assert address.split(",") == [f"http://etcd-{n}.etcd:2379" for n in range(count)]


def test_what_kustomizations_name_exists() -> None:
    for directory in (BASE, MINIO):
        (kustomization,) = documents(directory / "kustomization.yaml")
        for resource in kustomization["resources"]:
            assert (directory / resource).exists(), resource
        for generator in kustomization.get("configMapGenerator", ()):
            for file in generator["files"]:
                assert (directory / file).exists(), file


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="without kubectl")
def test_kustomize_builds_them() -> None:
    for directory in (BASE, MINIO):
        built = subprocess.run(
            ["kubectl", "kustomize", str(directory)], capture_output=True, check=True
        )
        kinds = {one["kind"] for one in yaml.safe_load_all(built.stdout)}
        assert {"Deployment", "StatefulSet", "Service", "PodDisruptionBudget"} <= kinds


def test_the_image_is_small_rootless_and_has_what_it_copies() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert text.count("\nFROM ") == 2
    (user,) = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert user not in ("0", "root")
    assert pod(named("Deployment", "gazette"))["securityContext"]["runAsUser"] == int(user)
    assert "\nHEALTHCHECK " in text
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for group in re.findall(r'"\.\[([\w,]+)\]"', text):
        assert set(group.split(",")) <= set(extras)
    ignored = (ROOT / ".dockerignore").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists(), source
            assert f"!{source}\n" in ignored, source


@pytest.mark.parametrize(
    ("path", "extra", "command"),
    [("constraints.txt", "dev", ".ci/run"), ("deploy/constraints.txt", "s3", "deploy/Dockerfile")],
)
def test_what_is_installed_is_pinned_by_hashes(path: str, extra: str, command: str) -> None:
    """Each requirement has a pin that it permits, each pin has hashes; `make constraints` writes them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / path).read_text()
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
    entries = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
    assert len(entries) == len(re.findall(r"^\S+==", text, re.MULTILINE))
    assert all("--hash=sha256:" in one for one in entries)
    wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
    wanted += (DEPLOY / "build.in").read_text().splitlines()[1:]
    for one in map(Requirement, wanted):
        version = pins[canonicalize_name(one.name)]
        assert one.specifier.contains(version), f"{one}: {version} (run `make constraints`)"
    assert ("LOCKED=1" if command == ".ci/run" else "--require-hashes -r constraints.txt") in (
        ROOT / command
    ).read_text()


def test_services_that_others_wait_for_exist() -> None:
    services = COMPOSE["services"]
    for name, service in services.items():
        waits = service.get("depends_on", {})
        for other in waits:
            assert other in services, (name, other)
            healthy = isinstance(waits, dict) and waits[other]["condition"] == "service_healthy"
            # Ours have a check in the image.
            assert not healthy or "healthcheck" in services[other] or "build" in services[other]
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).exists(), volume
