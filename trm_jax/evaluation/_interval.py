"""How sure an accuracy over problems is."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

__all__ = ["bootstrap_interval"]

_CHUNK = 1000  # resamples drawn at once


def bootstrap_interval(
    values: Float[np.ndarray, " N"], *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap of a mean over problems (Efron 1979).

    Problems are drawn with replacement; the samples of one problem stay together, so that correlated answers do not
    count as independent ones. When every problem has 0, or every one 1, no resample differs; the ends then are
    Clopper and Pearson's: ``[0, 1 - (α/2)^{1/N}]``, or its mirror image.

    Args:
      values: ``[N]``, a problem's mean reward in [0, 1]; N ≥ 1.
      confidence: in (0, 1).
      resamples: at least 1.
      seed: of the resampling.

    Returns:
      ``(low, high)``.

    Raises:
      ValueError: no values, one outside [0, 1] or not a number, or an option out of its range.

    Example:
      >>> low, high = bootstrap_interval(np.array([0.0, 1.0] * 50))
      >>> round(low, 2), round(high, 2)
      (0.4, 0.6)
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"values has shape {list(values.shape)}; a vector of at least one problem is required")
    if not np.all((values >= 0) & (values <= 1)):
        raise ValueError("values holds something outside [0, 1]; mean rewards are required")
    if not 0 < confidence < 1 or resamples < 1:
        raise ValueError(f"confidence={confidence} must lie in (0, 1) and resamples={resamples} be at least 1")
    count, tail = len(values), (1 - confidence) / 2
    if np.all(values == values[0]) and values[0] in (0.0, 1.0):
        end = float(1 - tail ** (1 / count))
        return (0.0, end) if values[0] == 0.0 else (1 - end, 1.0)
    rng = np.random.default_rng(seed)
    means = np.concatenate(
        [
            rng.choice(values, (min(_CHUNK, resamples - start), count)).mean(axis=1)
            for start in range(0, resamples, _CHUNK)
        ]
    )
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)
