"""The engine's two compiled programs: prefill into slots, and a chunk of decode steps.

Decoding starts by running the last prompt token again, so every sampled token's logits come from the decode step itself
and carry its weights' version.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from trm_jax.models import ComputeConfig, KVCache, Transformer, TransformerOutput, head_log_probs, init_cache
from trm_jax.rollout._config import EngineConfig, SamplingConfig
from trm_jax.rollout._sampling import pack_support, sample
from trm_jax.rollout._slots import Record, Slots
from trm_jax.rollout._weights import EngineWeights

__all__ = ["admit", "cache_into_slots", "decode", "into_slots", "run_prompts"]


def run_prompts(
    model: Transformer, prompts: Array, noise_seeds: Array, *, config: EngineConfig, compute: ComputeConfig
) -> TransformerOutput:
    """One pass over prompts ``[R, P]`` that fills a cache of the engine's row length."""
    empty = init_cache(model.config, prompts.shape[0], config.sequence_length, compute)
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1], dtype=jnp.int32), prompts.shape)
    return model(prompts, positions=positions, cache=empty, compute=compute, jitter_seeds=noise_seeds)


def into_slots(old: Array, new: Array, slot: Array) -> Array:
    """``old`` with ``new[i]`` at ``slot[i]``; a slot past the end is dropped."""
    return old.at[slot].set(new.astype(old.dtype), mode="drop")


def cache_into_slots(cache: KVCache, prefix: KVCache, slot: Array, row: Array) -> KVCache:
    """``cache`` with keys and values of prompt ``row[i]`` in ``slot[i]``; a slot past the end is dropped."""
    out: KVCache = jax.tree.map(lambda c, p: c.at[:, slot].set(p[:, row], mode="drop"), cache, prefix)
    return out


def admit(
    weights: EngineWeights,
    slots: Slots,
    record: Record,
    prompts: Array,
    noise_seeds: Array,
    slot: Array,
    row: Array,
    start: dict[str, Array],
    *,
    graphdef: Any,
    config: EngineConfig,
    compute: ComputeConfig,
) -> tuple[Slots, Record]:
    """Runs prompts and copies keys and values of prompt ``row[i]`` into ``slot[i]``; a slot past the end is dropped.

    Args:
      weights: the engine's.
      slots: donated.
      record: donated; it takes the prompts' routes, when it has any.
      prompts: ``[R, P]``.
      noise_seeds: ``[R]``.
      slot: ``[C]``.
      row: ``[C]``.
      start: ``[C]`` each: last token, its position, seed and request of what starts.
      graphdef: of the ``Transformer``.
      config: sizes.
      compute: arithmetic.
    """
    model: Transformer = nnx.merge(graphdef, weights.params)
    out = run_prompts(model, prompts, noise_seeds, config=config, compute=compute)
    assert out.cache is not None
    begun = {"step": jnp.zeros_like(slot), "alive": jnp.ones_like(slot, bool), **start}
    slots = dataclasses.replace(
        slots,
        cache=cache_into_slots(slots.cache, out.cache, slot, row),
        **{name: into_slots(getattr(slots, name), value, slot) for name, value in begun.items()},
    )
    if record.routes is None or out.routed_experts is None:
        return slots, record
    # Decoding runs the last prompt token again, and writes its routes then.
    length = prompts.shape[1]
    before = jnp.arange(length)[None, :] < start["position"][:, None]
    routes = jnp.where(before[:, :, None, None], _by_position(out.routed_experts)[row], -1)
    request = jnp.where(slot < config.slots, start["request"], record.routes.shape[0])
    routes = record.routes.at[request, :length].set(routes.astype(record.routes.dtype), mode="drop")
    return slots, dataclasses.replace(record, routes=routes)


def _by_position(routed_experts: Array) -> Array:
    """``[M, B, S, k]`` to ``[B, S, M, k]``."""
    return jnp.moveaxis(routed_experts, 0, 2)


def decode(
    weights: EngineWeights,
    slots: Slots,
    record: Record,
    version: Array,
    *,
    sampling: SamplingConfig,
    eos: tuple[int, ...],
    graphdef: Any,
    config: EngineConfig,
    compute: ComputeConfig,
) -> tuple[Slots, Record]:
    """``decode_chunk`` tokens of every slot; slots and record are donated."""
    model: Transformer = nnx.merge(graphdef, weights.params)
    idle_row = record.tokens.shape[0] - 1
    limit = config.max_response_length

    def step(carry: tuple[Slots, Record], _: None) -> tuple[tuple[Slots, Record], None]:
        slots, record = carry
        out = model(
            slots.token[:, None],
            positions=slots.position[:, None],
            cache=slots.cache,
            compute=compute,
            jitter_seeds=slots.seed,
        )
        assert out.cache is not None
        hidden = out.hidden[:, 0]
        logps = head_log_probs(hidden, weights.head, temperature=sampling.temperature, compute=compute)
        token, logp, kept = sample(logps, slots.seed, slots.step, sampling, compute)
        ended = jnp.isin(token, jnp.array(eos, jnp.int32))
        going = slots.alive & ~ended & (slots.step + 1 < limit)

        row = jnp.where(slots.alive, slots.request, idle_row)
        at = (row, jnp.minimum(slots.step, limit - 1))
        routes = record.routes
        if routes is not None and out.routed_experts is not None:
            routes = routes.at[row, slots.position].set(_by_position(out.routed_experts)[:, 0].astype(routes.dtype))
        support = record.support
        if support is not None and kept is not None:
            support = support.at[at].set(pack_support(kept))
        record = Record(
            tokens=record.tokens.at[at].set(token),
            logps=record.logps.at[at].set(logp),
            versions=record.versions.at[at].set(version),
            length=record.length.at[row].set(slots.step + 1),
            finished=record.finished.at[row].set(ended),
            hidden=None if record.hidden is None else record.hidden.at[at].set(hidden),
            support=support,
            routes=routes,
        )
        slots = dataclasses.replace(
            slots,
            cache=out.cache,
            token=jnp.where(going, token, slots.token),
            position=slots.position + going,
            step=slots.step + going,
            alive=going,
        )
        return (slots, record), None

    carry, _ = jax.lax.scan(step, (slots, record), None, length=config.decode_chunk)
    return carry
