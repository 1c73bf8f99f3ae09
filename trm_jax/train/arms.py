"""A whole experiment: every arm for every seed, the shared warm starts, the report at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flax import nnx
from jax.sharding import Mesh

from trm_jax.checkpoint import CheckpointError
from trm_jax.models import make_mesh
from trm_jax.report import ConsoleProgress, PlannedRun, write_report
from trm_jax.train.config import WARM_START, ArmConfig, RunConfig, TrainConfig
from trm_jax.train.engines import SamplingError, describe_engine
from trm_jax.train.evidence import NonFiniteError
from trm_jax.train.experiment import Experiment, check_experiment, open_experiment
from trm_jax.train.export import export_policy, exported_policy
from trm_jax.train.loop import RunOutcome, TrainRun
from trm_jax.train.records import NEVER_BEGAN, RunRecords, lock_root, metric_writers, prepare_root, withdraw_root
from trm_jax.train.warmstart import warm_start, warmstart_directory

__all__ = ["ArmsFailed", "Interrupted", "check_arms", "run_experiment"]


class Interrupted(RuntimeError):
    """The run was asked to stop; everything up to there is saved."""


class ArmsFailed(RuntimeError):
    """Some runs went non-finite; all others are complete, and the report has been written.

    Attributes:
      report: its path.
    """

    def __init__(self, failures: Sequence[str], total: int, report: Path) -> None:
        super().__init__(f"{len(failures)} of {total} runs failed: " + "; ".join(failures))
        self.report = report


def run_experiment(
    config: RunConfig,
    *,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    command: Sequence[str] | None = None,
) -> Path:
    """Runs every arm for every seed and writes the report.

    A run whose loss, gradient or log-probs are not finite is recorded as failed, with its reason and the batch that
    broke, and the others go on.

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
      CheckpointError: a checkpoint could not be written or read; the report has been written.
      SamplingError: the server at ``rollout.address`` failed or stayed away; what was done is saved.
      ArmsFailed: at the end, when a run went non-finite.
    """
    check_arms(config)
    root = Path(config.directory)
    runs = [(arm, dataclasses.replace(arm.train, seed=seed)) for seed in config.seeds for arm in config.arms]
    _check_weights_free(root, runs)
    with lock_root(root):
        if resume:
            for arm, train in runs:
                RunRecords(root, arm, train).check()
        prepare_root(config, resume=resume, command=sys.argv if command is None else command)
        try:
            failures = _run_all(runs, root, should_stop)
        except (Interrupted, CheckpointError, SamplingError):
            with contextlib.suppress(OSError):  # a disk that refused the checkpoint may refuse this too
                write_report(root)
            raise
        except ValueError:
            withdraw_root(root)
            raise
        report = write_report(root)
    if failures:
        raise ArmsFailed(failures, len(runs), report)
    return report


def _run_all(runs: Sequence[tuple[ArmConfig, TrainConfig]], root: Path, should_stop: Callable[[], bool]) -> list[str]:
    """Every run in order; says which went non-finite."""
    warm_names = _name_warm_starts(root, [train for _, train in runs])
    planned = [
        PlannedRun(arm=name, seed=train.seed, steps=train.warmstart.steps, stage="warmstart")
        for name, train in warm_names.values()
    ]
    planned += [PlannedRun(arm=arm.name, seed=train.seed, steps=train.steps) for arm, train in runs]
    failures: list[str] = []
    broken: dict[Path, str] = {}  # warm starts that diverged: the other arms that share one would diverge there again
    with ConsoleProgress(runs=planned) as progress:
        for arm, train in runs:
            if should_stop():
                raise Interrupted(f"stopped before arm {arm.name!r}, seed {train.seed}; continue with --resume.")
            place = warmstart_directory(root, train)
            run = _ArmRun(arm, train, root, progress, should_stop)
            try:
                run(place, warm_names[place][0] if place in warm_names else "", broken)
            except NonFiniteError as error:
                failures.append(f"arm {arm.slug}, seed {train.seed}: {error}")
    return failures


def check_arms(config: RunConfig) -> None:
    """Checks every arm's devices, data and lengths, so that the last arm's mistake is not found hours after the first.

    Raises:
      ValueError: naming the arm and what does not fit.
    """
    faults: dict[str, str] = {}
    for arm in config.arms:
        try:
            check_experiment(arm.train)
        except ValueError as error:
            faults[arm.slug] = str(error)
    if not faults:
        return
    slug, fault = next(iter(faults.items()))
    shared = len(faults) == len(config.arms) and len(set(faults.values())) == 1
    raise ValueError(fault if shared else f"arm {slug}: {fault}")


def _check_weights_free(root: Path, runs: Sequence[tuple[ArmConfig, TrainConfig]]) -> None:
    """Refuses before anything is written what the owner of a weight directory would stop after the warm start."""
    wanted = {
        train.rollout.weights
        for arm, train in runs
        if train.rollout.address and not RunRecords(root, arm, train).complete
    }
    if wanted:
        from trm_jax.serve import WeightDirectory

        for path in sorted(wanted):
            WeightDirectory(Path(path)).check_free()


def _name_warm_starts(root: Path, runs: Sequence[TrainConfig]) -> dict[Path, tuple[str, TrainConfig]]:
    """Each warm start's directory, with a name that is its own within its seed, and the first run that begins there."""
    first: dict[Path, TrainConfig] = {}
    for train in runs:
        if train.warmstart.steps:
            first.setdefault(warmstart_directory(root, train), train)
    named: dict[Path, tuple[str, TrainConfig]] = {}
    for place, train in first.items():
        places = [other for other, config in first.items() if config.seed == train.seed]
        named[place] = (WARM_START if len(places) == 1 else f"{WARM_START} {places.index(place) + 1}", train)
    return named


