"""Manifests that kustomize and Helm render from deploy/: they fit the schemas of Kubernetes, and are equal.

`make deploy-tools` installs both programs.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gazette.client.oidc.roles import read_roles
from gazette.version import __version__
from tests.deployment import (
    APPLICATION,
    BASE,
    CONSOLE,
    DEPLOY,
    KUSTOMIZATIONS,
    ROOT,
    WORD_COUNT,
    WORKLOADS,
    manifests,
    named,
    pod,
    schema_problems,
    tool,
)

PAGE = ROOT / "docs" / "deploying.md"
CHART = DEPLOY / "helm" / "gazette"
KUBECTL, HELM = tool("kubectl"), tool("helm")
VERSIONS = ("1.30", "1.37")
"""The oldest and the newest version of Kubernetes that manifests are held to."""


def built(directory: Path) -> list[dict[str, Any]]:
    if KUBECTL is None:
        pytest.skip("without kubectl: `make deploy-tools` installs it")
    return output_of(KUBECTL, "kustomize", str(directory))


def output_of(*command: str) -> list[dict[str, Any]]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document is not None]


def problems(documents: list[dict[str, Any]]) -> list[str]:
    pytest.importorskip("kubernetes_validate", reason="without the schemas of Kubernetes")
    assert documents
    return [
        f"{version}: {problem}"
        for version in VERSIONS
        for document in documents
        for problem in schema_problems(document, version)
    ]


def test_manifests_are_valid() -> None:
    assert problems(manifests()) == []


def test_a_planted_mistake_is_found() -> None:
    deployment = named("Deployment", "application")
    pod(deployment)["terminationGracePeriod"] = 3720
    pod(deployment)["containers"][0]["ports"][0]["containerPort"] = "8080"
    found = problems([deployment])
    assert len(found) == len(VERSIONS)
    assert all(problem.startswith(tuple(VERSIONS)) for problem in found)


@pytest.mark.parametrize("directory", KUSTOMIZATIONS, ids=lambda directory: directory.name)
def test_what_kustomize_builds_is_valid_and_complete(directory: Path) -> None:
    documents = built(directory)
    assert problems(documents) == []
    assert_complete(documents)


def assert_complete(documents: list[dict[str, Any]]) -> None:
    """Require that pods find all that they name, but for secrets that an operator makes."""
    known = {(document["kind"], document["metadata"]["name"]) for document in documents}
    assert len(known) == len(documents)
    for document in documents:
        if document["kind"] not in WORKLOADS:
            continue
        spec = pod(document)
        for volume in spec.get("volumes", ()):
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in known
        names = {volume["name"] for volume in spec.get("volumes", ())}
        names |= {
            claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", ())
        }
        for container in spec["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= names
            ports = {port["name"] for port in container.get("ports", ())}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if "httpGet" in container.get(probe, ()):
                    assert container[probe]["httpGet"]["port"] in ports
        labels = document["spec"]["template"]["metadata"]["labels"]
        for constraint in spec.get("topologySpreadConstraints", ()):
            assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()
        if document["kind"] != "Job":
            selector = document["spec"]["selector"]["matchLabels"]
            assert selector.items() <= labels.items()


def test_members_find_brokers_and_both_find_etcd() -> None:
    """Addresses name Services of the same overlay, with their ports."""
    documents = built(WORD_COUNT)
    services = {
        f"{document['metadata']['name']}:{port['port']}"
        for document in documents
        if document["kind"] == "Service"
        for port in document["spec"]["ports"]
    }
    seen = set()
    for document in documents:
        if document["kind"] in WORKLOADS:
            for container in pod(document)["containers"]:
                for entry in container.get("env", ()):
                    if entry["name"].endswith("_ADDRESS"):
                        seen.add(entry["name"])
                        for address in entry["value"].split(","):
                            host = address.removeprefix("http://").rpartition(".")[2]
                            assert host in services, address
    assert seen == {"BROKER_ADDRESS", "CONSUMER_ADDRESS", "ETCD_ADDRESS"}


def test_a_second_application_is_another_one(tmp_path: Path) -> None:
    """As docs/deploying.md says: another prefix of names, other labels of its pods, and its own image."""
    overlay = tmp_path / "kustomize" / "orders"
    overlay.mkdir(parents=True)
    shutil.copytree(APPLICATION, tmp_path / "kustomize" / "application")
    (block,) = (
        block
        for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "namePrefix" in block
    )
    (overlay / "kustomization.yaml").write_text(block)
    documents = built(overlay)
    assert problems(documents) == []
    assert_complete(documents)
    (deployment,) = (one for one in documents if one["kind"] == "Deployment")
    (service,) = (one for one in documents if one["kind"] == "Service")
    (budget,) = (one for one in documents if one["kind"] == "PodDisruptionBudget")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in (service["spec"]["selector"], budget["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()
        other = named("Deployment", "application")["spec"]["template"]["metadata"]["labels"]
        assert not selector.items() <= other.items()
    for constraint in pod(deployment)["topologySpreadConstraints"]:
        assert "app.kubernetes.io/instance" in constraint["labelSelector"]["matchLabels"]
    (container,) = pod(deployment)["containers"]
    assert container["image"] == "registry.example/orders:1.4"


def rendered(*settings: str) -> list[dict[str, Any]]:
    if HELM is None:
        pytest.skip("without helm: `make deploy-tools` installs it")
    flags = [word for setting in settings for word in ("--set-json", setting)]
    return output_of(HELM, "template", "gazette", str(CHART), "--no-hooks", *flags)


def comparable(document: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest without the labels and names that only one of both tools gives."""
    text = json.dumps(document)
    for directory in (BASE, APPLICATION):
        for name in re.findall(
            r"name: (\S+-zonemap)\n", (directory / "kustomization.yaml").read_text()
        ):
            text = re.sub(rf"{name}-[a-z0-9]+", name, text)
    plain: dict[str, Any] = json.loads(text)
    plain["metadata"].pop("labels", None)
    template = plain.get("spec", {}).get("template", {}).get("metadata", {})
    template.get("annotations", {}).pop("checksum/zone", None)
    if plain["kind"] == "ConfigMap":
        lines = plain["data"]["node-zone.sh"].splitlines()
        plain["data"]["node-zone.sh"] = [line for line in lines if line[:1] != "#"]
    return plain


