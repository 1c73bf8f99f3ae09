"""Accuracy on fixed problems, with the trainer's own arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx

from trm_jax.data import Problem, encode_prompts
from trm_jax.evaluation import ask
from trm_jax.rollout import RolloutNumerics, SamplingConfig
from trm_jax.train.config import TrainConfig
from trm_jax.train.engines import make_engine
from trm_jax.train.experiment import Experiment

__all__ = ["Evaluator"]

_EVALUATION_STEP = 2**31  # seeds of evaluation never coincide with those of a training step


class Evaluator:
    """Answers the same prompts with the same sampling seeds at every call.

    Args:
      experiment: tokenizer, reward and model.
      problems: what is asked; at least one.
      config: ``config.eval`` and lengths.
    """

    def __init__(self, experiment: Experiment, problems: Sequence[Problem], config: TrainConfig) -> None:
        self._experiment = experiment
        self._problems = list(problems)
        compute = config.model.compute()
        self._engine = make_engine(
            experiment,
            config.rollout,
            numerics=RolloutNumerics(
                dtype=compute.dtype, batch_invariant=compute.batch_invariant, experts=compute.experts
            ),
            sampling=SamplingConfig(temperature=config.eval.temperature, greedy=config.eval.greedy),
            slots=min(config.rollout.slots, len(self._problems)),
            record_hidden=False,
        )
        self._prompts = encode_prompts(
            self._problems,
            experiment.tokenizer,
            max_prompt_length=config.rollout.max_prompt_length,
            samples_per_prompt=1,
            seed=0,
            step=_EVALUATION_STEP,
        )

    @property
    def items(self) -> int:
        """Problems asked."""
        return len(self._problems)

    def __call__(self, params: nnx.State[Any, Any]) -> float:
        """The share of the problems that earn the full reward."""
        self._engine.update_weights(0, params)
        texts = [answer.text for answer in ask(self._engine, self._prompts, self._experiment.tokenizer)]
        return float(np.mean(np.asarray(self._experiment.score(self._problems, texts)) >= 1.0))
