"""Pictures over steps: one panel a quantity, one line an arm, one colour and dash an arm (needs matplotlib)."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trm_jax.report.catalogue import METRICS, Metric
from trm_jax.report.curves import series
from trm_jax.report.runs import ReportData
from trm_jax.report.styles import ArmStyle, arm_styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PANELS", "drawable_panels", "render_overview", "render_panel"]

PANELS: Mapping[str, tuple[str, ...]] = {
    "Learning": ("accuracy/heldout", "reward/mean"),
    "Mismatch": ("mismatch/token_kl_mean", "mismatch/token_kl_max", "mismatch/ppl_gap"),
    "Correction": (
        "correction/sequence_keep_fraction",
        "correction/token_keep_fraction",
        "correction/weight_mean",
        "correction/weight_max",
    ),
    "Age of samples": ("rollout/staleness_mean", "rollout/dropped_groups"),
    "Optimisation": ("optim/grad_norm", "policy/entropy"),
}
"""Which quantities are drawn, by heading."""

_OVERVIEW = ("accuracy/heldout", "mismatch/token_kl_max", "correction/sequence_keep_fraction", "optim/grad_norm")
_DECADES = 8.0


def drawable_panels(data: ReportData) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Headings with the panels worth drawing, and a sentence for each one left out.

    A panel is left out when no arm has a number for it, or when a quantity of the correction or of the samples' age is
    the same number in every arm at every step.
    """
    kept: dict[str, tuple[str, ...]] = {}
    left_out: list[str] = []
    for heading, names in PANELS.items():
        drawn = []
        for name in names:
            values = np.concatenate([np.empty(0), *(series(arm, name).mean for arm in data.arms)])
            values = values[np.isfinite(values)]
            label = METRICS[name].label
            if not values.size:
                left_out.append(f"{label}: not recorded")
            elif name.startswith(("correction/", "rollout/")) and values.min() == values.max():
                left_out.append(f"{label}: {values[0]:.4g} in every arm at every step")
            else:
                drawn.append(name)
        if drawn:
            kept[heading] = tuple(drawn)
    return kept, tuple(left_out)


def render_panel(data: ReportData, name: str, *, format: Literal["svg", "png"] = "svg") -> bytes:
    """One quantity over steps, without a legend (the page has one for all panels).

    Args:
      data: the runs.
      name: a metric of the catalogue with numbers.
      format: ``svg`` or ``png``.

    Returns:
      The file's bytes, the same for the same data.

    Raises:
      ValueError: ``name`` is no numeric metric of the catalogue.
    """
    metric = METRICS.get(name)
    if metric is None or metric.reduction == "label":
        raise ValueError(f"{name!r} is not a numeric metric of trm_jax.report.METRICS and cannot be drawn")
    with _style():
        figure = _figure((4.6, 2.9))
        _draw(figure.add_subplot(), data, metric)
        return _encode(figure, format)


def render_overview(data: ReportData, *, format: Literal["svg", "png"] = "png") -> bytes:
    """Accuracy, largest token KL, kept sequences and gradient norm in one picture with a legend, for a document."""
    with _style():
        figure = _figure((9.2, 6.4))
        axes = figure.subplots(2, 2).flat
        for axis, name in zip(axes, _OVERVIEW, strict=True):
            _draw(axis, data, METRICS[name])
        handles = _handles(data)
        if handles:
            figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)), handlelength=3.5)
        return _encode(figure, format)


