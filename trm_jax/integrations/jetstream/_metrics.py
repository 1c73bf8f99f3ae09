"""The driver's counters in Prometheus' text format."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from trm_jax.integrations.jetstream._driver import RolloutDriver
from trm_jax.integrations.jetstream._state import Counters

__all__ = ["make_registry", "metrics_text"]

_MEANING = {
    "tokens": "Tokens sampled for requests",
    "chunks": "Decode calls",
    "prefills": "Prefill calls",
    "finished": "Requests answered in full",
    "failed": "Requests ended by a fault",
    "cancelled": "Requests whose client went away",
    "refused": "Requests that found the queue full",
    "restarts": "Times a thread went on after an exception",
    "updates": "Weight updates taken",
}
assert set(_MEANING) == {field.name for field in dataclasses.fields(Counters)}


class _Collector:
    def __init__(self, driver: RolloutDriver) -> None:
        self._driver = driver

    def collect(self) -> Iterator[Any]:
        health = self._driver.health()
        gauges = {
            "live": ("1 while requests are answered", health.live),
            "policy_version": ("Policy version of the weights in use", self._driver.version),
            "queue_depth": ("Requests that wait for their prefill", health.queue_depth),
            "slots_busy": ("Slots that decode", health.slots_busy),
        }
        for name, (meaning, value) in gauges.items():
            yield GaugeMetricFamily(f"trm_jax_rollouts_{name}", meaning, value=float(value))
        for name, meaning in _MEANING.items():
            total = float(getattr(self._driver.counters, name))
            yield CounterMetricFamily(f"trm_jax_rollouts_{name}", meaning, value=total)


def make_registry(driver: RolloutDriver) -> prometheus_client.CollectorRegistry:
    """A registry of its own: nothing of other libraries in this process is published."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(_Collector(driver))
    return registry


def metrics_text(registry: prometheus_client.CollectorRegistry) -> str:
    """What a scrape returns."""
    return prometheus_client.generate_latest(registry).decode("utf-8")
