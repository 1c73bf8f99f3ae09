"""One run: ``prompts → rollout → rescore → correction → loss → update``, step after step, and nothing lost between."""

from __future__ import annotations

import dataclasses
import functools
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

from trm_jax import correction, losses
from trm_jax.data import Problem, Stream, encode_prompts, prompt_stream
from trm_jax.rescore import rescore
from trm_jax.rollout import EngineConfig, InProcessEngine, SamplingConfig, WeightLag
from trm_jax.train.checkpoint import Checkpointer
from trm_jax.train.config import TrainConfig
from trm_jax.train.evaluate import Evaluator, decode_responses
from trm_jax.train.experiment import Experiment, training_compute
from trm_jax.train.measure import batch_pairs, to_record
from trm_jax.train.state import TrainState, init_state, make_optimizer, make_schedule, state_shardings
from trm_jax.train.step import UpdateBatch, make_update
from trm_jax.types import CorrectedBatch, RolloutBatch, ScoredBatch

__all__ = ["NonFiniteError", "RunOutcome", "TrainRun"]

_SAMPLES = 8  # responses kept as text beside a checkpoint, one a prompt

Pairs = dict[str, tuple[Array, Array]]


class NonFiniteError(RuntimeError):
    """Log-probs, loss or gradient were not finite; the batch is on disk and the weights are those before its update."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """Attributes:

    status: "complete" or "stopped".
    step: steps done.
    accuracy_start: held-out accuracy before RL; NaN when not evaluated.
    accuracy_final: held-out accuracy after the last step; NaN when not evaluated.
    evaluation_items: held-out problems.
    """

    status: str
    step: int
    accuracy_start: float
    accuracy_final: float
    evaluation_items: int


class TrainRun:
    """The state of one run and its step.

    Args:
      experiment: problems, reward, tokenizer, model.
      config: the run's configuration.
      params: weights to start from (the warm start's); copied.
      directory: the run's own directory, for checkpoints and evidence.
      mesh: devices.
      note: called with sentences worth reading.
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
        rollout, loss = config.rollout, config.loss
        graphdef = experiment.graphdef
        compute = training_compute(config.model)
        per_update = rollout.rows // loss.minibatches
        micro = loss.microbatch_rows or per_update
        self._schedule = make_schedule(config.optimizer, config.steps * loss.minibatches)
        optimizer = make_optimizer(config.optimizer, self._schedule)
        state = init_state(jax.tree.map(jnp.copy, params), optimizer)
        shardings = state_shardings(state, optimizer, mesh)
        self._state: TrainState = jax.device_put(state, shardings)
        self._rows = NamedSharding(mesh, PartitionSpec("data"))
        self._update = jax.jit(
            make_update(
                graphdef,
                optimizer,
                loss,
                compute=compute,
                microbatches=per_update // micro,
                remat=config.model.remat,
            ),
            donate_argnums=0,
            out_shardings=(shardings, None),
        )
        self._score = jax.jit(
            functools.partial(
                _score, graphdef=graphdef, config=config.correction, compute=compute, microbatches=rollout.rows // micro
            )
        )
        self._advantages = jax.jit(
            functools.partial(losses.group_advantages, normalize=loss.advantage, scope=loss.advantage_scope)
        )
        self._engine = InProcessEngine(
            experiment.model,
            EngineConfig(
                slots=rollout.slots,
                max_prompt_length=rollout.max_prompt_length,
                max_response_length=rollout.max_response_length,
                prefill_rows=rollout.prefill_rows,
                decode_chunk=rollout.decode_chunk,
            ),
            numerics=rollout.numerics,
            sampling=SamplingConfig(temperature=rollout.temperature, top_p=rollout.top_p),
            eos_ids=experiment.tokenizer.eos_ids,
            record_hidden=rollout.record_hidden,
        )
        self._lag = WeightLag(rollout.lag)
        self._lag.push(0, jax.tree.map(jnp.copy, self._state.params))
        self._stream: Stream[list[Problem]] = prompt_stream(
            experiment.train, prompts_per_step=rollout.prompts_per_step, seed=config.seed
        )
        self._evaluator = Evaluator(experiment, config) if config.eval.prompts else None
        self._checkpoints = Checkpointer(directory / "checkpoints", keep=config.checkpoint.keep, report=note)
        self._step = 0
        self._samples: list[dict[str, object]] = []
        self._accuracy_start = self._accuracy = float("nan")

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
        self._lag = WeightLag(self._config.rollout.lag)
        for version, held in zip(saved["held_versions"], arrays["held"], strict=True):
            self._lag.push(version, held)
        self._stream.set_state(saved["stream"])
        self._accuracy_start, self._accuracy = saved["accuracy_start"], saved["accuracy"]
        return True

    def save(self) -> None:
        """Writes a checkpoint of all that the rest of the run depends on, and a few samples to read beside it."""
        held = self._lag.held
        self._write_samples()
        self._checkpoints.save(
            self._step,
            {"state": self._state, "held": [params for _, params in held]},
            {
                "held_versions": [version for version, _ in held],
                "stream": self._stream.get_state(),
                "accuracy_start": self._accuracy_start,
                "accuracy": self._accuracy,
                "config": dataclasses.asdict(self._config),
            },
        )

    def _write_samples(self) -> None:
        """``samples/step<N>.json``: the newest step's first responses as text, with their rewards."""
        path = self._directory / "samples" / f"step{self._step:08d}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self._samples, indent=1, ensure_ascii=False), encoding="utf-8")
        except OSError as error:
            self._note(f"could not write {path}: {error.strerror}; the run goes on.")

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
        """
        config = self._config
        if self._step < config.steps and should_stop():
            return self._outcome("stopped")
        if self._step == 0 and self._evaluator is not None:
            self._accuracy_start = self._accuracy = self._evaluator(self._state.params)
            on_step(0, {"step": 0, "version": 0, "stage": "rl", "accuracy/heldout": self._accuracy})
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
                return self._outcome("stopped")
        return self._outcome("complete")

    def _outcome(self, status: str) -> RunOutcome:
        return RunOutcome(
            status=status,
            step=self._step,
            accuracy_start=self._accuracy_start,
            accuracy_final=self._accuracy,
            evaluation_items=0 if self._evaluator is None else self._evaluator.items,
        )

    def _train_step(self) -> dict[str, float | str]:
        config, began = self._config, time.perf_counter()
        problems = next(self._stream)
        samples = config.rollout.samples_per_prompt
        prompts = encode_prompts(
            problems,
            self._experiment.tokenizer,
            max_prompt_length=config.rollout.max_prompt_length,
            samples_per_prompt=samples,
            seed=config.seed,
            step=self._step,
        )
        version, weights = self._lag.oldest
        if self._engine.version != version:
            self._engine.update_weights(version, weights)
        rollout = jax.block_until_ready(self._engine.generate(prompts))
        texts = decode_responses(self._experiment, rollout.response_tokens, rollout.response_mask)
        repeated = [problem for problem in problems for _ in range(samples)]
        rewards = np.asarray(self._experiment.score(repeated, texts), np.float32)
        self._samples = [
            {"prompt": problem.prompt, "response": text, "reference": problem.reference, "reward": float(reward)}
            for problem, text, reward in zip(repeated, texts, rewards, strict=True)
        ][:: max(samples, len(texts) // _SAMPLES)]
        sampled = time.perf_counter()

        rollout = jax.device_put(rollout, self._rows)
        head = self._engine.head_matrix() if config.rollout.record_hidden else None
        scored, corrected, pairs = jax.block_until_ready(self._score(self._state.params, rollout, head))
        refused, rows = corrected.metrics["rejected/non_finite"]
        if 0 < float(rows) <= float(refused):
            self._stop_nonfinite("a log-prob in every sequence", {"rollout": rollout, "scored": scored}, rewards, texts)
        # The hidden states have served; the update need not move them.
        rollout = dataclasses.replace(rollout, hidden=None)
        advantages = self._advantages(jnp.asarray(rewards), rollout.group_ids, sequence_keep=corrected.sequence_keep)
        rescored = time.perf_counter()

        batch = UpdateBatch(rollout=rollout, scored=scored, corrected=corrected, advantages=advantages)
        before = int(self._state.version)
        totals: list[dict[str, tuple[np.ndarray, np.ndarray]]] = []
        for index in range(config.loss.minibatches):
            part = batch if config.loss.minibatches == 1 else _minibatch(batch, index, config.loss.minibatches)
            self._state, metrics = self._update(self._state, part)
            totals.append(jax.device_get(metrics))
            if totals[-1]["nonfinite"][0] > 0:
                self._stop_nonfinite("the loss or its gradient", part, rewards, texts)
            if not totals[-1]["skipped"][0]:
                self._lag.push(int(self._state.version), jax.tree.map(jnp.copy, self._state.params))
        ended = time.perf_counter()
        self._step += 1

        tokens = int(np.asarray(rollout.response_mask).sum())
        solved = rewards.reshape(-1, samples).max(axis=1) >= 1.0
        record: dict[str, float | str] = {**to_record(jax.device_get(pairs), totals)}
        record |= {
            "step": self._step,
            "version": int(self._state.version),
            "stage": "rl",
            "reward/mean": float(rewards.mean()),
            "reward/solved_groups": float(solved.mean()),
            "optim/learning_rate": float(self._schedule(before)),
            "rollout/staleness_mean": float(before - version),
            "time/rollout_s": sampled - began,
            "time/rescore_s": rescored - sampled,
            "time/update_s": ended - rescored,
            "time/tokens_per_s": tokens / (ended - began),
            "memory/peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }
        self._explain_skip(record, rewards, corrected)
        return record

    def _explain_skip(self, record: dict[str, float | str], rewards: np.ndarray, corrected: CorrectedBatch) -> None:
        """Says why an update was left out."""
        if not record["optim/skipped"]:
            return
        if not np.asarray(corrected.sequence_keep).any():
            why = (
                "the correction rejected every sequence. If this goes on, the two policies are further apart than the "
                "mask allows: lower rollout.lag, use a finer rollout.numerics.weight_format, or raise the threshold"
            )
        elif (
            np.ptp(rewards) == 0
            or not np.ptp(rewards.reshape(-1, self._config.rollout.samples_per_prompt), axis=1).any()
        ):
            why = (
                f"all rewards within every group are equal (mean {rewards.mean():.2f}), so every advantage is 0. If "
                "this goes on, the task is too hard or too easy for the policy, or samples_per_prompt is too small"
            )
        else:
            why = "every token's weight or advantage is 0"
        self._note(f"step {self._step}: update skipped, the optimizer is untouched: {why}.")

    def _stop_nonfinite(self, what: str, batch: Any, rewards: np.ndarray, texts: list[str]) -> NoReturn:
        """Writes the evidence and raises."""
        path = self._directory / f"nonfinite_step{self._step + 1:08d}.npz"
        arrays: dict[str, Any] = {
            jax.tree_util.keystr(key, simple=True, separator="."): _readable(value)
            for key, value in jax.tree_util.tree_leaves_with_path(batch)
        }
        try:
            np.savez_compressed(path, rewards=rewards, texts=np.array(json.dumps(texts)), **arrays)
            evidence = f"The batch is in {path}."
        except OSError as error:
            evidence = f"The batch could not be written to {path} ({error.strerror})."
        saved = self._checkpoints.steps()
        last = f"the last good checkpoint is step {saved[-1]}" if saved else "no checkpoint had been written yet"
        raise NonFiniteError(
            f"step {self._step + 1}: {what} is not finite. This update was not made; {last}. {evidence} Look at its "
            "rewards, log-probs and weights. The same configuration would come here again: lower the learning rate or "
            "choose a correction that bounds the weights, and run in another directory (directory=PATH)."
        )


def _readable(value: Any) -> np.ndarray:
    """An array that ``np.load`` reads without extra packages."""
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == jnp.bfloat16 else array


def _score(
    params: nnx.State[Any, Any],
    rollout: RolloutBatch,
    head: Array | None,
    *,
    graphdef: Any,
    config: correction.CorrectionConfig,
    compute: Any,
    microbatches: int,
) -> tuple[ScoredBatch, CorrectedBatch, Pairs]:
    scored, checks = rescore(graphdef, params, rollout, head, compute=compute, microbatches=microbatches)
    corrected = correction.correct(scored, config)
    return scored, corrected, {**corrected.metrics, **checks, **batch_pairs(rollout, scored)}


def _minibatch(batch: UpdateBatch, index: int, count: int) -> UpdateBatch:
    """Every ``count``-th row, from ``index`` on: each minibatch holds samples of every group."""
    batch = dataclasses.replace(batch, corrected=dataclasses.replace(batch.corrected, metrics={}))
    part: UpdateBatch = jax.tree.map(lambda x: x[index::count], batch)
    return part
