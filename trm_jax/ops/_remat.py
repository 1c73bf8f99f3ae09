"""What JAX sees of an operator when it decides what to keep or to compute ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

__all__ = ["as_one_step"]


def as_one_step(function: Callable[..., Any], *operands: Any, barrier: bool = False) -> Any:
    """``function(*operands)``, into which no policy of ``jax.checkpoint`` looks.

    One that saves products (``dots_saveable``) would save every chunk's logits, ``[N, V]`` together; it does not look
    into what has a derivative of its own. That derivative is the function's, of any order and mode, which an experiment
    of JAX for the same purpose, ``optimize_remat`` of ``jax.custom_vjp``, has not.

    The derivative of a loop looks into it all the same, and computes what no turn changes once, ahead of the loop: of a
    constant rollout all logits. Behind a barrier everything depends on every operand.

    Args:
      function: closes over no array.
      operands: pytrees of arrays.
      barrier: nothing is computed of some operands alone.
    """

    def behind_barrier(*operands: Any) -> Any:
        return function(*jax.lax.optimization_barrier(operands))

    whole = jax.custom_jvp(behind_barrier if barrier else function)

    @whole.defjvp
    def derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        out: tuple[Any, Any] = jax.jvp(whole.fun, primals, tangents)
        return out

    return whole(*operands)
