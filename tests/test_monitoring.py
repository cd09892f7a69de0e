"""deploy/monitoring: rules and dashboards name metrics that exist, and each rule is on the page."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from gazette.runtime.metrics import render
from tests.test_docs import anchors
from tools import dashboards

ROOT = Path(__file__).parents[1]
MONITORING = ROOT / "deploy" / "monitoring"
RULES = [
    rule
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDS = {rule["record"]: rule for rule in RULES if "record" in rule}
CONFIG = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())

KINDS = ("Counter", "Gauge", "Histogram", "PlainCounter", "GaugeMetricFamily")
TARGET = {"job", "instance"}
"""Labels that Prometheus gives to each series that it scrapes."""
OTHERS = {
    "up": set[str](),
    "ALERTS": {"alertname", "alertstate"},
    "probe_success": set[str](),
    "node_filesystem_avail_bytes": {"mountpoint"},
    "node_filesystem_size_bytes": {"mountpoint"},
    **{
        f"spark_streaming_{name}": {"query"}
        for name in (
            *("inputRate_total", "processingRate_total", "latency"),
            *("states_rowsTotal", "states_usedBytes"),
        )
    },
    **{
        f"metrics_executor_{name}": {"executor_id"}
        for name in (
            *("activeTasks", "completedTasks_total", "failedTasks_total", "JVMHeapMemory_bytes"),
            *("totalGCTime_seconds_total", "totalShuffleRead_bytes_total"),
            "totalShuffleWrite_bytes_total",
        )
    },
    "gazette:broker_limit": set[str](),
    "gazette:recovery_horizon_max_bytes": set[str](),
    "gazette:shard_lag_bytes": {"shard", "journal"},
}
"""Metrics of Prometheus, its exporters, Spark and our rules, by name, with the labels that we use."""
WORDS = set(
    re.findall(
        r"\w+",
        "by on unless offset and or group_left group_right sum max rate increase deriv topk vector scalar"
        " histogram_quantile min_over_time max_over_time clamp_min",
    )
)
"""Words of Prometheus' language in our expressions."""


@cache
def labels_of_metrics() -> dict[str, set[str]]:
    """Return the labels of each metric by its name, as the source defines it."""
    labels = {}
    for path in sorted((ROOT / "gazette").rglob("*.py")):
        text = path.read_text()
        if "prometheus_client" not in text:
            continue
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and getattr(call.func, "id", None) in KINDS:
                name, *_ = call.args
                if isinstance(name, ast.Constant):
                    named = [word.value for word in call.keywords if word.arg == "labels"]
                    given = [*call.args[2:3], *named]
                    labels[str(name.value)] = {
                        text for node in given for text in texts(node, vars(module))
                    }
    return labels


def texts(node: ast.expr, names: dict[str, Any]) -> Iterator[str]:
    """Yield the strings of a list, a tuple, or a constant of its module."""
    match node:
        case ast.List() | ast.Tuple():
            for element in node.elts:
                yield from texts(element, names)
        case ast.Starred():
            yield from texts(node.value, names)
        case ast.Name():
            yield from names[node.id]
        case ast.Constant():
            yield str(node.value)


@cache
def metrics() -> dict[str, set[str]]:
    """Return the labels of each series that a process exports, and of those in ``OTHERS``."""
    labels = labels_of_metrics()
    series = dict(OTHERS)
    for kind in re.findall(r"^# TYPE (\S+) (\S+)", render().decode(), re.MULTILINE):
        name, of = kind[0], labels.get(kind[0], set())
        series[name] = of
        if kind[1] == "histogram":
            series |= {f"{name}_bucket": of | {"le"}, f"{name}_count": of, f"{name}_sum": of}
    return series | {name: of for name, of in labels.items() if name not in series}


def problems(expression: str) -> list[str]:
    """Return the metrics of an expression that do not exist, and labels that they do not have."""
    missing = []
    known = {"__name__", *TARGET}
    for name, selectors in re.findall(
        r"([a-zA-Z_:][\w:]*)(?:\{([^}]*)\})?(?!\w)", bare(expression)
    ):
        if name in WORDS:
            continue
        if name not in metrics():
            missing.append(name)
            continue
        labels = metrics()[name] | TARGET
        known |= labels
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selectors))
        missing += [f"{name}: {label}" for label in sorted(used - labels)]
    for labels_of_operator in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        used = set(re.findall(r"\w+", labels_of_operator))
        missing += [f"by {label}" for label in sorted(used - known)]
    return missing


def bare(expression: str) -> str:
    """Return an expression without strings, durations, and labels of operators."""
    without = re.sub(r'"[^"]*"', '""', expression)
    return re.sub(r"\b(by|on|group_left|group_right) \([^)]*\)|\[[^]]*\]|\d+[mh]\b", " ", without)


