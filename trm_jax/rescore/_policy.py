"""The training model's log-probs of a rollout's tokens: one function for the rescore and for the loss."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from trm_jax import ops
from trm_jax.models import ComputeConfig, RematPolicy, Transformer, head_token_logps
from trm_jax.rescore._layout import operator_layout
from trm_jax.rescore._rows import training_rows
from trm_jax.types import RolloutBatch

__all__ = ["policy_logps", "response_states", "scored_tokens"]


def response_states(
    model: Transformer,
    rollout: RolloutBatch,
    *,
    compute: ComputeConfig,
    remat: bool | RematPolicy = False,
    replay_routes: bool = False,
) -> Float[Array, "B T D"]:
    """Final hidden states from which the training model predicts every response token.

    Args:
      model: the policy; differentiable in its parameters.
      rollout: the sampled tokens.
      compute: the training side's arithmetic.
      remat: recompute activations in the backward pass.
      replay_routes: use the experts that the engine recorded (routing replay, R3: Ma et al., arXiv 2510.11370); their
        weights still come from this model's router, and are differentiable.

    Returns:
      ``[B, T, D]`` in the compute dtype; at masked slots, states of padding.

    Raises:
      ValueError: routes are to be replayed and none are recorded, or those of another model.
    """
    tokens, states = training_rows(rollout)
    routes = rollout.routed_experts if replay_routes else None
    if replay_routes and routes is None:
        raise ValueError(
            "replay_routes=True needs the experts that the engine chose, but the rollout holds none: sample with an "
            "engine that records them (record_routes=True)."
        )
    if routes is not None:
        routes = jnp.moveaxis(routes, 2, 0).astype(jnp.int32)
    hidden = model(tokens, compute=compute, remat=remat, routed_experts=routes).hidden
    return jnp.take_along_axis(hidden, states[:, :, None], axis=1)


def scored_tokens(rollout: RolloutBatch) -> tuple[Int[Array, " N"], UInt8[Array, "N V8"] | None]:
    """The sampled tokens and their support, rows of a head; masked slots, which may hold anything, get legal values."""
    tokens = jnp.where(rollout.response_mask, rollout.response_tokens, 0).reshape(-1)
    if rollout.support is None:
        return tokens, None
    support = jnp.where(rollout.response_mask[:, :, None], rollout.support, jnp.uint8(255))
    return tokens, support.reshape(tokens.shape[0], -1)


def policy_logps(
    model: Transformer,
    rollout: RolloutBatch,
    *,
    compute: ComputeConfig,
    remat: bool | RematPolicy = False,
    replay_routes: bool = False,
    hidden: Float[Array, "B T D"] | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probs of the sampled tokens under the training model, and its entropy, at the rollout's temperature.

    Args:
      model: the policy; differentiable in its parameters.
      rollout: the sampled tokens; when it has a support (top-p), both values are taken within it.
      compute: the training side's arithmetic.
      remat: recompute activations in the backward pass.
      replay_routes: use the experts that the engine recorded (see ``response_states``).
      hidden: response states, when they have been computed already.

    Returns:
      ``logps`` and ``entropy``, ``[B, T]`` float32; at masked slots finite values without a meaning. A token outside
      its support has ``-inf``.

    Raises:
      ValueError: a rollout sampled with ``top_p < 1`` that did not record its support; routes that are to be replayed
        and were not recorded.
    """
    if rollout.top_p < 1 and rollout.support is None:
        raise ValueError(
            f"the rollout was sampled with top_p={rollout.top_p} but holds no support: its log-probs cannot be "
            "compared with the training model's. Record the support at sampling time, or sample with top_p=1."
        )
    if hidden is None:
        hidden = response_states(model, rollout, compute=compute, remat=remat, replay_routes=replay_routes)
    batch, length, width = hidden.shape
    flat = hidden.reshape(-1, width)
    tokens, support = scored_tokens(rollout)
    if compute.batch_invariant:
        logps, entropy = head_token_logps(
            flat, model.head(), tokens, temperature=rollout.temperature, compute=compute, support=support
        )
    else:
        head = model.head().astype(compute.jnp_dtype)
        out = ops.linear_logps(
            flat, head, tokens, temperature=rollout.temperature, support=support, **operator_layout()
        )
        logps, entropy = out.logps, out.entropy
    return logps.reshape(batch, length), entropy.reshape(batch, length)
