"""Checks of shapes, dtypes and ranges; each message says what was given, what is required and what to do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from trm_jax.numerics import AnyArray

__all__ = [
    "bool_mask",
    "in_range",
    "known_name",
    "number",
    "ordered",
    "required",
    "rows_of_tokens",
    "same_shape",
    "shape_of",
    "static",
    "static_temperature",
    "token_ids",
]

_MIN_TEMPERATURE = 1e-6
_INT32_MAX = 2**31 - 1


def shape_of(name: str, array: AnyArray) -> tuple[int, ...]:
    """The shape of an array, of a Python number too.

    Raises:
      TypeError: on a list or a tuple, which would be an array on the host at every call.

    >>> shape_of("rewards", [0.0, 1.0])
    Traceback (most recent call last):
      ...
    TypeError: rewards must be an array, given a list: pass jax.numpy.asarray(rewards)
    """
    if isinstance(array, (list, tuple)):
        raise TypeError(f"{name} must be an array, given a {type(array).__name__}: pass jax.numpy.asarray({name})")
    return tuple(jnp.shape(array))


def same_shape(**arrays: AnyArray | None) -> tuple[int, ...]:
    """The one shape that all given arrays share; arrays that are None are left out.

    Raises:
      ValueError: when two shapes differ; the message lists every name with its shape.
      TypeError: on a list or a tuple.

    >>> import numpy as np
    >>> same_shape(token_kl=np.zeros((2, 3)), response_mask=np.ones((2, 3), bool))
    (2, 3)
    """
    shapes = {name: shape_of(name, array) for name, array in arrays.items() if array is not None}
    if len(set(shapes.values())) > 1:
        given = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(f"these arrays must have one shape, given {given}: align them to the same response positions")
    return next(iter(shapes.values()))


def required(**arrays: AnyArray | None) -> None:
    """Refuses arrays that are None where none may be left out.

    Raises:
      TypeError: naming the array.

    >>> required(proximal_logps=None)
    Traceback (most recent call last):
      ...
    TypeError: proximal_logps must be an array, given None: it may not be left out
    """
    for name, array in arrays.items():
        if array is None:
            raise TypeError(f"{name} must be an array, given None: it may not be left out")


def rows_of_tokens(shape: tuple[int, ...]) -> None:
    """Refuses anything but ``[B, T]``: a third axis would be reduced over as if it were tokens.

    Raises:
      ValueError: with the shape.
    """
    if len(shape) != 2:
        raise ValueError(
            f"response_mask must be [B, T], given {list(shape)}: reshape to rows of tokens, or use jax.vmap"
        )


def bool_mask(**masks: AnyArray | None) -> None:
    """Refuses masks that are not boolean: a 0/1 float mask would select by index or scale silently.

    Raises:
      TypeError: when a mask has another dtype.
    """
    for name, mask in masks.items():
        if mask is not None and mask.dtype != jnp.bool_:
            raise TypeError(f"{name} must be bool (True = counts), given dtype {mask.dtype}: pass {name} > 0")


def number(name: str, value: Any) -> float:
    """The scalar as a Python float: an int, a NumPy or a JAX scalar may stand for one, no text, bool or list.

    Raises:
      TypeError: naming the field and what was given.

    >>> number("tis_cap", "2")
    Traceback (most recent call last):
      ...
    TypeError: tis_cap must be a number, given '2'
    """
    if isinstance(value, (str, bytes, bool)) or not hasattr(value, "__float__") or jnp.shape(value) != ():
        given = f"an array of shape {list(value.shape)}" if hasattr(value, "shape") else repr(value)
        raise TypeError(f"{name} must be a number, given {given}")
    return float(value)


@overload
def in_range(
    name: str, value: float, *, low: float = ..., high: float = ..., low_open: bool = ..., high_open: bool = ...
) -> float: ...


@overload
def in_range(
    name: str, value: None, *, low: float = ..., high: float = ..., low_open: bool = ..., high_open: bool = ...
) -> None: ...


@overload
def in_range(
    name: str, value: float | None, *, low: float = ..., high: float = ..., low_open: bool = ..., high_open: bool = ...
) -> float | None: ...


def in_range(
    name: str,
    value: float | None,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
    high_open: bool = False,
) -> float | None:
    """The scalar as a Python float, refused outside its interval; None passes.

    An int, a NumPy or a JAX scalar comes back as a plain float, which takes part in float32 arithmetic without widening
    it (a ``np.float64`` would, under ``jax_enable_x64``).

    Raises:
      ValueError: naming the field, its value and the interval. NaN is always refused.
      TypeError: on what is no number.

    >>> in_range("cap", 0.0, low=0.0, low_open=True)
    Traceback (most recent call last):
      ...
    ValueError: cap must lie in (0, inf], given 0.0
    """
    if value is None:
        return None
    given, value = value, number(name, value)
    above = value > low if low_open else value >= low
    below = value < high if high_open else value <= high
    if not (above and below):
        left, right = "(" if low_open else "[", ")" if high_open else "]"
        raise ValueError(f"{name} must lie in {left}{low:g}, {high:g}{right}, given {given!r}")
    return value


def static(**numbers: Any) -> None:
    """Refuses traced values for numbers that are compiled into a program.

    Raises:
      TypeError: naming the argument.
    """
    for name, value in numbers.items():
        if isinstance(value, jax.core.Tracer):
            raise TypeError(
                f"{name} is compiled into the program and must be a number, given a traced value: close over it or "
                "name it in static_argnames of jax.jit"
            )


def static_temperature(temperature: Any, *, rows: str = "each row of the logits") -> float:
    """A temperature that divides logits, as a Python float.

    Args:
      temperature: as the user gave it.
      rows: what he can divide instead where every row has its own.

    Raises:
      ValueError: below 1e-6, where quotients leave float32, infinite or NaN.
      TypeError: on a traced value, one for each row or what is no number.

    >>> static_temperature(0.0)
    Traceback (most recent call last):
      ...
    ValueError: temperature must lie in [1e-06, inf), given 0.0: pass 1.0 for the log-probs of greedy samples
    """
    if given := getattr(temperature, "shape", ()):
        raise TypeError(
            f"temperature must be one number for all rows, given an array of shape {list(given)}: call once for each "
            f"temperature, or divide {rows} by its own"
        )
    static(temperature=temperature)
    value = number("temperature", temperature)
    if not _MIN_TEMPERATURE <= value < math.inf:
        raise ValueError(
            f"temperature must lie in [{_MIN_TEMPERATURE:g}, inf), given {temperature!r}: pass 1.0 for the log-probs "
            "of greedy samples"
        )
    return value


def token_ids(tokens: AnyArray) -> Array:
    """Token ids as int32; an id that int32 has not becomes -1, which no vocabulary has, instead of wrapping around.

    Raises:
      TypeError: on what is no array, or one of other numbers.

    >>> token_ids(np.array([3, 2**32 + 3])).tolist()
    [3, -1]
    """
    if not hasattr(tokens, "dtype"):
        raise TypeError(f"tokens must be an array of integers, given {tokens!r}: pass jax.numpy.asarray(tokens)")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"tokens must be integers, given dtype {tokens.dtype}: pass token ids")
    if tokens.dtype.itemsize < 4 or tokens.dtype == jnp.int32:
        return jnp.asarray(tokens, jnp.int32)
    xp: Any = jnp if isinstance(tokens, jax.Array) else np  # before JAX cuts 64 bits to 32
    ids: Any = tokens
    return jnp.asarray(xp.where((ids >= 0) & (ids <= _INT32_MAX), ids.astype(np.int32), np.int32(-1)))


def ordered(low_name: str, low: float, high_name: str, high: float) -> None:
    """Refuses a band whose lower end is not below its upper end.

    Raises:
      ValueError: naming both ends and their values.
    """
    if not low < high:
        raise ValueError(f"{low_name} must be below {high_name}, given {low_name}={low!r} and {high_name}={high!r}")


def known_name(kind: str, name: Any, names: Iterable[str]) -> None:
    """Refuses a name that is not in the list, with the nearest one as a hint.

    Raises:
      ValueError: listing the legal names.

    >>> known_name("preset", "tsi", ("tis", "cis"))
    Traceback (most recent call last):
      ...
    ValueError: unknown preset 'tsi' (did you mean 'tis'?): choose one of tis, cis
    """
    legal = list(names)
    if name in legal:
        return
    close = difflib.get_close_matches(str(name), legal, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(f"unknown {kind} {name!r}{hint}: choose one of {', '.join(legal)}")
