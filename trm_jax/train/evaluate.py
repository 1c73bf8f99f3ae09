"""Held-out accuracy, with the trainer's own arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
from flax import nnx

from trm_jax.data import encode_prompts
from trm_jax.rollout import EngineConfig, InProcessEngine, RolloutNumerics, SamplingConfig
from trm_jax.train.config import TrainConfig
from trm_jax.train.experiment import Experiment, training_compute

__all__ = ["Evaluator", "decode_responses"]

_EVALUATION_STEP = 2**31  # seeds of evaluation never coincide with those of a training step


def decode_responses(experiment: Experiment, tokens: Any, mask: Any) -> list[str]:
    """Responses as text, without the end token."""
    eos = experiment.tokenizer.eos_ids
    rows, keep = np.asarray(tokens), np.asarray(mask)
    return [
        experiment.tokenizer.decode([int(t) for t in row[ok] if int(t) not in eos])
        for row, ok in zip(rows, keep, strict=True)
    ]


class Evaluator:
    """Answers the same held-out prompts with the same sampling seeds at every call.

    Args:
      experiment: its test problems; at least one.
      config: ``config.eval`` and lengths.
    """

    def __init__(self, experiment: Experiment, config: TrainConfig) -> None:
        self._experiment = experiment
        self._problems = list(experiment.test)
        rollout, compute = config.rollout, training_compute(config.model)
        self._engine = InProcessEngine(
            experiment.model,
            EngineConfig(
                slots=min(rollout.slots, len(self._problems)),
                max_prompt_length=rollout.max_prompt_length,
                max_response_length=rollout.max_response_length,
                prefill_rows=rollout.prefill_rows,
                decode_chunk=rollout.decode_chunk,
            ),
            numerics=RolloutNumerics(dtype=compute.dtype, batch_invariant=compute.batch_invariant),
            sampling=SamplingConfig(temperature=config.eval.temperature, greedy=config.eval.greedy),
            eos_ids=experiment.tokenizer.eos_ids,
            record_hidden=False,
        )
        self._prompts = encode_prompts(
            self._problems,
            experiment.tokenizer,
            max_prompt_length=rollout.max_prompt_length,
            samples_per_prompt=1,
            seed=0,
            step=_EVALUATION_STEP,
        )

    @property
    def items(self) -> int:
        """Held-out problems."""
        return len(self._problems)

    def __call__(self, params: nnx.State[Any, Any]) -> float:
        """The share of held-out problems that earn the full reward."""
        self._engine.update_weights(0, params)
        rollout = self._engine.generate(self._prompts)
        texts = decode_responses(self._experiment, rollout.response_tokens, rollout.response_mask)
        return float(np.mean(np.asarray(self._experiment.score(self._problems, texts)) >= 1.0))
