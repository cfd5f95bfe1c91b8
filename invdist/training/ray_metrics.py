"""Training metrics through Ray's own (`ray.util.metrics`): for its dashboard, Prometheus and Grafana."""

from __future__ import annotations

import re
import urllib.request
from typing import Any

from invdist.training.history import Event, direction_name


class RayMetrics:
    """Takes the events of a run. Ray exports what they say, with the tag `run`, as `ray_invdist_train_*`."""

    def __init__(self, run: str) -> None:
        from ray.util import metrics as declared

        metrics: Any = declared  # its types allow one tag only
        self._tags = {"run": run}
        self._gauges = {
            name: metrics.Gauge(f"invdist_train_{name}", text, ("run",))
            for name, text in (
                ("loss", "Loss of the last step that was written."),
                ("rows_per_s", "Labeled interactions per second in this epoch."),
                ("global_step", "Steps of training."),
                ("epoch", "Epoch, from 0."),
                ("eta_s", "Seconds to the end of the epoch."),
            )
        }
        self._directions = metrics.Counter(
            "invdist_train_directions", "Steps by the direction that was chosen.", ("run", "direction")
        )
        self._valid = metrics.Gauge(
            "invdist_train_valid", "Metrics on the validation interactions of the last epoch.", ("run", "metric")
        )
        self._final = metrics.Gauge(
            "invdist_train_final", "Metrics of the best epoch, at the end.", ("run", "split", "metric")
        )

    def write(self, event: Event) -> None:
        """Takes one event."""
        kind = event["event"]
        if kind in ("step", "epoch"):
            for name, gauge in self._gauges.items():
                if isinstance(event.get(name), int | float):
                    gauge.set(event[name], self._tags)
        if kind == "step" and event.get("direction") is not None:
            self._directions.inc(1, {**self._tags, "direction": direction_name(event["direction"])})
        if kind == "epoch":
            for name, value in numbers(event.get("valid")):
                self._valid.set(value, {**self._tags, "metric": name})
        if kind == "final":
            for split in ("valid", "test"):
                for name, value in numbers(event.get(split)):
                    self._final.set(value, {**self._tags, "split": split, "metric": name})

    def close(self) -> None:
        """Nothing is pending: Ray exports by itself."""


def numbers(values: Any) -> list[tuple[str, float]]:
    """The entries of a mapping that are numbers; none for None."""
    found = (values or {}).items()
    return [(name, float(value)) for name, value in found if isinstance(value, int | float)]


def node_metrics(shown: str) -> str:
    """What Ray exports of this node to Prometheus, those metrics of it whose names begin with `shown`."""
    pattern = re.compile(rf"(# \w+ )?{re.escape(shown)}")
    with urllib.request.urlopen(node_metrics_url(), timeout=5) as page:
        return "".join(line for line in page.read().decode().splitlines(keepends=True) if pattern.match(line))


def node_metrics_url() -> str:
    """Where the node of this process exports its metrics."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == here)
    return f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
