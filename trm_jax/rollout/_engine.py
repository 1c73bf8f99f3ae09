"""In-process rollout engine: prefill, key/value cache, continuous batching over slots, all under ``jit``.

Requests wait in a queue. A free slot takes the next one: the prompt's keys and values come from a batched prefill
(shared by samples of one prompt that are admitted together) and are copied into the slot, which then decodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import nnx

from trm_jax.rollout._config import SamplingConfig
from trm_jax.rollout._local import LocalEngine
from trm_jax.rollout._record import Recorder
from trm_jax.rollout._requests import Admission, Requests
from trm_jax.rollout._slot_engine import chunk_steps
from trm_jax.rollout._slots import Chunk, Columns, DecodeState, PolicyWeights, idle_state
from trm_jax.rollout._stop import StopStrings
from trm_jax.types import PromptBatch, RolloutBatch

__all__ = ["InProcessEngine"]


class InProcessEngine(LocalEngine):
    """A rollout engine in the trainer's own process: one call after the other, in an order that repeats.

    Takes the arguments of ``LocalEngine``.
    """

    def update_weights(self, version: int, params: nnx.State[Any, Any]) -> None:
        """Takes the trainer's parameters of policy ``version``, in this engine's format; float32 without a copy."""
        self._policy = self._slots.borrow(version, params)
        self._version = int(version)

    def generate(
        self,
        prompts: PromptBatch,
        sampling: SamplingConfig | None = None,
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> RolloutBatch:
        """Answers every row of ``prompts``.

        Args:
          prompts: rows of at most ``max_prompt_length`` tokens, left-aligned.
          sampling: overrides the engine's own options for this call.
          on_progress: called after every chunk of decode steps with the answers that have ended and the tokens sampled.

        Returns:
          A ``RolloutBatch`` with ``T = max_response_length``.

        Raises:
          ValueError: an empty or too long prompt, or a token outside the vocabulary, naming the row; stop strings
            without a tokenizer.
          RuntimeError: before the first ``update_weights``.
        """
        policy, (requests, sampling) = self._loaded(), self._asked(prompts, sampling)
        run = _Run(self, policy, requests, sampling)
        while run.busy or run.waiting:
            run.start()
            run.decode()
            if on_progress is not None:
                on_progress(run.ended, int(np.sum(run.lengths)))
        return run.record.rollout(prompts.group_ids, lengths=run.lengths, finished=run.finished)


class _Run:
    """One call of ``generate``: which request every slot samples for, and how far it is."""

    def __init__(
        self, engine: InProcessEngine, policy: PolicyWeights, requests: Requests, sampling: SamplingConfig
    ) -> None:
        self._engine, self._slots, self._policy = engine, engine._slots, policy
        self._requests, self._sampling = requests, sampling
        total, count = len(requests), self._slots.config.slots
        self.lengths, self.finished, self.ended = np.zeros(total, np.int32), np.zeros(total, bool), 0
        self.waiting = deque(range(total))
        self.busy: dict[int, int] = {}  # slot → request
        self._free = list(range(count))[::-1]
        self._steps = np.zeros(count, np.int64)  # decode steps asked for, of the sample in each slot
        self._watch: dict[int, StopStrings] = {}
        self._unread: deque[tuple[Chunk, dict[int, int]]] = deque()
        self._state: DecodeState = idle_state(self._slots.shape, self._slots.config, self._slots.compute)
        self.record = Recorder(self._slots, requests, sampling, support=engine._record_support)

    def start(self) -> None:
        """Gives free slots to waiting requests."""
        count = min(len(self._free), len(self.waiting))
        taken = [(self._free.pop(), self.waiting.popleft()) for _ in range(count)]
        for admission in self._requests.admissions(taken, self._slots.config.prefill_rows):
            self._admit(admission)

    def _admit(self, admission: Admission) -> None:
        requests, limit = self._requests, self._slots.config.max_response_length
        prefix = self._slots.prefill(self._policy, [requests.prompt(row) for row in admission.rows])
        placed = list(zip(admission.slots, admission.requests, admission.prompts, strict=True))
        starts = [(slot, row, int(requests.seeds[r]), limit, self._sampling) for slot, r, row in placed]
        self._state = self._slots.insert(prefix, self._state, starts)
        for slot, request, _ in placed:
            self.busy[slot], self._steps[slot] = request, 0
            if self._sampling.stop:
                assert self._engine._tokenizer is not None
                self._watch[request] = StopStrings(self._engine._tokenizer, self._sampling.stop)
        if prefix.routes is not None:
            self.record.add_prompts(prefix.routes, [(request, row) for _, request, row in placed])

    def decode(self) -> None:
        """Asks for a chunk, and reads the oldest one that is due: at once when somebody waits for a slot.

        Otherwise the device is given the next chunk before the last one has been looked at.
        """
        left = self._slots.config.max_response_length - self._steps[list(self.busy)]
        steps = chunk_steps(self._slots.config.decode_chunk, left[left > 0].tolist(), free=False)
        self._state, chunk = self._slots.generate(self._policy, self._state, steps)
        self._steps += steps
        chunk.data.copy_to_host_async()
        self.record.add(chunk, self.busy)
        self._unread.append((chunk, dict(self.busy)))
        while len(self._unread) > (0 if self.waiting else 1):
            self._read()
        if not self.busy:
            self._unread.clear()

    def _read(self) -> None:
        chunk, slots = self._unread.popleft()
        columns = Columns.of(np.asarray(chunk.data))
        counts = columns.valid.sum(axis=1).tolist()
        for slot, request in slots.items():
            if self.busy.get(slot) != request:  # it ended in an earlier chunk
                continue
            tokens, alive = columns.tokens[slot, : counts[slot]], bool(columns.alive[slot])
            stopped = self._watch[request].take(tokens.tolist()) if self._watch else None
            tokens = tokens if stopped is None else tokens[:stopped]
            self.lengths[request] += tokens.size
            if alive and stopped is None:
                continue
            self.finished[request] = stopped is not None or int(tokens[-1]) in self._slots.eos_ids
            self.ended += 1
            del self.busy[slot]
            self._watch.pop(request, None)
            self._free.append(slot)
