"""A head (weight, scale, bias) and the logits that it makes of hidden states."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8

from trm_jax.checks import in_range, number, required, shape_of, static, static_temperature, token_ids
from trm_jax.numerics import AnyArray, absent_values
from trm_jax.ops._axis_types import as_varying

__all__ = [
    "Head",
    "Scaling",
    "as_head",
    "cap_slope",
    "check_operands",
    "check_scaling",
    "finish_logits",
    "head_logits",
    "legal_tokens",
    "product_dtype",
    "product_precision",
]

_INT8_ROWS = 4096
_CAPS = 1e-30, 1e24
"""Caps by which a float32 logit can be divided and multiplied, with any temperature."""


class Head(NamedTuple):
    """The rows of a head, or of one shard of it.

    Attributes:
      weight: ``[V, D]`` row-major.
      scale: ``[V]`` factor of each row's logit, of a quantised weight.
      bias: ``[V]`` added to each row's logit; ``-inf`` takes the token out of the vocabulary, other values are
        above -1e29.
    """

    weight: Float[Array, "V D"] | Int8[Array, "V D"]
    scale: Float[Array, " V"] | None = None
    bias: Float[Array, " V"] | None = None


class Scaling(NamedTuple):
    """What happens to a logit behind the head: ``cap · tanh(z / cap) / temperature``, in Gemma's order."""

    temperature: float
    soft_cap: float | None


