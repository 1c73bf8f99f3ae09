"""The compiled programs of every engine here: prefill, insert, and a chunk of decode steps over slots.

Decoding starts by running the last prompt token again, so every sampled token's logits come from the decode step itself
and carry its weights' version. Each slot has sampling options and a limit of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from trm_jax.models import ComputeConfig, KVCache, Transformer, TransformerConfig, head_distributions, init_cache
from trm_jax.rollout._config import EngineConfig
from trm_jax.rollout._sampling import sample_rows
from trm_jax.rollout._slots import Chunk, DecodeState, PolicyWeights, Prefix, Recording, SlotRequests

__all__ = ["decode", "insert", "prefill"]


def prefill(
    policy: PolicyWeights,
    prompts: Array,
    lengths: Array,
    noise_seeds: Array,
    *,
    recording: Recording,
    graphdef: Any,
    config: EngineConfig,
    compute: ComputeConfig,
) -> Prefix:
    """Runs prompts.

    Args:
      policy: weights.
      prompts: ``[R, W]``; anything at or after ``lengths``.
      lengths: ``[R]``, at least 1.
      noise_seeds: ``[R]`` seeds of the router's noise. They depend on the prompt alone: samples of one prompt share its
        run, and it must not matter whose request ran it.
      recording: whether routes are kept.
      graphdef: of the ``Transformer``.
      config: sizes.
      compute: arithmetic.
    """
    model: Transformer = nnx.merge(graphdef, policy.weights.params)
    # Sums over another number of keys round otherwise: where bits matter there are as many as in decoding.
    width = config.sequence_length if compute.batch_invariant else prompts.shape[1]
    out = model(
        prompts,
        positions=jnp.broadcast_to(jnp.arange(prompts.shape[1], dtype=jnp.int32), prompts.shape),
        cache=init_cache(model.config, prompts.shape[0], width, compute),
        compute=compute,
        jitter_seeds=noise_seeds,
    )
    assert out.cache is not None
    last = lengths - 1
    return Prefix(
        cache=out.cache,
        token=jnp.take_along_axis(prompts, last[:, None], axis=1)[:, 0],
        position=last,
        routes=_by_position(out.routed_experts) if recording.routes else None,
    )


def insert(prefix: Prefix, state: DecodeState, slot: Array, row: Array, requests: SlotRequests) -> DecodeState:
    """Starts prompt ``row[i]`` in ``slot[i]`` with ``requests[i]``; drops slots past the end. Donates ``state``."""

    def put(old: Array, new: Array) -> Array:
        return old.at[slot].set(new.astype(old.dtype), mode="drop")

    def put_rows(old: Array, new: Array) -> Array:
        # To the row's end, with zeros: what is left of an earlier sequence could be NaN, which no weight of 0 removes.
        rest = [(0, 0)] * new.ndim
        rest[2] = (0, old.shape[2] - new.shape[2])
        return old.at[:, slot].set(jnp.pad(new[:, row], rest), mode="drop")

    cache: KVCache = jax.tree.map(put_rows, state.cache, prefix.cache)
    return DecodeState(
        cache=cache,
        token=put(state.token, prefix.token[row]),
        position=put(state.position, prefix.position[row]),
        step=put(state.step, jnp.zeros_like(slot)),
        alive=put(state.alive, jnp.ones_like(slot, bool)),
        requests=jax.tree.map(put, state.requests, requests),
    )


def decode(
    policy: PolicyWeights,
    state: DecodeState,
    steps: Array,
    *,
    eos: tuple[int, ...],
    recording: Recording,
    graphdef: Any,
    config: EngineConfig,
    compute: ComputeConfig,
) -> tuple[DecodeState, Chunk]:
    """``steps <= decode_chunk`` tokens of every slot, fewer when no slot is left. Donates ``state``."""
    weights = policy.weights
    model: Transformer = nnx.merge(graphdef, weights.params)

    def step(state: DecodeState) -> tuple[DecodeState, dict[str, Array]]:
        wanted = state.requests
        out = model(
            state.token[:, None],
            positions=state.position[:, None],
            cache=state.cache,
            compute=compute,
            jitter_seeds=wanted.seed,
        )
        assert out.cache is not None
        hidden = out.hidden[:, 0]
        # A slot that does not decode must not make the others pay for its temperature or the sort of a cut support.
        rows = wanted.sampling.where(state.alive)
        scaled, model_logps, lse = head_distributions(
            hidden, weights.head, temperature=rows.temperature, compute=compute
        )
        token, logp, support = sample_rows(scaled, wanted.seed, state.step, rows, compute)
        model_logp = jnp.take_along_axis(model_logps, token[:, None], axis=-1)[:, 0]
        made = {"tokens": token, "valid": state.alive, "logps": logp, "model_logps": model_logp, "support": support}
        if recording.hidden:
            made |= {"hidden": hidden, "logsumexp": lse}
        if recording.top_logps:
            made["top_logps"], made["top_tokens"] = jax.lax.top_k(model_logps, recording.top_logps)
        if recording.routes:
            made["routes"] = _by_position(out.routed_experts)[:, 0]
        going = state.alive & ~jnp.isin(token, jnp.array(eos, jnp.int32)) & (state.step + 1 < wanted.limit)
        after = dataclasses.replace(
            state,
            cache=out.cache,
            token=jnp.where(going, token, state.token),
            position=state.position + going,
            step=state.step + going,
            alive=going,
        )
        return after, made

    def body(carry: tuple[Array, DecodeState, dict[str, Array]]) -> tuple[Array, DecodeState, dict[str, Array]]:
        i, state, chunk = carry
        state, made = step(state)
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=1)
        return i + 1, state, {name: put(held, made[name].astype(held.dtype)) for name, held in chunk.items()}

    def more(carry: tuple[Array, DecodeState, dict[str, Array]]) -> Array:
        return (carry[0] < steps) & jnp.any(carry[1].alive)

    empty = _empty_chunk(model.config, config, compute, recording)
    _, after, made = jax.lax.while_loop(more, body, (jnp.zeros((), jnp.int32), state, empty))
    bits = {name: jax.lax.bitcast_convert_type(made[name], jnp.int32) for name in ("logps", "model_logps")}
    version = jnp.broadcast_to(policy.version, state.step.shape)
    columns = [
        *(made["tokens"], made["valid"], state.step[:, None] + 1, bits["logps"], bits["model_logps"]),
        *(version[:, None], after.alive[:, None]),
    ]
    data = jnp.concatenate([column.astype(jnp.int32) for column in columns], axis=1)
    names = ("hidden", "logsumexp", "top_tokens", "top_logps", "routes")
    return after, Chunk(data=data, support=made["support"], **{name: made.get(name) for name in names})


def _empty_chunk(
    shape: TransformerConfig, config: EngineConfig, compute: ComputeConfig, recording: Recording
) -> dict[str, Array]:
    """Where the steps' results go, ``[C, k, ...]`` each."""

    def zeros(dtype: Any, *rest: int) -> Array:
        return jnp.zeros((config.slots, config.decode_chunk, *rest), dtype)

    out = {
        "tokens": zeros(jnp.int32),
        "valid": zeros(bool),
        "logps": zeros(jnp.float32),
        "model_logps": zeros(jnp.float32),
        "support": zeros(jnp.uint8, -(-shape.vocab_size // 8)),
    }
    if recording.hidden:
        out |= {"hidden": zeros(compute.jnp_dtype, shape.d_model), "logsumexp": zeros(jnp.float32)}
    if recording.top_logps:
        out["top_tokens"] = zeros(jnp.int32, recording.top_logps)
        out["top_logps"] = zeros(jnp.float32, recording.top_logps)
    if recording.routes:
        out["routes"] = zeros(jnp.int16, shape.moe_layers, shape.experts_per_token)
    return out


def _by_position(routed_experts: Array | None) -> Array:
    """``[M, B, S, k]`` to ``[B, S, M, k]`` int16."""
    assert routed_experts is not None
    return jnp.moveaxis(routed_experts, 0, 2).astype(jnp.int16)
