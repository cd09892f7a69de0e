"""Values of metrics as `/metrics` shows them."""

from __future__ import annotations

from prometheus_client.metrics import MetricWrapperBase

from gazette.runtime.metrics import Tally


def value_of(metric: MetricWrapperBase | Tally) -> float:
    """Return the value of a counter or a gauge: of one without labels, or of one with its labels."""
    if isinstance(metric, Tally):
        return metric.count
    (family,) = metric.collect()
    return family.samples[0].value
