"""What a client asks for and what it gets: one prompt, some samples, and a complete record of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from jaxtyping import Float32, Int32

from trm_jax.checks import in_range

__all__ = ["Completion", "FinishReason", "Limits", "SampleRequest", "SamplingOptions", "TextCodec"]

FinishReason = Literal["", "stop", "length"]
"""Why a response ended: "stop" by an end token, "length" by its limit, "" when it goes on in a later piece."""


class TextCodec(Protocol):
    """Text to ids and back; every tokenizer of ``trm_jax.data`` is one."""

    def encode(self, text: str) -> Sequence[int]:
        """Ids of ``text``."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The distribution that a request's tokens are drawn from.

    Attributes:
      temperature: logits are divided by it; above 0.
      top_p: nucleus mass in (0, 1].
      top_k: most likely tokens kept; 0 keeps all.
      min_p: tokens below this share of the largest probability are cut; in [0, 1).
      greedy: take the most likely token.

    Raises:
      ValueError: naming field, value and rule.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    greedy: bool = False

    def __post_init__(self) -> None:
        in_range("temperature", self.temperature, low=0.0, low_open=True, high=1e6)
        in_range("top_p", self.top_p, low=0.0, low_open=True, high=1.0)
        in_range("min_p", self.min_p, low=0.0, high=1.0, high_open=True)
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k={self.top_k}: must be 0 (keep all) or a count of tokens.")

    @property
    def cuts(self) -> bool:
        """Whether the support is cut, and recorded."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """Samples of one prompt, which share its prefill.

    Attributes:
      prompt: token ids.
      seeds: a uint32 seed a sample; prompt, weights and seed determine the sample.
      max_tokens: longest response, the end token included.
      sampling: the distribution.
      hidden: also return final hidden states and the log-sum-exp of the logits.
      stream_every: tokens between two pieces of a sample; 0 sends each sample whole.
      version: policy version that the server must have when it takes the request; None takes any.
    """

    prompt: Sequence[int]
    seeds: Sequence[int]
    max_tokens: int
    sampling: SamplingOptions = SamplingOptions()
    hidden: bool = False
    stream_every: int = 0
    version: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may ask for.

    Attributes:
      prompt: ``P``, longest prompt in tokens.
      response: ``T``, longest response in tokens.
      vocab_size: token ids lie below it.
      samples: most samples of one prompt.
      hidden: whether hidden states are recorded.
    """

    prompt: int
    response: int
    vocab_size: int
    samples: int
    hidden: bool

    def check(self, request: SampleRequest) -> None:
        """Refuses what the engine cannot do as asked; nothing is truncated or clamped.

        Raises:
          ValueError: saying what was given and what is allowed.

        >>> Limits(prompt=2, response=4, vocab_size=9, samples=1, hidden=False).check(
        ...     SampleRequest(prompt=[1, 2, 3], seeds=[0], max_tokens=4)
        ... )
        Traceback (most recent call last):
          ...
        ValueError: the prompt has 3 tokens; the engine takes 1 to 2. Shorten it or raise max_prompt_length.
        """
        given = len(request.prompt)
        if not 1 <= given <= self.prompt:
            raise ValueError(
                f"the prompt has {given} tokens; the engine takes 1 to {self.prompt}. "
                "Shorten it or raise max_prompt_length."
            )
        for position, token in enumerate(request.prompt):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"prompt position {position}: token id {token} is outside the vocabulary [0, {self.vocab_size}). "
                    "Encode prompts with this model's own tokenizer."
                )
        if not 1 <= request.max_tokens <= self.response:
            raise ValueError(
                f"max_tokens={request.max_tokens}: must lie in 1..{self.response} (the engine's max_response_length)."
            )
        if not 1 <= len(request.seeds) <= self.samples:
            raise ValueError(f"{len(request.seeds)} seeds: a request has 1 to {self.samples} samples, a seed each.")
        for seed in request.seeds:
            if not 0 <= seed < 2**32:
                raise ValueError(f"seed {seed}: must lie in [0, 2^32).")
        if request.stream_every < 0:
            raise ValueError(f"stream_every={request.stream_every}: must be 0 (whole samples) or a count of tokens.")
        if request.hidden and not self.hidden:
            raise ValueError("hidden states were asked for; this server does not record them (rollout.record_hidden).")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """A sample, or a piece of one when it is streamed; ``n`` tokens.

    Attributes:
      sample: its place among the request's samples.
      tokens: ``[n]``; an end token, when sampled, is part of it.
      logps: ``[n]`` under the distribution drawn from.
      model_logps: ``[n]`` under the model at temperature 1 over the whole vocabulary.
      versions: ``[n]`` policy version of every token.
      finish: why it ended; empty when more pieces follow.
      support_tokens: ids that could be drawn, position after position (CSR), or None when nothing was cut.
      support_offsets: ``[n + 1]`` where each position's ids begin.
      hidden: ``[n, D]`` final hidden states in the engine's dtype, or None.
      logsumexp: ``[n]`` log-sum-exp of the logits at temperature 1, or None.
    """

    sample: int
    tokens: Int32[np.ndarray, " n"]
    logps: Float32[np.ndarray, " n"]
    model_logps: Float32[np.ndarray, " n"]
    versions: Int32[np.ndarray, " n"]
    finish: FinishReason
    support_tokens: Int32[np.ndarray, " m"] | None = None
    support_offsets: Int32[np.ndarray, " n_plus_1"] | None = None
    hidden: np.ndarray | None = None
    logsumexp: Float32[np.ndarray, " n"] | None = None
