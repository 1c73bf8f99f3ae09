"""A whole experiment: every arm for every seed, the shared warm starts, the records on disk, the report at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flax import nnx

from trm_jax.models import make_mesh
from trm_jax.report import (
    ConsoleProgress,
    JsonlWriter,
    MultiWriter,
    PlannedRun,
    TensorBoardWriter,
    write_report,
)
from trm_jax.report.writers import write_atomically
from trm_jax.train.checkpoint import CheckpointError
from trm_jax.train.config import ArmConfig, RunConfig, TrainConfig
from trm_jax.train.evidence import NonFiniteError
from trm_jax.train.experiment import check_experiment, open_experiment
from trm_jax.train.loop import RunOutcome, TrainRun
from trm_jax.train.warmstart import warm_start, warmstart_directory

__all__ = ["Interrupted", "check_arms", "run_experiment"]

_WARM = "warm start"


class Interrupted(RuntimeError):
    """The run was asked to stop; everything up to there is saved."""


def run_experiment(
    config: RunConfig,
    *,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    command: Sequence[str] | None = None,
) -> Path:
    """Runs every arm for every seed and writes the report.

    Args:
      config: what to run.
      resume: continue what stands in ``config.directory``: complete arms are left as they are, an interrupted one goes
        on from its newest good checkpoint to the same bits.
      should_stop: asked after every step; True saves a checkpoint and ends.
      command: recorded in the report; default this process's command line.

    Returns:
      The path of the HTML report.

    Raises:
      ValueError: a directory that holds another run (without ``resume``), or anything a configuration check finds.
      Interrupted: stopped on request; the report of what is there has been written.
      NonFiniteError: one run's loss or gradient was not finite.
    """
    check_arms(config)
    root = _prepare(config, resume=resume, command=sys.argv if command is None else command)
    runs = [(arm, dataclasses.replace(arm.train, seed=seed)) for seed in config.seeds for arm in config.arms]
    plan = []
    for seed in config.seeds:
        warm = [train for arm, train in runs if train.seed == seed and train.warmstart.steps]
        directories = dict.fromkeys(warmstart_directory(root, train) for train in warm)
        for index, directory in enumerate(directories):
            train = next(t for t in warm if warmstart_directory(root, t) == directory)
            name = _WARM if len(directories) == 1 else f"{_WARM} {index + 1}"
            plan.append((PlannedRun(arm=name, seed=seed, steps=train.warmstart.steps, stage="warmstart"), directory))
    names = {(item.seed, directory): item.arm for item, directory in plan}
    planned = [item for item, _ in plan] + [PlannedRun(arm=arm.name, seed=t.seed, steps=t.steps) for arm, t in runs]
    try:
        with ConsoleProgress(runs=planned) as progress:
            for arm, train in runs:
                if should_stop():
                    raise Interrupted(f"stopped before arm {arm.name!r}, seed {train.seed}; continue with --resume.")
                warm_name = names.get((train.seed, warmstart_directory(root, train)), _WARM)
                _run_arm(arm, train, root, progress, should_stop, warm_name=warm_name)
    except (Interrupted, NonFiniteError, CheckpointError):
        write_report(root)
        raise
    return write_report(root)


def check_arms(config: RunConfig) -> None:
    """Checks every arm's devices, data and lengths, so that the last arm's mistake is not found hours after the first.

    Raises:
      ValueError: naming the arm and what does not fit.
    """
    for arm in config.arms:
        try:
            check_experiment(arm.train)
        except ValueError as error:
            raise ValueError(f"arm {arm.slug}: {error}") from error


def _prepare(config: RunConfig, *, resume: bool, command: Sequence[str]) -> Path:
    """Makes the run's directory, or checks that the one there is the same experiment."""
    root = Path(config.directory)
    description = {
        "title": config.title,
        "command": shlex.join(command),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "arms": [
            {"name": arm.name, "slug": arm.slug, "description": arm.description, "role": arm.role}
            for arm in config.arms
        ],
        "seeds": list(config.seeds),
    }
    path = root / "run.json"
    if path.exists() and not resume:
        raise ValueError(
            f"directory {str(root)!r} already holds a run. Continue it with --resume, choose another with "
            "directory=PATH, or remove it."
        )
    if path.exists():
        held = _read_record(path)
        known = {arm["slug"] for arm in held["arms"]} | {arm.slug for arm in config.arms}
        description |= {"created": held["created"], "command": held["command"]}
        description["seeds"] = sorted({*held["seeds"], *config.seeds})
        extra = [arm for arm in held["arms"] if arm["slug"] in known - {arm.slug for arm in config.arms}]
        description["arms"] = [*description["arms"], *extra]
    try:
        root.mkdir(parents=True, exist_ok=True)
        _write_record(path, description)
    except OSError as error:
        raise ValueError(
            f"cannot write to the run directory {str(root)!r}: {error.strerror}. Choose another with directory=PATH."
        ) from error
    return root


def _write_record(path: Path, record: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(record, indent=1).encode())


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON ({error}). Put a copy back, or start in another one.") from error
    return record


