"""The dashboards of ``deploy/monitoring``: ``python -m tools.dashboards`` writes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

DIRECTORY: Final = Path(__file__).parents[1] / "deploy" / "monitoring" / "dashboards"
COLUMNS: Final = 3
WIDTH: Final = 24 // COLUMNS
"""Grafana's grid has 24 units."""
HEIGHT: Final = 7
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph. ``queries`` maps the text of a legend to an expression.

    In an expression, ``OF`` stands for the selectors of job and instance, and ``EXECUTORS`` for the selectors
    of Spark's executors. ``unit`` is one of Grafana's.
    """

    title: str
    unit: str
    queries: dict[str, str]
    description: str = ""


def _rate(metric: str, by: str = "", more: str = "") -> str:
    """Return how much a counter grows in a second, as a sum for each value of the labels ``by``."""
    selectors = f"OF, {more}" if more else "OF"
    return f"sum by ({by}) (rate({metric}{{{selectors}}}[$__rate_interval]))"


PROCESSES: Final = (
    Panel(
        "Processors in use",
        "percentunit",
        {"{{instance}}": "rate(process_cpu_seconds_total{OF}[$__rate_interval])"},
        "1 is one core: a process has not much more.",
    ),
    Panel("Memory", "bytes", {"{{instance}}": "process_resident_memory_bytes{OF}"}),
    Panel(
        "Open files",
        "percentunit",
        {"{{instance}}": "process_open_fds{OF} / process_max_fds{OF}"},
    ),
    Panel(
        "HTTP connections refused",
        "ops",
        {
            "{{instance}} {{reason}}": "rate(gazette_http_connections_refused_total{OF}[$__rate_interval])"
        },
    ),
)
BROKERS: Final = {
    "Appends and reads": (
        Panel(
            "Appends by status",
            "ops",
            {
                "{{status}}": _rate(
                    "gazette_journal_server_completed_totals", "status", 'operation="Append"'
                )
            },
            "All but ok: see Appends that are refused, in docs/operating.md.",
        ),
        Panel(
            "Duration of appends",
            "s",
            {
                f"{share:.0%}": f"histogram_quantile({share}, sum by (le) (rate("
                'grpc_server_handling_seconds_bucket{OF, grpc_method="Append"}[$__rate_interval])))'
                for share in (0.5, 0.99)
            },
        ),
        Panel(
            "Appended bytes",
            "Bps",
            {"{{instance}}": _rate("gazette_spool_commit_bytes_total", "instance")},
            "Of all replicas.",
        ),
        Panel(
            "Journals that grow fastest",
            "Bps",
            {"{{journal}}": "topk(10, max by (journal) (deriv(gazette_write_head{OF}[5m])))"},
        ),
        Panel(
            "Calls by method",
            "reqps",
            {"{{grpc_method}}": _rate("grpc_server_handled_total", "grpc_method")},
        ),
        Panel(
            "Calls that failed",
            "reqps",
            {
                "{{grpc_method}} {{grpc_code}}": _rate(
                    "grpc_server_handled_total", "grpc_method, grpc_code", 'grpc_code!="OK"'
                )
            },
        ),
    ),
    "Fragments and stores": (
        Panel(
            "Fragments that wait to be stored",
            "short",
            {"{{instance}}": "gazette_spool_unpersisted{OF}"},
        ),
        Panel(
            "Uploads",
            "ops",
            {
                "stored": _rate("gazette_spool_persisted_total"),
                "failed": _rate("gazette_spool_persist_failures_total"),
                "not compressed": _rate("gazette_spool_compression_failures_total"),
            },
        ),
        Panel(
            "Stored bytes",
            "Bps",
            {"{{store}}": _rate("gazette_store_put_bytes_total", "store")},
        ),
        Panel(
            "Calls of stores",
            "ops",
            {
                "{{store}} {{operation}} {{status}}": _rate(
                    "gazette_store_operation_total", "store, operation, status"
                )
            },
        ),
        Panel(
            "Duration of 99% of store calls",
            "s",
            {
                "{{store}} {{operation}}": "histogram_quantile(0.99, sum by (store, operation, le) (rate("
                "gazette_store_operation_duration_seconds_bucket{OF}[$__rate_interval])))"
            },
        ),
        Panel(
            "Stores that hang or are unhealthy",
            "short",
            {
                "{{store}} hung calls": "sum by (store) (gazette_store_hung_calls{OF})",
                "{{store}} failed checks": "sum by (store) (increase(gazette_store_health_check_total"
                '{OF, status="error"}[10m]))',
            },
        ),
    ),
    "Cluster and processes": (
        Panel(
            "Slots",
            "short",
            {
                "replicas of journals": "max(gazette_allocator_desired_replication_slots{OF})",
                "room": "scalar(gazette:broker_limit) * max(gazette_allocator_members{OF})",
                "journals": "max(gazette_allocator_items{OF})",
            },
        ),
        Panel(
            "Items of members that leave",
            "short",
            {
                "{{instance}} {{waits_for}}": "sum by (instance, waits_for) (gazette_draining_items{OF})"
            },
        ),
        Panel(
            "Spool disk: waits and roll-backs",
            "ops",
            {
                "appends that waited": _rate("gazette_spool_disk_waits_total"),
                "roll-backs": _rate("gazette_spool_rollbacks_total"),
            },
        ),
        Panel(
            "Free space of spools",
            "percentunit",
            {
                "{{instance}} {{mountpoint}}": 'node_filesystem_avail_bytes{mountpoint=~".*spool.*"}'
                ' / node_filesystem_size_bytes{mountpoint=~".*spool.*"}'
            },
        ),
        Panel(
            "Fragments in conflict",
            "short",
            {"{{instance}}": "increase(gazette_fragment_conflicts_total{OF}[1h])"},
        ),
        *PROCESSES,
    ),
}
CONSUMERS: Final = {
    "Shards": (
        Panel(
            "Replicas by status",
            "short",
            {"{{status}}": "sum by (status) (gazette_shard_up{OF})"},
        ),
        Panel(
            "Bytes behind the write head",
            "bytes",
            {"{{shard}} {{journal}}": "topk(20, gazette:shard_lag_bytes)"},
            "Of all members. Needs the brokers in the same Prometheus.",
        ),
        Panel(
            "Dead letters and misplaced messages",
            "short",
            {
                "{{shard}} {{reason}}": "sum by (shard, reason) (increase(gazette_shard_poison_messages_total"
                "{OF}[$__rate_interval]))",
                "{{shard}} misplaced": "sum by (shard) (increase(gazette_shard_misplaced_messages_total"
                "{OF}[$__rate_interval]))",
            },
        ),
        Panel(
            "Messages",
            "ops",
            {"{{shard}}": _rate("gazette_shard_read_messages_total", "shard")},
        ),
        Panel(
            "Bytes",
            "Bps",
            {"{{shard}}": _rate("gazette_shard_read_bytes_total", "shard")},
        ),
        Panel(
            "Transactions",
            "ops",
            {"{{shard}}": _rate("gazette_shard_transactions_total", "shard")},
        ),
        Panel(
            "What transactions do",
            "percentunit",
            {"{{phase}}": _rate("gazette_shard_phase_seconds_total", "phase")},
            "Seconds of each second, of all shards.",
        ),
        Panel(
            "Timers that fired",
            "ops",
            {"{{shard}}": _rate("gazette_shard_timers_total", "shard")},
        ),
        Panel(
            "Replicas that started again",
            "short",
            {
                "{{shard}}": "sum by (shard) (increase(gazette_shard_restarts_total{OF}[$__rate_interval]))"
            },
        ),
    ),
    "Recovery": (
        Panel(
            "Bytes that a recovery reads",
            "bytes",
            {"{{shard}}": "gazette_shard_recovery_horizon_bytes{OF}"},
        ),
        Panel(
            "Standbys: bytes behind their log",
            "bytes",
            {"{{shard}} {{instance}}": "gazette_shard_standby_lag_bytes{OF}"},
        ),
        Panel(
            "Played back",
            "Bps",
            {
                "{{instance}}": "rate(gazette_recoverylog_recovered_bytes_total{OF}[$__rate_interval])"
            },
        ),
        Panel(
            "Waits for brokers",
            "bytes",
            {
                "{{instance}}": "gazette_consumer_append_backlog_bytes{OF}",
                "{{instance}} in memory": "gazette_consumer_append_memory_bytes{OF}",
            },
            "Bytes that shards have released and brokers have not taken yet.",
        ),
        Panel(
            "Calls of brokers that failed",
            "reqps",
            {
                "{{grpc_method}} {{grpc_code}}": _rate(
                    "grpc_client_handled_total", "grpc_method, grpc_code", 'grpc_code!="OK"'
                )
            },
        ),
    ),
    "Processes": PROCESSES,
}


def _of_executors(metric: str) -> str:
    """Return how much a counter of all executors grows in a second."""
    return f"sum(rate({metric}{{EXECUTORS}}[$__rate_interval]))"


EXECUTORS: Final = 'job="gazette-spark-executors", instance=~"$instance"'
"""Executors are another job: drivers serve their metrics at another path."""
SPARK: Final = {
    "Streams": (
        Panel(
            "Rows read", "ops", {"{{instance}} {{query}}": "spark_streaming_inputRate_total{OF}"}
        ),
        Panel(
            "Rows processed",
            "ops",
            {"{{instance}} {{query}}": "spark_streaming_processingRate_total{OF}"},
            "While a batch runs. Below the rows read, the stream falls behind.",
        ),
        Panel(
            "Duration of the last batch",
            "ms",
            {"{{instance}} {{query}}": "spark_streaming_latency{OF}"},
        ),
        Panel(
            "Rows of state",
            "short",
            {"{{instance}} {{query}}": "spark_streaming_states_rowsTotal{OF}"},
        ),
        Panel(
            "Bytes of state",
            "bytes",
            {"{{instance}} {{query}}": "spark_streaming_states_usedBytes{OF}"},
        ),
        Panel(
            "Calls of brokers by all clients",
            "reqps",
            {
                "{{grpc_method}}": "sum by (grpc_method) (rate(grpc_server_handled_total"
                '{job="gazette-brokers"}[$__rate_interval]))'
            },
        ),
    ),
    "Executors": (
        Panel(
            "Tasks that run",
            "short",
            {"{{instance}} {{executor_id}}": "metrics_executor_activeTasks{EXECUTORS}"},
        ),
        Panel(
            "Tasks",
            "ops",
            {
                "completed": _of_executors("metrics_executor_completedTasks_total"),
                "failed": _of_executors("metrics_executor_failedTasks_total"),
            },
        ),
        Panel(
            "Time of garbage collection",
            "percentunit",
            {
                "{{instance}} {{executor_id}}": "rate(metrics_executor_totalGCTime_seconds_total{EXECUTORS}"
                "[$__rate_interval])"
            },
        ),
        Panel(
            "Heap",
            "bytes",
            {"{{instance}} {{executor_id}}": "metrics_executor_JVMHeapMemory_bytes{EXECUTORS}"},
        ),
        Panel(
            "Shuffled bytes",
            "Bps",
            {
                "read": _of_executors("metrics_executor_totalShuffleRead_bytes_total"),
                "written": _of_executors("metrics_executor_totalShuffleWrite_bytes_total"),
            },
        ),
    ),
}


def dashboard(title: str, job: str, rows: dict[str, tuple[Panel, ...]]) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = [_alerts()]
    top = HEIGHT
    for name, graphs in rows.items():
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        panels.append({"type": "row", "title": name, "gridPos": place, "panels": []})
        top += 1
        for index, graph in enumerate(graphs):
            line, column = divmod(index, COLUMNS)
            place = {"x": column * WIDTH, "y": top + line * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_graph(graph, place, f'job="{job}", instance=~"$instance"'))
        top += -(-len(graphs) // COLUMNS) * HEIGHT
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    instances = f'label_values(up{{job="{job}"}}, instance)'
    return {
        "uid": job,
        "title": title,
        "tags": ["gazette"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "instance",
                    "type": "query",
                    "datasource": SOURCE,
                    "query": {"query": instances, "refId": "instance"},
                    "definition": instances,
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": panels,
    }


def _graph(graph: Panel, place: dict[str, int], selectors: str) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "expr": expression.replace("{OF", "{" + selectors).replace("EXECUTORS", EXECUTORS),
            "legendFormat": legend,
        }
        for index, (legend, expression) in enumerate(graph.queries.items())
    ]
    defaults = {"unit": graph.unit, "min": 0, "custom": {"fillOpacity": 10}}
    return {
        "type": "timeseries",
        "title": graph.title,
        "description": graph.description,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def _alerts() -> dict[str, Any]:
    """Return a table of the alerts that fire."""
    target = {
        "refId": "A",
        "datasource": SOURCE,
        "expr": 'ALERTS{alertname=~"Gazette.*", alertstate="firing"}',
        "format": "table",
        "instant": True,
    }
    return {
        "type": "table",
        "title": "Alerts that fire",
        "datasource": SOURCE,
        "gridPos": {"x": 0, "y": 0, "w": 24, "h": HEIGHT},
        "targets": [target],
    }


def files() -> dict[str, str]:
    """Return the content of each file."""
    dashboards = {
        "brokers.json": dashboard("Gazette brokers", "gazette-brokers", BROKERS),
        "consumers.json": dashboard("Gazette applications", "gazette-applications", CONSUMERS),
        "spark.json": dashboard("Gazette on Spark", "gazette-spark", SPARK),
    }
    return {name: json.dumps(content, indent=1) + "\n" for name, content in dashboards.items()}


if __name__ == "__main__":
    for file, text in files().items():
        (DIRECTORY / file).write_text(text)
