"""What a correction reports, as ``(total, denominator)`` pairs that add across microbatches and devices.

Names under ``max/`` hold ``(maximum, 1)`` and combine by maximum. Raw and applied weights never share a name.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax.correction._legal import LegalLogps
from trm_jax.divergences import k2, k3
from trm_jax.numerics import masked_max, masked_sum, over_tokens, safe_exp, sequence_ends, sequence_mean, sequence_sum
from trm_jax.types import ScoredBatch

__all__ = [
    "Metrics",
    "divergence_metrics",
    "effective_sample_fraction",
    "keep_metrics",
    "logp_metrics",
    "weight_metrics",
]

Metrics = dict[str, tuple[Array, Array]]


def _count(flags: Array) -> Array:
    return jnp.sum(flags).astype(jnp.float32)


def _maximum(values: Array, mask: Array) -> tuple[Array, Array]:
    return masked_max(values, mask), jnp.float32(1.0)


def effective_sample_fraction(metrics: Mapping[str, tuple[Array, Array]]) -> Float[Array, ""]:
    """Kish's ``(Σw)² / (n Σw²)`` from summed metrics, in [0, 1]; 0 when every weight is 0.

    Args:
      metrics: ``CorrectedBatch.metrics``, summed over any number of batches.

    >>> pairs = {"weight/applied_mean": (jnp.float32(2), jnp.float32(4)),
    ...          "weight/applied_mean_square": (jnp.float32(2), jnp.float32(4))}
    >>> print(effective_sample_fraction(pairs))
    0.5
    """
    total, count = metrics["weight/applied_mean"]
    squares, _ = metrics["weight/applied_mean_square"]
    safe = jnp.where(squares > 0, squares * count, 1.0)
    return jnp.where(squares > 0, total * total / safe, 0.0)


def keep_metrics(
    scored: ScoredBatch,
    sequence_keep: Bool[Array, B * T],
    token_keep: Bool[Array, "B T"],
    rejected: Mapping[str, Bool[Array, B * T]],
) -> Metrics:
    """Kept fractions and rejected sequences by cause, each sequence counted at its last token."""
    mask = scored.response_mask
    ends = sequence_ends(mask, scored.segment_ids)
    sequences, tokens = _count(ends), _count(mask)
    kept = over_tokens(sequence_keep, mask)
    metrics = {
        "sequences/kept_fraction": (_count(ends & kept), sequences),
        "tokens/kept_fraction": (_count(token_keep & kept), tokens),
    }
    for name, flags in rejected.items():
        metrics[f"rejected/{name}"] = (_count(ends & over_tokens(flags, mask)), sequences)
    return metrics


def weight_metrics(
    log_ratio: Float[Array, "B T"],
    raw_weights: Float[Array, "B T"],
    importance_weights: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    capped: bool,
) -> Metrics:
    """Raw ratios, applied weights, and where they differ; ``raw_weights`` is what the cap was applied to."""
    finite = mask & jnp.isfinite(log_ratio)
    tokens = _count(mask)
    positive = mask & (importance_weights > 0)
    bound = positive & (importance_weights != raw_weights) if capped else jnp.zeros_like(mask)
    return {
        "ratio/raw_mean": (masked_sum(safe_exp(log_ratio), finite), _count(finite)),
        "weight/applied_mean": (masked_sum(importance_weights, mask), tokens),
        "weight/applied_mean_square": (masked_sum(jnp.square(importance_weights), mask), tokens),
        "weight/capped_fraction": (_count(bound), tokens),
        "weight/dropped_fraction": (_count(mask & ~positive), tokens),
        "max/weight": _maximum(importance_weights, mask),
        "max/ratio": _maximum(safe_exp(log_ratio), finite),
    }


def divergence_metrics(scored: ScoredBatch, log_ratio: Float[Array, "B T"], refused: Bool[Array, "B T"]) -> Metrics:
    """Estimators on sampled tokens, full-vocabulary divergences and entropies when the record carries them."""
    mask = scored.response_mask & ~refused
    finite = mask & jnp.isfinite(log_ratio)
    metrics = {
        "kl/k1_mean": (masked_sum(-log_ratio, finite), _count(finite)),
        "kl/k3_mean": (masked_sum(k3(jnp.minimum(log_ratio, 60.0)), finite), _count(finite)),
        "max/k2": _maximum(k2(log_ratio), mask),
    }
    for name, short in (("token_kl", "kl/token_mean"), ("token_tv", "tv/token_mean")):
        values = getattr(scored, name)
        if values is not None:
            known = mask & jnp.isfinite(values)
            metrics[short] = (masked_sum(values, known), _count(known))
            metrics[f"max/{name}"] = _maximum(values, mask & ~jnp.isnan(values))
            metrics[f"illegal/{name}_nan_fraction"] = (_count(mask & jnp.isnan(values)), _count(mask))
    for name, short in (("policy_entropy", "entropy/policy_mean"), ("rollout_entropy", "entropy/rollout_mean")):
        values = getattr(scored, name)
        if values is not None:
            known = mask & jnp.isfinite(values)
            metrics[short] = (masked_sum(values, known), _count(known))
    return metrics


def logp_metrics(scored: ScoredBatch, proximal: LegalLogps, rollout: LegalLogps) -> Metrics:
    """Perplexity gap and the count of every kind of unusual log-prob (totals are counts of tokens)."""
    mask = scored.response_mask
    tokens = _count(mask)
    odd = proximal.refused | rollout.refused | proximal.zero_probability | rollout.zero_probability
    ends = sequence_ends(mask, scored.segment_ids)
    usable = ends & (over_tokens(sequence_sum(odd.astype(jnp.float32), mask, scored.segment_ids), mask) == 0)
    metrics: Metrics = {}
    means = []
    for name, legal in (("proximal", proximal), ("rollout", rollout)):
        mean = sequence_mean(jnp.where(odd, 0.0, legal.logps), mask, scored.segment_ids)
        means.append(over_tokens(mean, mask))
        metrics[f"logps/{name}_mean"] = (masked_sum(means[-1], usable), _count(usable))
    metrics["logps/ppl_gap"] = (masked_sum(means[0] - means[1], usable), _count(usable))
    for kind in ("nan", "sentinel", "above_zero", "clamped"):
        flags = getattr(proximal, kind) | getattr(rollout, kind)
        metrics[f"illegal/{kind}_fraction"] = (_count(flags), tokens)
    metrics["illegal/proximal_zero_fraction"] = (_count(proximal.zero_probability), tokens)
    metrics["illegal/rollout_zero_fraction"] = (_count(rollout.zero_probability), tokens)
    return metrics