def _run_arm(
    arm: ArmConfig,
    train: TrainConfig,
    root: Path,
    progress: ConsoleProgress,
    should_stop: Callable[[], bool],
    *,
    warm_name: str,
) -> None:
    directory = root / "arms" / arm.slug / f"seed{train.seed}"
    result = directory / "result.json"
    settings = json.loads(json.dumps(dataclasses.asdict(train)))
    _check_same_settings(directory / "config.json", settings)
    if result.exists() and _read_record(result)["status"] == "complete":
        progress.start_run(arm.name, train.seed, first_step=train.steps)
        progress.finish_run("complete", "done before")
        return
    mesh = make_mesh(train.mesh.data, train.mesh.tensor)
    with open_experiment(train) as experiment:
        directory.mkdir(parents=True, exist_ok=True)
        _write_record(directory / "config.json", settings)
        params = nnx.state(experiment.model)
        if train.warmstart.steps:
            place = warmstart_directory(root, train)
            started = False
            with _writers(place, after=None) as write:

                def on_warm(step: int, record: dict[str, float | str]) -> None:
                    nonlocal started
                    if not started:
                        progress.start_run(warm_name, train.seed, first_step=step - 1)
                    started = True
                    write(step, record)
                    progress.update(step, record)

                warm = warm_start(
                    experiment, train, place, mesh, on_step=on_warm, should_stop=should_stop, note=progress.note
                )
            if warm is None:
                progress.finish_run("stopped", "saved; continue with --resume")
                raise Interrupted("stopped during the warm start; continue with --resume.")
            params = warm
        began = time.perf_counter()
        run = TrainRun(experiment, train, params, directory, mesh, note=progress.note)
        run.resume()
        progress.start_run(arm.name, train.seed, first_step=run.step)
        outcome, reason = None, ""
        try:
            with _writers(directory, after=run.step) as write:

                def on_step(step: int, record: dict[str, float | str]) -> None:
                    write(step, record)
                    progress.update(step, record)

                outcome = run.run(on_step=on_step, should_stop=should_stop)
        except (NonFiniteError, CheckpointError) as error:
            reason = str(error)
            _write_result(result, None, "failed", reason, train, time.perf_counter() - began, steps=run.step)
            progress.finish_run("failed", reason)
            raise
    reason = "" if outcome.status == "complete" else "stopped on request; continue with --resume"
    _write_result(result, outcome, outcome.status, reason, train, time.perf_counter() - began, steps=outcome.step)
    progress.finish_run(outcome.status, reason)
    if outcome.status == "stopped":
        raise Interrupted(
            f"arm {arm.name!r}, seed {train.seed}: stopped after step {outcome.step}; continue with --resume."
        )


def _check_same_settings(path: Path, settings: dict[str, Any]) -> None:
    """Refuses to continue a run under another configuration."""
    if not path.exists():
        return
    held = _read_record(path)
    if held != settings:
        keys = sorted(_differences(held, settings))
        raise ValueError(
            f"{path.parent} was run with another configuration ({', '.join(keys)} differ). Resume with the same "
            "options, or choose another directory with directory=PATH."
        )


def _differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {*a, *b}:
            yield from _differences(a.get(key), b.get(key), f"{where}.{key}" if where else key)
    elif a != b:
        yield where


@contextlib.contextmanager
def _writers(directory: Path, *, after: int | None) -> Iterator[Callable[[int, dict[str, float | str]], None]]:
    """JSONL and TensorBoard; rows past ``after`` (written by a run that was killed before its checkpoint) are removed.

    With ``after`` None, a row replaces those from its step on: the first row of a resumed warm start does it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    jsonl = JsonlWriter(directory / "metrics.jsonl")
    if after is not None:
        jsonl.truncate_after(after if after > 0 else -1)
    board = TensorBoardWriter(directory / "tensorboard", resume_after=after)
    writer = MultiWriter(jsonl, board)
    first = True

    def write(step: int, record: dict[str, float | str]) -> None:
        nonlocal first
        if first and after is None:
            jsonl.truncate_after(step - 1)
        first = False
        writer.write(step, record)

    try:
        yield write
    finally:
        writer.close()


def _write_result(
    path: Path, outcome: RunOutcome | None, status: str, reason: str, train: TrainConfig, seconds: float, *, steps: int
) -> None:
    """``result.json``; the time adds up over resumptions."""
    before = _read_record(path)["seconds"] if path.exists() else 0.0
    nan = float("nan")
    accuracy = {
        "accuracy_start": nan if outcome is None else outcome.accuracy_start,
        "accuracy_final": nan if outcome is None else outcome.accuracy_final,
    }
    record = {
        "status": status,
        "reason": reason,
        **{name: None if value != value else value for name, value in accuracy.items()},
        "evaluation_items": 0 if outcome is None else outcome.evaluation_items,
        "seconds": round(before + seconds, 2),
        "steps": steps,
        "seed": train.seed,
    }
    _write_record(path, record)
