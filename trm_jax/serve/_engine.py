"""Slots with continuous batching as single operations: load, prefill, insert, generate. When is for others to say.

``trm_jax.integrations.jetstream`` puts JetStream's threads and queues around this; a plain loop would do as well.
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
from jaxtyping import Int32

from trm_jax.models import Transformer, init_cache
from trm_jax.rollout import EngineConfig, RolloutNumerics, convert_weights
from trm_jax.serve._programs import Chunk, DecodeState, PolicyWeights, Prefix, SlotRequests, generate, insert, prefill
from trm_jax.serve._requests import Limits, SamplingOptions
from trm_jax.serve._sampling import RowSampling

__all__ = ["SlotEngine", "Start", "describe_numerics"]

Start = tuple[int, int, int, int, SamplingOptions]
"""Slot, row of the prefix, seed, limit, sampling."""


def describe_numerics(numerics: RolloutNumerics) -> str:
    """The options as JSON with sorted keys.

    >>> describe_numerics(RolloutNumerics(weight_format="int8"))[:44]
    '{"batch_invariant": false, "dtype": "float32'
    """
    return json.dumps(dataclasses.asdict(numerics), sort_keys=True)


class SlotEngine:
    """Our decode engine, one operation a call; every call of an operation runs one compiled program.

    Args:
      model: the architecture; its parameters are not used (see ``load``).
      config: sizes.
      numerics: the engine's arithmetic and weight format.
      eos_ids: token ids that end a response.
      record_hidden: keep final hidden states and log-sum-exp for those who ask.

    Raises:
      ValueError: for an end token outside the vocabulary, or routing jitter on a dense model.
    """

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        *,
        numerics: RolloutNumerics,
        eos_ids: Iterable[int],
        record_hidden: bool = True,
    ) -> None:
        shape = model.config
        self.eos_ids = tuple(sorted(int(i) for i in eos_ids))
        if not all(0 <= i < shape.vocab_size for i in self.eos_ids):
            raise ValueError(f"eos_ids={list(self.eos_ids)}: every id must lie in [0, vocab_size={shape.vocab_size}).")
        if numerics.routing_jitter > 0 and not shape.n_experts:
            raise ValueError(
                f"routing_jitter={numerics.routing_jitter} needs a mixture of experts; this model is dense."
            )
        self.config, self.numerics, self.record_hidden = config, numerics, record_hidden
        self.shape = shape
        self._compute = numerics.compute()
        graphdef = nnx.graphdef(model)
        bound: dict[str, Any] = {"graphdef": graphdef, "config": config, "compute": self._compute}
        self._convert = jax.jit(functools.partial(convert_weights, graphdef, numerics=numerics))
        self._prefill = jax.jit(functools.partial(prefill, **bound))
        self._insert = jax.jit(insert, donate_argnums=1)
        self._generate = jax.jit(
            functools.partial(generate, eos=self.eos_ids, record_hidden=record_hidden, **bound), donate_argnums=1
        )

    def limits(self, *, samples: int) -> Limits:
        """What one request may ask of this engine."""
        return Limits(
            prompt=self.config.max_prompt_length,
            response=self.config.max_response_length,
            vocab_size=self.shape.vocab_size,
            samples=samples,
            hidden=self.record_hidden,
        )

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
        return PolicyWeights(weights=placed, version=jax.device_put(jnp.int32(version), jnp.int32(0).sharding))

    def empty_state(self) -> DecodeState:
        """All slots idle; committed to a device, as everything that the programs return is."""
        out: DecodeState = jax.tree.map(lambda x: jax.device_put(x, x.sharding), self._idle())
        return out

    def _idle(self) -> DecodeState:
        count = self.config.slots

        def full(value: Any, dtype: Any) -> jax.Array:
            return jnp.full((count,), value, dtype)  # an array of its own for every field: they are donated

        return DecodeState(
            cache=init_cache(self.shape, count, self.config.sequence_length, self._compute),
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

    def prefill(self, policy: PolicyWeights, prompts: Sequence[Sequence[int]]) -> Prefix:
        """Runs 1 to ``prefill_rows`` prompts of 1 to ``max_prompt_length`` tokens."""
        rows, width = self.config.prefill_rows, self.config.max_prompt_length
        if not 1 <= len(prompts) <= rows:
            raise ValueError(f"{len(prompts)} prompts in one prefill: it takes 1 to prefill_rows={rows}.")
        tokens, lengths = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
        noise = np.zeros(rows, np.uint32)
        for row, prompt in enumerate(prompts):
            ids: Int32[np.ndarray, " n"] = np.asarray(prompt, np.int32)
            tokens[row, : ids.size], lengths[row], noise[row] = ids, ids.size, zlib.crc32(ids.tobytes())
        out: Prefix = self._prefill(policy, tokens, lengths, noise)
        return out

    def insert(self, prefix: Prefix, state: DecodeState, starts: Sequence[Start]) -> DecodeState:
        """Starts samples in slots; ``state`` is donated."""
        count = self.config.slots
        ints, floats = np.zeros((4, count), np.int32), np.zeros((3, count), np.float32)
        seeds: Any = np.zeros(count, np.uint32)
        greedy: Any = np.zeros(count, bool)
        ints[0], ints[2], floats[:2] = count, 1, 1.0  # entries past the starts point behind the last slot
        for i, (slot, row, seed, limit, sampling) in enumerate(starts):
            ints[:, i] = slot, row, limit, sampling.top_k
            floats[:, i] = sampling.temperature, sampling.top_p, sampling.min_p
            seeds[i], greedy[i] = seed, sampling.greedy
        rows = RowSampling(temperature=floats[0], top_p=floats[1], top_k=ints[3], min_p=floats[2], greedy=greedy)
        requests = SlotRequests(seed=seeds, limit=ints[2], sampling=rows)
        out: DecodeState = self._insert(prefix, state, ints[0], ints[1], requests)
        return out

    def generate(self, policy: PolicyWeights, state: DecodeState) -> tuple[DecodeState, Chunk]:
        """``decode_chunk`` tokens of every slot; ``state`` is donated."""
        out: tuple[DecodeState, Chunk] = self._generate(policy, state)
        return out

    def compilations(self) -> int:
        """Programs compiled so far, of prefill, insert and generate."""
        programs: list[Any] = [self._prefill, self._insert, self._generate]
        return sum(program._cache_size() for program in programs)