def _draw(axis: Axes, data: ReportData, metric: Metric) -> None:
    curves = {arm.slug: series(arm, metric.name) for arm in data.arms}
    sparse = metric.name == "accuracy/heldout"
    for slug, style in arm_styles(data.arms).items():
        curve = curves[slug]
        known = np.isfinite(curve.mean)
        if not known.any():
            continue
        marker = "o" if sparse or known.sum() == 1 else ""
        # Dropping the unknown steps lets evaluations that are far apart join into a line.
        steps, mean = curve.steps[known], curve.mean[known]
        axis.plot(steps, mean, color=style.colour, linestyle=_dash(style), marker=marker, markersize=3.5)
        if curve.seeds > 1:
            axis.fill_between(steps, curve.low[known], curve.high[known], color=style.colour, alpha=0.13, linewidth=0)
    unit = f" ({metric.unit})" if metric.unit not in ("", "fraction") else ""
    axis.set_title(f"{metric.label}{unit}", loc="left")
    axis.set_xlabel("step")
    everything = [values for curve in curves.values() for values in (curve.low, curve.high)]
    values = np.concatenate([np.empty(0), *everything])
    _scale(axis, metric, values[np.isfinite(values)])
    if not axis.lines:
        axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", va="center", color="#555555")


def _scale(axis: Axes, metric: Metric, values: np.ndarray) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    positive = values[values > 0]
    if metric.scale == "log" and positive.size and values.max() > 3 * positive.min():
        _log_scale(axis, float(positive.min()), float(positive.max()), exact_zero=bool((values <= 0).any()))
    elif metric.unit == "fraction" and values.size:
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:.4g}%"))
        spare = 0.06 * max(0.05, float(np.ptp(values)))
        axis.set_ylim(max(-0.02, float(values.min()) - spare), min(1.02, float(values.max()) + spare))


def _log_scale(axis: Axes, low: float, high: float, *, exact_zero: bool) -> None:
    """Decades; when a curve is exactly 0 (no mismatch), a linear strip at the foot holds it."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    top = math.log10(high) + 0.15
    bottom = max(math.log10(low), math.log10(high) - _DECADES)
    first, last = math.floor(bottom), math.ceil(top)
    every = max(1, math.ceil((top - bottom) / 5))
    subs = (1, 2, 5) if top - bottom < 1.3 else (1, 3) if top - bottom < 2.6 else (1,)
    ticks = [sub * 10.0**power for power in range(first, last + 1, every) for sub in subs]
    if exact_zero:
        floor = 10.0**first
        axis.set_yscale("symlog", linthresh=floor, linscale=0.5)
        axis.set_ylim(-0.2 * floor, 10**top)
        ticks = [0.0, *ticks]
    else:
        axis.set_yscale("log")
        axis.set_ylim(10 ** (bottom - 0.15), 10**top)
    lower, upper = axis.get_ylim()
    axis.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if lower <= tick <= upper]))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_formatter(NullFormatter())


def _handles(data: ReportData) -> list[Any]:
    from matplotlib.lines import Line2D

    names = {arm.slug: arm.name for arm in data.arms}
    return [
        Line2D([], [], color=style.colour, linestyle=_dash(style), label=names[slug])
        for slug, style in arm_styles(data.arms).items()
    ]


def _dash(style: ArmStyle) -> Any:
    return (0, tuple(float(length) for length in style.dash.split())) if style.dash else "-"


def _style() -> Any:
    import matplotlib

    return matplotlib.rc_context(
        {
            "font.size": 9,
            "axes.titlesize": 9.5,
            "axes.titleweight": "bold",
            "axes.labelsize": 8.5,
            "axes.edgecolor": "#888888",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#e3e3e3",
            "grid.linewidth": 0.7,
            "lines.linewidth": 1.6,
            "legend.frameon": False,
            "svg.hashsalt": "trm_jax",
            "svg.fonttype": "path",
            "text.parse_math": False,
        }
    )


def _figure(inches: tuple[float, float]) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _encode(figure: Figure, format: Literal["svg", "png"]) -> bytes:
    if format not in ("svg", "png"):
        raise ValueError(f"format must be 'svg' or 'png', got {format!r}")
    stream = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if format == "svg" else {"Software": None}
    figure.savefig(stream, format=format, dpi=150, metadata=metadata)
    return stream.getvalue()
