"""What a correction reports, as ``(total, denominator)`` pairs that add across microbatches and devices.

Names under ``max/`` and ``min/`` hold ``(extremum, 1)``, or ``(0, 0)`` where nothing counts, and combine by maximum and
minimum. Raw and applied weights never share a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax.correction._legal import LegalLogps
from trm_jax.correction._statistics import Statistic, Totals
from trm_jax.divergences import k3
from trm_jax.numerics import MAX_LOG_RATIO, masked_values, safe_exp
from trm_jax.types import ScoredBatch

__all__ = ["Metrics", "SequenceDecisions", "effective_sample_fraction", "metrics_from_totals", "token_quantities"]

Metrics = dict[str, tuple[Array, Array]]

_ILLEGAL = ("nan", "sentinel", "above_zero", "clamped")
_DIVERGENCES = {"token_kl": "kl/token_mean", "token_tv": "tv/token_mean"}
_ENTROPIES = {"policy_entropy": "entropy/policy_mean", "rollout_entropy": "entropy/rollout_mean"}


class SequenceDecisions(NamedTuple):
    """What was decided of each sequence, ``[B]``, or ``[B, T]`` for packed rows.

    Attributes:
      ends: True at one slot of every sequence that has response tokens.
      keep: sequences that are trained on.
      rejected: by cause.
      factor: what the token weights of the sequence were multiplied by.
      bound: whether ``factor`` is a cap.
    """

    ends: Bool[Array, "B *T"]
    keep: Bool[Array, "B *T"]
    rejected: Mapping[str, Bool[Array, "B *T"]]
    factor: Float[Array, "B *T"]
    bound: Bool[Array, "B *T"]


def effective_sample_fraction(metrics: Mapping[str, tuple[Array, Array]]) -> Float[Array, ""]:
    """Kish's ``(Σw)² / (n Σw²)`` from summed metrics, in [0, 1]; 0 when every weight is 0.

    Args:
      metrics: ``CorrectedBatch.metrics``, summed over any number of batches.

    Returns:
      Scalar float32.

    >>> pairs = {"weight/applied_mean": (jnp.float32(2), jnp.float32(4)),
    ...          "weight/applied_mean_square": (jnp.float32(2), jnp.float32(4))}
    >>> print(effective_sample_fraction(pairs))
    0.5
    """
    total, count = metrics["weight/applied_mean"]
    squares, _ = metrics["weight/applied_mean_square"]
    safe = jnp.where(squares > 0, squares * count, 1.0)
    return jnp.where(squares > 0, total * total / safe, 0.0)


def token_quantities(
    scored: ScoredBatch,
    numerator: LegalLogps,
    rollout: LegalLogps,
    log_ratio: Float[Array, "B T"],
    weights: Float[Array, "B T"],
    capped: Bool[Array, "B T"],
    token_keep: Bool[Array, "B T"],
) -> Statistic:
    """Everything that the metrics add up or take the maximum of, token by token."""
    mask = scored.response_mask
    refused = numerator.refused | rollout.refused
    legal = mask & ~refused
    finite = legal & jnp.isfinite(log_ratio)
    positive = legal & (weights > 0)
    possible = legal & ~numerator.zero_probability & ~rollout.zero_probability
    flags = {kind: getattr(numerator, kind) | getattr(rollout, kind) for kind in _ILLEGAL}
    flags |= {"proximal_zero": numerator.zero_probability, "rollout_zero": rollout.zero_probability}
    flags |= {"refused": refused, "finite": finite, "kept": token_keep, "positive": positive, "capped": capped}
    sums = {
        "log_ratio": masked_values(log_ratio, finite),
        "ratio": masked_values(safe_exp(log_ratio), finite),
        "k3": masked_values(k3(jnp.minimum(log_ratio, MAX_LOG_RATIO)), finite),
        "weight": weights,
        "weight_square": jnp.square(weights),
        "proximal": masked_values(numerator.logps, possible),
        "rollout": masked_values(rollout.logps, possible),
    }
    maxima = {
        "weight": weights,
        "minus_weight": masked_values(-weights, positive, -jnp.inf),
        "log_ratio": masked_values(log_ratio, finite, -jnp.inf),
        "abs_log_ratio": masked_values(jnp.abs(log_ratio), legal, -jnp.inf),
    }
    for name in (*_DIVERGENCES, *_ENTROPIES):
        values = getattr(scored, name)
        if values is not None:
            known = legal & jnp.isfinite(values)
            flags[f"{name}/known"] = known
            sums[name] = masked_values(values, known)
            if name in _DIVERGENCES:
                nan = legal & jnp.isnan(values)
                flags[f"{name}/nan"] = nan
                maxima[name] = masked_values(values, legal & ~nan, -jnp.inf)
    return Statistic(sums=sums, counts=flags, maxima=maxima, value=lambda totals: totals)


def metrics_from_totals(totals: Totals, decided: SequenceDecisions) -> Metrics:
    """The metrics from the totals of ``token_quantities``, each sequence counted once."""

    def total(values: Array, where: Array = decided.ends) -> Array:
        return jnp.sum(masked_values(values, where & decided.ends))

    def sequences(where: Array) -> Array:
        return total(jnp.ones_like(totals.tokens), where)

    def largest(values: Array) -> tuple[Array, Array]:
        top = jnp.max(masked_values(values, decided.ends, -jnp.inf), initial=-jnp.inf)
        return jnp.where(top > -jnp.inf, top, 0.0), (top > -jnp.inf).astype(jnp.float32)

    sums, counts, maxima = totals.sums, totals.counts, totals.maxima
    tokens, everything = total(totals.tokens), sequences(decided.ends)
    legal = tokens - total(counts["refused"])
    finite = total(counts["finite"])
    weighted = decided.factor > 0
    capped = jnp.where(decided.bound, counts["positive"], counts["capped"])
    metrics = {
        "sequences/kept_fraction": (sequences(decided.keep), everything),
        "tokens/kept_fraction": (total(counts["kept"], decided.keep), tokens),
        "ratio/raw_mean": (total(sums["ratio"]), finite),
        "weight/applied_mean": (total(sums["weight"] * decided.factor), legal),
        "weight/applied_mean_square": (total(sums["weight_square"] * jnp.square(decided.factor)), legal),
        "weight/capped_fraction": (total(capped, weighted), legal),
        "weight/dropped_fraction": (legal - total(counts["positive"], weighted), legal),
        "kl/k1_mean": (-total(sums["log_ratio"]), finite),
        "kl/k3_mean": (total(sums["k3"]), finite),
    }
    metrics |= {f"rejected/{name}": (sequences(flags), everything) for name, flags in decided.rejected.items()}

    ratio, count = largest(maxima["log_ratio"])
    metrics["max/ratio"] = (jnp.where(count > 0, safe_exp(ratio), 0.0), count)
    furthest, count = largest(maxima["abs_log_ratio"])
    metrics["max/k2"] = (0.5 * jnp.square(furthest), count)
    has_weight = decided.ends & weighted & (counts["positive"] > 0)
    metrics["max/weight"] = largest(jnp.where(has_weight, maxima["weight"] * decided.factor, -jnp.inf))
    smallest, count = largest(jnp.where(has_weight, maxima["minus_weight"] * decided.factor, -jnp.inf))
    metrics["min/weight"] = (-smallest, count)

    for name, short in (_DIVERGENCES | _ENTROPIES).items():
        if name in sums:
            metrics[short] = (total(sums[name]), total(counts[f"{name}/known"]))
        if name in maxima:
            metrics[f"max/{name}"] = largest(maxima[name])
            metrics[f"illegal/{name}_nan_fraction"] = (total(counts[f"{name}/nan"]), legal)
    for kind in (*_ILLEGAL, "proximal_zero", "rollout_zero"):
        metrics[f"illegal/{kind}_fraction"] = (total(counts[kind]), tokens)

    # A sequence with an illegal or impossible token has no mean log-prob.
    usable = (counts["refused"] + counts["proximal_zero"] + counts["rollout_zero"] == 0) & decided.ends
    count = sequences(usable)
    for name in ("proximal", "rollout"):
        metrics[f"logps/{name}_mean"] = (total(totals.mean(sums[name]), usable), count)
    metrics["logps/ppl_gap"] = (total(totals.mean(sums["proximal"] - sums["rollout"]), usable), count)
    return metrics
