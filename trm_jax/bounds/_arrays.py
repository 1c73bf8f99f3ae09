"""One arithmetic for two kinds of input: float64 numpy for numbers and numpy arrays, ``jax.numpy`` for jax arrays.

A value that is known is checked and refused by name. A traced one cannot be looked at, so an illegal one becomes NaN.
Every formula caps its inputs first (TV at 1, KL at 2, where Pinsker reaches 1): no infinity meets a zero afterwards.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from trm_jax.checks import in_range
from trm_jax.numerics import AnyArray, expm1_minus_identity

__all__ = [
    "Leaf",
    "Scalar",
    "Value",
    "capped",
    "checked_length",
    "coupled_shift",
    "excess",
    "is_traced",
    "namespace",
    "nonnegative",
    "pinsker_shift",
    "root",
]

Value: TypeAlias = Float[AnyArray, ""] | float
"""A float scalar, the result: ``np.float64``, or a jax array of no dimension."""

Scalar: TypeAlias = Float[AnyArray, ""] | Int[AnyArray, ""] | float | int
"""A real scalar, the input: a number, or an array of no dimension."""

if TYPE_CHECKING:
    Leaf: TypeAlias = Value
else:  # a record is also built around what jax puts in the place of values: shapes, axes, None
    Leaf = Any


def is_traced(*values: Any) -> bool:
    """Whether any of them is abstract, inside ``jax.jit``, ``jax.grad`` or ``jax.vmap``."""
    return any(isinstance(value, jax.core.Tracer) for value in values)


def namespace(*values: Any) -> Any:
    """``jax.numpy`` when any of them is a jax array, ``numpy`` otherwise."""
    return jnp if any(isinstance(value, jax.Array) for value in values) else np


def checked_length(length: SupportsIndex) -> int:
    """T as an int, at least 1.

    Raises:
      ValueError: when it is below 1.
    """
    number = operator.index(length)
    if number < 1:
        raise ValueError(f"length must be at least 1, given {number}: it counts the response tokens of a sequence")
    return number


def nonnegative(name: str, value: Scalar, xp: Any) -> Any:
    """The value as a float of no dimension; a known one below 0, or NaN, is refused; a traced one becomes NaN."""
    if not is_traced(value):
        in_range(name, float(value), low=0.0)
    number = xp.asarray(value, dtype=float)
    return xp.where(number >= 0, number, xp.nan)


def capped(name: str, value: Scalar, cap: float, xp: Any) -> Any:
    """``min(value, cap)``, checked like ``nonnegative``."""
    return xp.minimum(nonnegative(name, value, xp), cap)


def root(value: Any, xp: Any) -> Any:
    """Square root with gradient 0 at 0, where the derivative is infinite."""
    zero = value == 0
    return xp.where(zero, 0.0, xp.sqrt(xp.where(zero, 1.0, value)))


def excess(values: Any, xp: Any) -> Any:
    """``e^x - 1 - x`` in the precision of the input, with full relative accuracy near 0."""
    if xp is jnp:
        return expm1_minus_identity(values)
    small = np.abs(values) < 0.01
    x = np.where(small, values, 0.0)
    series = 0.5 * x * x * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7)))))
    return np.where(small, series, np.expm1(values) - values)


def coupled_shift(steps: Any, token_tv: Any, xp: Any) -> Any:
    """``min(1, n ε)``: total variation after n tokens, by coupling."""
    return xp.minimum(steps * token_tv, 1.0)


def pinsker_shift(steps: Any, token_kl: Any, xp: Any) -> Any:
    """``min(1, √(n δ/2))``: total variation after n tokens, by the chain rule of the KL and Pinsker."""
    return xp.minimum(root(steps * (token_kl / 2), xp), 1.0)
