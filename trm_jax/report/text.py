"""Numbers as the report writes them: short, and never rounded across a boundary that matters."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trm_jax.report.estimates import Difference, Estimate

__all__ = ["accuracy", "duration", "interval", "join", "number", "percent", "points"]


def percent(value: float) -> str:
    """A fraction as a percentage; only 1 is "100%" and only 0 is "0%".

    Example:
      >>> percent(1.0), percent(0.9999), percent(0.256), percent(2e-5), percent(0.0), percent(float("nan"))
      ('100%', '>99.9%', '25.6%', '<0.1%', '0%', '–')
    """
    if math.isnan(value):
        return "–"
    if value in (0, 1):
        return f"{value:.0%}"
    if 0.9995 <= value < 1:
        return ">99.9%"
    if 0 < value < 0.0005:
        return "<0.1%"
    return f"{value:.1%}"


def number(value: float) -> str:
    """Three significant digits; 0 is exactly 0.

    Example:
      >>> number(0.0), number(0.12345), number(1.2e-7), number(31234.0), number(float("inf")), number(float("nan"))
      ('0', '0.123', '1.2e-07', '31,234', '∞', '–')
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace("-", "−")
    text = f"{value:.3g}"
    return f"−{text[1:]}" if text.startswith("-") else text


def points(value: float) -> str:
    """A difference of fractions in signed percentage points, without the word.

    Example:
      >>> points(0.0512), points(-0.2), points(float("nan"))
      ('+5.1', '−20.0', '–')
    """
    return "–" if math.isnan(value) else f"{value * 100:+.1f}".replace("-", "−")


def accuracy(estimate: Estimate) -> str:
    """Mean, and ± the spread over seeds when there is one."""
    spread = "" if estimate.spread is None else f" ± {estimate.spread * 100:.1f}"
    return f"{percent(estimate.value)}{spread}"


def interval(gap: Difference) -> str:
    """The difference in points with its interval, for a parenthesis."""
    if math.isnan(gap.low):
        return f"{points(gap.value)} points, interval unknown"
    return f"{points(gap.value)} points, 95% interval {points(gap.low)} to {points(gap.high)}"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours.

    Example:
      >>> duration(8.31), duration(95.0), duration(7260.0)
      ('8.3 s', '1 min 35 s', '2 h 1 min')
    """
    if math.isnan(seconds):
        return "–"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def join(words: Sequence[str]) -> str:
    """A list in a sentence.

    Example:
      >>> join(["a"]), join(["a", "b"]), join(["a", "b", "c"])
      ('a', 'a and b', 'a, b and c')
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""
