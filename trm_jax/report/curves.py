"""The curve of one metric of one arm: mean, smallest and largest over seeds."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import numpy as np

from trm_jax.report.catalogue import METRICS, Metric
from trm_jax.report.runs import Arm, SeedRun
from trm_jax.report.summary import rl_rows

__all__ = ["Series", "series"]

_MAX_POINTS = 400


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One arm's curve: the mean over the seeds that have a value at a step, and their smallest and largest.

    Attributes:
      steps: ``[n]`` increasing steps.
      mean: ``[n]`` mean over seeds; NaN where no seed has a number.
      low: ``[n]`` smallest over seeds.
      high: ``[n]`` largest over seeds.
      seeds: how many seeds have the metric at all.
    """

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int


def series(arm: Arm, name: str) -> Series:
    """The curve of one metric over the reinforcement-learning steps of every seed; infinities count as missing."""
    curves = [curve for run in arm.runs if (curve := _curve(run, name))]
    steps = sorted({step for curve in curves for step in curve})
    table = np.full((max(1, len(curves)), len(steps)), np.nan)
    for row, curve in enumerate(curves):
        table[row] = [curve.get(step, math.nan) for step in steps]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step at which no seed has a number is NaN, and meant to be
        mean, low, high = np.nanmean(table, axis=0), np.nanmin(table, axis=0), np.nanmax(table, axis=0)
    return _thin(
        Series(steps=np.asarray(steps, float), mean=mean, low=low, high=high, seeds=len(curves)), METRICS[name]
    )


def _curve(run: SeedRun, name: str) -> dict[float, float]:
    rows = list(rl_rows(run))
    found = {float(row["step"]): float(row[name]) for row in rows if name in row}
    if name == "accuracy/heldout" and rows and math.isfinite(run.result.accuracy_start):
        found.setdefault(max(0.0, float(rows[0]["step"]) - 1), run.result.accuracy_start)
    return {step: value if math.isfinite(value) else math.nan for step, value in found.items()}


def _thin(curve: Series, metric: Metric) -> Series:
    """Long curves are drawn by bins of steps: the mean of a bin, or its largest value for a maximum."""
    size = math.ceil(len(curve.steps) / _MAX_POINTS)
    if size <= 1:
        return curve
    starts = range(0, len(curve.steps), size)
    middle = np.nanmax if metric.reduction == "max" else np.nanmean

    def binned(values: np.ndarray, reduce: Any) -> np.ndarray:
        bins = [values[start : start + size] for start in starts]
        return np.asarray([reduce(part) if np.isfinite(part).any() else math.nan for part in bins])

    return Series(
        steps=binned(curve.steps, np.nanmax),
        mean=binned(curve.mean, middle),
        low=binned(curve.low, np.nanmin),
        high=binned(curve.high, np.nanmax),
        seeds=curve.seeds,
    )
