"""Every bound that the inputs allow, and the smallest: each holds by itself, so their minimum holds (TRM 3.4)."""

from __future__ import annotations

import dataclasses
import functools
from typing import SupportsIndex

import jax
from jaxtyping import Float

from trm_jax.bounds._adaptive import adaptive_bound
from trm_jax.bounds._arrays import Leaf, Scalar, Value, checked_length, is_traced, namespace
from trm_jax.bounds._worst_case import (
    classical_bound,
    coupling_bound,
    mixed_bound_kl,
    mixed_bound_tv,
    pinsker_marginal_bound_kl,
    pinsker_marginal_bound_tv,
)
from trm_jax.numerics import AnyArray

__all__ = ["UnifiedBound", "unified_bound"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class UnifiedBound:
    """The bounds on ``|Error|`` by name, in reward units; None where the inputs do not allow the bound.

    Attributes:
      classical: ``2T(T-1)ε²``.
      coupling: total variation alone.
      pinsker_marginal_kl: advantage and shift by KL.
      pinsker_marginal_tv: advantage by TV, shift by KL.
      mixed_kl: shift by the KL of whole sequences.
      mixed_tv: shift by the TV of whole sequences.
      adaptive_kl: mean TV of each position, future by KL.
      adaptive_tv: mean TV of each position, future by TV.
      adaptive: the hybrid of the two.
    """

    classical: Leaf | None = None
    coupling: Leaf | None = None
    pinsker_marginal_kl: Leaf | None = None
    pinsker_marginal_tv: Leaf | None = None
    mixed_kl: Leaf | None = None
    mixed_tv: Leaf | None = None
    adaptive_kl: Leaf | None = None
    adaptive_tv: Leaf | None = None
    adaptive: Leaf | None = None

    @property
    def bounds(self) -> dict[str, Leaf]:
        """name → bound, those that the inputs allow, in the order of TRM Table 1."""
        pairs = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: bound for name, bound in pairs if bound is not None}

    @property
    def minimum(self) -> Leaf:
        """``B*``, the smallest of them; NaN when any is NaN."""
        values = list(self.bounds.values())
        smallest: Leaf = functools.reduce(namespace(*values).minimum, values)
        return smallest

    @property
    def tightest(self) -> str:
        """The name of the smallest, the first of equals.

        Raises:
          ValueError: under ``jax.jit``, where a name cannot depend on values.
        """
        bounds = self.bounds
        if is_traced(*bounds.values()):
            raise ValueError("tightest names a bound, which needs values: read it outside jax.jit, or use minimum")
        return min(bounds, key=lambda name: float(bounds[name]))


def unified_bound(
    length: SupportsIndex,
    *,
    max_token_kl: Scalar | None = None,
    max_token_tv: Scalar | None = None,
    sequence_kl: Scalar | None = None,
    sequence_tv: Scalar | None = None,
    mean_token_tv_by_position: Float[AnyArray, " T"] | None = None,
) -> UnifiedBound:
    """``B* = min`` over all bounds whose inputs are given (TRM Theorem 3.8, equation 21).

    Nothing is inferred: by Pinsker ``ε <= √(δ/2)`` and ``D_TV^seq <= √(D_KL^seq/2)``, and whoever wants the TV bounds
    from KL alone passes these (TRM Table 1 does, in its column "KL-only").

    Args:
      length: T, response tokens of a sequence, at least 1.
      max_token_kl: δ in nats, at least 0, or None.
      max_token_tv: ε, at least 0, or None.
      sequence_kl: D_KL^seq in nats, at least 0, or None.
      sequence_tv: D_TV^seq, at least 0, or None.
      mean_token_tv_by_position: ``[T]``, D̄_t, or None.

    Returns:
      ``UnifiedBound``: each bound by name, ``.minimum`` and ``.tightest``.

    Raises:
      ValueError: when the inputs allow no bound, D̄_t has another length than T, or a known value is illegal. A traced
        one gives NaN.

    >>> result = unified_bound(4096, max_token_kl=1e-4, max_token_tv=5e-3, sequence_kl=0.01, sequence_tv=0.05)
    >>> print(result.tightest, result.minimum.round(4), result.coupling.round(4))
    mixed_tv 4.096 79.91
    """
    steps = checked_length(length)
    kl, tv, means = max_token_kl, max_token_tv, mean_token_tv_by_position
    if means is not None and means.shape[0] != steps:
        raise ValueError(
            f"mean_token_tv_by_position must have length T = {steps}, given [{means.shape[0]}]: "
            "one mean for each position, 0 behind the last one reached"
        )
    bounds: dict[str, Value] = {}
    if tv is not None:
        bounds["classical"] = classical_bound(steps, max_token_tv=tv)
        bounds["coupling"] = coupling_bound(steps, max_token_tv=tv)
    if kl is not None:
        bounds["pinsker_marginal_kl"] = pinsker_marginal_bound_kl(steps, max_token_kl=kl)
    if kl is not None and tv is not None:
        bounds["pinsker_marginal_tv"] = pinsker_marginal_bound_tv(steps, max_token_kl=kl, max_token_tv=tv)
    if kl is not None and sequence_kl is not None:
        bounds["mixed_kl"] = mixed_bound_kl(steps, max_token_kl=kl, sequence_kl=sequence_kl)
    if tv is not None and sequence_tv is not None:
        bounds["mixed_tv"] = mixed_bound_tv(steps, max_token_tv=tv, sequence_tv=sequence_tv)
    if means is not None and kl is not None:
        bounds["adaptive_kl"] = adaptive_bound(means, max_token_kl=kl)
    if means is not None and tv is not None:
        bounds["adaptive_tv"] = adaptive_bound(means, max_token_tv=tv)
    if means is not None and kl is not None and tv is not None:
        bounds["adaptive"] = adaptive_bound(means, max_token_kl=kl, max_token_tv=tv)
    if not bounds:
        raise ValueError(
            "no bound can be computed: every bound needs max_token_kl or max_token_tv; sequence_kl, sequence_tv and "
            "mean_token_tv_by_position only tighten it (TRM Proposition 3.10)"
        )
    return UnifiedBound(**bounds)
