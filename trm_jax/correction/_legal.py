"""Which log-probs may be used: bf16 rounding is clamped, NaN, sentinels and impossible values are told apart."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from trm_jax.numerics import AnyArray, as_float32

__all__ = ["MAX_ROUNDING_LOGP", "LegalLogps", "inspect_logps", "raise_on_illegal"]

MAX_ROUNDING_LOGP = 1.0
"""Above 0 up to here a log-prob is read as rounding (bfloat16 logits near 100 are 0.5 apart); beyond it is illegal."""


class LegalLogps(NamedTuple):
    """Log-probs at response tokens, sorted by what may be done with them; all flags are False at masked slots.

    Attributes:
      logps: ``[B, T]`` float32, at most 0, 0 at masked and refused slots.
      refused: NaN, sentinel or far above 0: the sequence is rejected.
      nan: not a number.
      sentinel: the engine's mark for "no log-prob".
      above_zero: further above 0 than rounding explains, ``+inf`` included.
      clamped: above 0 by rounding, now 0.
      zero_probability: ``-inf``.
    """

    logps: Float[Array, "B T"]
    refused: Bool[Array, "B T"]
    nan: Bool[Array, "B T"]
    sentinel: Bool[Array, "B T"]
    above_zero: Bool[Array, "B T"]
    clamped: Bool[Array, "B T"]
    zero_probability: Bool[Array, "B T"]


def inspect_logps(
    logps: Float[AnyArray, "B T"], response_mask: Bool[AnyArray, "B T"], sentinel: float | None
) -> LegalLogps:
    """Sorts the log-probs of the response tokens."""
    values = jax.lax.stop_gradient(as_float32(logps))
    mask = jnp.asarray(response_mask)
    is_sentinel = jnp.zeros_like(mask)
    if sentinel is not None:  # as the log-probs' type holds it: -9999 is -9984 in bfloat16
        is_sentinel = mask & (values == jnp.asarray(sentinel, jnp.asarray(logps).dtype).astype(jnp.float32))
    is_nan = mask & jnp.isnan(values)
    above = mask & (values > MAX_ROUNDING_LOGP) & ~is_sentinel
    refused = is_nan | is_sentinel | above
    return LegalLogps(
        logps=jnp.where(mask & ~refused, jnp.minimum(values, 0.0), 0.0),
        refused=refused,
        nan=is_nan,
        sentinel=is_sentinel,
        above_zero=above,
        clamped=mask & (values > 0) & ~refused,
        zero_probability=mask & jnp.isneginf(values),
    )


def raise_on_illegal(name: str, legal: LegalLogps) -> None:
    """Raises when any log-prob was refused.

    Raises:
      ValueError: with counts and the first place; or under ``jax.jit``, where values cannot be looked at.
    """
    if isinstance(legal.refused, jax.core.Tracer):
        raise ValueError("non_finite='raise' looks at values: call correct outside jax.jit, or use non_finite='drop'")
    refused = np.asarray(legal.refused)
    if refused.any():
        row, slot = np.argwhere(refused)[0]
        raise ValueError(
            f"{name} holds {int(np.sum(legal.nan))} NaN, {int(np.sum(legal.sentinel))} sentinel and "
            f"{int(np.sum(legal.above_zero))} values above {MAX_ROUNDING_LOGP:g} at response tokens, the first at row "
            f"{row}, position {slot}: log-probs must be at most 0; repair the engine's records, or use "
            "non_finite='drop' to reject these sequences and count them"
        )