@dataclasses.dataclass(frozen=True)
class _ArmRun:
    """One arm at one seed, from its warm start to its result."""

    arm: ArmConfig
    train: TrainConfig
    root: Path
    progress: ConsoleProgress
    should_stop: Callable[[], bool]

    def __call__(self, place: Path, warm_name: str, broken: dict[Path, str]) -> None:
        arm, train, progress = self.arm, self.train, self.progress
        records = RunRecords(self.root, arm, train)
        wanted = (train.steps, train.checkpoint.export)
        exported = wanted[1] == "none" or exported_policy(records.directory / "model") == wanted
        if records.complete and exported:
            progress.start_run(arm.name, train.seed, first_step=train.steps)
            progress.finish_run("complete", "done before")
            return
        mesh = make_mesh(train.mesh.data, train.mesh.tensor)
        with open_experiment(train) as experiment:
            records.check()
            if not train.rollout.address:
                records.begin()  # at an address the weight directory's owner may still refuse it
            params = nnx.state(experiment.model)
            if train.warmstart.steps:
                try:
                    params = self._warm(experiment, mesh, place, warm_name, broken)
                except (NonFiniteError, CheckpointError) as error:
                    broken[place] = str(error)
                    progress.start_run(arm.name, train.seed)
                    self._fail(records, error, 0.0)
            self._reinforce(experiment, mesh, params, records)

    def _warm(
        self, experiment: Experiment, mesh: Mesh, place: Path, name: str, broken: dict[Path, str]
    ) -> nnx.State[Any, Any]:
        if place in broken:
            raise NonFiniteError(broken[place])
        progress, seed, started = self.progress, self.train.seed, False
        with metric_writers(place, after=None) as write:

            def on_warm(step: int, record: dict[str, float | str]) -> None:
                nonlocal started
                if not started:
                    progress.start_run(name, seed, first_step=step - 1)
                started = True
                write(step, record)
                progress.update(step, record)

            warm = warm_start(
                experiment,
                self.train,
                place,
                mesh,
                on_step=on_warm,
                should_stop=self.should_stop,
                note=progress.note,
            )
        if warm is None:
            progress.finish_run("stopped", "saved; continue with --resume")
            raise Interrupted("stopped during the warm start; continue with --resume.")
        return warm

    def _reinforce(self, experiment: Experiment, mesh: Mesh, params: nnx.State[Any, Any], records: RunRecords) -> None:
        try:
            run = TrainRun(experiment, self.train, params, records.directory, mesh, note=self.progress.note)
        except SamplingError as error:
            self.progress.start_run(self.arm.name, self.train.seed)
            self._fail(records, error, 0.0)
        with contextlib.closing(run):
            records.begin()
            self._run(experiment, run, records)

    def _run(self, experiment: Experiment, run: TrainRun, records: RunRecords) -> None:
        arm, train, progress, began = self.arm, self.train, self.progress, time.perf_counter()
        run.resume()
        progress.start_run(arm.name, train.seed, first_step=run.step)
        progress.note(f"samples come from {describe_engine(train.rollout)}")
        stale = records.directory / "model"
        if stale.exists() and train.checkpoint.export == "none":
            progress.note(f"{stale} holds an earlier policy and stays as it is: checkpoint.export renews it")
        try:
            with metric_writers(records.directory, after=run.step) as write:

                def on_step(step: int, record: dict[str, float | str]) -> None:
                    write(step, record)
                    progress.update(step, record)

                outcome = run.run(on_step=on_step, should_stop=self.should_stop)
            if train.checkpoint.export != "none" and outcome.step:
                place = export_policy(
                    experiment.graphdef, run.params, train, records.directory / "model", step=outcome.step
                )
                progress.note(f"the policy after step {outcome.step}: {place}")
        except (NonFiniteError, CheckpointError, SamplingError) as error:
            self._fail(records, error, time.perf_counter() - began, run.outcome("failed"))
        reason = "" if outcome.status == "complete" else "stopped on request; continue with --resume"
        records.end(outcome, reason, time.perf_counter() - began)
        progress.finish_run(outcome.status, reason)
        if outcome.status == "stopped":
            raise Interrupted(
                f"arm {arm.name!r}, seed {train.seed}: stopped after step {outcome.step}; continue with --resume."
            )

    def _fail(
        self, records: RunRecords, error: RuntimeError, seconds: float, outcome: RunOutcome = NEVER_BEGAN
    ) -> NoReturn:
        with contextlib.suppress(OSError):
            records.begin()
            records.end(outcome, str(error), seconds)
        self.progress.finish_run("failed", str(error))
        raise error
