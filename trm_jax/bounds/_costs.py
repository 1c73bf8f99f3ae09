"""What a sampled sequence adds to a certificate: the variables whose means are then limited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from trm_jax.bounds._arrays import excess
from trm_jax.numerics import MAX_LOG_RATIO, segment_index, sequence_ends

__all__ = ["Sequences", "cost_table", "sequences"]


class Sequences(NamedTuple):
    """One entry a row, ``[N] = [B]``; one a slot for packed rows, ``[N] = [B·T]``, of which only ends count.

    Attributes:
      counted: sequences with response tokens, each once.
      accepted: counted ones that are kept and whose log-ratios are below ``+inf``, none of them NaN.
      shift: ``Σ u_t`` with ``u_t = ρ_t - 1``; like the next two, of what is not accepted nothing is to be read.
      deviation: ``Σ |u_t|``.
      product: ``Π ρ_t``.
    """

    counted: Any
    accepted: Any
    shift: Any
    deviation: Any
    product: Any


def sequences(log_ratio: Any, response_mask: Any, sequence_keep: Any, segment_ids: Any, xp: Any) -> Sequences:
    """The sequences of ``[B, T]`` tokens, whose log-ratios are 0 where the mask is False."""
    if segment_ids is None:
        counted = response_mask.any(axis=1)
    else:
        counted = xp.asarray(sequence_ends(response_mask, segment_ids)).ravel()
        rows, length = response_mask.shape
        index = (xp.asarray(segment_index(segment_ids)) + length * xp.arange(rows)[:, None]).ravel()

    def total(values: Any) -> Any:
        if segment_ids is None:
            return xp.sum(values, axis=1)
        if xp is np:
            return np.bincount(index, values.ravel(), minlength=index.size)[index]
        return jax.ops.segment_sum(values.ravel(), index, num_segments=index.size)[index]

    below = log_ratio < xp.inf  # False for NaN
    finite = xp.where(below, log_ratio, 0.0)
    deviations = xp.expm1(xp.minimum(finite, MAX_LOG_RATIO))
    return Sequences(
        counted=counted,
        accepted=counted & sequence_keep.ravel() & (total(xp.where(below, 0.0, 1.0)) == 0),
        shift=total(deviations),
        deviation=total(xp.abs(deviations)),
        product=xp.exp(xp.minimum(total(finite), MAX_LOG_RATIO)),
    )


def cost_table(
    reward: Any, of: Sequences, deviation_cuts: Sequence[float], ratio_cap: float, xp: Any
) -> tuple[Any, Any, Any]:
    """``[N, 3K+2]`` variables whose means count against π_θ, with their ranges.

    K columns of ``-M_c R Σ u_t``, K of ``M_c ψ(U)``, K of ``(1-M_c) R``, then ``R - M R min(ρ, C)`` and ``1 - M``.
    """
    cuts = xp.asarray(deviation_cuts, dtype=float)
    inside = of.accepted[:, None] & (of.deviation[:, None] <= cuts)
    columns = [
        xp.where(inside, -(reward * of.shift)[:, None], 0.0),
        excess(xp.where(inside, of.deviation[:, None], 0.0), xp),
        xp.where(inside, 0.0, reward[:, None]),
        (reward - xp.where(of.accepted, reward * xp.minimum(of.product, ratio_cap), 0.0))[:, None],
        xp.where(of.accepted, 0.0, 1.0)[:, None],
    ]
    zero, one = xp.zeros_like(cuts), xp.ones_like(cuts)
    low = xp.concatenate([-cuts, zero, zero, (1 - ratio_cap) * one[:1], zero[:1]])
    high = xp.concatenate([cuts, excess(cuts, xp), one, one[:1], one[:1]])
    return xp.concatenate(columns, axis=1), low, high
