"""One policy update: gradients of sums over microbatches, one division, clip, AdamW."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from trm_jax import losses
from trm_jax.models import ComputeConfig, RematPolicy
from trm_jax.rescore import policy_logps
from trm_jax.train.config import LossConfig
from trm_jax.train.rounding import apply_updates, in_float32
from trm_jax.train.state import TrainState
from trm_jax.types import CorrectedBatch, LossTotal, RolloutBatch, ScoredBatch

__all__ = ["UpdateBatch", "make_update", "policy_loss"]

Pairs = dict[str, tuple[Array, Array]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateBatch:
    """All that an update reads: what was sampled, scored, corrected, and the advantages ``[B]``."""

    rollout: RolloutBatch
    scored: ScoredBatch
    corrected: CorrectedBatch
    advantages: Float[Array, " B"]


def policy_loss(logps: Float[Array, "B T"], batch: UpdateBatch, config: LossConfig) -> LossTotal:
    """The configured loss on the current policy's log-probs."""
    mask, corrected = batch.scored.response_mask, batch.corrected
    if config.kind == "masked":
        return losses.masked_surrogate(
            logps, batch.scored.rollout_logps, batch.advantages, mask, corrected.sequence_keep
        )
    return losses.clipped_surrogate(
        logps,
        batch.scored.proximal_logps,
        batch.advantages,
        mask,
        importance_weights=corrected.importance_weights,
        sequence_keep=corrected.sequence_keep,
        token_keep=corrected.token_keep,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip or None,
        aggregation=config.aggregation,
        denominator=config.denominator,
    )


def make_update(
    graphdef: Any,
    optimizer: optax.GradientTransformation,
    config: LossConfig,
    *,
    compute: ComputeConfig,
    microbatches: int = 1,
    remat: bool | RematPolicy = False,
    replay_routes: bool = False,
) -> Callable[[TrainState, UpdateBatch], tuple[TrainState, Pairs]]:
    """Builds ``update(state, batch) -> (state, metrics)``, to be jitted with the state donated.

    When nothing is left to train on (everything masked, every weight or advantage zero) or the loss or gradient is not
    finite, the state comes back as it was and ``skipped`` is 1; ``nonfinite`` tells the two apart.

    Args:
      graphdef: of the ``Transformer``.
      optimizer: applied to the gradient of ``total / denominator``.
      config: the loss.
      compute: the training side's arithmetic.
      microbatches: row groups whose sums and counts are accumulated; divides the batch.
      remat: recompute activations in the backward pass.
      replay_routes: use the experts that the engine recorded.
    """

    def total(params: nnx.State[Any, Any], part: UpdateBatch) -> tuple[Array, tuple[Array, Pairs]]:
        model = nnx.merge(graphdef, params)
        logps, entropy = policy_logps(model, part.rollout, compute=compute, remat=remat, replay_routes=replay_routes)
        loss = policy_loss(logps, part, config)
        mask = part.scored.response_mask
        entropy_sum = jnp.sum(jnp.where(mask, jax.lax.stop_gradient(entropy), 0.0))
        aux = {**loss.aux, "entropy/policy_mean": (entropy_sum, jnp.sum(mask, dtype=jnp.float32))}
        return loss.total, (loss.denominator, aux)

    def accumulate(
        params: nnx.State[Any, Any], batch: UpdateBatch
    ) -> tuple[tuple[Array, tuple[Array, Pairs]], nnx.State[Any, Any]]:
        gradient = jax.value_and_grad(total, has_aux=True)
        if microbatches == 1:
            return in_float32(gradient(params, batch))  # type: ignore[no-any-return]
        # Part m holds rows m, m + M, ...: rows that are sharded over devices stay where they are.
        parts = jax.tree.map(
            lambda x: x.reshape(x.shape[0] // microbatches, microbatches, *x.shape[1:]).swapaxes(0, 1),
            dataclasses.replace(batch, corrected=dataclasses.replace(batch.corrected, metrics={})),
        )
        first = jax.tree.map(lambda x: x[0], parts)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), jax.eval_shape(gradient, params, first))

        def body(sums: Any, part: UpdateBatch) -> tuple[Any, None]:
            return jax.tree_util.tree_map_with_path(_combine, sums, gradient(params, part)), None

        sums: Any = jax.lax.scan(body, zeros, parts)[0]
        return sums  # type: ignore[no-any-return]

    def update(state: TrainState, batch: UpdateBatch) -> tuple[TrainState, Pairs]:
        (loss_sum, (count, aux)), grads = accumulate(state.params, batch)
        inverse = jnp.where(count > 0, 1.0 / jnp.where(count > 0, count, 1.0), 0.0)
        grads = jax.tree.map(lambda g: g * inverse, grads)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss_sum)
        apply = finite & _contributes(batch)

        def move(held: TrainState) -> TrainState:
            updates, opt_state = optimizer.update(grads, held.opt_state, held.params)
            return TrainState(apply_updates(held.params, updates, held.version), opt_state, held.version + 1)

        state = jax.lax.cond(apply, move, lambda held: held, state)
        one = jnp.ones((), jnp.float32)
        metrics: Pairs = {
            **aux,
            "optim/loss": (loss_sum, count),
            "grad_norm": (norm, one),
            "skipped": (1.0 - apply.astype(jnp.float32), one),
            "nonfinite": (1.0 - finite.astype(jnp.float32), one),
        }
        return state, metrics

    return update


def _combine(path: tuple[Any, ...], total: Array, part: Array) -> Array:
    """Sums and counts add up; what is named a maximum is one."""
    largest = any(str(getattr(key, "key", "")).startswith("max/") for key in path)
    return jnp.maximum(total, part) if largest else total + part


def _contributes(batch: UpdateBatch) -> Array:
    """Whether any token carries weight and advantage."""
    corrected = batch.corrected
    keep = corrected.sequence_keep if corrected.sequence_keep.ndim == 2 else corrected.sequence_keep[:, None]
    weighty = (corrected.importance_weights != 0) & (batch.advantages != 0)[:, None]
    return jnp.any(batch.scored.response_mask & keep & corrected.token_keep & weighty)
