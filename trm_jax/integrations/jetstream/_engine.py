"""Our slots behind JetStream's ``Engine`` interface: the stock driver can run them, and ours does."""

from __future__ import annotations

import itertools
from typing import Any

import flax.struct
import jax
import numpy as np

from trm_jax.integrations.jetstream._library import jetstream
from trm_jax.rollout import Chunk, Columns, DecodeState, PolicyWeights, Prefix, SamplingConfig, SlotEngine

__all__ = ["PolicyBox", "RolloutEngine", "RolloutTokens"]

_ENGINE: Any = jetstream().engine_api


class PolicyBox:
    """The weights in use, in a place of their own: a driver's threads hold the box, so its content can be changed.

    Args:
      policy: the first weights.
    """

    def __init__(self, policy: PolicyWeights) -> None:
        self.current = policy


@flax.struct.dataclass
class RolloutTokens(_ENGINE.ResultTokens):  # type: ignore[misc]
    """JetStream's ``ResultTokens``, whose columns are the first of ``Chunk.data``, with the whole chunk.

    Attributes:
      chunk: everything that was recorded.
    """

    chunk: Chunk | None = None


class RolloutEngine(_ENGINE.Engine):  # type: ignore[misc]
    """JetStream's ``Engine`` over a ``SlotEngine``; a chunk's ``k`` tokens are its speculative tokens.

    Args:
      slots: the engine.
      tokenizer: for text requests under the stock driver; anything with its interface, or None.
      sampling: what a request samples that does not say.
    """

    def __init__(
        self,
        slots: SlotEngine,
        *,
        tokenizer: Any = None,
        sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen
    ) -> None:
        self.slots = slots
        self._tokenizer, self._sampling = tokenizer, sampling
        self._seeds = itertools.count()

    def prefill(
        self, *, params: PolicyBox, existing_prefix: Any = None, padded_tokens: Any, true_length: int
    ) -> Prefix:
        """Runs one prompt."""
        if existing_prefix is not None:
            raise NotImplementedError("a prompt is run as a whole; pass existing_prefix=None.")
        return self.slots.prefill(params.current, [np.asarray(padded_tokens)[:true_length].tolist()])

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Starts one sample with the default options and the next seed."""
        limit = self.slots.config.max_response_length
        return self.slots.insert(prefix, decode_state, [(slot, 0, next(self._seeds), limit, self._sampling)])

    def generate(
        self, params: PolicyBox, decode_state: DecodeState, steps: int | None = None
    ) -> tuple[DecodeState, RolloutTokens]:
        """One chunk of every slot; ``steps``, which the stock driver does not give, makes it shorter."""
        state, chunk = self.slots.generate(params.current, decode_state, steps)
        bounds = Columns.bounds(self.slots.config.decode_chunk)
        ranges = {
            "tokens_idx": (0, bounds[0]),
            "valid_idx": (bounds[0], bounds[1]),
            "length_idx": (bounds[1], bounds[2]),
        }
        return state, RolloutTokens(data=chunk.data, **ranges, samples_per_slot=1, chunk=chunk)

    def load_params(self, *args: Any, **kwargs: Any) -> PolicyBox:
        """Versioned weights from the trainer: ``load_params(version, params)``."""
        return PolicyBox(self.slots.load(*args, **kwargs))

    def init_decode_state(self, *args: Any, **kwargs: Any) -> DecodeState:
        """All slots idle."""
        return self.slots.empty_state()

    def get_prefix_destination_sharding(self) -> Any:
        """Prefill and decode share devices."""
        return None

    def get_tokenizer(self) -> Any:
        """Metadata that ``build_tokenizer`` takes."""
        return None

    def build_tokenizer(self, metadata: Any) -> Any:
        """The tokenizer that was given."""
        return self._tokenizer

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots."""
        return self.slots.config.slots

    @property
    def samples_per_slot(self) -> int:
        """One."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """Longest prompt."""
        return self.slots.config.max_prompt_length

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """None: arrays carry their shardings."""
        return None

    @property
    def colocated_cpus(self) -> None:
        """None."""
        return None
