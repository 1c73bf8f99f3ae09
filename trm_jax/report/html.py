"""The report as one HTML file: no network, no scripts, pictures inside (needs jinja2 and matplotlib)."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trm_jax.report.catalogue import GROUP_TITLES, METRICS
from trm_jax.report.curves import series
from trm_jax.report.figures import drawable_panels, render_panel
from trm_jax.report.findings import conclude
from trm_jax.report.runs import Arm, ReportData, collect
from trm_jax.report.styles import arm_styles
from trm_jax.report.summary import COLUMNS, summarise
from trm_jax.report.text import join, number, percent
from trm_jax.report.writers import write_atomically

__all__ = ["render_html", "write_report"]

_ROLE_WORDS = {
    "reference": "reference",
    "lag_only": "lag only",
    "numerics_only": "numerics only",
    "uncorrected": "lag and numerics, uncorrected",
    "corrected": "lag and numerics, corrected",
}


def write_report(run_root: Path) -> Path:
    """Reads the runs under ``run_root`` and writes ``run_root/report.html``, replacing an earlier one atomically.

    Returns:
      The path of the report.

    Raises:
      FileNotFoundError: ``run_root`` holds no job (see :func:`trm_jax.report.collect`).
    """
    path = Path(run_root) / "report.html"
    write_atomically(path, render_html(collect(run_root)).encode())
    return path


def render_html(data: ReportData) -> str:
    """The whole page; every number and sentence in it is computed from ``data``, and everything is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("trm_jax.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    panels, left_out = drawable_panels(data)
    summaries = [summarise(arm) for arm in data.arms]
    return environment.get_template("report.html.j2").render(
        data=data,
        notices=_notices(data),
        findings=conclude(data),
        headings=[heading for heading, _ in COLUMNS],
        rows=[(summary, [cell(summary) for _, cell in COLUMNS]) for summary in summaries],
        roles=_ROLE_WORDS,
        styles=arm_styles(data.arms),
        panels={heading: [_picture(data, name) for name in names] for heading, names in panels.items()},
        left_out=left_out,
        bands=any(len(arm.runs) > 1 for arm in data.arms),
        glossary=_glossary(),
        differences=_differences(data.arms),
        configs=[(arm.name, _pretty(arm.runs[0].config)) for arm in data.arms if arm.runs and arm.runs[0].config],
    )


def _notices(data: ReportData) -> list[str]:
    """What a reader must know before believing a number."""
    notices = []
    single = [f"“{arm.name}”" for arm in data.arms if len(arm.complete) == 1]
    if single:
        everyone = len(single) == len(data.arms) and len(single) > 1
        who = "Every arm rests" if everyone else f"{join(single)} {'rests' if len(single) == 1 else 'rest'}"
        notices.append(
            f"{who} on one complete seed: the spread between seeds is unknown, and the interval covers only the "
            "held-out problems. One seed shows where to look; it proves nothing."
        )
    for arm in data.arms:
        state = summarise(arm).state
        if state != "complete":
            notices.append(f"“{arm.name}” is incomplete: {state}. Runs that are not complete enter no comparison.")
    return notices


def _picture(data: ReportData, name: str) -> dict[str, str]:
    metric = METRICS[name]
    form = percent if metric.unit == "fraction" else number
    ends = []
    for arm in data.arms:
        mean = series(arm, name).mean
        known = [float(value) for value in mean if math.isfinite(value)]
        if known:
            ends.append(f"{arm.name} from {form(known[0])} to {form(known[-1])}")
    source = base64.b64encode(render_panel(data, name)).decode()
    return {
        "source": f"data:image/svg+xml;base64,{source}",
        "alt": f"{metric.label} over steps: {'; '.join(ends)}.",
        "caption": metric.meaning,
    }


def _glossary() -> list[tuple[str, list[Any]]]:
    groups: dict[str, list[Any]] = {}
    for metric in METRICS.values():
        groups.setdefault(GROUP_TITLES[metric.group], []).append(metric)
    return list(groups.items())


def _differences(arms: tuple[Arm, ...]) -> list[tuple[str, list[str]]]:
    """Configuration keys whose value is not the same in every arm, with each arm's value; the seed is left out."""
    flat = [_flatten(arm.runs[0].config) if arm.runs else {} for arm in arms]
    keys = list(dict.fromkeys(key for config in flat for key in config if key.rpartition(".")[2] != "seed"))
    table = [(key, [config.get(key, "–") for config in flat]) for key in keys]
    return [(key, values) for key, values in table if len(set(values)) > 1]


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return flat


def _pretty(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2, ensure_ascii=False)