def queries() -> list[str]:
    """Return the expressions of all panels."""
    return [
        target["expr"]
        for path in sorted((MONITORING / "dashboards").glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", ())
    ]


def rows() -> dict[str, str]:
    """Return the condition of each alert in docs/operating.md."""
    text = (ROOT / "docs" / "operating.md").read_text()
    section = text.partition("## What to alert on")[2].partition("\n## ")[0]
    found = re.findall(r"^\| `(\w+)` \| ((?:\\\||[^|])*) \|", section, re.MULTILINE)
    assert len(found) == section.count("\n| ") - 1
    assert len(dict(found)) == len(found)
    return dict(found)


def test_rules_and_dashboards_name_metrics_and_labels_that_exist() -> None:
    assert {name for name in labels_of_metrics() if name.startswith("gazette")} > {
        "gazette_store_hung_calls",
        "gazette_shard_up",
    }
    assert labels_of_metrics()["grpc_server_handled_total"] >= {"grpc_method", "grpc_code"}
    for rule in RULES:
        assert problems(rule["expr"]) == [], rule
    assert len(queries()) > 30
    for expression in queries():
        assert problems(expression) == [], expression


def test_a_metric_or_a_label_that_does_not_exist_is_found() -> None:
    good = 'sum by (status) (rate(gazette_shard_up{status="FAILED"}[5m] offset 1h)) > 0'
    assert problems(good) == []
    assert problems(good.replace("shard_up", "shards_up")) == ["gazette_shards_up", "by status"]
    assert problems(good.replace("{status", "{state")) == ["gazette_shard_up: state"]
    assert problems(good.replace("(status)", "(journal)")) == ["by journal"]


def test_each_row_of_the_page_has_a_rule_and_each_rule_a_row() -> None:
    """The rule has each metric that its row names, and waits as long as the row says."""
    conditions = rows()
    assert sorted(conditions) == sorted(ALERTS)
    for name, condition in conditions.items():
        rule = ALERTS[name]
        expression = rule["expr"]
        for record in re.findall(r"gazette:\w+", expression):
            expression += RECORDS[record]["expr"]
        named = re.findall(r"\b(?:gazette|process|grpc)_\w+", condition)
        assert [metric for metric in named if metric not in expression] == [], name
        for window in re.findall(r"\[\d+\w\]|> [\d.]+", condition):
            assert window in expression, name
        waits = re.search(r"for (\d+) min", condition)
        if waits is not None and "grows" not in condition and "growing" not in condition:
            assert rule["for"] == f"{waits[1]}m", name


def test_each_alert_says_where_why_and_what_to_read() -> None:
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("critical", "warning"), name
        notes = rule["annotations"]
        assert set(notes) == {"summary", "description", "runbook_url"}, name
        labels = {
            label
            for metric, of in metrics().items()
            if re.search(rf"{metric}\b", rule["expr"])
            for label in of
        }
        used = set(re.findall(r"\$labels\.(\w+)", "".join(notes.values())))
        assert used <= labels | TARGET, name
        assert used or name == "GazetteSlotsRunOut"
        link = re.fullmatch(
            r"\{\{ \$externalLabels\.gazette_docs \}\}/([\w-]+\.md)#([\w-]+)", notes["runbook_url"]
        )
        assert link is not None, name
        assert link[2] in anchors(ROOT / "docs" / link[1]), name
    assert CONFIG["global"]["external_labels"]["gazette_docs"].startswith("https://")


def test_each_alert_is_made_to_fire() -> None:
    text = (ROOT / "tests" / "test_alerts.py").read_text()
    assert set(re.findall(r"prometheus\.fires\(\s*\"(\w+)\"", text)) == set(ALERTS)


def test_dashboards_are_those_that_the_tool_writes() -> None:
    written = {path.name: path.read_text() for path in (MONITORING / "dashboards").iterdir()}
    assert written == dashboards.files()
    for text in written.values():
        panels = json.loads(text)["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
        assert len(set(places)) == len(places)


def test_what_the_files_name_exists() -> None:
    """Jobs, files and exporters, as Prometheus, Grafana and compose have them."""
    jobs = {job["job_name"]: job for job in CONFIG["scrape_configs"]}
    text = json.dumps([rule["expr"] for rule in RULES] + queries()).replace("\\", "")
    assert set(re.findall(r'job="([^"]+)"', text)) <= set(jobs)
    for job in jobs.values():
        for discovery in job.get("file_sd_configs", ()):
            for name in discovery["files"]:
                assert isinstance(yaml.safe_load((MONITORING / name).read_text()), list), name
    assert [(MONITORING / name).exists() for name in CONFIG["rule_files"]] == [True]
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    profile = {name for name, service in services.items() if "profiles" in service}
    assert profile == {"prometheus", "grafana", "blackbox-exporter", "node-exporter"}
    named = json.dumps(CONFIG) + (MONITORING / "brokers.yaml").read_text()
    named += (MONITORING / "applications.yaml").read_text()
    named += (MONITORING / "grafana" / "datasources.yaml").read_text()
    hosts = set(re.findall(r"\b([a-z][a-z-]+):\d+", named))
    members = {name for name in services if name.startswith(("broker-", "application-"))}
    assert hosts == members | {"prometheus"} | profile - {"grafana"}
    (provider,) = yaml.safe_load((MONITORING / "grafana" / "dashboards.yaml").read_text())[
        "providers"
    ]
    assert any(
        volume == f"./monitoring/dashboards:{provider['options']['path']}:ro"
        for volume in services["grafana"]["volumes"]
    )


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
@pytest.mark.parametrize(
    "command",
    ["check config prometheus.yaml", "check rules alerts.yaml", "test rules alerts_test.yaml"],
)
def test_promtool_accepts_the_rules(command: str) -> None:
    done = subprocess.run(
        ["promtool", *command.split()], cwd=MONITORING, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_test_of_its_rule() -> None:
    """It fires in a test, and in one test it does not fire."""
    tests = yaml.safe_load((MONITORING / "alerts_test.yaml").read_text())["tests"]
    for name in ALERTS:
        cases = [
            case["exp_samples"]
            for test in tests
            if test["name"].startswith(name)
            for case in test["promql_expr_test"]
        ]
        assert any(not samples for samples in cases), name
        assert any(
            f'alertname="{name}"' in json.dumps(samples).replace("\\", "") for samples in cases
        )