def check_operands(
    role: str,
    hidden: AnyArray,
    head: AnyArray,
    tokens: AnyArray,
    support: AnyArray | None,
    *,
    scale: AnyArray | None = None,
    bias: AnyArray | None = None,
) -> None:
    """Shapes of one policy's operands; ``role`` (``""``, ``"policy_"``, ``"rollout_"``) starts their names.

    Raises:
      ValueError: naming what was given and what is required.
      TypeError: a list, a layer or None for an array, another type than float32 or bfloat16 (an int8 head apart), an
        integer head without its scale, or a scale without an integer head.
    """
    required(**{f"{role}hidden": hidden, f"{role}head": head, "tokens": tokens})
    if not isinstance(head, (list, tuple)) and not (hasattr(head, "shape") and hasattr(head, "dtype")):
        raise TypeError(
            f"{role}head must be an array, given {type(head).__name__}: pass the [V, D] matrix (kernel.T of a Dense "
            "layer, the embedding where it is tied)"
        )
    of_hidden, of_head = shape_of(f"{role}hidden", hidden), shape_of(f"{role}head", head)
    if len(of_hidden) != 2 or len(of_head) != 2 or of_hidden[1] != of_head[1]:
        raise ValueError(
            f"{role}hidden must be [N, D] and {role}head [V, D] (rows are tokens), given {list(of_hidden)} and "
            f"{list(of_head)}: flatten leading axes, transpose a [D, V] head"
        )
    (n, width), (vocabulary, _) = of_hidden, of_head
    if vocabulary == 0 or width == 0:
        raise ValueError(
            f"{role}head must have a row for each token and a column for each feature, given {list(of_head)}: pass the "
            "whole head"
        )
    if (of_tokens := shape_of("tokens", tokens)) != (n,):
        if role == "rollout_":  # they fit the policy's
            raise ValueError(
                f"rollout_hidden must have a row for each of the {of_tokens[0]} rows of policy_hidden, given "
                f"{list(of_hidden)}: pass the hidden states of the same tokens"
            )
        raise ValueError(f"tokens must be [{n}], one for each row of {role}hidden, given {list(of_tokens)}")
    if support is not None and shape_of("support", support) != (n, -(-vocabulary // 8)):
        raise ValueError(
            f"support must be [{n}, {-(-vocabulary // 8)}] uint8, one bit for each token of the head, given "
            f"{list(shape_of('support', support))}"
        )
    if support is not None and support.dtype != jnp.uint8:
        raise TypeError(
            f"support must be uint8 bits, given {support.dtype}: pack it with numpy.packbits, little-endian"
        )
    if not _is_float(hidden):
        raise TypeError(
            f"{role}hidden must be float32 or bfloat16, given {hidden.dtype}: pass {role}hidden.astype(jnp.float32)"
        )
    for name, vector in ((f"{role}head_scale", scale), (f"{role}bias", bias)):
        if vector is None:
            continue
        if shape_of(name, vector) != (vocabulary,):
            raise ValueError(
                f"{name} must be [{vocabulary}], one for each row of {role}head, given {list(shape_of(name, vector))}"
            )
        if not _is_float(vector):
            raise TypeError(
                f"{name} must be float32 or bfloat16, given {vector.dtype}: pass {name}.astype(jnp.float32)"
            )
    _check_type(role, head, scaled=scale is not None)


def _check_type(role: str, head: AnyArray, *, scaled: bool) -> None:
    wide = f"{role}head.astype(jnp.float32)"
    if scaled and head.dtype != jnp.int8:
        raise TypeError(
            f"{role}head must be int8 to have a scale, given {head.dtype} with a scale: leave {role}head_scale out and "
            f"pass {wide} * {role}head_scale[:, None]"
        )
    if scaled or _is_float(head):
        return
    if head.dtype != jnp.int8:
        todo = f"pass {wide}"
    elif role == "rollout_":
        todo = "pass rollout_head_scale, the factor of each row"
    else:
        todo = f"pass {wide} * scale[:, None]; an int8 head is taken as rollout_head only"
    raise TypeError(f"{role}head must be float32 or bfloat16, given {head.dtype} without a scale: {todo}")


def as_head(weight: AnyArray, scale: AnyArray | None = None, bias: AnyArray | None = None) -> Head:
    """The head that every form works on: a bias of at most -1e29 is ``-inf``, and has no gradient.

    >>> as_head(jnp.eye(3), bias=jnp.array([1.0, jnp.finfo(jnp.float32).min, jnp.nan])).bias.tolist()
    [1.0, -inf, nan]
    """
    offsets = None if bias is None else absent_values(bias)
    return Head(jnp.asarray(weight), None if scale is None else jnp.asarray(scale), offsets)


def legal_tokens(tokens: Int[AnyArray, " N"], vocabulary: int) -> tuple[Int[Array, " N"], Bool[Array, " N"]]:
    """Tokens in ``[0, vocabulary)``, the others replaced by 0, and which they are."""
    y = token_ids(tokens)
    legal = (y >= 0) & (y < vocabulary)
    return jnp.where(legal, y, 0), legal


def _is_float(array: AnyArray) -> bool:
    """Whether JAX holds it in a type whose products the operators have: NumPy's float64 is float32 to JAX."""
    return jax.dtypes.canonicalize_dtype(array.dtype) in (jnp.float32, jnp.bfloat16)


def check_scaling(temperature: float, logit_soft_cap: float | None, chunk_size: int | None) -> Scaling:
    """The static numbers, checked.

    Raises:
      ValueError: one of them out of range.
      TypeError: one of them traced, or a chunk of a fraction of tokens.
    """
    static(logit_soft_cap=logit_soft_cap, chunk_size=chunk_size)
    divisor = static_temperature(temperature, rows="each row of hidden (where there is no bias and no cap)")
    if logit_soft_cap is not None and not _CAPS[0] <= (cap := number("logit_soft_cap", logit_soft_cap)) <= _CAPS[1]:
        raise ValueError(f"logit_soft_cap must lie in [1e-30, 1e+24], given {cap!r}: pass None for no cap")
    if chunk_size is not None and (isinstance(chunk_size, bool) or not hasattr(chunk_size, "__index__")):
        raise TypeError(f"chunk_size must be an integer, given {chunk_size!r}: pass the number of tokens of a chunk")
    in_range("chunk_size", chunk_size, low=1)
    return Scaling(divisor, None if logit_soft_cap is None else float(logit_soft_cap))


def product_precision(*operands: AnyArray) -> jax.lax.Precision:
    """Exact products as soon as one operand is float32; one bfloat16 pass is exact already for bfloat16 and int8."""
    exact = any(operand.dtype == jnp.float32 for operand in operands)
    return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT


def product_dtype(*operands: Any) -> jnp.dtype:
    """What the operands of a product are cast to: the widest type of those that are no integers (int8 fits bfloat16).

    Nothing is promoted, which ``jax.numpy_dtype_promotion("strict")`` forbids.
    """
    floats = [jnp.dtype(x.dtype) for x in operands if not jnp.issubdtype(x.dtype, jnp.integer)]
    return max(floats, key=lambda dtype: dtype.itemsize)


def _product(hidden: Array, weight: Array) -> Array:
    """``hidden · weightᵀ``, accumulated in float32 whatever the dtype of the operands."""
    dtype = product_dtype(hidden, weight)
    return jax.lax.dot_general(
        hidden.astype(dtype),
        weight.astype(dtype),
        (((1,), (1,)), ((), ())),
        precision=product_precision(hidden, weight),
        preferred_element_type=jnp.float32,
    )


def finish_logits(product: Array, scale: Array | None, bias: Array | None, soft_cap: float | None) -> Array:
    """``cap(product · scale + bias)``, of ``[N, V]`` products or of one of each row."""
    scale, bias = (None if x is None else jax.lax.expand_dims(x, range(product.ndim - 1)) for x in (scale, bias))
    logits = product if scale is None else product * scale.astype(jnp.float32)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    if soft_cap is not None:
        capped = soft_cap * jnp.tanh(logits / soft_cap)
        logits = capped if bias is None else jnp.where(jnp.isneginf(bias), -jnp.inf, capped)
    return logits


def head_logits(hidden: Float[Array, "N D"], head: Head, soft_cap: float | None) -> Float[Array, "N V"]:
    """Float32 logits before the temperature: ``cap(hidden · weightᵀ · scale + bias)``.

    An int8 weight is widened some thousand rows at a time.
    """
    weight = head.weight
    vocabulary = weight.shape[0]
    if weight.dtype != jnp.int8 or vocabulary <= _INT8_ROWS:
        return finish_logits(_product(hidden, weight), head.scale, head.bias, soft_cap)

    def step(index: Array, product: Array) -> Array:
        # Slices are clamped: the last block starts early enough to be whole, and what it shares with its neighbour
        # comes out twice the same.
        rows = jax.lax.dynamic_slice_in_dim(weight, index * _INT8_ROWS, _INT8_ROWS)
        return jax.lax.dynamic_update_slice_in_dim(product, _product(hidden, rows), index * _INT8_ROWS, 1)

    start = as_varying(jnp.zeros((hidden.shape[0], vocabulary), jnp.float32), like=(hidden, weight))
    product: Array = jax.lax.fori_loop(0, -(-vocabulary // _INT8_ROWS), step, start)
    return finish_logits(product, head.scale, head.bias, soft_cap)


def cap_slope(logits: Float[Array, "N V"], soft_cap: float | None) -> Float[Array, "N V"] | float:
    """Derivative of the cap, from the capped logits."""
    return 1.0 if soft_cap is None else 1.0 - jnp.square(logits / soft_cap)
