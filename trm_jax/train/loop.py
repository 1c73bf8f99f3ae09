"""One run: ``prompts → rollout → rescore → correction → loss → update``, step after step, and nothing lost between."""

from __future__ import annotations

import dataclasses
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from trm_jax.checkpoint import Checkpointer
from trm_jax.train.ahead import Ahead
from trm_jax.train.config import TrainConfig
from trm_jax.train.engines import SamplingError
from trm_jax.train.evaluate import Evaluator
from trm_jax.train.evidence import NonFiniteError, skip_reason, write_evidence, write_samples
from trm_jax.train.experiment import Experiment
from trm_jax.train.measure import to_record
from trm_jax.train.programs import compile_programs, minibatch
from trm_jax.train.sampling import Sampled, Sampler
from trm_jax.train.source import InTurn, Source
from trm_jax.train.staleness import drop_stale
from trm_jax.train.state import TrainState, init_state, make_optimizer, make_schedule, on_mesh, state_shardings
from trm_jax.train.step import UpdateBatch

__all__ = ["RunOutcome", "TrainRun"]

_SAMPLES = 8  # responses kept as text beside a checkpoint

Pairs = dict[str, tuple[Array, Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """Attributes:

    status: "complete", "stopped" or "failed".
    step: steps done.
    accuracy_start: held-out accuracy before RL; NaN when not evaluated.
    accuracy_final: held-out accuracy after the last step; NaN when not evaluated.
    evaluation_items: held-out problems.
    sampled_tokens: response tokens sampled over the run.
    """

    status: str
    step: int
    accuracy_start: float
    accuracy_final: float
    evaluation_items: int
    sampled_tokens: int


class TrainRun:
    """The state of one run and its step.

    Args:
      experiment: problems, reward, tokenizer, model.
      config: the run's configuration.
      params: weights to start from, of the experiment's model or its warm start. The run takes them over: its first
        update donates them, so that no copy of a large policy stays in memory.
      directory: the run's own directory, for checkpoints and evidence.
      mesh: devices.
      note: called with sentences worth reading.

    Raises:
      ValueError: the server at ``config.rollout.address`` is made for something else.
      SamplingError: there is no server.
    """

    def __init__(
        self,
        experiment: Experiment,
        config: TrainConfig,
        params: nnx.State[Any, Any],
        directory: Path,
        mesh: Mesh,
        *,
        note: Callable[[str], None] = print,
    ) -> None:
        self._experiment, self._config, self._directory, self._note = experiment, config, directory, note
        self._schedule = make_schedule(config.optimizer, config.steps * config.loss.minibatches)
        optimizer = make_optimizer(config.optimizer, self._schedule)
        state = init_state(params, optimizer)
        shardings = state_shardings(state, optimizer, mesh)
        self._state: TrainState = jax.device_put(state, shardings)
        self._mesh = mesh
        self._rows = NamedSharding(mesh, PartitionSpec("data"))
        self._programs = compile_programs(experiment.graphdef, optimizer, shardings, config)
        self._source = self._make_source()
        self._evaluator = Evaluator(experiment, experiment.test, config) if config.eval.prompts else None
        self._checkpoints = Checkpointer(directory / "checkpoints", keep=config.checkpoint.keep, report=note)
        self._step = 0
        self._sampled: Sampled | None = None
        self._sampled_tokens = 0
        self._accuracy_start = self._accuracy = float("nan")

    def _make_source(self) -> Source:
        sampler, params = Sampler(self._experiment, self._config), self._state.params
        if not self._config.ahead:
            return InTurn(sampler, self._config.rollout.lag, params)
        return Ahead(sampler, self._config, params, context=lambda: on_mesh(self._mesh))

    def close(self) -> None:
        """Lets go of the engine, which may have a connection or threads."""
        self._source.close()

    @property
    def step(self) -> int:
        """Steps done."""
        return self._step

    @property
    def params(self) -> nnx.State[Any, Any]:
        """The policy's weights."""
        return self._state.params

    def resume(self) -> bool:
        """Goes to the newest good checkpoint; False when there is none, ``CheckpointError`` when none is good."""
        params = self._state.params

        def template(saved: dict[str, Any]) -> Any:
            return {"state": self._state, "held": [params] * len(saved["held_versions"])}

        restored = self._checkpoints.restore_latest(template)
        if restored is None:
            return False
        self._step, arrays, saved = restored
        self._state = arrays["state"]
        self._source.set_state(self._step, saved, arrays["held"])
        self._accuracy_start, self._accuracy = saved["accuracy_start"], saved["accuracy"]
        self._sampled_tokens = saved["sampled_tokens"]
        return True

    def save(self) -> None:
        """Writes a checkpoint of all that the rest of the run depends on, and a few samples to read beside it."""
        if self._sampled is not None:
            fault = write_samples(self._directory, self._step, self._sampled.as_text(_SAMPLES))
            if fault:
                self._note(fault)
        self._checkpoints.save(
            self._step,
            {"state": self._state, "held": [params for _, params in self._source.held]},
            {
                **self._source.get_state(),
                "accuracy_start": self._accuracy_start,
                "accuracy": self._accuracy,
                "sampled_tokens": self._sampled_tokens,
                "config": dataclasses.asdict(self._config),
            },
        )

    def run(
        self,
        *,
        on_step: Callable[[int, dict[str, float | str]], None],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> RunOutcome:
        """Runs to the last step, or until asked to stop; a checkpoint of every step done stands at the end either way.

        Args:
          on_step: called with the number of steps done and the step's metrics, before the step's checkpoint is written.
          should_stop: asked before the first and after every step.

        Raises:
          NonFiniteError: the loss or gradient was not finite.
          CheckpointError: a checkpoint could not be written.
          SamplingError: the server failed or stayed away; a checkpoint of every step done has been written.
        """
        with on_mesh(self._mesh):
            try:
                return self._run(on_step, should_stop)
            finally:
                self._source.stop()

    def _run(
        self, on_step: Callable[[int, dict[str, float | str]], None], should_stop: Callable[[], bool]
    ) -> RunOutcome:
        config = self._config
        if self._step < config.steps and should_stop():
            return self.outcome("stopped")
        if self._step == 0 and self._evaluator is not None:
            self._accuracy_start = self._accuracy = self._evaluator(self._state.params)
            on_step(0, {"step": 0, "version": 0, "stage": "rl", "accuracy/heldout": self._accuracy})
        self._source.start()
        while self._step < config.steps:
            record = self._train_step()
            done = self._step == config.steps
            if self._evaluator is not None and (done or self._step % config.eval.every == 0):
                self._accuracy = record["accuracy/heldout"] = self._evaluator(self._state.params)
            on_step(self._step, record)
            stopped = should_stop() and not done
            if done or stopped or self._step % config.checkpoint.every == 0:
                self.save()
            if stopped:
                return self.outcome("stopped")
        return self.outcome("complete")

    def outcome(self, status: str) -> RunOutcome:
        """Where the run stands."""
        return RunOutcome(
            status=status,
            step=self._step,
            accuracy_start=self._accuracy_start,
            accuracy_final=self._accuracy,
            evaluation_items=0 if self._evaluator is None else self._evaluator.items,
            sampled_tokens=self._sampled_tokens,
        )

    def _train_step(self) -> dict[str, float | str]:
        """Sample, score, correct, learn; the state and the source move, everything else is in the record."""
        began, before = time.perf_counter(), int(self._state.version)
        sampled = self._sampled = self._take()
        rolled = time.perf_counter()
        fresh, ages = drop_stale(sampled.rollout, version=before, most=self._config.rollout.oldest_allowed)
        batch, pairs = self._rescore(dataclasses.replace(sampled, rollout=fresh))
        rescored = time.perf_counter()
        totals = self._learn(batch, sampled)
        ended = time.perf_counter()
        self._source.after_step(int(self._state.version), self._state.params)
        self._step += 1
        tokens = int(np.asarray(sampled.rollout.response_mask).sum())
        self._sampled_tokens += tokens
        record: dict[str, float | str] = {
            **to_record(jax.device_get(pairs), totals),
            "step": self._step,
            "version": int(self._state.version),
            "stage": "rl",
            "reward/mean": float(sampled.rewards.mean()),
            "reward/solved_groups": float((sampled.by_group.max(axis=1) >= 1.0).mean()),
            "optim/learning_rate": float(self._schedule(before)),
            "rollout/staleness_mean": ages.mean,
            "rollout/staleness_max": float(ages.oldest),
            "rollout/dropped_groups": float(ages.dropped_groups),
            "time/rollout_s": sampled.seconds,
            "time/wait_s": rolled - began,
            "time/rescore_s": rescored - rolled,
            "time/update_s": ended - rescored,
            "time/tokens_per_s": tokens / (ended - began),
            "memory/peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }
        if record["optim/skipped"]:
            keep, answered = np.asarray(batch.corrected.sequence_keep), np.any(np.asarray(fresh.response_mask), axis=1)
            why = skip_reason(sampled.by_group, keep, np.asarray(answered))
            self._note(f"step {self._step}: update skipped, the optimizer is untouched: {why}.")
        return record

    def _take(self) -> Sampled:
        """The samples of this step; when there are none to be had, what has been done is saved first."""
        try:
            return self._source.take()
        except SamplingError:
            if self._step and self._step not in self._checkpoints.steps():
                self.save()
            raise

    def _rescore(self, sampled: Sampled) -> tuple[UpdateBatch, Pairs]:
        """The training policy's view of the samples, the correction, and the advantages."""
        rollout = jax.device_put(sampled.rollout, self._rows)
        scored, corrected, pairs = self._programs.score(self._state.params, rollout, sampled.head)
        refused, rows = jax.device_get(corrected.metrics["rejected/non_finite"])
        if 0 < rows <= refused:
            self._stop_nonfinite("a log-prob in every sequence", {"rollout": rollout, "scored": scored}, sampled)
        advantages = self._programs.advantages(
            jnp.asarray(sampled.rewards), rollout.group_ids, sequence_keep=corrected.sequence_keep
        )
        rollout = dataclasses.replace(rollout, hidden=None)  # they have served; the update need not move them
        batch = UpdateBatch(rollout=rollout, scored=scored, corrected=corrected, advantages=advantages)
        return jax.block_until_ready(batch), pairs

    def _learn(self, batch: UpdateBatch, sampled: Sampled) -> list[dict[str, tuple[np.ndarray, np.ndarray]]]:
        """One update a minibatch; the source hears of every version that was reached."""
        totals = []
        count = self._config.loss.minibatches
        for index in range(count):
            part = minibatch(batch, index, count)
            self._state, metrics = self._programs.update(self._state, part)
            totals.append(jax.device_get(metrics))
            if totals[-1]["nonfinite"][0] > 0:
                self._stop_nonfinite("the loss or its gradient", part, sampled)
            if not totals[-1]["skipped"][0]:
                self._source.after_update(int(self._state.version), self._state.params)
        return totals

    def _stop_nonfinite(self, what: str, batch: Any, sampled: Sampled) -> NoReturn:
        """Writes the evidence and raises."""
        path = self._directory / f"nonfinite_step{self._step + 1:08d}.npz"
        texts = np.array(json.dumps(sampled.texts))
        evidence = write_evidence(path, batch, rewards=sampled.rewards, texts=texts)
        saved = self._checkpoints.steps()
        last = f"the last good checkpoint is step {saved[-1]}" if saved else "no checkpoint had been written yet"
        raise NonFiniteError(
            f"step {self._step + 1}: {what} is not finite. This update was not made; {last}. {evidence} Look at its "
            "rewards, log-probs and weights. The same configuration would come here again: lower the learning rate or "
            "choose a correction that bounds the weights, and run in another directory (directory=PATH)."
        )
