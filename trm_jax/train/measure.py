"""From a step's records to the numbers of one metrics row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from trm_jax.types import CorrectedBatch, RolloutBatch, ScoredBatch

__all__ = ["mismatch_pairs", "to_record"]

Pairs = dict[str, tuple[Array, Array]]

_FROM_UPDATE = ("optim/loss", "optim/grad_norm", "optim/skipped", "optim/clip_fraction", "policy/entropy")


def mismatch_pairs(rollout: RolloutBatch, scored: ScoredBatch, corrected: CorrectedBatch) -> Pairs:
    """Sums and counts (or maxima, under "max/") of how far both sides are apart and of what the correction did.

    ``mismatch/ppl_gap`` is Δ_PPL of TRM: the mean over sequences of the difference of mean log-probs.
    """
    mask = scored.response_mask
    one = jnp.ones((), jnp.float32)
    tokens = jnp.sum(mask, dtype=jnp.float32)
    length = jnp.sum(mask, axis=1, dtype=jnp.float32)
    rows = jnp.sum(length > 0, dtype=jnp.float32)
    both = mask & jnp.isfinite(scored.proximal_logps) & jnp.isfinite(scored.rollout_logps)
    ratio = jnp.where(both, scored.proximal_logps - scored.rollout_logps, 0.0)
    keep = corrected.sequence_keep if corrected.sequence_keep.ndim == 2 else corrected.sequence_keep[:, None]
    kept_tokens = mask & keep & corrected.token_keep
    weights = jnp.where(kept_tokens, corrected.importance_weights, 0.0)
    finished = jnp.sum(rollout.finished & (length > 0), dtype=jnp.float32)

    def mean(values: Array) -> tuple[Array, Array]:
        return jnp.sum(jnp.where(mask, values, 0.0)), tokens

    out: Pairs = {
        "mismatch/ppl_gap": (jnp.sum(jnp.sum(ratio, axis=1) / jnp.maximum(length, 1.0)), rows),
        "max/mismatch/log_ratio_max_abs": (jnp.max(jnp.abs(ratio)), one),
        "log_ratio": mean(ratio),
        "log_ratio_square": mean(jnp.square(ratio)),
        "mismatch/bitwise_equal_fraction": mean((scored.proximal_logps == scored.rollout_logps).astype(jnp.float32)),
        "correction/sequence_keep_fraction": (jnp.sum((keep & mask).any(axis=1), dtype=jnp.float32), rows),
        "correction/token_keep_fraction": mean(kept_tokens.astype(jnp.float32)),
        "correction/ratio_raw_mean": mean(jnp.exp(ratio)),
        "correction/weight_mean": mean(weights),
        "max/correction/weight_max": (jnp.max(weights), one),
        "weight_square": mean(jnp.square(weights)),
        "rollout/response_length_mean": (tokens, rows),
        "rollout/truncated_fraction": (rows - finished, rows),
    }
    for name, values in (("token_kl", scored.token_kl), ("token_tv", scored.token_tv)):
        if values is not None:
            out[f"mismatch/{name}_mean"] = mean(values)
            out[f"max/mismatch/{name}_max"] = (jnp.max(jnp.where(mask, values, 0.0)), one)
    if scored.rollout_entropy is not None:
        out["rollout/entropy"] = mean(scored.rollout_entropy)
    return out


def to_record(
    pairs: Mapping[str, tuple[Any, Any]], updates: Sequence[Mapping[str, tuple[Any, Any]]]
) -> dict[str, float | str]:
    """Divides the sums of a step: ``pairs`` of the batch, and those of its updates added up."""
    value = {name: _divide(*pair) for name, pair in pairs.items()}
    record: dict[str, float | str] = {
        name.removeprefix("max/"): number
        for name, number in value.items()
        if name.startswith(("mismatch/", "correction/", "rollout/", "max/mismatch/", "max/correction/"))
    }
    record["mismatch/log_ratio_sd"] = max(0.0, value["log_ratio_square"] - value["log_ratio"] ** 2) ** 0.5
    square = value["weight_square"]
    record["correction/ess_fraction"] = value["correction/weight_mean"] ** 2 / square if square > 0 else 0.0
    for name in _FROM_UPDATE:
        found = [update[name] for update in updates if name in update]
        if found:
            record[name] = _divide(sum(float(t) for t, _ in found), sum(float(d) for _, d in found))
    return record


def _divide(total: Any, count: Any) -> float:
    return float(np.asarray(total)) / float(np.asarray(count)) if float(np.asarray(count)) else 0.0
