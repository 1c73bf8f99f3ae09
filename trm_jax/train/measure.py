"""From a step's records to the numbers of one metrics row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from trm_jax.correction import effective_sample_fraction
from trm_jax.report import reduce_pairs
from trm_jax.types import RolloutBatch, ScoredBatch

__all__ = ["batch_pairs", "to_record"]

Pairs = dict[str, tuple[Array, Array]]

_NAMES = {
    "logps/ppl_gap": "mismatch/ppl_gap",
    "kl/token_mean": "mismatch/token_kl_mean",
    "max/token_kl": "mismatch/token_kl_max",
    "tv/token_mean": "mismatch/token_tv_mean",
    "max/token_tv": "mismatch/token_tv_max",
    "sequences/kept_fraction": "correction/sequence_keep_fraction",
    "tokens/kept_fraction": "correction/token_keep_fraction",
    "ratio/raw_mean": "correction/ratio_raw_mean",
    "weight/applied_mean": "correction/weight_mean",
    "max/weight": "correction/weight_max",
    "min/weight": "correction/weight_min",
    "weight/capped_fraction": "correction/weight_capped_fraction",
    "weight/dropped_fraction": "correction/weight_zero_fraction",
    "rejected/non_finite": "correction/non_finite_fraction",
    "entropy/rollout_mean": "rollout/entropy",
    "max/log_ratio_abs": "mismatch/log_ratio_max_abs",
    "equal_fraction": "mismatch/bitwise_equal_fraction",
    "response_length": "rollout/response_length_mean",
    "truncated_fraction": "rollout/truncated_fraction",
    "max/recorded_logp_error": "mismatch/recorded_logp_error",
    "optim/loss": "optim/loss",
    "clip/fraction": "optim/clip_fraction",
    "entropy/policy_mean": "policy/entropy",
}
"""The names of the library's sums and counts, and of the metrics that they become."""


def batch_pairs(rollout: RolloutBatch, scored: ScoredBatch) -> Pairs:
    """Sums and counts (or maxima, under "max/") that only the whole record can give: differences, lengths, ends."""
    mask = scored.response_mask
    one = jnp.ones((), jnp.float32)
    tokens = jnp.sum(mask, dtype=jnp.float32)
    answered = jnp.any(mask, axis=1)
    rows = jnp.sum(answered, dtype=jnp.float32)
    finite = mask & jnp.isfinite(scored.proximal_logps) & jnp.isfinite(scored.rollout_logps)
    log_ratio = jnp.where(finite, scored.proximal_logps - scored.rollout_logps, 0.0)
    equal = mask & (scored.proximal_logps == scored.rollout_logps)
    return {
        "max/log_ratio_abs": (jnp.max(jnp.abs(log_ratio)), one),
        "log_ratio": (jnp.sum(log_ratio), tokens),
        "log_ratio_square": (jnp.sum(jnp.square(log_ratio)), tokens),
        "equal_fraction": (jnp.sum(equal, dtype=jnp.float32), tokens),
        "response_length": (tokens, rows),
        "truncated_fraction": (jnp.sum(answered & ~rollout.finished, dtype=jnp.float32), rows),
    }


def to_record(
    pairs: Mapping[str, tuple[Any, Any]], updates: Sequence[Mapping[str, tuple[Any, Any]]]
) -> dict[str, float]:
    """Divides the sums of a step: those of the batch, and those of its updates added up.

    The gradient norm is the largest of the updates; the step counts as skipped when every update was.
    """
    value = {**reduce_pairs([pairs]), **reduce_pairs(updates)}
    value |= {name.removeprefix("max/"): number for name, number in value.items()}
    record = {metric: value[n] for name, metric in _NAMES.items() if (n := name.removeprefix("max/")) in value}
    variance = value["log_ratio_square"] - value["log_ratio"] ** 2
    record["mismatch/log_ratio_sd"] = max(0.0, variance) ** 0.5
    weights = {name: (jnp.asarray(a), jnp.asarray(b)) for name, (a, b) in pairs.items() if name.startswith("weight/")}
    record["correction/ess_fraction"] = float(effective_sample_fraction(weights))
    record["optim/grad_norm"] = max(float(update["grad_norm"][0]) for update in updates)
    record["optim/skipped"] = float(all(float(update["skipped"][0]) for update in updates))
    return record
