"""A run's metrics as Prometheus finds them at a Ray node."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import ray

from jobs.metrics import RayMetrics
from pipelines.metrics import MetricsLine


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        # Gauges and counters reach the endpoint a few seconds late; ten by Ray's own setting.
        _system_config={"metrics_report_interval_ms": 1000},
    )
    try:
        node = ray.nodes()[0]
        yield f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    finally:
        ray.shutdown()


def make_line(**values: Any) -> MetricsLine:
    return MetricsLine(**{field.name: values.get(field.name, 0) for field in fields(MetricsLine)})


@pytest.mark.ray
def test_gauges_follow_and_counters_add_up(endpoint: str) -> None:
    metrics = RayMetrics("/data/out")
    metrics.take(make_line(num_running=3, kv_use=0.25, num_decode_tokens=10))
    metrics.take(make_line(num_running=5, kv_use=0.5, num_decode_tokens=14))
    expected = {
        "ray_overnight_num_running": 5.0,
        "ray_overnight_kv_use": 0.5,
        "ray_overnight_decode_tokens_total": 14.0,
    }
    deadline = time.monotonic() + 60
    found: dict[str, float] = {}
    while found != expected and time.monotonic() < deadline:
        time.sleep(0.5)
        with urllib.request.urlopen(endpoint, timeout=10) as answer:
            lines = [line for line in answer.read().decode().splitlines() if 'output="/data/out"' in line]
        found = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}
        found = {name: value for name, value in found.items() if name in expected}
    assert found == expected
