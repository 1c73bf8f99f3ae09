"""One decoder-only transformer, built from parts: kind of attention, dense or mixture of experts, with a cache or not.

Parameters are stacked over layers and equal blocks run under ``lax.scan``, so compile time does not grow with depth.
Every parameter carries ``logical_axes`` metadata, which ``models.param_shardings`` maps to a mesh.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from trm_jax.models._block import BlockContext, RematPolicy, run_blocks
from trm_jax.models._blocks import Blocks
from trm_jax.models._cache import KVCache, TransformerOutput
from trm_jax.models._compute import ComputeConfig
from trm_jax.models._config import TransformerConfig
from trm_jax.models._parts import rms_norm
from trm_jax.models._rowwise import rowwise

__all__ = ["Transformer"]

_FLOAT32 = jnp.dtype("float32")


class Transformer(nnx.Module):
    """Decoder-only transformer; ``hidden`` and the output head are exposed apart, so that no logits need be held.

    Args:
      config: the shape.
      rngs: ``nnx.Rngs(params=...)``.
      param_dtype: type of the stored parameters.

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> model = Transformer(TransformerConfig(vocab_size=16), rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 5), jnp.int32)).hidden.shape
    (2, 5, 96)
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs, param_dtype: jnp.dtype = _FLOAT32) -> None:
        self.config = config
        shape = (config.vocab_size, config.d_model)

        def table() -> nnx.Param[Array]:
            # Rows of unit expected norm: tied or not, initial logits then have a spread of about one.
            value = jax.random.normal(rngs.params(), shape, param_dtype) * (1.0 / math.sqrt(config.d_model))
            return nnx.Param(value, logical_axes=("vocab", "embed"))

        self.embedding = table()
        make = functools.partial(Blocks, config, rngs=rngs, param_dtype=param_dtype)
        if config.n_dense_layers:
            self.dense_blocks = make(layers=config.n_dense_layers, experts=False)
        self.blocks = make(layers=config.n_layers - config.n_dense_layers, experts=config.n_experts > 0)
        self.final_norm = nnx.Param(jnp.ones((config.d_model,), param_dtype), logical_axes=("norm",))
        if not config.tie_embeddings:
            self.lm_head = table()

    def head(self) -> Float[Array, "V D"]:
        """The output head, ``[V, D]``, in the parameters' own type."""
        return (self.embedding if self.config.tie_embeddings else self.lm_head).get_value()

    def __call__(
        self,
        tokens: Int[Array, "B S"],
        *,
        positions: Int[Array, "B S"] | None = None,
        segment_ids: Int[Array, "B S"] | None = None,
        cache: KVCache | None = None,
        compute: ComputeConfig = ComputeConfig(),  # noqa: B008 - frozen
        jitter_seeds: UInt32[Array, " B"] | None = None,
        routed_experts: Int[Array, "M B S k"] | None = None,
        remat: bool | RematPolicy = False,
        layer_states: bool = False,
    ) -> TransformerOutput:
        """Final hidden states of every position.

        Args:
          tokens: ``[B, S]`` ids in ``[0, V)``, left-aligned rows; padding on the right never reaches an earlier token.
          positions: ``[B, S]``; default ``0 .. S-1``. With a cache, also the slots that are written.
          segment_ids: ``[B, S]`` for packed rows: a token attends within its segment. Not together with a cache.
          cache: earlier positions. Query ``p`` attends to slots ``0 .. p``.
          compute: the arithmetic.
          jitter_seeds: ``[B]`` seeds of the router's noise; required when ``compute.routing_jitter > 0``.
          routed_experts: ``[M, B, S, k]`` experts to use in the ``M`` blocks that have some, as another engine chose
            them (routing replay); a token whose first id is negative chooses for itself. The experts' weights still
            come from this model's router.
          remat: what the backward pass recomputes (see ``RematPolicy``); True is "full", False "none".
          layer_states: also return the stream that enters every block.

        Returns:
          Hidden states, the updated cache, the experts that ran and how near the router's choice was.

        Raises:
          ValueError: segment ids together with a cache, routing jitter without seeds, or routes of another shape than
            the model's.
        """
        config = self.config
        batch, length = tokens.shape
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        if cache is not None and segment_ids is not None:
            raise ValueError("segment_ids describe packed training rows; decoding with a cache has one segment a row.")
        if compute.routing_jitter > 0 and jitter_seeds is None:
            raise ValueError(f"routing_jitter={compute.routing_jitter} needs jitter_seeds, one for each row.")
        routes = (config.moe_layers, batch, length, config.experts_per_token)
        if routed_experts is not None and routed_experts.shape != routes:
            raise ValueError(
                f"routed_experts has shape {routed_experts.shape}; this model and these tokens need {routes} "
                "(blocks with experts, rows, positions, experts a token)."
            )
        if cache is not None:
            allowed = jnp.arange(cache.key.shape[2])[None, None, :] <= positions[:, :, None]
        else:
            index = jnp.arange(length)
            allowed = jnp.broadcast_to(index[None, None, :] <= index[None, :, None], (batch, length, length))
            if segment_ids is not None:
                allowed &= segment_ids[:, :, None] == segment_ids[:, None, :]

        context = BlockContext(
            config=config,
            compute=compute,
            positions=positions,
            allowed=allowed,
            jitter_seeds=jitter_seeds if compute.routing_jitter > 0 else None,
        )
        table = self.embedding.get_value()
        stream = table[tokens].astype(compute.jnp_dtype).reshape(batch * length, config.d_model)
        groups = [nnx.to_pure_dict(nnx.state(self.blocks))]
        if config.n_dense_layers:
            groups.insert(0, nnx.to_pure_dict(nnx.state(self.dense_blocks)))
        policy: RematPolicy = remat if isinstance(remat, str) else ("full" if remat else "none")
        stream, cache, experts, margins, states = run_blocks(
            stream, groups, context, cache=cache, routed_experts=routed_experts, remat=policy, layer_states=layer_states
        )
        hidden = rowwise(
            functools.partial(rms_norm, eps=config.norm_eps), compute, (stream,), (self.final_norm.get_value(),)
        )
        return TransformerOutput(
            hidden=hidden.reshape(batch, length, config.d_model),
            cache=cache,
            routed_experts=experts,
            router_margins=margins,
            layer_states=states,
        )
