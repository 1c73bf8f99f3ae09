"""What every loss shares: which tokens carry it, their ratios, and the sum with its count."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax.checks import bool_mask, in_range, known_name, required, rows_of_tokens, same_shape, shape_of
from trm_jax.numerics import (
    MAX_LOG_RATIO,
    AnyArray,
    as_float32,
    expm1_minus_identity,
    masked_max,
    masked_sum,
    over_tokens,
    sequence_count,
    sequence_ends,
    sequence_mean,
)
from trm_jax.types import LossTotal

__all__ = [
    "Aggregation",
    "Denominator",
    "TokenTerms",
    "active_mean",
    "aggregate",
    "clip_band",
    "log_ratio_to",
    "prepare",
    "sequence_log_ratio",
]


Aggregation: TypeAlias = Literal["token_mean", "sequence_mean", "constant_length"]
Denominator: TypeAlias = Literal["original", "kept"]


class TokenTerms(NamedTuple):
    """Aligned ``[B, T]`` inputs of a loss, harmless wherever ``active`` is False.

    Attributes:
      active: tokens that carry loss: response tokens that are kept and weigh more than 0.
      policy_logps: carries the gradient; 0 at inactive slots.
      log_ratio: ``policy_logps - proximal_logps``, within ±60, carries the gradient; 0 at inactive slots.
      advantages: constants.
      weights: constants, 0 at inactive slots.
      response_mask: the original one.
      segment_ids: of packed rows, or None.
    """

    active: Bool[Array, "B T"]
    policy_logps: Float[Array, "B T"]
    log_ratio: Float[Array, "B T"]
    advantages: Float[Array, "B T"]
    weights: Float[Array, "B T"]
    response_mask: Bool[Array, "B T"]
    segment_ids: Array | None


def prepare(
    policy_logps: AnyArray,
    proximal_logps: AnyArray,
    advantages: AnyArray,
    response_mask: AnyArray,
    importance_weights: AnyArray | None,
    sequence_keep: AnyArray | None,
    token_keep: AnyArray | None,
    segment_ids: AnyArray | None,
) -> TokenTerms:
    """Checks and aligns the inputs; inactive slots are replaced before any arithmetic."""
    required(
        policy_logps=policy_logps,
        proximal_logps=proximal_logps,
        advantages=advantages,
        response_mask=response_mask,
    )
    shape = same_shape(
        policy_logps=policy_logps,
        proximal_logps=proximal_logps,
        response_mask=response_mask,
        importance_weights=importance_weights,
        token_keep=token_keep,
        segment_ids=segment_ids,
    )
    rows_of_tokens(shape)
    bool_mask(response_mask=response_mask, sequence_keep=sequence_keep, token_keep=token_keep)
    for name, value in (("advantages", advantages), ("sequence_keep", sequence_keep)):
        if value is not None and shape_of(name, value) not in (shape[:1], shape):
            raise ValueError(f"{name} must be [B] or [B, T] of response_mask {list(shape)}, given {list(value.shape)}")
    mask = jnp.asarray(response_mask)
    active = mask
    if sequence_keep is not None:
        active = active & over_tokens(sequence_keep, mask)
    if token_keep is not None:
        active = active & jnp.asarray(token_keep)
    weights = jnp.ones(shape, jnp.float32)
    if importance_weights is not None:
        weights = jax.lax.stop_gradient(as_float32(importance_weights))
        active = active & (weights != 0)
    policy = jnp.where(active, as_float32(policy_logps), 0.0)
    return TokenTerms(
        active=active,
        policy_logps=policy,
        log_ratio=log_ratio_to(proximal_logps, policy, active),
        advantages=jnp.where(active, over_tokens(jax.lax.stop_gradient(as_float32(advantages)), mask), 0.0),
        weights=jnp.where(active, weights, 0.0),
        response_mask=mask,
        segment_ids=None if segment_ids is None else jnp.asarray(segment_ids),
    )


def log_ratio_to(logps: AnyArray, policy: Float[Array, "B T"], active: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Of the policy to constant log-probs, within ±60, 0 at inactive slots."""
    constant = jnp.where(active, jax.lax.stop_gradient(as_float32(logps)), 0.0)
    return jnp.clip(policy - constant, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_band(clip_low: float, clip_high: float) -> tuple[float, float]:
    """``(1 - clip_low, 1 + clip_high)``.

    Raises:
      ValueError: on a width outside its range.
    """
    clip_low = in_range("clip_low", clip_low, low=0.0, high=1.0)
    clip_high = in_range("clip_high", clip_high, low=0.0)
    return 1.0 - clip_low, 1.0 + clip_high


def aggregate(
    token_loss: Float[Array, "B T"],
    terms: TokenTerms,
    aggregation: Aggregation,
    denominator: Denominator,
    constant_length: int | None,
    aux: dict[str, tuple[Array, Array]] | None = None,
) -> LossTotal:
    """Sum and count of the token losses; totals and denominators add over any split of the batch into rows.

    ``aux`` gets the ratio and the divergence of the update besides.

    * token_mean: Σ over tokens / number of tokens.
    * sequence_mean: Σ over sequences of the mean over their tokens / number of sequences.
    * constant_length: Σ over tokens / (number of sequences · ``constant_length``).

    Under "original" the tokens and sequences that count are those of the response mask, under "kept" the active ones.
    """
    known_name("aggregation", aggregation, ("token_mean", "sequence_mean", "constant_length"))
    known_name("denominator", denominator, ("original", "kept"))
    in_range("constant_length", constant_length, low=1)
    counted = terms.response_mask if denominator == "original" else terms.active
    loss = jnp.where(terms.active, token_loss, 0.0)
    if aggregation == "token_mean":
        total, count = jnp.sum(loss), jnp.sum(counted)
    elif aggregation == "sequence_mean":
        lengths = over_tokens(sequence_count(counted, terms.segment_ids), loss)
        total = jnp.sum(loss / jnp.maximum(lengths, 1.0))
        count = jnp.sum(sequence_ends(counted, terms.segment_ids))
    else:
        total = jnp.sum(loss)
        count = jnp.sum(sequence_ends(counted, terms.segment_ids)) * (constant_length or loss.shape[1])
    return LossTotal(
        total=total, denominator=count.astype(jnp.float32), aux=jax.lax.stop_gradient((aux or {}) | _ratio_aux(terms))
    )


def active_mean(values: Array, terms: TokenTerms) -> tuple[Array, Array]:
    """Total and count of float or bool values over the active tokens."""
    return masked_sum(values.astype(jnp.float32), terms.active), jnp.sum(terms.active).astype(jnp.float32)


def _ratio_aux(terms: TokenTerms) -> dict[str, tuple[Array, Array]]:
    ratio = jnp.exp(terms.log_ratio)
    return {
        "ratio/update_mean": active_mean(ratio, terms),
        "max/update_ratio": (masked_max(ratio, terms.active), jnp.float32(1.0)),
        "kl/update_k3_mean": active_mean(expm1_minus_identity(terms.log_ratio), terms),
        "tokens/active_fraction": (
            jnp.sum(terms.active).astype(jnp.float32),
            jnp.sum(terms.response_mask).astype(jnp.float32),
        ),
    }


def sequence_log_ratio(terms: TokenTerms) -> Float[Array, "B T"]:
    """``(1/T) Σ log r_t`` over the active tokens of each sequence, at every token."""
    return over_tokens(sequence_mean(terms.log_ratio, terms.active, terms.segment_ids), terms.active)
