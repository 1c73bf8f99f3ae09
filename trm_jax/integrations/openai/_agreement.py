"""How far a server's log-probs are from this project's own, on tokens that the server sampled."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import nnx

from trm_jax.integrations.openai._engine import OpenAIEngine
from trm_jax.models import ComputeConfig, Transformer
from trm_jax.rescore import rescore
from trm_jax.types import PromptBatch, RolloutBatch, ScoredBatch

__all__ = ["Agreement", "agreement_of", "measure_agreement"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """Log ratios ``d = proximal − rollout`` over response tokens, in nats.

    Attributes:
      tokens: how many.
      mean_abs: mean of ``|d|``.
      max_abs: largest ``|d|``.
      k3: mean of ``e^d − 1 − d``, which estimates KL(server ‖ model) without bias.
      faulty_rows: responses without a usable record, left out.
    """

    tokens: int
    mean_abs: float
    max_abs: float
    k3: float
    faulty_rows: int


def agreement_of(scored: ScoredBatch) -> Agreement:
    """The statistics of a scored batch, in float64.

    >>> import jax.numpy as jnp
    >>> scored = ScoredBatch(
    ...     proximal_logps=jnp.array([[-1.0, -2.0], [-1.0, -1.0]]),
    ...     rollout_logps=jnp.array([[-1.0, -1.5], [jnp.nan, jnp.nan]]),
    ...     response_mask=jnp.ones((2, 2), bool),
    ... )  # fmt: skip
    >>> agreement_of(scored)
    Agreement(tokens=2, mean_abs=0.25, max_abs=0.5, k3=0.05326532985631671, faulty_rows=1)
    """
    log_ratio = np.asarray(scored.proximal_logps, np.float64) - np.asarray(scored.rollout_logps, np.float64)
    mask = np.asarray(scored.response_mask)
    faulty = (np.isnan(np.asarray(scored.rollout_logps)) & mask).any(axis=1)
    d = log_ratio[mask & ~faulty[:, None]]
    if not d.size:
        raise ValueError("no response has a usable record: there is nothing to compare.")
    return Agreement(
        tokens=int(d.size),
        mean_abs=float(np.abs(d).mean()),
        max_abs=float(np.abs(d).max()),
        k3=float((np.expm1(d) - d).mean()),
        faulty_rows=int(faulty.sum()),
    )


def measure_agreement(engine: OpenAIEngine, prompts: PromptBatch, model: Transformer) -> Agreement:
    """Has the server answer ``prompts`` and scores its tokens with ``model`` in float32.

    Raises:
      ValueError: as ``OpenAIEngine.generate`` and ``rescore`` do.
    """
    graphdef, params = nnx.split(model, nnx.Param)
    rollout = engine.generate(prompts)
    rows = rollout.response_tokens.shape[0]

    @jax.jit
    def score(params: nnx.State[Any, Any], rollout: RolloutBatch) -> ScoredBatch:
        return rescore(graphdef, params, rollout, None, compute=ComputeConfig(), microbatches=rows)[0]

    return agreement_of(score(params, rollout))
