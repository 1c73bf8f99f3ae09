"""What a client asks for and what it gets: one prompt, some samples, and a complete record of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int16, Int32

from trm_jax.rollout import SamplingConfig, SlotEngine

__all__ = ["Completion", "FinishReason", "Limits", "SampleRequest"]

FinishReason = Literal["", "stop", "length"]
"""Why a response ended: "stop" by an end token or string, "length" by its limit, "" when a later piece goes on."""


_MOST_STOP_STRINGS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """Samples of one prompt, which share its prefill.

    Attributes:
      prompt: token ids.
      seeds: a uint32 seed a sample; prompt, weights and seed determine the sample.
      max_tokens: longest response, the end token included.
      sampling: the distribution.
      hidden: also return final hidden states and the log-sum-exp of the logits.
      top_logps: also return so many of the most likely tokens at every position, with their log-probs.
      routes: also return the experts that ran.
      stream_every: tokens between two pieces of a sample; 0 sends each sample whole.
      version: policy version that the server must have when it takes the request; None takes any.
      weights: identity of the weights that must make every token (see ``WeightDirectory.identity``); None takes any.
    """

    prompt: Sequence[int]
    seeds: Sequence[int]
    max_tokens: int
    sampling: SamplingConfig = SamplingConfig()  # noqa: RUF009 - frozen
    hidden: bool = False
    top_logps: int = 0
    routes: bool = False
    stream_every: int = 0
    version: int | None = None
    weights: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may ask for.

    Attributes:
      prompt: ``P``, longest prompt in tokens.
      response: ``T``, longest response in tokens.
      vocab_size: token ids lie below it.
      samples: most samples of one prompt.
      hidden: whether hidden states are recorded.
      top_logps: most likely tokens that are recorded at every position.
      routes: whether experts are recorded.
      stop: whether there is a tokenizer that stop strings can be found with.
    """

    prompt: int
    response: int
    vocab_size: int
    samples: int
    hidden: bool
    top_logps: int = 0
    routes: bool = False
    stop: bool = False

    @classmethod
    def of(cls, engine: SlotEngine, *, samples: int, stop: bool) -> Limits:
        """What one request may ask of this engine."""
        return cls(
            prompt=engine.config.max_prompt_length,
            response=engine.config.max_response_length,
            vocab_size=engine.shape.vocab_size,
            samples=samples,
            hidden=engine.recording.hidden,
            top_logps=engine.recording.top_logps,
            routes=engine.recording.routes,
            stop=stop,
        )

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
        if not 0 <= request.top_logps <= self.top_logps:
            raise ValueError(f"top_logps={request.top_logps}: this server records 0 to {self.top_logps}.")
        if request.routes and not self.routes:
            raise ValueError("experts were asked for; this server does not record them.")
        if request.sampling.stop and not self.stop:
            raise ValueError("stop strings were asked for; this server has no tokenizer to find them with.")
        if len(request.sampling.stop) > _MOST_STOP_STRINGS:
            raise ValueError(f"{len(request.sampling.stop)} stop strings: a request has {_MOST_STOP_STRINGS} at most.")


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
      top_tokens: ``[n, K]`` most likely tokens, the likeliest first, or None.
      top_logps: ``[n, K]`` their log-probs as in ``model_logps``, or None.
      routed_experts: ``[m, M, k]`` experts that ran, or None. Of a whole sample ``m = P + n - 1``: every position of
        prompt and response but the last token's, which was never run. The first piece has the prompt's.
      weights: identities of all weights that were in use since the request was taken, the first ones first; "" stands
        for weights that no trainer made. One of them made each token.
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
    top_tokens: Int32[np.ndarray, "n K"] | None = None
    top_logps: Float32[np.ndarray, "n K"] | None = None
    routed_experts: Int16[np.ndarray, "m M k"] | None = None
    weights: tuple[str, ...] = ()
