"""The data-dependent bound: the divergence of each position instead of the largest one (TRM 3.3)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from trm_jax.bounds._arrays import Scalar, Value, capped, coupled_shift, is_traced, namespace, pinsker_shift
from trm_jax.checks import shape_of
from trm_jax.numerics import AnyArray

__all__ = ["adaptive_bound"]


def adaptive_bound(
    mean_token_tv_by_position: Float[AnyArray, " T"],
    *,
    max_token_kl: Scalar | None = None,
    max_token_tv: Scalar | None = None,
) -> Value:
    """``4 Σ_t D̄_t min(1, (T-t)ε, √((T-t)δ/2))`` on ``|Error|`` (TRM 3.3, B_Adap).

    With both maxima this is the hybrid, whose terms change route at ``T - t = δ/(2ε²)``; with one of them it is
    B_Adap^KL or B_Adap^TV. When ``D̄_t <= min(ε, √(δ/2))``, as theory has it, no larger than the coupling bound and
    both Pinsker-marginal bounds.

    Args:
      mean_token_tv_by_position: ``[T]``, ``D̄_t = E_roll[D_TV(c_t)]``, each in [0, 1]. For responses of several lengths
        the mean runs over all sequences and one that has ended adds 0.
      max_token_kl: δ in nats, at least 0, ``inf`` included; None leaves its route out.
      max_token_tv: ε, at least 0; None leaves its route out.

    Returns:
      The bound, in reward units: float64, or a jax scalar when an input is a jax array.

    Raises:
      ValueError: when neither maximum is given, there is no position, or a known value is NaN or out of its range. A
        traced one gives NaN.

    >>> import numpy as np
    >>> print(adaptive_bound(np.full(4096, 5e-3), max_token_kl=1e-4, max_token_tv=5e-3).round(4))
    24.7106
    """
    if max_token_kl is None and max_token_tv is None:
        raise ValueError("adaptive_bound needs max_token_kl, max_token_tv or both (the hybrid), given neither")
    xp = namespace(mean_token_tv_by_position, max_token_kl, max_token_tv)
    shape = shape_of("mean_token_tv_by_position", mean_token_tv_by_position)
    if len(shape) != 1 or shape == (0,):
        raise ValueError(f"mean_token_tv_by_position must be [T], with T at least 1, given shape {list(shape)}")
    length = shape[0]
    if not is_traced(mean_token_tv_by_position):
        known = np.asarray(mean_token_tv_by_position, dtype=float)
        if not np.all((known >= 0) & (known <= 1)):
            raise ValueError(
                f"mean_token_tv_by_position must lie in [0, 1], given {known.min()} to {known.max()}: "
                "it is the mean total variation of each position"
            )
    means = xp.asarray(mean_token_tv_by_position, dtype=float)
    means = xp.where((means >= 0) & (means <= 1), means, xp.nan)
    remaining = xp.arange(length)[::-1]  # T - t
    shift = 1.0
    if max_token_tv is not None:
        shift = xp.minimum(shift, coupled_shift(remaining, capped("max_token_tv", max_token_tv, 1.0, xp), xp))
    if max_token_kl is not None:
        shift = xp.minimum(shift, pinsker_shift(remaining, capped("max_token_kl", max_token_kl, 2.0, xp), xp))
    bound: Value = 4.0 * xp.sum(means * shift)
    return bound
