"""deploy/: files that parse, that name settings which exist, and that fit together.

Nothing is started here: see `test_deploy_processes.py` and `test_deploy_image.py`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from first_application import WordCount
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gazette.broker.flags import BrokerFlags
from gazette.broker.main import schema
from gazette.broker.settings import BrokerSettings
from gazette.client.flags import BrokerClientFlags
from gazette.cluster.process.cluster_member import CANCEL_S
from gazette.cluster.process.member import MemberFlags
from gazette.config.schema import Schema
from gazette.consumer.settings import ConsumerSettings
from gazette.gazctl.commands import COMMANDS
from gazette.gazctl.journals.apply import parse_changes
from gazette.gazctl.settings import GROUPS, schema_of
from gazette.net.diagnostics import diagnostic_routes
from gazette.run.console.command import UiFlags
from gazette.run.console.gate import READY_PATH
from gazette.run.dev.console_process import KEY_ENV
from gazette.run.new_project import write_project
from gazette.runconsumer.flags import ConsumerFlags, MemberClientFlags, SpecsApplyFlags
from gazette.runconsumer.process import schema as member_schema
from tests.deployment import (
    APPLICATION,
    BASE,
    COMPOSE,
    DEPLOY,
    IMAGE,
    IMAGES,
    KUSTOMIZATIONS,
    MINIO,
    ROOT,
    SYSTEMD,
    WORKLOADS,
    Unit,
    documents,
    image_environment,
    manifests,
    named,
    pod,
)

JOURNALS = [DEPLOY / "journals.yaml", MINIO / "journals.yaml"]

OURS = ("BROKER_", "CONSUMER_", "ETCD_", "LOG_", "DEBUG_", "GAZETTE_", "GAZCTL_")
SERVE_ENVIRONMENT = {option.env for option in schema().options}
GAZCTL_ENVIRONMENT = {option.env for command in COMMANDS for option in schema_of(command).options}
MEMBER = member_schema(WordCount(), "app.py serve")
APPLY = Schema(
    "app.py apply",
    {"": SpecsApplyFlags, "broker": BrokerClientFlags, "consumer": MemberClientFlags},
)
UI = Schema("gazette ui", {"": UiFlags, **GROUPS})
ENVIRONMENTS = {
    "gazette serve": SERVE_ENVIRONMENT,
    "gazette ui": {option.env for option in UI.options} | {KEY_ENV},
    "gazctl": GAZCTL_ENVIRONMENT,
    "app.py serve": {option.env for option in MEMBER.options},
    "app.py apply": {option.env for option in APPLY.options},
}
FLAGS = {option.flag for parsed in (schema(), MEMBER, APPLY, UI) for option in parsed.options} | {
    option.flag for command in COMMANDS for option in schema_of(command).options
}


def environments() -> Iterator[tuple[str, set[str], str]]:
    """Yield (where, names of ours, command line) of everything that runs an image of ours."""
    for name, service in COMPOSE["services"].items():
        if service.get("image") == "gazette":
            words = service.get("entrypoint", ["gazette"]) + service.get("command", [])
            line = shlex.join(words if len(words) > 1 else ["gazette", "serve"])
            yield f"compose {name}", set(service.get("environment", {})), line
    for manifest in manifests():
        if manifest["kind"] in WORKLOADS:
            for container in pod(manifest)["containers"]:
                if container["image"] in IMAGES:
                    names = {entry["name"] for entry in container.get("env", ())}
                    yield manifest["metadata"]["name"], names, " ".join(container["command"])
    for path in sorted(SYSTEMD.glob("gazette-[!e]*.service")):
        unit = Unit.read(path, "1")
        yield path.name, set(unit.environment), unit.command


def test_settings_are_those_that_programs_have() -> None:
    seen: dict[str, int] = {}
    for where, names, command in environments():
        (program,) = (program for program in ENVIRONMENTS if program in command)
        ours = {name for name in names if name.startswith(OURS)}
        assert ours <= ENVIRONMENTS[program], where
        seen[program] = seen.get(program, 0) + len(ours)
        assert set(re.findall(r"--[a-z.-]+", command)) <= FLAGS, where
    assert {program: count > 3 for program, count in seen.items()} == {
        "gazette serve": True,
        "gazette ui": True,
        "gazctl": False,
        "app.py serve": True,
        "app.py apply": True,
    }
    names = {*image_environment()}
    assert names
    assert names <= SERVE_ENVIRONMENT | ENVIRONMENTS["app.py serve"]
    # What comments advise is there, too.
    advised = 0
    for path in sorted(DEPLOY.rglob("*")):
        if path.suffix in (".yaml", ".service", ".tpl"):
            for flag in re.findall(r"--(?:broker|consumer)\.[a-z-]*[a-z]", path.read_text()):
                assert flag in FLAGS, (path, flag)
                advised += 1
    assert advised > 5


def test_the_effective_settings_of_brokers_and_members_can_be_loaded() -> None:
    seen = 0
    for name, service in COMPOSE["services"].items():
        environment = image_environment() | service.get("environment", {})
        if name.startswith("broker-"):
            flags: MemberFlags = schema().load([], environment).group(BrokerFlags)
        elif name.startswith("application-"):
            flags = MEMBER.load([], environment).group(ConsumerFlags)
            # The program alone would listen on loopback.
            assert flags.bind_host == "0.0.0.0"
        else:
            continue
        assert (flags.id, flags.port, flags.http_port) == (name, "8080", "8081")
        assert flags.zone.startswith("zone-")
        seen += 1
    assert seen == 5


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_journals_are_valid(path: Path) -> None:
    changes = parse_changes(path.read_text())
    assert [change.upsert.name for change in changes if change.upsert] == ["examples/events"]
    # Applying them again, at the next start, is no conflict.
    assert all(change.expect_mod_revision == -1 for change in changes)


def test_both_sets_of_journals_are_the_same() -> None:
    one, two = (documents(path) for path in JOURNALS)
    assert one == two


def test_members_are_given_the_time_that_they_take_to_leave() -> None:
    """The grace period covers the drain, the calls, the replicas or shards, and the last uploads."""
    broker, member = BrokerSettings(), ConsumerSettings()
    afterwards = {
        "gazette": 2 * broker.graceful_stop_s + broker.persist_timeout_s,
        # The shards get twice the time of calls. Tasks and appends are cancelled after them.
        "application": 3 * member.graceful_stop_s + 2 * CANCEL_S,
    }
    longest = {
        "gazette": broker.drain_timeout_max_s + afterwards["gazette"],
        "application": member.drain_timeout_max_s + afterwards["application"],
    }
    for name, seconds in longest.items():
        spec = pod(named("Deployment", name))
        assert spec["terminationGracePeriodSeconds"] >= seconds, name
        unit = Unit.read(SYSTEMD / f"gazette-{name.replace('gazette', 'broker')}@.service", "1")
        assert int(unit.value("TimeoutStopSec")) >= seconds, name
    for name, service in COMPOSE["services"].items():
        if name.startswith(("broker-", "application-")):
            minutes = int(re.fullmatch(r"(\d+)m", service["stop_grace_period"])[1])  # type: ignore[index]
            role, alone = (
                ("gazette", broker.drain_timeout_s)
                if name.startswith("broker-")
                else ("application", member.drain_timeout_s)
            )
            assert minutes * 60 >= alone + afterwards[role], name


def test_keys_are_required_and_ports_are_not_published() -> None:
    """Without the secrets of keys no pod starts; a development machine publishes to itself only."""
    seen: dict[str, int] = {}
    for manifest in manifests():
        if manifest["kind"] in WORKLOADS:
            for container in pod(manifest)["containers"]:
                for entry in container.get("env", ()):
                    secret = entry.get("valueFrom", {}).get("secretKeyRef", {})
                    if secret.get("key") == "keys":
                        assert not secret.get("optional"), manifest["metadata"]["name"]
                        keys = f"{entry['name']} {secret['name']}"
                        seen[keys] = seen.get(keys, 0) + 1
    assert seen == {"BROKER_AUTH_KEYS gazette-auth": 5, "CONSUMER_AUTH_KEYS application-auth": 3}
    for name, service in COMPOSE["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name


@pytest.mark.parametrize(
    ("name", "group", "files"),
    [("gazette", "BROKER", "SPOOL"), ("application", "CONSUMER", "SCRATCH")],
)
def test_probes_and_ports_are_of_the_http_server(name: str, group: str, files: str) -> None:
    (container,) = pod(named("Deployment", name))["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    assert ports == {"grpc": env[f"{group}_PORT"], "http": env[f"{group}_HTTP_PORT"]}
    assert container["readinessProbe"]["httpGet"] == {"path": "/debug/ready", "port": "http"}
    served = {route.path for route in diagnostic_routes(str)}
    # Not ready is no reason to be killed: a member that drains is not.
    for probe in ("livenessProbe", "startupProbe"):
        assert container[probe]["httpGet"]["port"] == "http"
        assert container[probe]["httpGet"]["path"] in served - {"/debug/ready"}
    service = named("Service", name)
    assert {port["name"]: str(port["port"]) for port in service["spec"]["ports"]} == ports
    template = named("Deployment", name)["spec"]["template"]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == ports["http"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert env[f"{group}_{files}_DIR"] in mounts.values()
    # The image has the same, so its health check is right for both.
    own = image_environment()
    assert [own[f"{group}_{key}"] for key in ("PORT", "HTTP_PORT", f"{files}_DIR")] == [
        env[f"{group}_{key}"] for key in ("PORT", "HTTP_PORT", f"{files}_DIR")
    ]
    assert f"http://127.0.0.1:{ports['http']}/debug/ready" in IMAGE


def test_the_console_is_reached_by_those_that_forward_ports() -> None:
    """In a pod it listens on loopback, and has no Service: its probes run there."""
    (container,) = pod(named("Deployment", "console"))["containers"]
    flags = UI.load(container["command"][2:], {}).group(UiFlags)
    assert (flags.host, flags.allow_changes) == ("127.0.0.1", False)
    assert [port["containerPort"] for port in container["ports"]] == [flags.port]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert [str(flags.scratch_dir)] == mounts
    for probe in ("readinessProbe", "livenessProbe"):
        (line,) = container[probe]["exec"]["command"][2:]
        assert f"'http://127.0.0.1:{flags.port}{READY_PATH}'" in line
    assert not [one for one in manifests() if one["kind"] == "Service" and "console" in str(one)]


def test_members_know_their_zone() -> None:
    """It is the label of the node, where pods get it, and what the script says otherwise."""
    scripts = [directory / "node-zone.sh" for directory in (BASE, APPLICATION)]
    assert scripts[0].read_text() == scripts[1].read_text()
    for name, variable in (("gazette", "BROKER_ZONE"), ("application", "CONSUMER_ZONE")):
        spec = pod(named("Deployment", name))
        (container,) = spec["containers"]
        fields = {
            entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"]
            for entry in container["env"]
            if "fieldRef" in entry.get("valueFrom", {})
        }
        (key, _) = (one["topologyKey"] for one in spec["topologySpreadConstraints"])
        assert fields["NODE_ZONE"] == f"metadata.labels['{key}']"
        assert fields["NODE_NAME"] == "spec.nodeName"
        shell, option, line = container["command"]
        line = line.replace("/zonemap", str(BASE))
        line = re.sub(r"exec .*", f"sh -c 'echo \"${variable}\"'", line)
        for zone, expected in (("eu-1a", "eu-1a"), ("", "local")):
            said = subprocess.run(
                [shell, option, line],
                env={**os.environ, "NODE_NAME": "node-1", "NODE_ZONE": zone},
                capture_output=True,
                text=True,
                check=True,
            )
            assert said.stdout == f"{expected}\n"


def test_the_application_is_that_of_new_projects(tmp_path: Path) -> None:
    write_project(tmp_path / "word-count")
    written = (tmp_path / "word-count" / "app.py").read_text()
    assert (DEPLOY / "application" / "app.py").read_text() == written


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
    for name in ("gazette", "application", "etcd"):
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
    for name in ("gazette", "application"):
        (container,) = pod(named("Deployment", name))["containers"]
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        addresses = env["ETCD_ADDRESS"].split(",")
        assert addresses == [f"http://etcd-{n}.etcd:2379" for n in range(count)]


def test_the_page_names_files_units_and_flags_that_exist() -> None:
    page = (ROOT / "docs" / "deploying.md").read_text()
    paths = set(re.findall(r"\bdeploy/[\w./-]*\w", page))
    own = {"deploy/kustomize/orders", "deploy/kustomize/orders/kustomization.yaml"}
    assert own < paths
    assert [path for path in paths - own if not (ROOT / path).exists()] == []
    units = set(re.findall(r"gazette-[a-z]+@|gazette-etcd|gazette\.target", page))
    assert units == {path.name.removesuffix(".service") for path in SYSTEMD.iterdir()}
    assert set(re.findall(r"--(?:broker|consumer)\.[a-z-]*[a-z]", page)) <= FLAGS
    named_there = set(re.findall(r"\b(?:BROKER|CONSUMER|ETCD)_[A-Z_]+", page))
    assert named_there <= set().union(*ENVIRONMENTS.values())


def test_what_kustomizations_name_exists() -> None:
    for directory in KUSTOMIZATIONS:
        (kustomization,) = documents(directory / "kustomization.yaml")
        for resource in kustomization["resources"]:
            assert (directory / resource).exists(), resource
        for generator in kustomization.get("configMapGenerator", ()):
            for file in generator["files"]:
                assert (directory / file).exists(), file


def test_the_image_is_small_rootless_and_has_what_it_copies() -> None:
    text = IMAGE
    assert text.count("\nFROM ") == 2
    (user,) = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert user not in ("0", "root")
    for name in ("gazette", "application"):
        assert pod(named("Deployment", name))["securityContext"]["runAsUser"] == int(user)
    assert "\nHEALTHCHECK " in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    for group in re.findall(r'"\.\[([\w,]+)\]"', text):
        assert set(group.split(",")) <= set(extras)
    ignored = (ROOT / ".dockerignore").read_text()
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
        for source in line.split()
    }
    # All that the wheels are made of.
    assert {*wheel["packages"], "packages"} <= copied
    for source in wheel["force-include"]:
        assert source.partition("/")[0] in copied
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


def is_ours(service: dict[str, Any]) -> bool:
    return service.get("image") == "gazette"


def test_services_that_others_wait_for_exist() -> None:
    services = COMPOSE["services"]
    for name, service in services.items():
        waits = service.get("depends_on", {})
        for other in waits:
            assert other in services, (name, other)
            healthy = isinstance(waits, dict) and waits[other]["condition"] == "service_healthy"
            # Ours have a check in the image, unless they disable it.
            check = services[other].get("healthcheck", {"disable": not is_ours(services[other])})
            assert not healthy or not check.get("disable"), (name, other)
        # Compose builds the image before it starts what waits for a service that builds it.
        if is_ours(service) and "build" not in service:
            assert any("build" in services[other] for other in waits), name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).exists(), volume
