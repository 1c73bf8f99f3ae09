"""What the engines in this process have in common: their programs, their default options, and the weights they hold."""

from __future__ import annotations

from collections.abc import Iterable

from jaxtyping import Array, Float

from trm_jax.models import Transformer
from trm_jax.rollout._config import EngineConfig, RolloutNumerics, SamplingConfig
from trm_jax.rollout._requests import Requests
from trm_jax.rollout._slot_engine import SlotEngine
from trm_jax.rollout._slots import PolicyWeights
from trm_jax.rollout._stop import TextCodec
from trm_jax.types import PromptBatch

__all__ = ["LocalEngine"]


class LocalEngine:
    """Base of the engines in this process; they say how weights are taken, and prompts answered.

    Args:
      model: the architecture (its parameters are not used; see ``update_weights``).
      config: sizes.
      numerics: the engine's arithmetic and weight format.
      sampling: default sampling options.
      eos_ids: token ids that end a response.
      record_hidden: also return the final hidden state behind every token.
      record_routes: also return the experts that ran at every position, prompts included.
      record_top_logps: also return so many of the most likely tokens at every position, with their log-probs.
      record_support: keep the tokens that could be drawn where the distribution is cut, a bit for every token of the
        vocabulary at every position; without it such samples can be read, but not be trained on.
      tokenizer: decodes responses where ``sampling.stop`` is to end them.

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
        sampling: SamplingConfig,
        eos_ids: Iterable[int],
        record_hidden: bool = True,
        record_routes: bool = False,
        record_top_logps: int = 0,
        record_support: bool = True,
        tokenizer: TextCodec | None = None,
    ) -> None:
        self._slots = SlotEngine(
            model,
            config,
            numerics=numerics,
            eos_ids=eos_ids,
            record_hidden=record_hidden,
            record_routes=record_routes,
            record_top_logps=record_top_logps,
        )
        self._sampling, self._tokenizer, self._record_support = sampling, tokenizer, record_support
        self._policy: PolicyWeights | None = None
        self._version = -1

    @property
    def version(self) -> int:
        """Policy version of the weights in use; -1 before the first ``update_weights``."""
        return self._version

    def head_matrix(self) -> Float[Array, "V D"]:
        """The output head as this engine multiplies with it, ``[V, D]`` in its compute dtype."""
        return self._loaded().weights.head_matrix(self._slots.compute.jnp_dtype)

    def _loaded(self) -> PolicyWeights:
        if self._policy is None:
            raise RuntimeError("the engine has no weights yet: call update_weights(version, params) first.")
        return self._policy

    def _asked(self, prompts: PromptBatch, sampling: SamplingConfig | None) -> tuple[Requests, SamplingConfig]:
        """What a call of ``generate`` is about, checked."""
        sampling = self._sampling if sampling is None else sampling
        if sampling.stop and self._tokenizer is None:
            raise ValueError(f"stop={list(sampling.stop)} needs the tokenizer that decodes responses: pass tokenizer.")
        limit, vocab_size = self._slots.config.max_prompt_length, self._slots.shape.vocab_size
        return Requests.of(prompts, limit=limit, vocab_size=vocab_size), sampling
