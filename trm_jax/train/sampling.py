"""Sampling for a run: the next prompts of its stream, answered by its engine, and graded."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Float32

from trm_jax.data import Problem, Stream, encode_prompts, prompt_stream
from trm_jax.evaluation import read_answers
from trm_jax.train.config import TrainConfig
from trm_jax.train.engines import close_engine, interrupt_engine, open_engine, served
from trm_jax.train.experiment import Experiment
from trm_jax.types import RolloutBatch

__all__ = ["Sampled", "Sampler"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
    """One step's responses, graded.

    Attributes:
      problems: a problem a row; a prompt's samples stand together.
      rollout: what the engine recorded.
      texts: the responses as text.
      rewards: ``[B]`` in [0, 1].
      group_size: samples a prompt.
      head: ``[V, D]`` output head that made ``rollout.hidden`` into logits, or None when they were not recorded.
      place: of the prompt stream after these problems.
      seconds: that sampling and grading took.
    """

    problems: list[Problem]
    rollout: RolloutBatch
    texts: list[str]
    rewards: Float32[np.ndarray, " B"]
    group_size: int
    head: Float[Array, "V D"] | None
    place: dict[str, int]
    seconds: float

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
    """The rollout side of a run: its prompts and its engine. Which weights, and when, is for others to say.

    Args:
      experiment: problems, reward, tokenizer, model.
      config: ``config.rollout`` and the seed.

    Raises:
      ValueError: the server at the run's address is made for something else.
      SamplingError: there is no server.
    """

    def __init__(self, experiment: Experiment, config: TrainConfig) -> None:
        rollout = config.rollout
        self._experiment, self._config = experiment, config
        self._stream: Stream[list[Problem]] = prompt_stream(
            experiment.train, prompts_per_step=rollout.prompts_per_step, seed=config.seed
        )
        self._engine = open_engine(experiment, rollout, record_routes=config.model.replay_routes)

    def interrupt(self) -> None:
        """A ``load`` or ``sample`` under way in another thread ends with an error, if it waits for others."""
        interrupt_engine(self._engine)

    def close(self) -> None:
        """Lets go of the engine."""
        close_engine(self._engine)

    @property
    def place(self) -> dict[str, int]:
        """Of the prompt stream: which problems are next."""
        return self._stream.get_state()

    @place.setter
    def place(self, place: dict[str, int]) -> None:
        self._stream.set_state(place)

    def load(self, version: int, params: Any) -> None:
        """Has the engine take these weights, unless it has them."""
        if self._engine.version != version:
            with served(self._config.rollout):
                self._engine.update_weights(version, params)

    def sample(self, step: int) -> Sampled:
        """The next prompts, answered by the weights that are loaded, and graded.

        Raises:
          SamplingError: the server failed, or stayed away.
        """
        began, config = time.perf_counter(), self._config.rollout
        problems, samples = next(self._stream), config.samples_per_prompt
        prompts = encode_prompts(
            problems,
            self._experiment.tokenizer,
            max_prompt_length=config.max_prompt_length,
            samples_per_prompt=samples,
            seed=self._config.seed,
            step=step,
        )
        with served(config):
            rollout = jax.block_until_ready(self._engine.generate(prompts))
        texts = [answer.text for answer in read_answers(rollout, self._experiment.tokenizer)]
        repeated = [problem for problem in problems for _ in range(samples)]
        return Sampled(
            problems=repeated,
            rollout=rollout,
            texts=texts,
            rewards=np.asarray(self._experiment.score(repeated, texts), np.float32),
            group_size=samples,
            head=self._engine.head_matrix() if config.record_hidden else None,
            place=self.place,
            seconds=time.perf_counter() - began,
        )
