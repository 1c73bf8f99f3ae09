"""From a scored batch to what is trained on: masks, then weights, all from the original response mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from trm_jax.checks import bool_mask, same_shape
from trm_jax.correction import _divergence_masks as divergence_masks
from trm_jax.correction import _ratio_masks as ratio_masks
from trm_jax.correction import _sequence_weights as sequence_weights
from trm_jax.correction import _weights as weights
from trm_jax.correction._config import CorrectionConfig, MaskName
from trm_jax.correction._legal import inspect_logps, raise_on_illegal
from trm_jax.correction._log_ratio import masked_log_ratio
from trm_jax.correction._metrics import divergence_metrics, keep_metrics, logp_metrics, weight_metrics
from trm_jax.numerics import AnyArray, over_tokens, safe_exp, sequence_sum
from trm_jax.types import CorrectedBatch, ScoredBatch

__all__ = ["correct"]


def _required(scored: ScoredBatch, field: str, mask: MaskName) -> Array:
    values = getattr(scored, field)
    if values is None:
        instead = "trm_sample (sampled log-probs suffice)" if field == "token_kl" else "trm_max or trm_sample"
        raise ValueError(
            f"the mask {mask} needs {field}, which this batch lacks: have the engine return hidden states so that "
            f"rescoring computes full-vocabulary divergences, or use {instead}"
        )
    out: Array = values
    return out


def _sequence_keep(mask: MaskName, scored: ScoredBatch, log_ratio: Array, config: CorrectionConfig) -> Array:
    response, segments = scored.response_mask, scored.segment_ids
    match mask:
        case "trm_max":
            kl = _required(scored, "token_kl", mask)
            return divergence_masks.max_kl_mask(kl, response, threshold=config.max_token_kl, segment_ids=segments)
        case "trm_avg":
            kl = _required(scored, "token_kl", mask)
            return divergence_masks.mean_kl_mask(kl, response, threshold=config.mean_token_kl, segment_ids=segments)
        case "trm_tv":
            tv = _required(scored, "token_tv", mask)
            return divergence_masks.max_tv_mask(tv, response, threshold=config.max_token_tv, segment_ids=segments)
        case "trm_sample":
            return divergence_masks.sampled_mask(
                log_ratio, response, max_k2=config.max_k2, mean_k3=config.mean_k3, segment_ids=segments
            )
        case "ln_trm":
            return ratio_masks.length_neutral_mask(
                log_ratio,
                response,
                threshold=config.ln_trm_threshold,
                max_token_kl=config.horizon_token_kl,
                max_token_tv=config.horizon_token_tv,
                segment_ids=segments,
            )
        case "ser":
            return ratio_masks.sequence_error_ratio_mask(
                log_ratio, response, threshold=config.ser_threshold, segment_ids=segments
            )
        case "geometric":
            return ratio_masks.geometric_mask(
                log_ratio, response, low=config.geometric_low, high=config.geometric_high, segment_ids=segments
            )
    raise AssertionError(f"{mask} is not a sequence mask")


def _importance_weights(
    scored: ScoredBatch, logp: Array, logq: Array, log_ratio: Array, config: CorrectionConfig
) -> Array:
    response, segments = scored.response_mask, scored.segment_ids
    match config.weight:
        case "none":
            return weights.unit_weights(log_ratio, response)
        case "exact":
            return weights.exact_weights(log_ratio, response, low=config.exact_low, high=config.exact_high)
        case "tis":
            return weights.truncated_weights(log_ratio, response, cap=config.tis_cap)
        case "icepop":
            return weights.masked_weights(log_ratio, response, low=config.icepop_low, high=config.icepop_high)
        case "kpop":
            return weights.bernoulli_kl_weights(logp, logq, response, threshold=config.kpop_threshold)
        case "seq_tis":
            return sequence_weights.sequence_truncated_weights(
                log_ratio, response, cap=config.seq_cap, segment_ids=segments
            )
        case "seq_mis":
            return sequence_weights.sequence_masked_weights(
                log_ratio, response, cap=config.seq_cap, segment_ids=segments
            )
        case "geo_mis":
            return sequence_weights.geometric_masked_weights(
                log_ratio,
                response,
                low=config.geo_mis_low,
                high=config.geo_mis_high,
                token_weight=config.geo_mis_token_weight,
                segment_ids=segments,
            )
        case "cis" | "cis_two_sided":
            return weights.calibrated_weights(
                logp,
                logq,
                response,
                cis_lambda=config.cis_lambda,
                cis_kappa=config.cis_kappa,
                two_sided=config.weight == "cis_two_sided",
            )


def correct(
    scored: ScoredBatch, config: CorrectionConfig, *, policy_logps: Float[AnyArray, "B T"] | None = None
) -> CorrectedBatch:
    """Decides which sequences and tokens are trained on and what each token weighs (TRM section 4, CIS Table 8).

    Every criterion sees the original response mask; the decisions are then joined by "and". A sequence with NaN, a
    sentinel or an illegal log-prob at a response token is rejected whatever the masks say. Weights do not depend on the
    masks. Everything is a constant for the gradient.

    Args:
      scored: log-probs of both policies at the response tokens, with divergences where the masks need them.
      config: static under ``jax.jit`` (``static_argnums=1``).
      policy_logps: ``[B, T]`` log-probs at the current weights, required for and only for ``numerator="policy"``; the
        divergences in ``scored`` should then be those of the current weights too.

    Returns:
      ``CorrectedBatch``. ``sequence_keep`` is ``[B]``, or ``[B, T]`` for packed rows, True for empty sequences.
      ``token_keep`` is within the response mask. Metrics are ``(total, denominator)`` pairs.

    Raises:
      ValueError: when a mask needs a divergence that the batch lacks, when shapes differ, when ``policy_logps`` and
        ``config.numerator`` disagree, or on illegal log-probs under ``non_finite="raise"``.

    >>> scored = ScoredBatch(proximal_logps=jnp.array([[-1.0, -1.0]]), rollout_logps=jnp.array([[-1.0, -3.0]]),
    ...                      response_mask=jnp.ones((1, 2), bool))
    >>> print(correct(scored, CorrectionConfig(weight="tis")).importance_weights)
    [[1. 2.]]
    """
    same_shape(
        proximal_logps=scored.proximal_logps,
        rollout_logps=scored.rollout_logps,
        response_mask=scored.response_mask,
        token_kl=scored.token_kl,
        token_tv=scored.token_tv,
        policy_entropy=scored.policy_entropy,
        rollout_entropy=scored.rollout_entropy,
        segment_ids=scored.segment_ids,
        policy_logps=policy_logps,
    )
    bool_mask(response_mask=scored.response_mask)
    if (config.numerator == "policy") != (policy_logps is not None):
        raise ValueError(
            f"numerator={config.numerator!r} with policy_logps {'missing' if policy_logps is None else 'given'}: "
            "pass policy_logps exactly when numerator='policy'"
        )
    scored = jax.tree.map(jnp.asarray, scored)
    mask = scored.response_mask
    numerator = inspect_logps(scored.proximal_logps if policy_logps is None else policy_logps, mask, config.sentinel)
    rollout = inspect_logps(scored.rollout_logps, mask, config.sentinel)
    if config.non_finite == "raise":
        raise_on_illegal("proximal_logps" if policy_logps is None else "policy_logps", numerator)
        raise_on_illegal("rollout_logps", rollout)
    refused = numerator.refused | rollout.refused
    logp = jnp.where(refused, 0.0, numerator.logps)
    logq = jnp.where(refused, 0.0, rollout.logps)
    log_ratio = masked_log_ratio(logp, logq, mask)

    refused_count = sequence_sum(refused.astype(jnp.float32), mask, scored.segment_ids)
    rejected = {"non_finite": refused_count > 0}
    token_keep = mask & ~refused
    for name in config.masks:
        if name == "token_outlier":
            outlier = ratio_masks.token_outlier_mask(log_ratio, mask, max_abs_log_ratio=config.max_abs_log_ratio)
            token_keep = token_keep & outlier
        else:
            rejected[name] = ~_sequence_keep(name, scored, log_ratio, config)
    sequence_keep = ~jnp.any(jnp.stack(list(rejected.values())), axis=0)

    importance_weights = jnp.where(refused, 0.0, _importance_weights(scored, logp, logq, log_ratio, config))
    raw = log_ratio
    if config.weight in ("seq_tis", "seq_mis"):
        raw = over_tokens(sequence_sum(log_ratio, mask, scored.segment_ids), mask)
    unit = config.weight == "none" or (config.weight == "geo_mis" and config.geo_mis_token_weight == "unit")
    metrics = keep_metrics(scored, sequence_keep, token_keep, rejected)
    metrics |= weight_metrics(log_ratio, safe_exp(raw), importance_weights, mask & ~refused, capped=not unit)
    metrics |= divergence_metrics(scored, log_ratio, refused)
    metrics |= logp_metrics(scored, numerator, rollout)
    return jax.lax.stop_gradient(
        CorrectedBatch(
            sequence_keep=sequence_keep,
            token_keep=token_keep,
            importance_weights=importance_weights,
            metrics=metrics,
        )
    )
