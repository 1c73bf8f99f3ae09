"""What decodes at present, and what the compiled programs take and return."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from trm_jax.models import ComputeConfig, KVCache, TransformerConfig, init_cache
from trm_jax.rollout._config import EngineConfig
from trm_jax.rollout._sampling import RowSampling
from trm_jax.rollout._weights import EngineWeights

__all__ = ["Chunk", "Columns", "DecodeState", "PolicyWeights", "Prefix", "Recording", "SlotRequests", "idle_state"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """What an engine keeps of every sampled token besides token, log-probs, support and version.

    Attributes:
      hidden: the final hidden state, and the log-sum-exp of the logits.
      top_logps: ``K`` most likely tokens of the whole vocabulary with their log-probs at temperature 1; 0 for none.
      routes: the experts that ran, at prompt positions too.

    Raises:
      ValueError: a negative count.
    """

    hidden: bool = False
    top_logps: int = 0
    routes: bool = False

    def __post_init__(self) -> None:
        if self.top_logps < 0:
            raise ValueError(f"top_logps={self.top_logps}: must be 0 (none) or a count of tokens.")


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
      routes: ``[R, W, M, k]`` int16 experts that ran at every position, or None.
    """

    cache: KVCache
    token: Array
    position: Array
    routes: Array | None


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


def idle_state(shape: TransformerConfig, config: EngineConfig, compute: ComputeConfig) -> DecodeState:
    """All slots idle."""

    def full(value: Any, dtype: Any) -> Array:
        return jnp.full((config.slots,), value, dtype)  # an array of its own for every field: they are donated

    return DecodeState(
        cache=init_cache(shape, config.slots, config.sequence_length, compute),
        token=full(0, jnp.int32),
        position=full(0, jnp.int32),
        step=full(0, jnp.int32),
        alive=full(False, bool),
        requests=SlotRequests(
            seed=full(0, jnp.uint32),
            limit=full(1, jnp.int32),
            sampling=RowSampling(
                temperature=full(1, jnp.float32),
                top_p=full(1, jnp.float32),
                top_k=full(0, jnp.int32),
                min_p=full(0, jnp.float32),
                greedy=full(False, bool),
            ),
        ),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """What at most ``k`` decode steps made. All that every request needs is one array: one copy to the host.

    Attributes:
      data: ``[C, 4k + 3]`` int32; see ``Columns``.
      support: ``[C, k, ceil(V/8)]`` uint8, the tokens that could be drawn, one bit each.
      hidden: ``[C, k, D]`` final hidden states, or None.
      logsumexp: ``[C, k]`` float32 log-sum-exp of the logits at temperature 1, or None (it goes with ``hidden``).
      top_tokens: ``[C, k, K]`` int32 most likely tokens, or None.
      top_logps: ``[C, k, K]`` float32 their log-probs at temperature 1, or None.
      routes: ``[C, k, M, k']`` int16 experts that ran on the token before each sampled one, or None.
    """

    data: Array
    support: Array
    hidden: Array | None
    logsumexp: Array | None
    top_tokens: Array | None
    top_logps: Array | None
    routes: Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """``Chunk.data`` by name, on the host (NumPy) or on the device.

    Attributes:
      tokens: ``[C, k]`` int32.
      valid: ``[C, k]`` int32, 1 where the slot still decoded when the token was drawn.
      length: ``[C]`` int32, tokens of the response up to and with this chunk's first.
      logps: ``[C, k]`` float32, under the distribution drawn from.
      model_logps: ``[C, k]`` float32, under the model at temperature 1 over the whole vocabulary.
      versions: ``[C]`` int32, the policy version of the chunk.
      alive: ``[C]`` int32, 1 where the slot goes on.
    """

    tokens: Any
    valid: Any
    length: Any
    logps: Any
    model_logps: Any
    versions: Any
    alive: Any

    @classmethod
    def of(cls, data: np.ndarray | Array) -> Columns:
        """Views into ``data``; on the host nothing is copied but the log-probs."""
        at = [0, *cls.bounds((data.shape[1] - 3) // 4)]
        tokens, valid, length, logps, model_logps, versions, alive = (
            data[:, start:end] for start, end in itertools.pairwise(at)
        )

        def floats(bits: Any) -> Any:
            if isinstance(bits, np.ndarray):
                return np.ascontiguousarray(bits).view(np.float32)
            return jax.lax.bitcast_convert_type(bits, jnp.float32)

        return cls(
            tokens=tokens,
            valid=valid,
            length=length[:, 0],
            logps=floats(logps),
            model_logps=floats(model_logps),
            versions=versions[:, 0],
            alive=alive[:, 0],
        )

    @staticmethod
    def bounds(k: int) -> list[int]:
        """Where each column ends."""
        return [k, 2 * k, 2 * k + 1, 3 * k + 1, 4 * k + 1, 4 * k + 2, 4 * k + 3]
