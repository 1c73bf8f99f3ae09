"""``trm-jax train`` and ``trm-jax report``."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro

from trm_jax.cli._signals import FAILED, STOPPED, StopOnSignal

__all__ = ["Report", "Train"]


@dataclasses.dataclass(frozen=True)
class Train:
    """Train a policy by RL on mismatched rollouts, one or more arms, and write a report.

    Every option of the configuration file can be overridden as section.key=value, e.g.
      trm-jax train configs/quickstart.toml steps=20 optimizer.learning_rate=1e-4 seeds=[0,1,2]
    or for one arm: arms.cis.rollout.lag=2. `trm-jax options` lists every key with its type, default and meaning.
    Samples come from this process, or with rollout.address=HOST:PORT rollout.weights=DIRECTORY from a `trm-jax serve`;
    rollout.max_staleness=1 has them sampled while the policy learns from the ones before.
    Ctrl-C saves a checkpoint and ends; a second one ends at once. --resume continues to the same bits.
    """

    config: Annotated[Path, tyro.conf.Positional]
    """TOML file; see configs/."""
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """section.key=value, values as TOML writes them."""
    arm: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Run only this arm (its slug); may be given several times."""
    resume: bool = False
    """Continue the run that stands in the configuration's directory."""
    check: bool = False
    """Check the configuration, its data and its server, and end."""

    def run(self) -> int:
        from rich.console import Console

        from trm_jax.report import collect, results_table
        from trm_jax.train import ArmsFailed, Interrupted, check_arms, load_config, run_experiment

        config = load_config(self.config, self.overrides)
        if self.arm:
            known = [arm.slug for arm in config.arms]
            missing = [slug for slug in self.arm if slug not in known]
            if missing:
                raise ValueError(f"--arm {' '.join(missing)}: no such arm; the file has {', '.join(known)}.")
            config = dataclasses.replace(config, arms=tuple(arm for arm in config.arms if arm.slug in self.arm))
        if self.check:
            check_arms(config)
            print(f"{self.config}: fine; arms {', '.join(arm.slug for arm in config.arms)}; seeds {list(config.seeds)}")
            return 0
        failure = None
        try:
            with StopOnSignal("stopping after this step; a checkpoint will be written") as stop:
                report = run_experiment(config, resume=self.resume, should_stop=stop)
        except Interrupted as interruption:
            print(interruption, file=sys.stderr)
            return STOPPED
        except ArmsFailed as error:
            failure, report = error, error.report
        Console().print(results_table(collect(Path(config.directory))))
        print(f"report: {report}")
        if failure is not None:
            print(f"trm-jax: {failure}", file=sys.stderr)
            return FAILED
        return 0


@dataclasses.dataclass(frozen=True)
class Report:
    """Write the HTML report of a run directory again and print its table."""

    directory: Annotated[Path, tyro.conf.Positional]
    """The run's directory."""

    def run(self) -> int:
        from rich.console import Console

        from trm_jax.report import collect, results_table, write_report

        if not (self.directory / "run.json").exists():
            raise ValueError(f"{str(self.directory)!r} holds no run (there is no run.json in it).")
        path = write_report(self.directory)
        Console().print(results_table(collect(self.directory)))
        print(f"report: {path}")
        return 0
