"""What decodes at present (slots), and what has been sampled so far (the record)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from trm_jax.models import ComputeConfig, KVCache, TransformerConfig, init_cache
from trm_jax.rollout._config import EngineConfig, SamplingConfig
from trm_jax.rollout._requests import Requests
from trm_jax.types import RolloutBatch

__all__ = ["Record", "Slots", "empty_record", "empty_slots", "to_rollout"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """What the slots are doing; ``[C]`` each, besides the cache.

    Attributes:
      cache: keys and values of prompt and response.
      token: the last token, whose keys and values are not in the cache yet.
      position: its position.
      step: response index of the token to be drawn next.
      seed: of the request's sampling.
      request: row in the record; the row after the last one for a slot that never started.
      alive: whether the slot's request still decodes.
    """

    cache: KVCache
    token: Array
    position: Array
    step: Array
    seed: Array
    request: Array
    alive: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Record:
    """What has been sampled, a row a request; the last row takes what idle slots write."""

    tokens: Array
    logps: Array
    versions: Array
    length: Array
    finished: Array
    hidden: Array | None
    support: Array | None
    routes: Array | None


def empty_slots(shape: TransformerConfig, config: EngineConfig, compute: ComputeConfig, *, total: int) -> Slots:
    """All slots idle, for ``total`` requests."""
    count = config.slots

    def zeros(dtype: Any = jnp.int32) -> Array:
        return jnp.zeros((count,), dtype)  # an array of its own for every field: the decode step donates them

    return Slots(
        cache=init_cache(shape, count, config.sequence_length, compute),
        token=zeros(),
        position=zeros(),
        step=zeros(),
        seed=zeros(jnp.uint32),
        request=jnp.full((count,), total, jnp.int32),
        alive=zeros(bool),
    )


def empty_record(
    shape: TransformerConfig,
    config: EngineConfig,
    compute: ComputeConfig,
    sampling: SamplingConfig,
    *,
    total: int,
    hidden: bool,
    routes: bool,
) -> Record:
    """Nothing sampled yet for ``total`` requests; hidden states and routes when asked for, a support under top-p."""
    rows = (total + 1, config.max_response_length)
    truncated = sampling.top_p < 1 and not sampling.greedy
    return Record(
        tokens=jnp.zeros(rows, jnp.int32),
        logps=jnp.zeros(rows, jnp.float32),
        versions=jnp.full(rows, -1, jnp.int32),
        length=jnp.zeros(rows[:1], jnp.int32),
        finished=jnp.zeros(rows[:1], bool),
        hidden=jnp.zeros((*rows, shape.d_model), compute.jnp_dtype) if hidden else None,
        support=jnp.zeros((*rows, -(-shape.vocab_size // 8)), jnp.uint8) if truncated else None,
        routes=jnp.full((total + 1, config.sequence_length, shape.moe_layers, shape.experts_per_token), -1, jnp.int16)
        if routes
        else None,
    )


def to_rollout(
    record: Record, requests: Requests, group_ids: Sequence[int] | Array, sampling: SamplingConfig
) -> RolloutBatch:
    """The finished record as the pipeline's batch."""
    total, length = len(requests), record.tokens.shape[1]
    sampled = jax.tree.map(lambda x: x[:total], record)
    return RolloutBatch(
        prompt_tokens=jnp.asarray(requests.tokens),
        prompt_mask=jnp.arange(requests.tokens.shape[1])[None, :] < jnp.asarray(requests.lengths)[:, None],
        response_tokens=sampled.tokens,
        response_mask=jnp.arange(length)[None, :] < sampled.length[:, None],
        rollout_logps=sampled.logps,
        versions=sampled.versions,
        finished=sampled.finished,
        group_ids=jnp.asarray(group_ids, jnp.int32),
        hidden=sampled.hidden,
        support=sampled.support,
        routed_experts=sampled.routes,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
    )
