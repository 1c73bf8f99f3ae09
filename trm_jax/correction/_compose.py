"""From a scored batch to what is trained on: masks, then weights, all from the original response mask."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from trm_jax.checks import bool_mask, required, rows_of_tokens, same_shape
from trm_jax.correction import _divergence_masks as divergence_masks
from trm_jax.correction import _ratio_masks as ratio_masks
from trm_jax.correction import _sequence_weights as sequence_weights
from trm_jax.correction import _weights as weights
from trm_jax.correction._config import CorrectionConfig, MaskName
from trm_jax.correction._legal import LegalLogps, inspect_logps, raise_on_illegal
from trm_jax.correction._log_ratio import log_weight, masked_log_ratio
from trm_jax.correction._metrics import SequenceDecisions, metrics_from_totals, token_quantities
from trm_jax.correction._statistics import Statistic, evaluate, max_at_most, mean_within
from trm_jax.numerics import AnyArray, over_tokens, safe_exp, sequence_ends
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


class _Tokens(NamedTuple):
    """Both policies at the tokens of a batch, made legal, and what each token weighs.

    Attributes:
      numerator: log-probs over which the ratio is taken.
      rollout: log-probs under which the tokens were sampled.
      log_ratio: 0 at masked and refused slots.
      weights: ``[B, T]``, before the factor of the sequence; 0 at masked and refused slots.
      capped: tokens whose weight is a cap instead of their ratio.
      keep: what the token masks leave of the response.
    """

    numerator: LegalLogps
    rollout: LegalLogps
    log_ratio: Array
    weights: Array
    capped: Array
    keep: Array

    @property
    def refused(self) -> Array:
        return self.numerator.refused | self.rollout.refused


def _token_weights(logp: Array, logq: Array, log_ratio: Array, legal: Array, config: CorrectionConfig) -> Array:
    match config.weight:
        case "none":
            return weights.unit_weights(log_ratio, legal)
        case "exact":
            return weights.exact_weights(log_ratio, legal, low=config.exact_low, high=config.exact_high)
        case "tis":
            return weights.truncated_weights(log_ratio, legal, cap=config.tis_cap)
        case "icepop":
            return weights.masked_weights(log_ratio, legal, low=config.icepop_low, high=config.icepop_high)
        case "kpop":
            return weights.bernoulli_kl_formula(log_weight(log_ratio, legal), logp, logq, config.kpop_threshold)
        case "cis" | "cis_two_sided":
            two_sided = config.weight == "cis_two_sided"
            return weights.calibrated_formula(
                log_weight(log_ratio, legal), logp, config.cis_lambda, config.cis_kappa, two_sided
            )
        case "geo_mis":
            weigh = sequence_weights.GEOMETRIC_TOKEN_WEIGHTS[config.geo_mis_token_weight]
            return weigh(log_ratio, legal)
        case "seq_tis" | "seq_mis":
            return legal.astype(jnp.float32)


def _sequence_factor(log_ratio: Array, response: Array, config: CorrectionConfig) -> Statistic:
    """What the token weights of a sequence are multiplied by, and whether that is a cap."""
    match config.weight:
        case "seq_tis":
            return sequence_weights.truncated_product(log_ratio, response, config.seq_cap)
        case "seq_mis":
            return sequence_weights.masked_product(log_ratio, response, 0.0, config.seq_cap)
        case "geo_mis":
            return sequence_weights.geometric_factor(log_ratio, response, config.geo_mis_low, config.geo_mis_high)
        case _:
            return Statistic(value=lambda totals: (jnp.ones_like(totals.tokens), jnp.zeros_like(totals.tokens, bool)))


def _tokens(numerator_logps: Array, rollout_logps: Array, response: Array, config: CorrectionConfig) -> _Tokens:
    numerator = inspect_logps(numerator_logps, response, config.sentinel)
    rollout = inspect_logps(rollout_logps, response, config.sentinel)
    legal = response & ~(numerator.refused | rollout.refused)
    log_ratio = masked_log_ratio(numerator.logps, rollout.logps, legal)
    weight = _token_weights(numerator.logps, rollout.logps, log_ratio, legal, config)
    unit = config.weight in ("none", "seq_tis", "seq_mis") or (
        config.weight == "geo_mis" and config.geo_mis_token_weight == "unit"
    )
    capped = jnp.zeros_like(response) if unit else (weight > 0) & (weight != safe_exp(log_ratio))
    keep = response
    if "token_outlier" in config.masks:
        keep = ratio_masks.token_outlier_mask(log_ratio, legal, max_abs_log_ratio=config.max_abs_log_ratio)
    return _Tokens(numerator, rollout, log_ratio, weight, capped, keep)


def _sequence_mask(mask: MaskName, scored: ScoredBatch, log_ratio: Array, config: CorrectionConfig) -> Statistic:
    response = scored.response_mask
    match mask:
        case "trm_max":
            return max_at_most(_required(scored, "token_kl", mask), response, config.max_token_kl)
        case "trm_avg":
            return mean_within(_required(scored, "token_kl", mask), response, high=config.mean_token_kl)
        case "trm_tv":
            return max_at_most(_required(scored, "token_tv", mask), response, config.max_token_tv)
        case "trm_sample":
            return divergence_masks.sampled_statistic(log_ratio, response, config.max_k2, config.mean_k3)
        case "ln_trm":
            return ratio_masks.length_neutral_statistic(
                log_ratio,
                response,
                scored.segment_ids,
                threshold=config.ln_trm_threshold,
                max_token_kl=config.horizon_token_kl,
                max_token_tv=config.horizon_token_tv,
            )
        case "ser":
            return ratio_masks.error_ratio_statistic(log_ratio, response, config.ser_threshold)
        case "geometric":
            return ratio_masks.geometric_statistic(log_ratio, response, config.geometric_low, config.geometric_high)
    raise AssertionError(f"{mask} is not a sequence mask")


def _written_together(weights: Array, keep: Array) -> tuple[Array, Array]:
    """Both arrays, unchanged, from one reading of what they are computed from.

    A reduction is the only operation of several results into which the CPU's compiler fuses what it reads. The axis
    that is reduced holds each array once, beside padding of the neutral element that nobody computes.
    """
    pairs = [jnp.pad(x[None], ((0, 1), (0, 0), (0, 0))) for x in (weights, keep)]

    def combine(left: list[Array], right: list[Array]) -> list[Array]:
        return [left[0] + right[0], left[1] | right[1]]

    together, kept = jax.lax.reduce(pairs, [jnp.float32(0.0), jnp.bool_(False)], combine, dimensions=(0,))
    return together, kept


@functools.partial(jax.jit, static_argnames="config")
def _correct(scored: ScoredBatch, numerator_logps: Array, *, config: CorrectionConfig) -> CorrectedBatch:
    """Two passes over the log-probs: totals of every sequence, then what stands at every token."""
    response, segments = scored.response_mask, scored.segment_ids
    tokens = _tokens(numerator_logps, scored.rollout_logps, response, config)
    masks = {"non_finite": max_at_most(tokens.refused.astype(jnp.float32), response, 0.0)} | {
        name: _sequence_mask(name, scored, tokens.log_ratio, config) for name in config.masks if name != "token_outlier"
    }
    factor = _sequence_factor(tokens.log_ratio, response, config)
    quantities = token_quantities(
        scored, tokens.numerator, tokens.rollout, tokens.log_ratio, tokens.weights, tokens.capped, tokens.keep
    )
    results = evaluate(masks | {"factor": factor, "totals": quantities}, response, segments)
    kept = {name: results[name] for name in masks}
    sequence_keep = jnp.all(jnp.stack(list(kept.values())), axis=0)
    factors, bound = results["factor"]

    # The compiler would otherwise share what both passes compute by writing it out and reading it again.
    logps, rollout_logps, mask = jax.lax.optimization_barrier((numerator_logps, scored.rollout_logps, response))
    written = _tokens(logps, rollout_logps, mask, config)
    importance_weights = written.weights * over_tokens(factors, written.weights)
    token_keep = written.keep & over_tokens(kept["non_finite"], response)
    if "token_outlier" in config.masks:  # otherwise token_keep needs no log-probs
        importance_weights, token_keep = _written_together(importance_weights, token_keep)
    ends = results["totals"].tokens > 0 if segments is None else sequence_ends(response, segments)
    decided = SequenceDecisions(ends, sequence_keep, {name: ~keep for name, keep in kept.items()}, factors, bound)
    return jax.lax.stop_gradient(
        CorrectedBatch(
            sequence_keep=sequence_keep,
            token_keep=token_keep,
            importance_weights=importance_weights,
            metrics=metrics_from_totals(results["totals"], decided),
        )
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
      ``token_keep`` is within the response mask, and False in sequences with an illegal log-prob. Metrics are
      ``(total, denominator)`` pairs.

    Raises:
      ValueError: when a mask needs a divergence that the batch lacks, when shapes differ, when ``policy_logps`` and
        ``config.numerator`` disagree, or on illegal log-probs under ``non_finite="raise"``.
      TypeError: on a mask that is not bool.

    >>> scored = ScoredBatch(proximal_logps=jnp.array([[-1.0, -1.0]]), rollout_logps=jnp.array([[-1.0, -3.0]]),
    ...                      response_mask=jnp.ones((1, 2), bool))
    >>> print(correct(scored, CorrectionConfig(weight="tis")).importance_weights)
    [[1. 2.]]
    """
    required(
        proximal_logps=scored.proximal_logps,
        rollout_logps=scored.rollout_logps,
        response_mask=scored.response_mask,
    )
    shape = same_shape(
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
    rows_of_tokens(shape)
    bool_mask(response_mask=scored.response_mask)
    if (config.numerator == "policy") != (policy_logps is not None):
        raise ValueError(
            f"numerator={config.numerator!r} with policy_logps {'missing' if policy_logps is None else 'given'}: "
            "pass policy_logps exactly when numerator='policy'"
        )
    scored = jax.tree.map(jnp.asarray, scored)
    name, logps = ("proximal_logps", scored.proximal_logps) if policy_logps is None else ("policy_logps", policy_logps)
    if config.non_finite == "raise":
        for side, values in ((name, logps), ("rollout_logps", scored.rollout_logps)):
            raise_on_illegal(side, inspect_logps(values, scored.response_mask, config.sentinel))
    corrected: CorrectedBatch = _correct(*jax.lax.stop_gradient((scored, jnp.asarray(logps))), config=config)
    return corrected
