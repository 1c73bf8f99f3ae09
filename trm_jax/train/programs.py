"""The compiled programs of a step: rescore and correct, advantages, update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from jaxtyping import Array

from trm_jax import correction, losses
from trm_jax.models import ComputeConfig
from trm_jax.rescore import rescore
from trm_jax.train.config import TrainConfig
from trm_jax.train.measure import batch_pairs
from trm_jax.train.state import TrainState
from trm_jax.train.step import UpdateBatch, make_update
from trm_jax.types import CorrectedBatch, RolloutBatch, ScoredBatch

__all__ = ["Programs", "compile_programs", "minibatch"]

Pairs = dict[str, tuple[Array, Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """Attributes:

    score: ``(params, rollout, rollout head) -> (scored, corrected, sums and counts)``.
    advantages: ``(rewards, group ids, sequence_keep=...) -> [B]``.
    update: ``(state, batch) -> (state, sums and counts)``; the state given is donated.
    """

    score: Callable[..., tuple[ScoredBatch, CorrectedBatch, Pairs]]
    advantages: Callable[..., Array]
    update: Callable[[TrainState, UpdateBatch], tuple[TrainState, Pairs]]


def compile_programs(
    graphdef: Any, optimizer: optax.GradientTransformation, shardings: TrainState, config: TrainConfig
) -> Programs:
    """The programs of one configuration; each compiles at its first call.

    Args:
      graphdef: of the ``Transformer``.
      optimizer: of the update.
      shardings: where the updated state lies.
      config: loss, correction and row counts.
    """
    loss, model = config.loss, config.model
    per_update = config.rollout.rows // loss.minibatches
    micro = loss.microbatch_rows or per_update
    update = make_update(
        graphdef,
        optimizer,
        loss,
        compute=model.compute(),
        microbatches=per_update // micro,
        remat=model.remat,
        replay_routes=model.replay_routes,
    )
    score = functools.partial(
        _score,
        graphdef=graphdef,
        config=config.correction,
        compute=model.compute(),
        microbatches=config.rollout.rows // micro,
        replay_routes=model.replay_routes,
    )
    advantages = functools.partial(losses.group_advantages, normalize=loss.advantage, scope=loss.advantage_scope)
    return Programs(
        score=jax.jit(score),
        advantages=jax.jit(advantages),
        update=jax.jit(update, donate_argnums=0, out_shardings=(shardings, None)),
    )


def minibatch(batch: UpdateBatch, index: int, count: int) -> UpdateBatch:
    """Every ``count``-th row, from ``index`` on: each minibatch holds samples of every group."""
    if count == 1:
        return batch
    batch = dataclasses.replace(batch, corrected=dataclasses.replace(batch.corrected, metrics={}))
    part: UpdateBatch = jax.tree.map(lambda x: x[index::count], batch)
    return part


def _score(
    params: Any,
    rollout: RolloutBatch,
    head: Array | None,
    *,
    graphdef: Any,
    config: correction.CorrectionConfig,
    compute: ComputeConfig,
    microbatches: int,
    replay_routes: bool,
) -> tuple[ScoredBatch, CorrectedBatch, Pairs]:
    scored, checks = rescore(
        graphdef, params, rollout, head, compute=compute, microbatches=microbatches, replay_routes=replay_routes
    )
    corrected = correction.correct(scored, config)
    return scored, corrected, {**corrected.metrics, **checks, **batch_pairs(rollout, scored)}
