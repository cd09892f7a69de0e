"""Values of metrics as `/metrics` shows them."""

from __future__ import annotations

from prometheus_client.metrics import MetricWrapperBase


def value_of(metric: MetricWrapperBase) -> float:
    """Return the value of a counter or a gauge: of one without labels, or of one with its labels."""
    (family,) = metric.collect()
    return family.samples[0].value
