"""Training rows from a rollout: prompt and response joined without a gap, and where each token was predicted from."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from trm_jax.types import RolloutBatch

__all__ = ["training_rows"]


def training_rows(rollout: RolloutBatch) -> tuple[Int[Array, "B S"], Int[Array, "B T"]]:
    """Joins prompt and response and tells which position predicts each response token.

    Args:
      rollout: ``P`` prompt and ``T`` response positions; a row's prompt has ``n`` tokens.

    Returns:
      ``tokens`` ``[B, P + T]``: prompt, response, then zeros; ``states`` ``[B, T]``: ``n - 1 + t``, the position whose
      hidden state predicts response token ``t`` (valid indices at masked slots too).

    >>> rollout = RolloutBatch(
    ...     prompt_tokens=jnp.array([[5, 6, 0]]), prompt_mask=jnp.array([[True, True, False]]),
    ...     response_tokens=jnp.array([[7, 8]]), response_mask=jnp.array([[True, True]]),
    ...     rollout_logps=jnp.zeros((1, 2)), versions=jnp.zeros((1, 2), jnp.int32),
    ...     finished=jnp.array([True]), group_ids=jnp.array([0]),
    ... )  # fmt: skip
    >>> tokens, states = training_rows(rollout)
    >>> print(tokens, states)
    [[5 6 7 8 0]] [[1 2]]
    """
    batch, response = rollout.response_tokens.shape
    length = jnp.sum(rollout.prompt_mask, axis=1, dtype=jnp.int32)
    row = jnp.arange(batch)[:, None]
    place = length[:, None] + jnp.arange(response, dtype=jnp.int32)
    prompt = jnp.where(rollout.prompt_mask, rollout.prompt_tokens, 0)
    answer = jnp.where(rollout.response_mask, rollout.response_tokens, 0)
    tokens = jnp.pad(prompt, [(0, 0), (0, response)]).at[row, place].set(answer)
    return tokens, jnp.maximum(place - 1, 0)
