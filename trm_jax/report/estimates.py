"""How sure an accuracy is: intervals of one arm and of the difference of two."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

__all__ = ["Difference", "Estimate", "difference", "estimate_accuracy"]

_Z = 1.959964
# Student's t, 97.5% quantile, 1 to 30 degrees of freedom.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """An accuracy with its 95% interval.

    Attributes:
      value: mean over seeds, in [0, 1]; NaN when no seed has one.
      low: lower end of the interval; NaN when it cannot be had.
      high: upper end; NaN likewise.
      seeds: how many seeds it averages.
      spread: standard deviation over seeds (ddof 1); None for fewer than two.
    """

    value: float
    low: float
    high: float
    seeds: int
    spread: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """A difference of two accuracies with its 95% interval, as fractions (0.1 = 10 points)."""

    value: float
    low: float
    high: float

    @property
    def resolved(self) -> bool:
        """True when the interval excludes 0; an interval that cannot be had resolves nothing."""
        return self.low > 0 or self.high < 0


def estimate_accuracy(values: Sequence[float], items: int) -> Estimate:
    """Mean accuracy and its 95% interval: Wilson's for the items, widened by the spread when there are several seeds.

    One seed: Wilson's binomial interval on ``items``; it says nothing about the variation between seeds. Several: the
    wider, on each side, of that and of Student's t interval over seeds (every seed answers the same items, so more
    seeds do not make more items).

    Args:
      values: one accuracy a seed, in [0, 1]; NaN entries are left out.
      items: held-out problems behind each accuracy; 0 when unknown (one seed then has no interval).

    Example:
      >>> one = estimate_accuracy([0.5], items=100)
      >>> f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]"
      '0.500 [0.404, 0.596]'
    """
    known = [value for value in values if not math.isnan(value)]
    n = len(known)
    if n == 0:
        return Estimate(value=math.nan, low=math.nan, high=math.nan, seeds=0, spread=None)
    mean = math.fsum(known) / n
    ends = [_wilson(mean, items)] if items > 0 else []
    spread = None
    if n > 1:
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in known) / (n - 1))
        quantile = _T[n - 2] if n - 2 < len(_T) else _Z + 2.4 / (n - 1)
        half = quantile * spread / math.sqrt(n)
        ends.append((max(0.0, mean - half), min(1.0, mean + half)))
    low = min((end[0] for end in ends), default=math.nan)
    high = max((end[1] for end in ends), default=math.nan)
    return Estimate(value=mean, low=low, high=high, seeds=n, spread=spread)


def difference(a: Estimate, b: Estimate) -> Difference:
    """``a − b`` with the interval that their own intervals give (Newcombe 1998, method 10: square-and-add).

    The two are treated as independent, which is careful when both answered the same items.

    Example:
      >>> gap = difference(estimate_accuracy([0.8], 100), estimate_accuracy([0.2], 100))
      >>> f"{gap.value:.2f} [{gap.low:.2f}, {gap.high:.2f}] {gap.resolved}"
      '0.60 [0.47, 0.69] True'
    """
    value = a.value - b.value
    return Difference(
        value=value,
        low=value - math.hypot(a.value - a.low, b.high - b.value),
        high=value + math.hypot(a.high - a.value, b.value - b.low),
    )


def _wilson(p: float, n: int) -> tuple[float, float]:
    z2 = _Z * _Z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))
