"""The served engine's three compiled programs: prefill, insert, and a chunk of decode steps over slots.

As in the in-process engine, decoding starts by running the last prompt token again, so every sampled token's logits
come from the decode step itself and carry its weights' version. Here each slot has sampling options and a limit of its
own, and what was sampled leaves with each chunk instead of being kept on the device.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from trm_jax.models import ComputeConfig, KVCache, QuantizedArray, Transformer, dequantize, head_log_probs
from trm_jax.rollout import EngineConfig, EngineWeights, cache_into_slots, into_slots, run_prompts
from trm_jax.serve._sampling import RowSampling, sample_rows

__all__ = [
    "Chunk",
    "Columns",
    "DecodeState",
    "PolicyWeights",
    "Prefix",
    "SlotRequests",
    "generate",
    "insert",
    "prefill",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyWeights:
    """Weights in the engine's format, with the policy version that every token made by them carries.

    Attributes:
      weights: the engine's.
      version: int32 scalar.
    """

    weights: EngineWeights
    version: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
    """Prompts that have been run, ``R`` of them.

    Attributes:
      cache: keys and values.
      token: ``[R]`` the last prompt token.
      position: ``[R]`` its position.
    """

    cache: KVCache
    token: Array
    position: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotRequests:
    """What slots sample; ``[C]`` each.

    Attributes:
      seed: uint32.
      limit: tokens of the response at most, the end token included.
      sampling: the distributions.
    """

    seed: Array
    limit: Array
    sampling: RowSampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """What the slots are doing; ``[C]`` each, besides the cache.

    Attributes:
      cache: keys and values of prompt and response.
      token: the last token, whose keys and values are not in the cache yet.
      position: its position.
      step: response index of the token to be drawn next.
      alive: whether the slot still decodes.
      requests: what it samples.
    """

    cache: KVCache
    token: Array
    position: Array
    step: Array
    alive: Array
    requests: SlotRequests


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """What ``k`` decode steps made. All that every request needs is one array: one copy to the host.

    Attributes:
      data: ``[C, 4k + 3]`` int32; see ``Columns``.
      support: ``[C, k, ceil(V/8)]`` uint8, the tokens that could be drawn, one bit each.
      hidden: ``[C, k, D]`` final hidden states, or None.
      logsumexp: ``[C, k]`` float32 log-sum-exp of the logits at temperature 1, or None (it goes with ``hidden``).
    """

    data: Array
    support: Array
    hidden: Array | None
    logsumexp: Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """``Chunk.data`` on the host.

    Attributes:
      tokens: ``[C, k]`` int32.
      valid: ``[C, k]`` int32, 1 where the slot still decoded when the token was drawn.
      length: ``[C]`` int32, tokens of the response up to and with this chunk's first.
      logps: ``[C, k]`` float32, under the distribution drawn from.
      model_logps: ``[C, k]`` float32, under the model at temperature 1 over the whole vocabulary.
      versions: ``[C]`` int32, the policy version of the chunk.
      alive: ``[C]`` int32, 1 where the slot goes on.
    """

    tokens: np.ndarray
    valid: np.ndarray
    length: np.ndarray
    logps: np.ndarray
    model_logps: np.ndarray
    versions: np.ndarray
    alive: np.ndarray

    @classmethod
    def of(cls, data: np.ndarray) -> Columns:
        """Views into ``data``, nothing is copied but the log-probs."""
        k = (data.shape[1] - 3) // 4
        tokens, valid, length, logps, model_logps, versions, alive = np.split(data, cls.bounds(k)[:-1], axis=1)
        return cls(
            tokens=tokens,
            valid=valid,
            length=length[:, 0],
            logps=np.ascontiguousarray(logps).view(np.float32),
            model_logps=np.ascontiguousarray(model_logps).view(np.float32),
            versions=versions[:, 0],
            alive=alive[:, 0],
        )

    @staticmethod
    def bounds(k: int) -> list[int]:
        """Where each column ends."""
        return [k, 2 * k, 2 * k + 1, 3 * k + 1, 4 * k + 1, 4 * k + 2, 4 * k + 3]


def prefill(
    policy: PolicyWeights,
    prompts: Array,
    lengths: Array,
    noise_seeds: Array,
    *,
    graphdef: Any,
    config: EngineConfig,
    compute: ComputeConfig,
) -> Prefix:
    """Runs prompts.

    Args:
      policy: weights.
      prompts: ``[R, P]``; anything at or after ``lengths``.
      lengths: ``[R]``, at least 1.
      noise_seeds: ``[R]`` seeds of the router's noise.
      graphdef: of the ``Transformer``.
      config: sizes.
      compute: arithmetic.
    """
    model: Transformer = nnx.merge(graphdef, policy.weights.params)
    cache = run_prompts(model, prompts, noise_seeds, config=config, compute=compute).cache
    assert cache is not None
    last = lengths - 1
    return Prefix(cache=cache, token=jnp.take_along_axis(prompts, last[:, None], axis=1)[:, 0], position=last)


def insert(prefix: Prefix, state: DecodeState, slot: Array, row: Array, requests: SlotRequests) -> DecodeState:
    """Starts prompt ``row[i]`` in ``slot[i]`` with ``requests[i]``; drops slots past the end. Donates ``state``."""

    put = functools.partial(into_slots, slot=slot)
    return DecodeState(
        cache=cache_into_slots(state.cache, prefix.cache, slot, row),
        token=put(state.token, prefix.token[row]),
        position=put(state.position, prefix.position[row]),
        step=put(state.step, jnp.zeros_like(slot)),
        alive=put(state.alive, jnp.ones_like(slot, bool)),
        requests=jax.tree.map(put, state.requests, requests),
    )


def generate(
    policy: PolicyWeights,
    state: DecodeState,
    *,
    eos: tuple[int, ...],
    record_hidden: bool,
    graphdef: Any,
    config: EngineConfig,
    compute: ComputeConfig,
) -> tuple[DecodeState, Chunk]:
    """``decode_chunk`` tokens of every slot. Donates ``state``."""
    weights = policy.weights
    model: Transformer = nnx.merge(graphdef, weights.params)

    def step(state: DecodeState, _: None) -> tuple[DecodeState, dict[str, Array]]:
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
        model_logps = head_log_probs(hidden, weights.head, temperature=1.0, compute=compute)
        # A slot that does not decode must not make the others pay for the sort of a cut support.
        rows = dataclasses.replace(wanted.sampling, greedy=wanted.sampling.greedy | ~state.alive)
        token, logp, support = sample_rows(model_logps, wanted.seed, state.step, rows, compute)
        model_logp = jnp.take_along_axis(model_logps, token[:, None], axis=-1)[:, 0]
        made = {"tokens": token, "valid": state.alive, "logps": logp, "model_logps": model_logp, "support": support}
        if record_hidden:
            made |= {"hidden": hidden, "logsumexp": _logits_at(hidden, weights.head, token, compute) - model_logp}
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

    after, made = jax.lax.scan(step, state, None, length=config.decode_chunk)
    made = {name: jnp.moveaxis(value, 0, 1) for name, value in made.items()}
    bits = {name: jax.lax.bitcast_convert_type(made[name], jnp.int32) for name in ("logps", "model_logps")}
    version = jnp.broadcast_to(policy.version, state.step.shape)
    columns = [
        *(made["tokens"], made["valid"], state.step[:, None] + 1, bits["logps"], bits["model_logps"]),
        *(version[:, None], after.alive[:, None]),
    ]
    data = jnp.concatenate([column.astype(jnp.int32) for column in columns], axis=1)
    return after, Chunk(data=data, support=made["support"], hidden=made.get("hidden"), logsumexp=made.get("logsumexp"))


def _logits_at(hidden: Array, head: Array | QuantizedArray, token: Array, compute: ComputeConfig) -> Array:
    """``[C]`` float32 logits of the given tokens."""
    weight = dequantize(head, compute.jnp_dtype)
    rows = weight.T[token] if isinstance(head, QuantizedArray) else weight[token]
    return jnp.sum(hidden.astype(compute.jnp_dtype).astype(jnp.float32) * rows.astype(jnp.float32), axis=-1)
