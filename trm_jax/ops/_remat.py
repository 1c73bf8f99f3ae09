"""What a policy of ``jax.checkpoint`` sees of an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

__all__ = ["as_one_step"]


def as_one_step(function: Callable[..., Any], *operands: Any) -> Any:
    """``function(*operands)``, into which no policy of ``jax.checkpoint`` looks.

    One that saves products (``dots_saveable``) would save every chunk's logits, ``[N, V]`` together; it does not look
    into what has a derivative of its own. That derivative is the function's, of any order and mode, which an experiment
    of JAX for the same purpose, ``optimize_remat`` of ``jax.custom_vjp``, has not.

    Args:
      function: closes over no array.
      operands: pytrees of arrays.
    """
    whole = jax.custom_jvp(function)

    @whole.defjvp
    def derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        out: tuple[Any, Any] = jax.jvp(function, primals, tangents)
        return out

    return whole(*operands)
