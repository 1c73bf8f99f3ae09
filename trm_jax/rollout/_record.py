"""What an engine in this process has sampled so far, kept on the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from trm_jax.rollout._config import SamplingConfig
from trm_jax.rollout._requests import Requests
from trm_jax.rollout._slot_engine import SlotEngine
from trm_jax.rollout._slots import Chunk, Columns
from trm_jax.types import RolloutBatch

__all__ = ["Record", "Recorder"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """``[B, T, ...]``, a row a request, as in ``RolloutBatch``; None where nothing of the kind is kept."""

    tokens: Array
    logps: Array
    versions: Array
    support: Array | None
    hidden: Array | None
    top_tokens: Array | None
    top_logps: Array | None
    routes: Array | None


class Recorder:
    """Gathers one batch's samples out of the chunks that hold them; nothing but indices comes from the host.

    Args:
      slots: the engine that decodes.
      requests: one a row of the batch.
      sampling: what they sample.
      support: keep the tokens that could be drawn, where the distribution is cut.
    """

    def __init__(self, slots: SlotEngine, requests: Requests, sampling: SamplingConfig, *, support: bool) -> None:
        self._requests, self._sampling, self._slots = requests, sampling, slots.config.slots
        self._record = _empty(slots, sampling, rows=len(requests), support=support)

    def add_prompts(self, routes: Array, started: Iterable[tuple[int, int]]) -> None:
        """Keeps the experts that ran on prompts.

        Args:
          routes: ``[R, W, M, k]`` of a prefill.
          started: request and row of the prefill, of at most as many samples as there are slots.
        """
        table = np.zeros((3, self._slots), np.int32)  # of one size, whatever starts
        table[0] = len(self._requests)
        for i, (request, row) in enumerate(started):
            table[:, i] = request, row, self._requests.lengths[request] - 1
        self._record = _store_prompts(self._record, routes, *table)

    def add(self, chunk: Chunk, running: Mapping[int, int]) -> None:
        """Keeps what a chunk holds for ``running``: the request that each slot samples for; others do not count."""
        request, last = np.full(self._slots, len(self._requests), np.int32), np.zeros(self._slots, np.int32)
        for slot, row in running.items():
            request[slot], last[slot] = row, self._requests.lengths[row] - 1
        self._record = _store(self._record, chunk, request, last)

    def rollout(
        self,
        group_ids: Sequence[int] | Array,
        *,
        lengths: Int[np.ndarray, " B"],
        finished: Bool[np.ndarray, " B"],
    ) -> RolloutBatch:
        """The pipeline's batch.

        Args:
          group_ids: ``[B]``.
          lengths: tokens of every response; what was sampled behind them is left out.
          finished: whether an end token or string ended it.
        """
        return _to_rollout(self._record, self._requests, group_ids, self._sampling, lengths=lengths, finished=finished)


def _empty(slots: SlotEngine, sampling: SamplingConfig, *, rows: int, support: bool) -> Record:
    """Nothing sampled yet for ``rows`` requests."""
    shape, recording = slots.shape, slots.recording
    size = (rows, slots.config.max_response_length)
    top, experts = (*size, recording.top_logps), (shape.moe_layers, shape.experts_per_token)
    return Record(
        tokens=jnp.zeros(size, jnp.int32),
        logps=jnp.zeros(size, jnp.float32),
        versions=jnp.full(size, -1, jnp.int32),
        support=jnp.zeros((*size, -(-shape.vocab_size // 8)), jnp.uint8) if sampling.cuts and support else None,
        hidden=jnp.zeros((*size, shape.d_model), slots.compute.jnp_dtype) if recording.hidden else None,
        top_tokens=jnp.zeros(top, jnp.int32) if recording.top_logps else None,
        top_logps=jnp.zeros(top, jnp.float32) if recording.top_logps else None,
        routes=jnp.full((rows, slots.config.sequence_length, *experts), -1, jnp.int16) if recording.routes else None,
    )


@functools.partial(jax.jit, donate_argnums=0)
def _store(record: Record, chunk: Chunk, request: Int[Array, " C"], last: Int[Array, " C"]) -> Record:
    """Puts a chunk's tokens in their rows; ``record`` is donated.

    Args:
      record: so far.
      chunk: from the decode program.
      request: the row that each slot samples for; one past the last for a slot that does not count.
      last: position of the prompt's last token.
    """
    columns = Columns.of(chunk.data)
    steps = columns.length[:, None] - 1 + jnp.arange(columns.tokens.shape[1])
    row = jnp.where(columns.valid == 1, request[:, None], record.tokens.shape[0])

    def put(old: Array, new: Array, at: Array = steps) -> Array:
        return old.at[row, at].set(new.astype(old.dtype), mode="drop")

    def put_kept(old: Array | None, new: Array | None, at: Array = steps) -> Array | None:
        return None if old is None or new is None else put(old, new, at)

    versions = jnp.broadcast_to(columns.versions[:, None], steps.shape)
    return dataclasses.replace(
        record,
        tokens=put(record.tokens, columns.tokens),
        logps=put(record.logps, columns.logps),
        versions=put(record.versions, versions),
        support=put_kept(record.support, chunk.support),
        hidden=put_kept(record.hidden, chunk.hidden),
        top_tokens=put_kept(record.top_tokens, chunk.top_tokens),
        top_logps=put_kept(record.top_logps, chunk.top_logps),
        routes=put_kept(record.routes, chunk.routes, last[:, None] + steps),
    )


@functools.partial(jax.jit, donate_argnums=0)
def _store_prompts(record: Record, routes: Array, request: Array, row: Array, last: Array) -> Record:
    """Puts the prompts' routes in their rows, but the last token's: decoding runs that again. Donates ``record``."""
    if record.routes is None:
        return record
    at = jnp.arange(routes.shape[1])[None, :]
    target = jnp.where(at < last[:, None], request[:, None], record.routes.shape[0])
    return dataclasses.replace(record, routes=record.routes.at[target, at].set(routes[row], mode="drop"))


def _to_rollout(
    record: Record,
    requests: Requests,
    group_ids: Sequence[int] | Array,
    sampling: SamplingConfig,
    *,
    lengths: Int[np.ndarray, " B"],
    finished: Bool[np.ndarray, " B"],
) -> RolloutBatch:
    """The finished record as the pipeline's batch."""
    mask = np.arange(record.tokens.shape[1])[None, :] < lengths[:, None]
    if sampling.stop:
        record = _cut(record, jnp.asarray(mask), jnp.asarray(requests.lengths + lengths - 1))
    return RolloutBatch(
        prompt_tokens=jnp.asarray(requests.tokens),
        prompt_mask=jnp.asarray(np.arange(requests.tokens.shape[1])[None, :] < requests.lengths[:, None]),
        response_tokens=record.tokens,
        response_mask=jnp.asarray(mask),
        rollout_logps=record.logps,
        versions=record.versions,
        finished=jnp.asarray(finished),
        group_ids=jnp.asarray(group_ids, jnp.int32),
        hidden=record.hidden,
        support=record.support,
        routed_experts=record.routes,
        top_tokens=record.top_tokens,
        top_logps=record.top_logps,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
    )


def _cut(record: Record, mask: Array, ran: Array) -> Record:
    """Without what was sampled behind the end of a stop string, in the rest of its chunk."""
    routes = record.routes
    if routes is not None:
        was_run = jnp.arange(routes.shape[1])[None, :] < ran[:, None]
        routes = jnp.where(was_run[:, :, None, None], routes, -1)
    return dataclasses.replace(
        record,
        tokens=jnp.where(mask, record.tokens, 0),
        logps=jnp.where(mask, record.logps, 0.0),
        versions=jnp.where(mask, record.versions, -1),
        routes=routes,
    )
