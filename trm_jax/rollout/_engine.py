"""In-process rollout engine: prefill, key/value cache, continuous batching over slots, all under ``jit``.

Requests wait in a queue. A free slot takes the next one: the prompt's keys and values come from a batched prefill
(shared by samples of one prompt that are admitted together) and are copied into the slot, which then decodes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from trm_jax.models import Transformer, TransformerConfig
from trm_jax.rollout._config import EngineConfig, RolloutNumerics, SamplingConfig
from trm_jax.rollout._programs import admit, decode
from trm_jax.rollout._requests import Admission, Requests
from trm_jax.rollout._slots import Record, Slots, empty_record, empty_slots, to_rollout
from trm_jax.rollout._weights import EngineWeights, convert_weights
from trm_jax.types import PromptBatch, RolloutBatch

__all__ = ["InProcessEngine"]


class InProcessEngine:
    """A rollout engine in the trainer's own process.

    Args:
      model: the architecture (its parameters are not used; see ``update_weights``).
      config: sizes.
      numerics: the engine's arithmetic and weight format.
      sampling: default sampling options.
      eos_ids: token ids that end a response.
      record_hidden: also return the final hidden state behind every token.
      record_routes: also return the experts that ran at every position, prompts included.

    Raises:
      ValueError: for an end token outside the vocabulary, or routing jitter or routes of a dense model.
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
        record_routes: bool = False,
    ) -> None:
        shape: TransformerConfig = model.config
        self._eos = tuple(sorted(int(i) for i in eos_ids))
        if not all(0 <= i < shape.vocab_size for i in self._eos):
            raise ValueError(f"eos_ids={list(self._eos)}: every id must lie in [0, vocab_size={shape.vocab_size}).")
        if numerics.routing_jitter > 0 and not shape.n_experts:
            raise ValueError(
                f"routing_jitter={numerics.routing_jitter} needs a mixture of experts; this model is dense."
            )
        if record_routes and not shape.n_experts:
            raise ValueError("record_routes=True needs a mixture of experts; this model is dense.")
        self._graphdef = nnx.graphdef(model)
        self._shape = shape
        self._config = config
        self._numerics = numerics
        self._compute = numerics.compute()
        self._sampling = sampling
        self._record_hidden, self._record_routes = record_hidden, record_routes
        self._weights: EngineWeights | None = None
        self._version = -1
        self._convert = jax.jit(functools.partial(convert_weights, self._graphdef, numerics=numerics))
        self._admit = jax.jit(
            functools.partial(admit, graphdef=self._graphdef, config=config, compute=self._compute),
            donate_argnums=(1, 2),
        )
        self._decode = jax.jit(
            functools.partial(decode, graphdef=self._graphdef, config=config, compute=self._compute),
            static_argnames=("sampling", "eos"),
            donate_argnums=(1, 2),
        )

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
        requests = Requests.of(prompts, limit=self._config.max_prompt_length, vocab_size=self._shape.vocab_size)
        shape, config, compute, total = self._shape, self._config, self._compute, len(requests)
        record = empty_record(
            shape, config, compute, sampling, total=total, hidden=self._record_hidden, routes=self._record_routes
        )
        slots = empty_slots(shape, config, compute, total=total)
        version = jnp.int32(self._version)
        waiting = iter(range(total))
        free, busy = list(range(config.slots)), set[int]()
        while True:
            taken = list(zip(free, itertools.islice(waiting, len(free)), strict=False))
            for admission in requests.admissions(taken, config):
                slots, record = self._start(weights, slots, record, requests, admission)
            busy.update(slot for slot, _ in taken)
            if not busy:
                return to_rollout(record, requests, prompts.group_ids, sampling)
            slots, record = self._decode(weights, slots, record, version, sampling=sampling, eos=self._eos)
            alive = np.asarray(slots.alive)
            busy = {slot for slot in busy if alive[slot]}
            free = [slot for slot in range(config.slots) if slot not in busy]

    def _start(
        self, weights: EngineWeights, slots: Slots, record: Record, requests: Requests, admission: Admission
    ) -> tuple[Slots, Record]:
        """Runs one prefill call."""
        which = admission.requests
        last = requests.lengths[which] - 1
        start = {
            "token": requests.tokens[which, last],
            "position": last,
            "seed": requests.seeds[which],
            "request": which,
        }
        started: tuple[Slots, Record] = self._admit(
            weights, slots, record, admission.prompts, admission.noise_seeds, admission.slots, admission.rows, start
        )
        return started

    def _loaded(self) -> EngineWeights:
        if self._weights is None:
            raise RuntimeError("the engine has no weights yet: call update_weights(version, params) first.")
        return self._weights
