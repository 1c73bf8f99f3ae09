"""The training model's log-probs of a rollout's tokens: one function for the rescore and for the loss."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from trm_jax import ops
from trm_jax.models import ComputeConfig, Transformer, head_token_logps
from trm_jax.rescore._rows import training_rows
from trm_jax.types import RolloutBatch

__all__ = ["policy_logps", "response_states"]


def response_states(
    model: Transformer, rollout: RolloutBatch, *, compute: ComputeConfig, remat: bool = False
) -> Float[Array, "B T D"]:
    """Final hidden states from which the training model predicts every response token."""
    tokens, states = training_rows(rollout)
    hidden = model(tokens, compute=compute, remat=remat).hidden
    return jnp.take_along_axis(hidden, states[:, :, None], axis=1)


def policy_logps(
    model: Transformer,
    rollout: RolloutBatch,
    *,
    compute: ComputeConfig,
    remat: bool = False,
    hidden: Float[Array, "B T D"] | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probs of the sampled tokens under the training model, and its entropy, at the rollout's temperature.

    Args:
      model: the policy; differentiable in its parameters.
      rollout: the sampled tokens; when it has a support (top-p), both values are taken within it.
      compute: the training side's arithmetic.
      remat: recompute activations in the backward pass.
      hidden: response states, when they have been computed already.

    Returns:
      ``logps`` and ``entropy``, ``[B, T]`` float32; unspecified but finite-gradient values at masked slots.
    """
    if hidden is None:
        hidden = response_states(model, rollout, compute=compute, remat=remat)
    batch, length, width = hidden.shape
    flat, tokens = hidden.reshape(-1, width), rollout.response_tokens.reshape(-1)
    if compute.batch_invariant:
        logps, entropy = head_token_logps(
            flat, model.head(), tokens, temperature=rollout.temperature, compute=compute
        )
    else:
        support = None if rollout.support is None else rollout.support.reshape(batch * length, -1)
        head = model.head().astype(compute.jnp_dtype)
        out = ops.linear_logps(flat, head, tokens, temperature=rollout.temperature, support=support)
        logps, entropy = out.logps, out.entropy
    return logps.reshape(batch, length), entropy.reshape(batch, length)
