"""Reads what a job left on disk: arms, their runs, and what is missing.

Layout: ``run.json`` beside ``arms/<slug>/seed<k>/{metrics.jsonl,result.json,config.json}``. A missing or broken piece
never stops the reading; it becomes a sentence in ``problems`` that the report prints.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

from trm_jax.report.writers import read_metrics

__all__ = ["Arm", "ReportData", "Role", "RunResult", "SeedRun", "collect"]

Role = Literal["reference", "lag_only", "numerics_only", "uncorrected", "corrected"]
Status = Literal["complete", "stopped", "failed", "unfinished"]
Row = Mapping[str, float | str]

_NUMBERS = ("accuracy_start", "accuracy_final", "evaluation_items", "seconds", "steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """How one run ended.

    Attributes:
      status: ``complete``, ``stopped``, ``failed``, or ``unfinished`` when it left no readable ``result.json``.
      reason: why it was stopped or failed; empty otherwise.
      accuracy_start: held-out accuracy before the first update, in [0, 1]; NaN when unknown.
      accuracy_final: held-out accuracy at the last evaluation, in [0, 1]; NaN when unknown.
      evaluation_items: held-out problems behind each accuracy; 0 when unknown.
      seconds: wall time of the run; NaN when unknown.
      steps: steps done; 0 when unknown.
      sampled_tokens: response tokens sampled over the run; None when not recorded.
    """

    status: Status
    reason: str = ""
    accuracy_start: float = math.nan
    accuracy_final: float = math.nan
    evaluation_items: int = 0
    seconds: float = math.nan
    steps: int = 0
    sampled_tokens: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedRun:
    """One arm at one seed: its records in order of step, its result and its configuration."""

    seed: int
    rows: tuple[Row, ...]
    result: RunResult
    config: Mapping[str, Any]

    @property
    def last_step(self) -> int:
        """The last step that left a record, or that the result names; 0 when there is neither."""
        return max([self.result.steps, *(int(row["step"]) for row in self.rows)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One arm with its runs in order of seed.

    Attributes:
      name: what the report calls it.
      slug: its folder.
      description: what distinguishes it, a sentence.
      role: what it stands for in the comparison; None when it has no part in it.
      runs: one entry a seed folder; empty when the arm was not run.
    """

    name: str
    slug: str
    description: str = ""
    role: Role | None = None
    runs: tuple[SeedRun, ...] = ()

    @property
    def complete(self) -> tuple[SeedRun, ...]:
        """The runs that ended by themselves; only these enter comparisons."""
        return tuple(run for run in self.runs if run.result.status == "complete")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportData:
    """Everything the report says comes from here.

    Attributes:
      title: headline of the job.
      command: the command that ran it; empty when unknown.
      created: when it began, as recorded; empty when unknown.
      arms: in the order of ``run.json``, then folders that it does not list.
      problems: what was missing or unreadable, one sentence each.
    """

    title: str
    command: str
    created: str
    arms: tuple[Arm, ...]
    problems: tuple[str, ...]


def collect(run_root: Path) -> ReportData:
    """Reads the runs under ``run_root``; anything missing is named in ``problems`` instead of raised.

    Args:
      run_root: the folder that holds ``run.json`` and ``arms/``.

    Returns:
      The arms with their runs. An arm without a folder has no runs; a run without ``result.json`` is ``unfinished``.

    Raises:
      FileNotFoundError: ``run_root`` is not a folder, or holds neither ``run.json`` nor ``arms/``.
    """
    root = Path(run_root)
    if not root.is_dir() or not ((root / "run.json").exists() or (root / "arms").is_dir()):
        raise FileNotFoundError(f"{root} has neither run.json nor arms/; give the folder that a training job wrote")
    problems: list[str] = []
    head = _read_object(root / "run.json", root, problems)
    arms = [_listed_arm(entry, index, root, problems) for index, entry in enumerate(_as_list(head.get("arms")), 1)]
    listed = {arm.slug for arm in arms if arm}
    folders = sorted(path.name for path in (root / "arms").glob("*") if path.is_dir() and path.name not in listed)
    for slug in folders:
        problems.append(f"arms/{slug} is not listed in run.json; it is shown under its folder's name.")
        arms.append(Arm(name=slug, slug=slug, runs=_read_runs(slug, slug, root, problems)))
    return ReportData(
        title=str(head.get("title") or root.name),
        command=_command(head.get("command")),
        created=str(head.get("created") or ""),
        arms=tuple(arm for arm in arms if arm),
        problems=tuple(problems),
    )