def by_name(documents: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    plain = [comparable(document) for document in documents]
    return {(document["kind"], document["metadata"]["name"]): document for document in plain}


def test_the_chart_is_what_the_bases_are() -> None:
    chart = by_name(rendered("console.enabled=true"))
    bases = by_name(built(BASE)) | by_name(built(APPLICATION)) | by_name(built(CONSOLE))
    assert sorted(chart) == sorted(bases)
    for key, document in bases.items():
        assert chart[key] == document


def test_the_chart_is_valid_and_complete() -> None:
    documents = rendered("console.enabled=true")
    assert problems(documents) == []
    assert_complete(documents)
    assert HELM is not None
    done = subprocess.run(
        [HELM, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__


def test_the_command_of_the_page_installs_the_chart() -> None:
    if HELM is None:
        pytest.skip("without helm: `make deploy-tools` installs it")
    (command,) = re.findall(
        r"^    helm upgrade --install (.*?)\n\n",
        PAGE.read_text().replace("\\\n", " "),
        re.MULTILINE | re.DOTALL,
    )
    words = [word.replace("deploy/", f"{DEPLOY}/") for word in shlex.split(command)]
    documents = output_of(HELM, "template", *words)
    assert problems(documents) == []
    (apply,) = pod(named("Job", "application-declarations", documents))["containers"]
    assert apply["image"] == "registry.example/orders:1.4"
    assert apply["command"][-2:] == ["--store=s3://bucket/prefix/", "--replication=3"]


def test_values_change_what_they_name() -> None:
    documents = rendered(
        "etcd.enabled=false",
        'etcd.address="https://etcd.example:2379"',
        "brokers.enabled=false",
        'brokers.address="http://gazette.brokers:8080"',
        'application.name="orders"',
        'application.image="registry.example/orders:1.4"',
        'application.program="python -m orders"',
        "application.replicas=5",
        'application.env=[{"name": "CONSUMER_LIMIT", "value": "64"}]',
        'imagePullSecrets=[{"name": "registry"}]',
        'application.scratch={"ephemeral": {"volumeClaimTemplate": {"spec": {"accessModes":'
        ' ["ReadWriteOnce"], "resources": {"requests": {"storage": "100Gi"}}}}}}',
    )
    assert problems(documents) == []
    assert_complete(documents)
    assert {document["metadata"]["name"] for document in documents} == {"orders", "orders-zonemap"}
    deployment = named("Deployment", "orders", documents)
    assert deployment["spec"]["replicas"] == 5
    spec = pod(deployment)
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    (container,) = spec["containers"]
    assert container["image"] == "registry.example/orders:1.4"
    assert container["command"][-1].endswith("exec python -m orders serve")
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert env["BROKER_ADDRESS"] == "http://gazette.brokers:8080"
    assert env["ETCD_ADDRESS"] == "https://etcd.example:2379"
    assert env["CONSUMER_LIMIT"] == "64"
    (scratch,) = (volume for volume in spec["volumes"] if volume["name"] == "scratch")
    assert "ephemeral" in scratch


def test_the_console_of_another_application() -> None:
    documents = rendered(
        "brokers.enabled=false",
        'brokers.address="http://gazette.brokers:8080"',
        'application.name="orders"',
        'application.authSecret="orders-auth"',
        "console.enabled=true",
        'console.name="orders-console"',
        'console.keySecret="orders-key"',
    )
    assert problems(documents) == []
    (container,) = pod(named("Deployment", "orders-console", documents))["containers"]
    env = {entry["name"]: entry for entry in container["env"]}
    assert env["BROKER_ADDRESS"]["value"] == "http://gazette.brokers:8080"
    assert env["CONSUMER_ADDRESS"]["value"] == "http://orders:8080"
    secrets = {
        name: entry["valueFrom"]["secretKeyRef"]["name"]
        for name, entry in env.items()
        if "valueFrom" in entry
    }
    assert secrets == {
        "GAZETTE_UI_KEY": "orders-key",
        "BROKER_AUTH_KEYS": "gazette-auth",
        "CONSUMER_AUTH_KEYS": "orders-auth",
    }


def test_values_of_a_provider(tmp_path: Path) -> None:
    """Brokers and members have the settings and a file of roles that they can read."""
    provider = ('oidc.issuer="https://login.example/"', 'oidc.audience="gazette"')
    roles = '[{"role": "a", "cap": ["READ", 65536], "sel": "%s"}]'
    brokers, members = roles % "name:prefix=a/", roles % "id:prefix=a-"
    documents = rendered(
        *provider, f"oidc.brokerRoles={brokers}", f"oidc.applicationRoles={members}"
    )
    assert problems(documents) == []
    assert_complete(documents)
    for name, prefix in (("gazette", "BROKER"), ("application", "CONSUMER")):
        spec = pod(named("Deployment", name, documents))
        (container,) = spec["containers"]
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert env[f"{prefix}_OIDC_ISSUER"] == "https://login.example/"
        assert env[f"{prefix}_OIDC_AUDIENCE"] == "gazette"
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert env[f"{prefix}_OIDC_ROLES"] == f"{mounts['roles']}/roles.yaml"
        (volume,) = (volume for volume in spec["volumes"] if volume["name"] == "roles")
        data = named("ConfigMap", volume["configMap"]["name"], documents)["data"]
        path = tmp_path / "roles.yaml"
        path.write_text(data["roles.yaml"])
        (role,) = read_roles(path)
        assert (role.name, role.capability) == ("a", 65536 | 8)
    # Case: without rows, there are no such settings.
    text = json.dumps(rendered(*provider, f"oidc.brokerRoles={brokers}"))
    assert ("BROKER_OIDC_ISSUER" in text, "CONSUMER_OIDC_ISSUER" in text) == (True, False)


def test_the_chart_applies_what_the_application_declares(tmp_path: Path) -> None:
    """The arguments arrive as they are, although the program is words of a shell."""
    if HELM is None:
        pytest.skip("without helm: `make deploy-tools` installs it")
    store = "s3://b/p/?endpoint=http://minio:9000&profile=a b"
    stores, flags = json.dumps([store]), json.dumps(["--replication=3"])
    given = f'application.declarations={{"stores": {stores}, "flags": {flags}}}'
    template = [HELM, "template", "gazette", str(CHART), "--set-json"]
    documents = output_of(*template, given, "--show-only", "templates/declarations.yaml")
    assert problems(documents) == []
    (job,) = documents
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "post-install,post-upgrade"
    (container,) = pod(job)["containers"]
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    said = subprocess.run(
        container["command"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.splitlines() == ["app.py", "apply", f"--store={store}", "--replication=3"]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("application.replica=2", "replica"),
        ("etcd.enabled=false", "give etcd.address"),
        ("brokers.enabled=false", "give brokers.address"),
        ('application.authSecret=""', "authSecret"),
    ],
)
def test_values_that_cannot_be_are_refused(setting: str, reason: str) -> None:
    if HELM is None:
        pytest.skip("without helm: `make deploy-tools` installs it")
    done = subprocess.run(
        [HELM, "template", "gazette", str(CHART), "--set-json", setting],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert reason in done.stderr
