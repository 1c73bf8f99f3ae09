"""What an engine makes of the trainer's weights when they arrive."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from trm_jax.models import QuantizedArray, Transformer, dequantize, quantize
from trm_jax.rollout._config import RolloutNumerics

__all__ = ["EngineWeights", "WeightLag", "convert_weights"]

_NOT_MATMUL = ("vocab", "norm", "bias")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineWeights:
    """The trainer's weights in an engine's format.

    Attributes:
      params: the model's parameters, matmul weights in the engine's format.
      head: the output head: ``[V, D]`` as an array, or quantised as ``[D, V]``.
    """

    params: Any
    head: Array | QuantizedArray

    def head_matrix(self, dtype: jnp.dtype) -> Float[Array, "V D"]:
        """The head as an engine that computes in ``dtype`` multiplies with it: dequantised and rounded, ``[V, D]``."""
        head = dequantize(self.head, dtype)
        return head.T if isinstance(self.head, QuantizedArray) else head


def convert_weights(graphdef: Any, params: nnx.State[Any, Any], numerics: RolloutNumerics) -> EngineWeights:
    """Quantises or casts the trainer's parameters once, at synchronisation.

    Args:
      graphdef: of the ``Transformer``.
      params: its parameters.
      numerics: the engine's format. float32 keeps the trainer's arrays (no copy).

    Returns:
      The parameters with ``QuantizedArray`` values in place of matmul weights, and the head apart (tied or not).

    Raises:
      ValueError: when an int4 group does not divide a weight's input width, naming the parameter.
    """
    model: Transformer = nnx.merge(graphdef, params)
    head = model.head()
    fmt = numerics.weight_format
    if fmt == "float32":
        return EngineWeights(params, head)

    def one(path: tuple[Any, ...], variable: nnx.Variable[Any]) -> Any:
        value = variable.get_value()
        if fmt == "bfloat16" or fmt == "float16":
            return variable.replace(value.astype(fmt))
        if any(axis in _NOT_MATMUL for axis in variable.get_metadata("logical_axes")):
            return variable
        try:
            return variable.replace(quantize(value, fmt, group_size=numerics.group_size if fmt == "int4" else None))
        except ValueError as error:
            raise ValueError(f"parameter {jax.tree_util.keystr(path)}: {error}") from error

    converted = jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    if fmt == "bfloat16" or fmt == "float16":
        return EngineWeights(converted, head.astype(fmt))
    if not numerics.quantize_head:
        return EngineWeights(converted, head)
    return EngineWeights(converted, quantize(head.T, fmt, group_size=numerics.group_size if fmt == "int4" else None))


class WeightLag:
    """Hands out parameters that are ``lag`` updates old; until that many exist, the oldest there are.

    Args:
      lag: versions between the newest parameters and those the engine gets; 0 is on-policy.

    Raises:
      ValueError: a negative lag.

    >>> held = WeightLag(1)
    >>> for version in range(3):
    ...     held.push(version, f"params {version}")
    >>> held.oldest
    (1, 'params 1')
    """

    def __init__(self, lag: int) -> None:
        if lag < 0:
            raise ValueError(f"lag={lag}: must be 0 or more.")
        self._held: deque[tuple[int, Any]] = deque(maxlen=lag + 1)

    def push(self, version: int, params: Any) -> None:
        """Adds the parameters after update ``version``; they must not be donated afterwards."""
        self._held.append((version, params))

    @property
    def oldest(self) -> tuple[int, Any]:
        """``(version, params)`` for the engine.

        Raises:
          RuntimeError: before the first ``push``.
        """
        if not self._held:
            raise RuntimeError("no parameters are held yet: call push(version, params) first.")
        return self._held[0]

    @property
    def held(self) -> list[tuple[int, Any]]:
        """All parameters held, oldest first: what a checkpoint must keep for a run to resume to the same bits."""
        return list(self._held)
