"""In-process rollout engine: prefill, key/value cache, continuous batching over slots, all under ``jit``.

Requests wait in a queue. A free slot takes the next one: the prompt's keys and values come from a batched prefill
(shared by samples of one prompt that are admitted together) and are copied into the slot; decoding then starts by
running the last prompt token again, so every sampled token's logits come from the decode step itself and carry its
weights' version.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from trm_jax.models import KVCache, Transformer, TransformerConfig, head_log_probs, init_cache
from trm_jax.rollout._config import EngineConfig, RolloutNumerics, SamplingConfig
from trm_jax.rollout._sampling import pack_support, sample
from trm_jax.rollout._weights import EngineWeights, convert_weights
from trm_jax.types import PromptBatch, RolloutBatch

__all__ = ["InProcessEngine"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Slots:
    """What the slots are doing; ``[C]`` each, besides the cache."""

    cache: KVCache
    token: Array
    position: Array
    step: Array
    seed: Array
    request: Array
    alive: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Record:
    """What has been sampled, a row a request; the last row takes what idle slots write."""

    tokens: Array
    logps: Array
    versions: Array
    length: Array
    finished: Array
    hidden: Array | None
    support: Array | None


class InProcessEngine:
    """A rollout engine in the trainer's own process.

    Args:
      model: the architecture (its parameters are not used; see ``update_weights``).
      config: sizes.
      numerics: the engine's arithmetic and weight format.
      sampling: default sampling options.
      eos_ids: token ids that end a response.
      record_hidden: also return the final hidden state behind every token.

    Raises:
      ValueError: for an end token outside the vocabulary, or routing jitter on a dense model.
    """

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        *,
        numerics: RolloutNumerics,
        sampling: SamplingConfig,
        eos_ids: Iterable[int],
        record_hidden: bool = True,
    ) -> None:
        shape: TransformerConfig = model.config
        self._eos = tuple(sorted(int(i) for i in eos_ids))
        if not all(0 <= i < shape.vocab_size for i in self._eos):
            raise ValueError(f"eos_ids={list(self._eos)}: every id must lie in [0, vocab_size={shape.vocab_size}).")
        if numerics.routing_jitter > 0 and not shape.n_experts:
            raise ValueError(
                f"routing_jitter={numerics.routing_jitter} needs a mixture of experts; this model is dense."
            )
        self._graphdef = nnx.graphdef(model)
        self._shape = shape
        self._config = config
        self._numerics = numerics
        self._compute = numerics.compute()
        self._sampling = sampling
        self._record_hidden = record_hidden
        self._weights: EngineWeights | None = None
        self._version = -1
        self._convert = jax.jit(functools.partial(convert_weights, self._graphdef, numerics=numerics))
        self._admit = jax.jit(self._admit_fn, donate_argnums=(1,))
        self._decode = jax.jit(self._decode_fn, static_argnames=("sampling", "eos"), donate_argnums=(1, 2))

    @property
    def version(self) -> int:
        """Policy version of the weights in use; -1 before the first ``update_weights``."""
        return self._version

    def update_weights(self, version: int, params: nnx.State[Any, Any]) -> None:
        """Takes the trainer's parameters of policy ``version``, in this engine's format."""
        if self._numerics.weight_format == "float32":  # nothing to convert: keep the arrays, make no copy
            self._weights = convert_weights(self._graphdef, params, self._numerics)
        else:
            self._weights = self._convert(params)
        self._version = int(version)

    def head_matrix(self) -> Float[Array, "V D"]:
        """The output head as this engine multiplies with it, ``[V, D]`` in its compute dtype."""
        return self._loaded().head_matrix(self._compute.jnp_dtype)

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig | None = None) -> RolloutBatch:
        """Answers every row of ``prompts``.

        Args:
          prompts: rows of at most ``max_prompt_length`` tokens, left-aligned.
          sampling: overrides the engine's own options for this call.

        Returns:
          A ``RolloutBatch`` with ``T = max_response_length``.

        Raises:
          ValueError: an empty or too long prompt, or a token outside the vocabulary, naming the row.
          RuntimeError: before the first ``update_weights``.
        """
        weights = self._loaded()
        sampling = self._sampling if sampling is None else sampling
        tokens, lengths = self._check_prompts(prompts)
        total = tokens.shape[0]
        record = self._empty_record(total, sampling)
        slots = self._empty_slots(total)
        seeds = np.asarray(prompts.seeds, np.uint32)
        free = list(range(self._config.slots))
        next_request = 0
        version = jnp.int32(self._version)
        busy: dict[int, int] = {}
        while next_request < total or busy:
            taken = [(free.pop(), r) for r in range(next_request, min(total, next_request + len(free)))]
            next_request += len(taken)
            busy.update(taken)
            for rows, placements in self._prefill_batches(taken, tokens, lengths):
                slots = self._admit_rows(weights, slots, rows, placements, tokens, lengths, seeds)
            slots, record = self._decode(weights, slots, record, version, sampling=sampling, eos=self._eos)
            alive = np.asarray(slots.alive)
            for slot in [s for s in busy if not alive[s]]:
                del busy[slot]
                free.append(slot)
            free.sort(reverse=True)
        response = jnp.arange(self._config.max_response_length)
        return RolloutBatch(
            prompt_tokens=jnp.asarray(tokens),
            prompt_mask=jnp.arange(tokens.shape[1])[None, :] < jnp.asarray(lengths)[:, None],
            response_tokens=record.tokens[:total],
            response_mask=response[None, :] < record.length[:total, None],
            rollout_logps=record.logps[:total],
            versions=record.versions[:total],
            finished=record.finished[:total],
            group_ids=jnp.asarray(prompts.group_ids, jnp.int32),
            hidden=None if record.hidden is None else record.hidden[:total],
            support=None if record.support is None else record.support[:total],
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )

    def _loaded(self) -> EngineWeights:
        if self._weights is None:
            raise RuntimeError("the engine has no weights yet: call update_weights(version, params) first.")
        return self._weights

    def _check_prompts(self, prompts: PromptBatch) -> tuple[np.ndarray, np.ndarray]:
        """The prompts padded to ``P`` and their lengths, or an error that names the first bad row."""
        tokens, mask = np.asarray(prompts.tokens), np.asarray(prompts.mask)
        lengths = mask.sum(axis=1).astype(np.int32)
        limit = self._config.max_prompt_length
        for row, length in enumerate(lengths):
            if length < 1 or length > limit:
                raise ValueError(
                    f"prompt in row {row} has {length} tokens; the engine takes 1 to max_prompt_length={limit}. "
                    "Raise max_prompt_length or drop the prompt."
                )
            if not mask[row, :length].all():
                raise ValueError(f"prompt in row {row} is not left-aligned: its mask has a gap before token {length}.")
        bad = np.argwhere(mask & ((tokens < 0) | (tokens >= self._shape.vocab_size)))
        if bad.size:
            row, column = bad[0]
            raise ValueError(
                f"prompt in row {row}, position {column}: token id {tokens[row, column]} is outside the vocabulary "
                f"[0, {self._shape.vocab_size}). Encode prompts with this model's own tokenizer."
            )
        padded = np.zeros((tokens.shape[0], limit), np.int32)
        width = min(limit, tokens.shape[1])
        padded[:, :width] = np.where(mask, tokens, 0)[:, :width]
        return padded, lengths

    def _prefill_batches(
        self, taken: list[tuple[int, int]], tokens: np.ndarray, lengths: np.ndarray
    ) -> Iterable[tuple[list[int], list[tuple[int, int, int]]]]:
        """Splits admissions into prefill calls: ``(requests whose prompt is run, (slot, request, row) placements)``."""
        rows: list[int] = []
        row_of: dict[bytes, int] = {}
        placements: list[tuple[int, int, int]] = []
        for slot, request in taken:
            prompt = tokens[request, : lengths[request]].tobytes()
            if prompt not in row_of:
                if len(rows) == self._config.prefill_rows:
                    yield rows, placements
                    rows, row_of, placements = [], {}, []
                row_of[prompt] = len(rows)
                rows.append(request)
            placements.append((slot, request, row_of[prompt]))
        if rows:
            yield rows, placements

    def _admit_rows(
        self,
        weights: EngineWeights,
        slots: _Slots,
        rows: list[int],
        placements: list[tuple[int, int, int]],
        tokens: np.ndarray,
        lengths: np.ndarray,
        seeds: np.ndarray,
    ) -> _Slots:
        """Pads one prefill call to its fixed shapes and runs it."""
        count, capacity = self._config.prefill_rows, self._config.slots
        prefill = np.array(rows + [rows[0]] * (count - len(rows)))
        table = np.full((3, capacity), capacity, np.int32)  # slot ids past the end are dropped by the scatter
        table[1:] = 0
        table[:, : len(placements)] = np.array(placements, np.int32).T
        slot, request, row = table
        # Router noise of a shared prompt must not depend on whose request it is, so it is seeded by the prompt itself.
        noise = np.array([zlib.crc32(tokens[r, : lengths[r]].tobytes()) for r in prefill], np.uint32)
        admitted: _Slots = self._admit(
            weights, slots, tokens[prefill], noise, slot, request, row,
            tokens[request, lengths[request] - 1], lengths[request] - 1, seeds[request],
        )  # fmt: skip
        return admitted

    def _admit_fn(
        self,
        weights: EngineWeights,
        slots: _Slots,
        prompt: Array,
        prompt_seed: Array,
        slot: Array,
        request: Array,
        row: Array,
        last_token: Array,
        last_position: Array,
        seed: Array,
    ) -> _Slots:
        """Runs the prompts and copies their keys and values into the slots."""
        model: Transformer = nnx.merge(self._graphdef, weights.params)
        empty = init_cache(self._shape, prompt.shape[0], self._config.sequence_length, self._compute)
        positions = jnp.broadcast_to(jnp.arange(prompt.shape[1], dtype=jnp.int32), prompt.shape)
        prefix = model(prompt, positions=positions, cache=empty, compute=self._compute, jitter_seeds=prompt_seed).cache
        assert prefix is not None
        cache = jax.tree.map(lambda c, p: c.at[:, slot].set(p[:, row], mode="drop"), slots.cache, prefix)

        def place(old: Array, new: Array) -> Array:
            return old.at[slot].set(new.astype(old.dtype), mode="drop")

        return _Slots(
            cache=cache,
            token=place(slots.token, last_token),
            position=place(slots.position, last_position),
            step=place(slots.step, jnp.zeros_like(slot)),
            seed=place(slots.seed, seed),
            request=place(slots.request, request),
            alive=place(slots.alive, jnp.ones_like(slot, bool)),
        )

    def _decode_fn(
        self,
        weights: EngineWeights,
        slots: _Slots,
        record: _Record,
        version: Array,
        *,
        sampling: SamplingConfig,
        eos: tuple[int, ...],
    ) -> tuple[_Slots, _Record]:
        """``decode_chunk`` steps of every slot."""
        model: Transformer = nnx.merge(self._graphdef, weights.params)
        trash = record.tokens.shape[0] - 1
        limit = self._config.max_response_length

        def step(carry: tuple[_Slots, _Record], _: None) -> tuple[tuple[_Slots, _Record], None]:
            slots, record = carry
            out = model(
                slots.token[:, None],
                positions=slots.position[:, None],
                cache=slots.cache,
                compute=self._compute,
                jitter_seeds=slots.seed,
            )
            hidden = out.hidden[:, 0]
            logps = head_log_probs(hidden, weights.head, temperature=sampling.temperature, compute=self._compute)
            token, logp, kept = sample(logps, slots.seed, slots.step, sampling, self._compute)
            row = jnp.where(slots.alive, slots.request, trash)
            at = (row, jnp.minimum(slots.step, limit - 1))
            ended = jnp.isin(token, jnp.array(eos, jnp.int32))
            done = ended | (slots.step + 1 >= limit)
            support = record.support
            if support is not None and kept is not None:
                support = support.at[at].set(pack_support(kept))
            record = _Record(
                tokens=record.tokens.at[at].set(token),
                logps=record.logps.at[at].set(logp),
                versions=record.versions.at[at].set(version),
                length=record.length.at[row].set(slots.step + 1),
                finished=record.finished.at[row].set(ended),
                hidden=None if record.hidden is None else record.hidden.at[at].set(hidden),
                support=support,
            )
            going = slots.alive & ~done
            assert out.cache is not None
            slots = dataclasses.replace(
                slots,
                cache=out.cache,
                token=jnp.where(going, token, slots.token),
                position=slots.position + going,
                step=slots.step + going,
                alive=going,
            )
            return (slots, record), None

        carry, _ = jax.lax.scan(step, (slots, record), None, length=self._config.decode_chunk)
        return carry

    def _empty_slots(self, total: int) -> _Slots:
        count = self._config.slots
        zeros = jnp.zeros((count,), jnp.int32)
        return _Slots(
            cache=init_cache(self._shape, count, self._config.sequence_length, self._compute),
            token=zeros,
            position=zeros + 0,
            step=zeros + 0,
            seed=jnp.zeros((count,), jnp.uint32),
            request=jnp.full((count,), total, jnp.int32),
            alive=jnp.zeros((count,), bool),
        )

    def _empty_record(self, total: int, sampling: SamplingConfig) -> _Record:
        shape = (total + 1, self._config.max_response_length)
        width, vocab = self._shape.d_model, self._shape.vocab_size
        truncated = sampling.top_p < 1 and not sampling.greedy
        return _Record(
            tokens=jnp.zeros(shape, jnp.int32),
            logps=jnp.zeros(shape, jnp.float32),
            versions=jnp.full(shape, -1, jnp.int32),
            length=jnp.zeros(shape[:1], jnp.int32),
            finished=jnp.zeros(shape[:1], bool),
            hidden=jnp.zeros((*shape, width), self._compute.jnp_dtype) if self._record_hidden else None,
            support=jnp.zeros((*shape, -(-vocab // 8)), jnp.uint8) if truncated else None,
        )