def _listed_arm(entry: Any, index: int, root: Path, problems: list[str]) -> Arm | None:
    slug = entry.get("slug") if isinstance(entry, dict) else None
    if not isinstance(slug, str) or not slug or Path(slug).name != slug:
        problems.append(f"Arm {index} of run.json has no usable slug and is left out: {entry!r}.")
        return None
    name = str(entry.get("name") or slug)
    role = entry.get("role") or None  # an arm without a role is written with an empty one
    if role is not None and role not in get_args(Role):
        problems.append(f"{name}: unknown role {role!r} in run.json (known: {', '.join(get_args(Role))}).")
        role = None
    runs = _read_runs(slug, name, root, problems)
    if not runs:
        problems.append(f"{name}: not run (no seed folder in arms/{slug}).")
    return Arm(name=name, slug=slug, description=str(entry.get("description") or ""), role=role, runs=runs)


def _read_runs(slug: str, name: str, root: Path, problems: list[str]) -> tuple[SeedRun, ...]:
    found = [(re.fullmatch(r"seed(\d+)", path.name), path) for path in (root / "arms" / slug).glob("seed*")]
    folders = sorted((int(match[1]), path) for match, path in found if match and path.is_dir())
    return tuple(_read_run(seed, folder, f"{name}, seed {seed}", root, problems) for seed, folder in folders)


def _read_run(seed: int, folder: Path, who: str, root: Path, problems: list[str]) -> SeedRun:
    rows: list[dict[str, float | str]] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows = read_metrics(folder / "metrics.jsonl")
        problems.extend(f"{who}: {_relative(str(warning.message), root)}." for warning in caught)
        if not rows:
            problems.append(f"{who}: metrics.jsonl is empty.")
    except FileNotFoundError:
        problems.append(f"{who}: metrics.jsonl is missing; the run has no curves.")
    except ValueError as error:
        problems.append(f"{who}: {_relative(str(error), root)}; the run has no curves.")
    config = _read_object(folder / "config.json", root, problems)
    result = _read_result(folder / "result.json", who, root, problems)
    return SeedRun(seed=seed, rows=_merge(rows), result=_fill(result, rows), config=config)


def _merge(rows: list[dict[str, float | str]]) -> tuple[Row, ...]:
    """One record a stage and step: an evaluation written apart from its step joins it."""
    merged: dict[tuple[str, float], dict[str, float | str]] = {}
    for row in rows:
        merged.setdefault((str(row.get("stage", "rl")), float(row["step"])), {}).update(row)
    return tuple(merged.values())


def _read_result(path: Path, who: str, root: Path, problems: list[str]) -> RunResult:
    if not path.exists():
        problems.append(f"{who}: result.json is missing; the run is still going or was killed.")
        return RunResult(status="unfinished")
    raw = _read_object(path, root, problems)
    if not raw:
        return RunResult(status="unfinished")
    status = raw.get("status")
    if status not in ("complete", "stopped", "failed"):
        problems.append(f"{who}: result.json has status {status!r}; known are complete, stopped, failed.")
        status = "unfinished"
    values = {key: _number(raw.get(key)) for key in _NUMBERS}
    lacking = [key for key, value in values.items() if math.isnan(value)]
    if status == "complete" and lacking:
        problems.append(f"{who}: result.json lacks {', '.join(lacking)}.")
    tokens = _number(raw.get("sampled_tokens"))
    return RunResult(
        status=cast(Status, status),
        reason=str(raw.get("reason") or ""),
        accuracy_start=values["accuracy_start"],
        accuracy_final=values["accuracy_final"],
        evaluation_items=_count(values["evaluation_items"]),
        seconds=values["seconds"],
        steps=_count(values["steps"]),
        sampled_tokens=None if math.isnan(tokens) else _count(tokens),
    )


def _fill(result: RunResult, rows: list[dict[str, float | str]]) -> RunResult:
    """Takes a final accuracy that the result lacks from the last evaluation of the curve."""
    seen = [float(row["accuracy/heldout"]) for row in rows if "accuracy/heldout" in row]
    known = [value for value in seen if not math.isnan(value)]
    if not known or not math.isnan(result.accuracy_final):
        return result
    return dataclasses.replace(result, accuracy_final=known[-1])


def _read_object(path: Path, root: Path, problems: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{path.relative_to(root)} is missing.")
        return {}
    except ValueError as error:
        problems.append(f"{path.relative_to(root)} is not readable JSON: {error}.")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.relative_to(root)} is not a JSON object.")
        return {}
    return value


def _number(value: Any) -> float:
    try:
        number = math.nan if value is None or isinstance(value, bool) else float(value)
        return number if math.isfinite(number) else math.nan
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _count(value: float) -> int:
    return int(value) if math.isfinite(value) and value > 0 else 0


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _command(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _relative(message: str, root: Path) -> str:
    return message.replace(f"{root}/", "")
