"""``RolloutBatch`` → ``ScoredBatch``: what the training model thinks of what was sampled, before the update."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from trm_jax import ops
from trm_jax.models import ComputeConfig, Transformer
from trm_jax.rescore._layout import operator_layout
from trm_jax.rescore._policy import policy_logps, response_states, scored_tokens
from trm_jax.types import RolloutBatch, ScoredBatch

__all__ = ["rescore"]


def rescore(
    graphdef: Any,
    params: nnx.State[Any, Any],
    rollout: RolloutBatch,
    rollout_head: Float[Array, "V D"] | None,
    *,
    compute: ComputeConfig,
    microbatches: int = 1,
    replay_routes: bool = False,
) -> tuple[ScoredBatch, dict[str, tuple[Array, Array]]]:
    """Recomputes log-probs of the sampled tokens and, where hidden states were recorded, the exact KL and TV.

    ``proximal_logps`` are log π_train at the rollout's temperature (and support). With ``rollout.hidden`` and
    ``rollout_head``, ``token_kl`` = KL(π_roll ‖ π_train) and ``token_tv`` are sums over the whole vocabulary (TRM 2.3),
    and the log-probs that follow from the recorded states are held against the recorded ones.

    Args:
      graphdef: of the ``Transformer``.
      params: the training weights before the update.
      rollout: what the engine sampled.
      rollout_head: the head that the engine made its logits with (``Engine.head_matrix``); needed when
        ``rollout.hidden`` is given.
      compute: the training side's arithmetic.
      microbatches: row groups processed one after another, to bound memory; divides ``B``.
      replay_routes: use the experts that the engine recorded (see ``response_states``).

    Returns:
      The scored batch, and ``{"max/recorded_logp_error": (value, 1)}`` when it could be taken: the largest difference
      between a recorded log-prob and the one that the recorded hidden state and head give. Above rounding, the record
      is not what the engine sampled from. What stands at masked slots of the rollout reaches no valid slot.

    Raises:
      ValueError: hidden states without a head, a truncated rollout without its support, raw log-probs of a rollout that
        was sampled at another temperature or truncated, replay without routes, or ``microbatches`` that does not
        divide ``B``.

    >>> from trm_jax.models import TransformerConfig
    >>> model = Transformer(TransformerConfig(vocab_size=16), rngs=nnx.Rngs(0))
    >>> rollout = RolloutBatch(
    ...     prompt_tokens=jnp.array([[5, 6]]), prompt_mask=jnp.array([[True, True]]),
    ...     response_tokens=jnp.array([[7, 8, 0]]), response_mask=jnp.array([[True, True, False]]),
    ...     rollout_logps=jnp.zeros((1, 3)), versions=jnp.zeros((1, 3), jnp.int32),
    ...     finished=jnp.array([True]), group_ids=jnp.array([0]),
    ... )  # fmt: skip
    >>> scored, checks = rescore(*nnx.split(model, nnx.Param), rollout, None, compute=ComputeConfig())
    >>> scored.proximal_logps.shape, scored.token_kl, checks
    ((1, 3), None, {})
    """
    rows = rollout.response_tokens.shape[0]
    if microbatches < 1 or rows % microbatches:
        raise ValueError(f"microbatches={microbatches} must be at least 1 and divide the {rows} rows of the rollout.")
    if rollout.hidden is not None and rollout_head is None:
        raise ValueError("the rollout holds hidden states; pass rollout_head, the head that made its logits.")
    if not rollout.processed_logps and (rollout.temperature, rollout.top_p) != (1.0, 1.0):
        raise ValueError(
            f"rollout_logps are the raw model's, but the tokens were sampled at temperature={rollout.temperature}, "
            f"top_p={rollout.top_p}: record log-probs after temperature and truncation (vLLM: "
            "logprobs_mode='processed_logprobs'), or sample at temperature 1 and top_p 1."
        )
    chex.assert_equal_shape([rollout.response_tokens, rollout.response_mask, rollout.rollout_logps, rollout.versions])
    chex.assert_equal_shape_prefix([rollout.prompt_tokens, rollout.response_tokens, rollout.group_ids], 1)
    model: Transformer = nnx.merge(graphdef, params)

    def one(part: RolloutBatch) -> dict[str, Array]:
        hidden = response_states(model, part, compute=compute, replay_routes=replay_routes)
        logps, entropy = policy_logps(model, part, compute=compute, hidden=hidden)
        out = {"logps": logps, "entropy": entropy}
        if part.hidden is None or rollout_head is None:
            return out
        batch, length, width = hidden.shape
        tokens, support = scored_tokens(part)
        divergence = ops.linear_vocab_divergence(
            hidden.reshape(-1, width),
            model.head().astype(compute.jnp_dtype),
            part.hidden.reshape(-1, width),
            rollout_head,
            tokens,
            temperature=part.temperature,
            support=support,
            **operator_layout(),
        )
        shape = (batch, length)
        assert divergence.token_tv is not None
        return out | {
            "kl": divergence.token_kl.reshape(shape),
            "tv": divergence.token_tv.reshape(shape),
            "rollout_logps": divergence.rollout_logps.reshape(shape),
            "rollout_entropy": divergence.rollout_entropy.reshape(shape),
        }

    if microbatches == 1:
        out = one(rollout)
    else:
        # Rows m, m + M, m + 2M, ... form part m: rows that are sharded over devices stay where they are.
        split = (rows // microbatches, microbatches)
        parts = jax.tree.map(lambda x: x.reshape(*split, *x.shape[1:]).swapaxes(0, 1), rollout)
        stacked = jax.lax.map(one, parts)
        out = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(rows, *x.shape[2:]), stacked)
    scored = ScoredBatch(
        proximal_logps=out["logps"],
        rollout_logps=rollout.rollout_logps,
        response_mask=rollout.response_mask,
        token_kl=out.get("kl"),
        token_tv=out.get("tv"),
        policy_entropy=out["entropy"],
        rollout_entropy=out.get("rollout_entropy"),
    )
    checks: dict[str, tuple[Array, Array]] = {}
    if "rollout_logps" in out:
        error = jnp.where(rollout.response_mask, jnp.abs(out["rollout_logps"] - rollout.rollout_logps), 0.0)
        checks["max/recorded_logp_error"] = (jnp.max(error), jnp.ones((), jnp.float32))
    return scored, checks
