"""Slots with continuous batching as single operations: load, prefill, insert, generate. When is for others to say.

``InProcessEngine`` is a loop around this; ``trm_jax.integrations.jetstream`` puts JetStream's threads and queues there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int32

from trm_jax.models import Transformer
from trm_jax.rollout._config import EngineConfig, RolloutNumerics, SamplingConfig
from trm_jax.rollout._placement import in_place, mesh_of, placement
from trm_jax.rollout._programs import decode, insert, prefill
from trm_jax.rollout._sampling import RowSampling
from trm_jax.rollout._slots import Chunk, DecodeState, PolicyWeights, Prefix, Recording, SlotRequests, idle_state
from trm_jax.rollout._weights import convert_weights

__all__ = ["SlotEngine", "Start", "chunk_steps", "describe_numerics"]

Start = tuple[int, int, int, int, SamplingConfig]
"""Slot, row of the prefix, seed, limit, sampling."""


def describe_numerics(numerics: RolloutNumerics) -> str:
    """The options as JSON with sorted keys.

    >>> describe_numerics(RolloutNumerics(weight_format="int8"))[:44]
    '{"batch_invariant": false, "dtype": "float32'
    """
    return json.dumps(dataclasses.asdict(numerics), sort_keys=True)


def chunk_steps(most: int, left: Iterable[int], *, free: bool) -> int:
    """Decode steps for the next call: as many as may be, but not so many that slots stand empty for long.

    Args:
      most: ``decode_chunk``.
      left: tokens that each running sample has left until its limit; the first to end frees its slot.
      free: whether slots are free at present, for requests that may come at any time.

    >>> chunk_steps(16, [40, 90], free=False), chunk_steps(16, [40, 7], free=False), chunk_steps(16, [40], free=True)
    (16, 7, 4)
    """
    least = max(1, most // 4)  # below this the calls themselves would count
    return least if free else max(least, min([most, *left]))


class SlotEngine:
    """Our decode engine, one operation a call; every call of an operation runs one of a few compiled programs.

    Args:
      model: the architecture; its parameters are not used (see ``load``).
      config: sizes.
      numerics: the engine's arithmetic and weight format.
      eos_ids: token ids that end a response.
      record_hidden: keep final hidden states and log-sum-exp for those who ask.
      record_top_logps: most likely tokens kept for those who ask, with their log-probs.
      record_routes: keep the experts that ran for those who ask.

    Raises:
      ValueError: for an end token outside the vocabulary, more top tokens than it has, or routing jitter or routes of a
        dense model.
    """

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        *,
        numerics: RolloutNumerics,
        eos_ids: Iterable[int],
        record_hidden: bool = True,
        record_top_logps: int = 0,
        record_routes: bool = False,
    ) -> None:
        shape = model.config
        self.eos_ids = tuple(sorted(int(i) for i in eos_ids))
        if not all(0 <= i < shape.vocab_size for i in self.eos_ids):
            raise ValueError(f"eos_ids={list(self.eos_ids)}: every id must lie in [0, vocab_size={shape.vocab_size}).")
        if numerics.routing_jitter > 0 and not shape.n_experts:
            raise ValueError(
                f"routing_jitter={numerics.routing_jitter} needs a mixture of experts; this model is dense."
            )
        if record_routes and not shape.n_experts:
            raise ValueError("record_routes=True needs a mixture of experts; this model is dense.")
        if record_top_logps > shape.vocab_size:
            raise ValueError(f"record_top_logps={record_top_logps}: the vocabulary has {shape.vocab_size} tokens.")
        self.config, self.numerics, self.shape = config, numerics, shape
        self.recording = Recording(hidden=record_hidden, top_logps=record_top_logps, routes=record_routes)
        self.compute = numerics.compute()
        self.graphdef = nnx.graphdef(model)
        bound: dict[str, Any] = {
            "recording": self.recording,
            "graphdef": self.graphdef,
            "config": config,
            "compute": self.compute,
        }
        self._convert = jax.jit(functools.partial(convert_weights, self.graphdef, numerics=numerics))
        self._prefill = jax.jit(functools.partial(prefill, **bound))
        self._mesh: Mesh | None = None

        def inserted(*operands: Any) -> DecodeState:
            return in_place(insert(*operands), self._mesh)

        def decoded(*operands: Any) -> tuple[DecodeState, Chunk]:
            state, chunk = decode(*operands, eos=self.eos_ids, **bound)
            return in_place(state, self._mesh), chunk

        self._insert = jax.jit(inserted, donate_argnums=1)
        self._decode = jax.jit(decoded, donate_argnums=1)

    def numerics_json(self) -> str:
        """The arithmetic in words, for a client to compare with what it expects."""
        return describe_numerics(self.numerics)

    def load(self, version: int, params: nnx.State[Any, Any]) -> PolicyWeights:
        """Copies the trainer's parameters of policy ``version`` in this engine's format.

        A copy, because a trainer that donates its parameters would delete them here too; and always committed to its
        devices, because a mixture of both kinds compiles every program twice.
        """
        weights = self._convert(params)
        placed = jax.tree.map(lambda x: jax.device_put(x, x.sharding), weights)
        self._mesh = mesh_of(placed)
        here = jnp.int32(0).sharding if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())
        return PolicyWeights(weights=placed, version=jax.device_put(jnp.int32(version), here))

    def borrow(self, version: int, params: nnx.State[Any, Any]) -> PolicyWeights:
        """Like ``load``; parameters that need no conversion are used where they lie, and must not be donated."""
        if self.numerics.weight_format == "float32":
            weights = convert_weights(self.graphdef, params, self.numerics)
        else:
            weights = self._convert(params)
        return PolicyWeights(weights=weights, version=jnp.int32(version))

    def empty_state(self) -> DecodeState:
        """All slots idle; committed to their devices, as everything that the programs return is.

        Where loaded weights are sharded, slots lie over the mesh's "batch" axis and heads over that of "kv_heads", as
        ``models.RULES`` say, wherever they divide by it.
        """
        state = idle_state(self.shape, self.config, self.compute)
        where = jax.tree.map(lambda x: x.sharding, state) if self._mesh is None else placement(state, self._mesh)
        out: DecodeState = jax.device_put(state, where)
        return out

    def prefill(self, policy: PolicyWeights, prompts: Sequence[Sequence[int] | Int32[np.ndarray, " n"]]) -> Prefix:
        """Runs 1 to ``prefill_rows`` prompts of 1 to ``max_prompt_length`` tokens; few or short ones cost less."""
        most, longest = self.config.prefill_rows, self.config.max_prompt_length
        if not 1 <= len(prompts) <= most:
            raise ValueError(f"{len(prompts)} prompts in one prefill: it takes 1 to prefill_rows={most}.")
        rows = _size(len(prompts), most)
        width = longest if self.compute.batch_invariant else _size(max(len(prompt) for prompt in prompts), longest)
        tokens, lengths = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
        noise = np.zeros(rows, np.uint32)
        for row, prompt in enumerate(prompts):
            ids: Int32[np.ndarray, " n"] = np.asarray(prompt, np.int32)
            tokens[row, : ids.size], lengths[row], noise[row] = ids, ids.size, zlib.crc32(ids.tobytes())
        out: Prefix = self._prefill(policy, tokens, lengths, noise)
        return out

    def insert(self, prefix: Prefix, state: DecodeState, starts: Sequence[Start]) -> DecodeState:
        """Starts samples in slots; ``state`` is donated."""
        count = _size(len(starts), self.config.slots)
        ints, floats = np.zeros((4, count), np.int32), np.zeros((3, count), np.float32)
        seeds: Any = np.zeros(count, np.uint32)
        greedy: Any = np.zeros(count, bool)
        ints[0], ints[2], floats[:2] = self.config.slots, 1, 1.0  # entries past the starts point behind the last slot
        for i, (slot, row, seed, limit, sampling) in enumerate(starts):
            ints[:, i] = slot, row, limit, sampling.top_k
            floats[:, i] = sampling.temperature, sampling.top_p, sampling.min_p
            seeds[i], greedy[i] = seed, sampling.greedy
        rows = RowSampling(temperature=floats[0], top_p=floats[1], top_k=ints[3], min_p=floats[2], greedy=greedy)
        requests = SlotRequests(seed=seeds, limit=ints[2], sampling=rows)
        out: DecodeState = self._insert(prefix, state, ints[0], ints[1], requests)
        return out

    def generate(
        self, policy: PolicyWeights, state: DecodeState, steps: int | None = None
    ) -> tuple[DecodeState, Chunk]:
        """``steps`` tokens of every slot, ``decode_chunk`` at most and by default; ``state`` is donated."""
        wanted = self.config.decode_chunk if steps is None else steps
        out: tuple[DecodeState, Chunk] = self._decode(policy, state, np.int32(wanted))
        return out

    def compilations(self) -> int:
        """Programs compiled so far, of prefill, insert and generate."""
        programs: list[Any] = [self._prefill, self._insert, self._decode]
        return sum(program._cache_size() for program in programs)


def _size(count: int, most: int) -> int:
    """The size of array for ``count`` things: one of two, so that few cost less and hardly more is compiled."""
    few = most // 8
    return few if count <= few and few > 1 else most
