"""Sampling for a run: an engine that may lag and compute otherwise, over a stream of prompts, its responses graded."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from trm_jax.data import Problem, Stream, encode_prompts, prompt_stream
from trm_jax.evaluation import read_answers
from trm_jax.rollout import EngineConfig, InProcessEngine, RolloutNumerics, SamplingConfig, WeightLag
from trm_jax.train.config import RolloutConfig, TrainConfig
from trm_jax.train.experiment import Experiment
from trm_jax.types import RolloutBatch

__all__ = ["Sampled", "Sampler", "make_engine"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
    """One step's responses, graded.

    Attributes:
      problems: a problem a row; a prompt's samples stand together.
      rollout: what the engine recorded.
      texts: the responses as text.
      rewards: ``[B]`` in [0, 1].
      group_size: samples a prompt.
    """

    problems: list[Problem]
    rollout: RolloutBatch
    texts: list[str]
    rewards: Float32[np.ndarray, " B"]
    group_size: int

    @property
    def by_group(self) -> Float32[np.ndarray, "groups samples"]:
        """Rewards, a row a prompt."""
        return self.rewards.reshape(-1, self.group_size)

    def as_text(self, most: int) -> list[dict[str, object]]:
        """About ``most`` rows to read, spread over the batch."""
        rows = [
            {"prompt": problem.prompt, "response": text, "reference": problem.reference, "reward": float(reward)}
            for problem, text, reward in zip(self.problems, self.texts, self.rewards, strict=True)
        ]
        return rows[:: max(1, len(rows) // most)]


class Sampler:
    """The rollout side of a run: the prompts, the engine, and the weights that it may be behind by.

    Args:
      experiment: problems, reward, tokenizer, model.
      config: ``config.rollout`` and the seed.
      params: policy version 0; copied.
    """

    def __init__(self, experiment: Experiment, config: TrainConfig, params: Any) -> None:
        rollout = config.rollout
        self._experiment, self._config = experiment, config
        self._engine = make_engine(
            experiment,
            rollout,
            numerics=rollout.numerics,
            sampling=SamplingConfig(temperature=rollout.temperature, top_p=rollout.top_p),
            slots=rollout.slots,
            record_hidden=rollout.record_hidden,
            record_routes=config.model.replay_routes,
        )
        self._lag = WeightLag(rollout.lag)
        self.push(0, params)
        self._stream: Stream[list[Problem]] = prompt_stream(
            experiment.train, prompts_per_step=rollout.prompts_per_step, seed=config.seed
        )

    @property
    def version(self) -> int:
        """Policy version of the weights that sampled last."""
        return self._engine.version

    @property
    def held(self) -> list[tuple[int, Any]]:
        """Versions and parameters that later steps will sample from."""
        return self._lag.held

    def push(self, version: int, params: Any) -> None:
        """Takes a copy of the policy after update ``version``: the update donates its own."""
        self._lag.push(version, jax.tree.map(jnp.copy, params))

    def head(self) -> Float[Array, "V D"] | None:
        """The engine's output head, when hidden states are recorded to go with it."""
        return self._engine.head_matrix() if self._config.rollout.record_hidden else None

    def sample(self, step: int) -> Sampled:
        """The next prompts, answered by the oldest weights held, and graded."""
        rollout_config, problems = self._config.rollout, next(self._stream)
        samples = rollout_config.samples_per_prompt
        prompts = encode_prompts(
            problems,
            self._experiment.tokenizer,
            max_prompt_length=rollout_config.max_prompt_length,
            samples_per_prompt=samples,
            seed=self._config.seed,
            step=step,
        )
        version, weights = self._lag.oldest
        if self._engine.version != version:
            self._engine.update_weights(version, weights)
        rollout = jax.block_until_ready(self._engine.generate(prompts))
        texts = [answer.text for answer in read_answers(rollout, self._experiment.tokenizer)]
        repeated = [problem for problem in problems for _ in range(samples)]
        rewards = np.asarray(self._experiment.score(repeated, texts), np.float32)
        return Sampled(problems=repeated, rollout=rollout, texts=texts, rewards=rewards, group_size=samples)

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the arrays of ``held``."""
        return {"held_versions": [version for version, _ in self.held], "stream": self._stream.get_state()}

    def set_state(self, state: dict[str, Any], held: list[Any]) -> None:
        """Goes back to a saved place with the parameters held there."""
        self._lag = WeightLag(self._config.rollout.lag)
        for version, params in zip(state["held_versions"], held, strict=True):
            self._lag.push(version, params)
        self._stream.set_state(state["stream"])


def make_engine(
    experiment: Experiment,
    config: RolloutConfig,
    *,
    numerics: RolloutNumerics,
    sampling: SamplingConfig,
    slots: int,
    record_hidden: bool,
    record_routes: bool = False,
) -> InProcessEngine:
    """An engine of the run's lengths; numerics and sampling are its caller's."""
    return InProcessEngine(
        experiment.model,
        EngineConfig(
            slots=slots,
            max_prompt_length=config.max_prompt_length,
            max_response_length=config.max_response_length,
            prefill_rows=config.prefill_rows,
            decode_chunk=config.decode_chunk,
        ),
        numerics=numerics,
        sampling=sampling,
        eos_ids=experiment.tokenizer.eos_ids,
        record_hidden=record_hidden,
        record_routes=record_routes,
    )
