"""Pictures over steps: one panel a quantity, one line an arm, one colour and dash an arm (needs matplotlib)."""

from __future__ import annotations

import dataclasses
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trm_jax.report.metrics import METRICS, Metric
from trm_jax.report.runs import Arm, ReportData, SeedRun
from trm_jax.report.summary import rl_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PANELS", "ArmStyle", "Series", "arm_styles", "drawable_panels", "render_overview", "render_panel", "series"]

PANELS: Mapping[str, tuple[str, ...]] = {
    "Learning": ("accuracy/heldout", "reward/mean"),
    "Mismatch": ("mismatch/token_kl_mean", "mismatch/token_kl_max", "mismatch/ppl_gap"),
    "Correction": (
        "correction/sequence_keep_fraction",
        "correction/token_keep_fraction",
        "correction/weight_mean",
        "correction/weight_max",
    ),
    "Optimisation": ("optim/grad_norm", "policy/entropy"),
}
"""Which quantities are drawn, by heading."""

_OVERVIEW = ("accuracy/heldout", "mismatch/token_kl_max", "correction/sequence_keep_fraction", "optim/grad_norm")
_MAX_POINTS = 400
_DECADES = 8.0

# Okabe and Ito's palette without its yellow, which is too light for a line on white; roles have fixed colours.
_ROLE_STYLES = {
    "reference": ("#000000", ""),
    "lag_only": ("#E69F00", "1.5 1.5"),
    "numerics_only": ("#56B4E9", "6 1.5 1.5 1.5"),
    "uncorrected": ("#D55E00", "5 2"),
}
_FREE = (("#0072B2", ""), ("#009E73", "8 2"), ("#CC79A7", "3 1.5"), ("#7F5A2E", "6 1.5 1.5 1.5 1.5 1.5"))
_OTHER_STYLES = (*_FREE, *((colour, "1.5 1.5") for colour, _ in _FREE), ("#666666", ""), ("#666666", "5 2"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArmStyle:
    """How an arm is drawn.

    Attributes:
      colour: ``#rrggbb``.
      dash: on and off lengths in units of the line width; empty for a solid line.
    """

    colour: str
    dash: str

    def svg_dash(self, width: float) -> str:
        """The dash in pixels for a line of ``width``, as ``stroke-dasharray`` wants it."""
        return " ".join(f"{float(length) * width:g}" for length in self.dash.split())


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


def arm_styles(arms: Sequence[Arm]) -> dict[str, ArmStyle]:
    """A style for each arm by its slug; roles keep their colour, the others take what is free, in order.

    Example:
      >>> arm_styles([Arm(name="zero mismatch", slug="zero", role="reference")])["zero"].colour
      '#000000'
    """
    styles: dict[str, ArmStyle] = {}
    used: set[tuple[str, str]] = set()
    for place, arm in enumerate(arms):
        wanted = _ROLE_STYLES.get(arm.role or "")
        free = [style for style in _OTHER_STYLES if style not in used]
        colour, dash = wanted if wanted and wanted not in used else (free or _OTHER_STYLES)[0 if free else place % 4]
        used.add((colour, dash))
        styles[arm.slug] = ArmStyle(colour=colour, dash=dash)
    return styles


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


def drawable_panels(data: ReportData) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Headings with the panels worth drawing, and a sentence for each one left out.

    A panel is left out when no arm has a number for it, or when a correction's quantity is the same number in every arm
    at every step.
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
            elif name.startswith("correction/") and values.min() == values.max():
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
