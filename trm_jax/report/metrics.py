"""Records held to the catalogue, and the parts of a metric put together."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import SupportsFloat

from trm_jax.report.catalogue import METRICS

__all__ = ["check_record", "reduce_pairs"]


def check_record(record: Mapping[str, object]) -> None:
    """Refuses a record with a name outside the catalogue, or with a value of the wrong kind.

    Args:
      record: metric name to number (NaN and infinities are legal; Python, NumPy or JAX scalars), or to a string for
        labels. Absent names are legal: not every step measures everything.

    Raises:
      ValueError: a name is unknown; the message offers the nearest known one.
      TypeError: a label holds a number, or a number's place holds something else.

    Example:
      >>> check_record({"step": 3, "reward/mean": 0.5, "stage": "rl"})
      >>> check_record({"reward/mena": 0.5})
      Traceback (most recent call last):
      ...
      ValueError: unknown metric 'reward/mena'; did you mean 'reward/mean'? The names are in trm_jax.report.METRICS
    """
    for name, value in record.items():
        metric = METRICS.get(name)
        if metric is None:
            close = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ValueError(f"unknown metric {name!r}{hint} The names are in trm_jax.report.METRICS")
        if metric.reduction == "label":
            if not isinstance(value, str):
                raise TypeError(f"metric {name!r} is a label and must be a string, got {value!r}")
            continue
        if isinstance(value, str):
            raise TypeError(f"metric {name!r} must be a number, got {value!r}")
        try:
            float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            raise TypeError(f"metric {name!r} must be a number, got {value!r}") from None


def reduce_pairs(parts: Iterable[Mapping[str, tuple[SupportsFloat, SupportsFloat]]]) -> dict[str, float]:
    """Combines ``(total, denominator)`` pairs of microbatches or devices and divides once.

    A mean is Σ total / Σ denominator. Extrema (catalogue names reduced by ``max`` or ``min``, and any name that starts
    with ``max/`` or ``min/``) take the largest or smallest total among parts with a positive denominator.

    Args:
      parts: one mapping a part. Names outside the catalogue are legal here (a loss's own auxiliary sums).

    Returns:
      Name to value, in order of first appearance. A quantity that nothing counted towards (denominator 0 everywhere)
      is NaN, and a NaN in any part that counts stays NaN.

    Raises:
      ValueError: a denominator is negative, or a quantity of the whole batch (such as a standard deviation) comes in
        more than one part.

    Example:
      >>> parts = [{"reward/mean": (3.0, 4.0), "correction/weight_max": (1.5, 1.0)}]
      >>> parts += [{"reward/mean": (0.0, 2.0), "correction/weight_max": (2.0, 1.0)}]
      >>> reduce_pairs(parts)
      {'reward/mean': 0.5, 'correction/weight_max': 2.0}
    """
    collected: dict[str, list[tuple[float, float]]] = {}
    for part in parts:
        for name, (total, denominator) in part.items():
            pair = (float(total), float(denominator))
            if pair[1] < 0:
                raise ValueError(f"metric {name!r} has denominator {pair[1]}; a count or a sum of weights is >= 0")
            collected.setdefault(name, []).append(pair)
    return {name: _reduce(name, pairs) for name, pairs in collected.items()}


def _reduce(name: str, pairs: list[tuple[float, float]]) -> float:
    metric = METRICS.get(name)
    prefix = name.partition("/")[0]
    reduction = prefix if prefix in ("max", "min") else metric.reduction if metric else "mean"
    counted = [(total, denominator) for total, denominator in pairs if denominator != 0]
    if not counted:
        return math.nan
    if reduction in ("max", "min"):
        totals = [total for total, _ in counted]
        extremum = max(totals) if reduction == "max" else min(totals)
        return math.nan if any(math.isnan(total) for total in totals) else extremum
    if reduction == "whole" and len(counted) > 1:
        raise ValueError(
            f"metric {name!r} came in {len(counted)} parts, but it belongs to the whole batch and parts of it do not "
            "add up; compute it once over all of them"
        )
    return sum(total for total, _ in counted) / sum(denominator for _, denominator in counted)
