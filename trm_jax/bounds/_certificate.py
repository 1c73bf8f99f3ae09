"""What a finite sample proves about ``J(π_θ) - J(π_roll)``, with no assumption on the policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Real

from trm_jax.bounds._arrays import Leaf, is_traced, namespace
from trm_jax.bounds._costs import cost_table, sequences
from trm_jax.bounds._limits import upper_limits
from trm_jax.checks import bool_mask, in_range, required, same_shape, shape_of
from trm_jax.numerics import AnyArray

__all__ = ["Certificate", "Term", "certify"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
    """One expectation under π_roll.

    Attributes:
      estimate: mean over the samples, reward units (a fraction for ``rejection_rate``).
      limit: one-sided confidence limit on the expectation.
      side: ``"lower"`` when the expectation is at least ``limit``, ``"upper"`` when at most (static).
    """

    estimate: Leaf
    limit: Leaf
    side: Literal["lower", "upper"] = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificate:
    """What ``certify`` found. ``lower_limit`` and all limits in ``terms`` hold at once, with the stated confidence.

    Attributes:
      lower_limit: lower limit on ``J(π_θ) - J(π_roll)``, in [-1, 1]; above 0 it proves an improvement. It never rests
        on the precondition of TRM Theorem 4.2.
      precondition_holds: bool. The precondition of TRM Theorem 4.2 holds in the sample: there is a sequence, none was
        rejected, no divergence is infinite or NaN, none exceeds δ where it is stated. False: it has failed, and (3) of
        the theorem must not be claimed. True is no proof: up to ``terms["rejection_rate"].limit`` of all sequences may
        still violate it.
      precondition_stated: bool. δ was stated for every reachable context (``max_token_kl``). Only where this and
        ``precondition_holds`` are both True does (3) of the theorem stand: ``J(π_θ) - J(π_roll) >= L'(π_θ) - B*``.
      terms: name → ``Term``. ``masked_surrogate``, ``accepted_error`` and ``rejected_return`` (at ``deviation_cut``),
        ``accepted_gain``, ``rejection_rate``: see ``certify``.
      deviation_cut: the cut c whose limit is the largest.
      sampled_max_token_kl: largest ``token_kl`` at a response token, nats: a lower estimate of δ, never δ; None without
        ``token_kl``.
      n: number of sequences with at least one response token.
      confidence: probability with which all limits hold (static).
    """

    lower_limit: Leaf
    precondition_holds: Leaf
    precondition_stated: bool = dataclasses.field(metadata={"static": True})
    terms: dict[str, Term]
    deviation_cut: Leaf
    sampled_max_token_kl: Leaf | None
    n: Leaf
    confidence: float = dataclasses.field(metadata={"static": True})


def _constant(values: Any, xp: Any) -> Any:
    return jax.lax.stop_gradient(values) if xp is jnp else values


def _refuse_illegal_rewards(rewards: Any, counted: Any) -> None:
    known = np.asarray(rewards, dtype=float)[np.asarray(counted)]
    if not np.all((known >= 0) & (known <= 1)):
        raise ValueError(
            f"rewards must lie in [0, 1], given {known.min()} to {known.max()}: the bounds hold for that range only; "
            "map rewards from [a, b] by (reward - a)/(b - a) and multiply the limits by b - a"
        )


def _checked_options(
    confidence: float, max_token_kl: float | None, deviation_cuts: Sequence[float], ratio_cap: float
) -> None:
    in_range("confidence", confidence, low=0.0, high=1.0, low_open=True, high_open=True)
    in_range("max_token_kl", max_token_kl, low=0.0, high_open=True)
    in_range("ratio_cap", ratio_cap, low=1.0, high=1e6, low_open=True)
    if not deviation_cuts:
        raise ValueError("deviation_cuts must name at least one cut, given none")
    for cut in deviation_cuts:
        in_range("deviation_cuts", cut, low=0.0, high=20.0, low_open=True)


def certify(
    log_ratio: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    sequence_keep: Bool[AnyArray, "B *T"],
    rewards: Real[AnyArray, "B *T"],
    *,
    confidence: float = 0.95,
    segment_ids: Int[AnyArray, "B T"] | None = None,
    token_kl: Float[AnyArray, "B T"] | None = None,
    max_token_kl: float | None = None,
    deviation_cuts: Sequence[float] = (0.0625, 0.25, 1.0),
    ratio_cap: float = 2.0,
) -> Certificate:
    """A lower limit on ``J(π_θ) - J(π_roll)`` from n sampled sequences, without a precondition (TRM 4.5, improved).

    Write ``u_t = ρ_t - 1``, ``U = Σ_t |u_t|``, ``ρ = Π_t ρ_t``, ``ψ(U) = e^U - 1 - U``, R the reward in [0, 1], M = 1
    for a kept sequence; all expectations are under π_roll.

    **Decomposition.** ``J(π_θ) >= E[ρR]``, since ``R >= 0`` and π_θ may also answer what π_roll cannot. So for *every*
    mask M, as ``ρ >= 0``::

        J(π_θ) - J(π_roll) >= E[M(ρ-1)R] - E[(1-M)R].

    Expanding the product, ``|ρ - 1 - Σ u_t| <= Π(1+|u_t|) - 1 - U <= ψ(U)``, hence::

        E[M(ρ-1)R] >= E[M R Σ u_t] - E[M ψ(U)] = L'_masked - B_A.

    TRM has ``r + D_TV^seq`` in the place of ``E[(1-M)R]``; that is larger, and not observable.

    **Heavy tails.** Neither ψ(U) nor ρ has a bound, so no limit from a finite sample is valid for their means as they
    stand. But the decomposition holds for every mask, in particular for ``M_c = M·1{U <= c}`` with a c fixed
    beforehand. Then ``|M_c R Σ u_t| <= c`` and ``M_c ψ(U) <= ψ(c)``, and whatever was cut is paid for in full in
    ``E[(1-M_c)R]``, which lies in [0, 1]. A second route needs no expansion, since a ratio may be lowered freely to a
    cap C::

        J(π_θ) - J(π_roll) >= E[M R min(ρ, C) - R],  a variable in [-1, C - 1].

    **Limits.** With m = 3·(number of cuts) + 2 means, each gets the better of a Chernoff-Hoeffding and an empirical
    Bernstein limit, each of the two at error ``(1 - confidence)/(2m)``; by the union bound all hold at once.
    ``lower_limit`` is the largest of the second route, whose limit is never below -1, and for each cut
    ``masked_surrogate - accepted_error - rejected_return`` by their limits.

    **Terms.** ``masked_surrogate`` ``E[M_c R Σ u_t]`` (lower), ``accepted_error`` ``E[M_c ψ(U)]`` (upper),
    ``rejected_return`` ``E[(1-M_c)R]`` (upper), ``accepted_gain`` ``E[M R min(ρ, C) - R]`` (lower),
    ``rejection_rate`` ``Pr[M = 0]`` (upper).

    **What this does not say.** The sequences must be independent draws of π_roll given their prompts, and fresh:
    neither the weights of π_θ nor the cuts may have been chosen by looking at them. With several samples of a prompt,
    J is the mean over the prompts of this batch. The precondition of TRM Theorem 4.2, ``D_KL(c) <= δ`` for *all*
    reachable contexts, can be refuted by a sample and never proven by one: a context that nobody sampled can hold any
    divergence (Proposition 3.10). What a sample gives is ``rejection_rate``: at most that share of sequences violates
    the criterion of the mask.

    Args:
      log_ratio: ``[B, T]``, ``policy_logps - rollout_logps``; ``-inf`` means ρ_t = 0. A sequence with NaN or ``+inf``
        at a response token counts as rejected.
      response_mask: ``[B, T]`` bool. A sequence without response tokens is padding and does not count.
      sequence_keep: M, ``[B]`` bool, or ``[B, T]`` for packed rows.
      rewards: in [0, 1], ``[B]``, or ``[B, T]`` for packed rows.
      confidence: in (0, 1); a Python number.
      segment_ids: ``[B, T]`` for packed rows: every segment is a sequence, whose ``sequence_keep`` and reward are read
        at its last response token.
      token_kl: ``[B, T]``, KL(π_roll ‖ π_θ), nats: only for the precondition.
      max_token_kl: δ in nats, when an argument (not a sample) gives it for every reachable context.
      deviation_cuts: values of c in (0, 20], fixed beforehand.
      ratio_cap: C in (1, 1e6], fixed beforehand.

    Returns:
      A ``Certificate``: float64 and Python numbers for numpy input, jax scalars for jax input (float32, whose rounding
      the limits do not include); constant for the gradient. With no sequence at all, n = 0 and the limit is -1.

    Raises:
      ValueError: on rewards outside [0, 1] or NaN, shapes that differ, or options out of range. Under ``jax.jit``
        illegal rewards make ``lower_limit`` NaN.
      TypeError: on masks that are not bool.

    >>> rng = np.random.default_rng(0)
    >>> log_ratio = np.where(rng.random((2000, 1)) < 0.5, np.log(1.5), np.log(0.5))
    >>> certificate = certify(log_ratio, np.ones((2000, 1), bool), np.ones(2000, bool), (log_ratio[:, 0] > 0) * 1.0)
    >>> print(f"{certificate.lower_limit:.2f} {certificate.n} {certificate.precondition_holds}")  # the truth is 0.25
    0.22 2000 True
    """
    required(log_ratio=log_ratio, response_mask=response_mask, sequence_keep=sequence_keep, rewards=rewards)
    shape = same_shape(log_ratio=log_ratio, response_mask=response_mask, token_kl=token_kl, segment_ids=segment_ids)
    by_sequence = shape if segment_ids is not None else shape[:1]
    for name, value in (("sequence_keep", sequence_keep), ("rewards", rewards)):
        if shape_of(name, value) != by_sequence:
            raise ValueError(
                f"{name} must be [B] = {list(shape[:1])}, or [B, T] = {list(shape)} with segment_ids "
                f"({'not ' if segment_ids is None else ''}given here), given {list(value.shape)}"
            )
    bool_mask(response_mask=response_mask, sequence_keep=sequence_keep)
    _checked_options(confidence, max_token_kl, deviation_cuts, ratio_cap)
    xp = namespace(log_ratio, response_mask, sequence_keep, rewards, segment_ids, token_kl)
    mask = xp.asarray(response_mask)
    ratios = _constant(xp.where(mask, xp.asarray(log_ratio, dtype=float), 0.0), xp)
    found = sequences(ratios, mask, xp.asarray(sequence_keep), segment_ids, xp)
    counted = found.counted
    reward = xp.asarray(rewards, dtype=float).ravel()
    if not is_traced(reward, counted):
        _refuse_illegal_rewards(reward, counted)
    reward = _constant(xp.where(counted, reward, 0.0), xp)

    # All means in one table: costs as they are, gains negated.
    table, low, high = cost_table(reward, found, deviation_cuts, ratio_cap, xp)
    cuts = len(deviation_cuts)
    means, limits = upper_limits(table, counted, low=low, high=high, error=(1 - confidence) / (3 * cuts + 2), xp=xp)
    by_cut = -limits[:cuts] - limits[cuts : 2 * cuts] - limits[2 * cuts : 3 * cuts]
    best = xp.argmax(by_cut)
    lower = xp.maximum(by_cut[best], -limits[-2])
    legal = xp.all((reward >= 0) & (reward <= 1))

    refuted = xp.any(counted & ~found.accepted) | ~xp.all(
        xp.isfinite(ratios)
    )  # p = 0 at a sampled token: an infinite KL
    sampled_max = None
    if token_kl is not None:
        kl = _constant(xp.where(mask, xp.asarray(token_kl, dtype=float), 0.0), xp)
        refuted = refuted | ~xp.all(xp.isfinite(kl)) | xp.any(kl > (xp.inf if max_token_kl is None else max_token_kl))
        sampled_max = xp.max(kl, initial=0.0)
    number = xp.sum(counted)
    holds = (number > 0) & ~refuted
    return Certificate(
        lower_limit=xp.where(legal, lower, xp.nan)[()],
        precondition_holds=bool(holds) if xp is np else holds,
        precondition_stated=max_token_kl is not None,
        terms={
            "masked_surrogate": Term(estimate=-means[best], limit=-limits[best], side="lower"),
            "accepted_error": Term(estimate=means[cuts + best], limit=limits[cuts + best], side="upper"),
            "rejected_return": Term(estimate=means[2 * cuts + best], limit=limits[2 * cuts + best], side="upper"),
            "accepted_gain": Term(estimate=-means[-2], limit=-limits[-2], side="lower"),
            "rejection_rate": Term(estimate=means[-1], limit=limits[-1], side="upper"),
        },
        deviation_cut=xp.asarray(deviation_cuts, dtype=float)[best],
        sampled_max_token_kl=sampled_max,
        n=int(number) if xp is np else number,
        confidence=confidence,
    )
