"""The records that travel along the pipeline, one per arrow.

``PromptBatch → RolloutBatch → ScoredBatch → CorrectedBatch → LossTotal``. Each is a frozen dataclass registered as
a pytree: a later stage makes a new record and never writes into an earlier one.

Axes: ``B`` rows (sequences), ``P`` prompt positions, ``T`` response positions, ``V`` vocabulary, ``D`` hidden width.
Log-probabilities are natural logarithms in float32. Masks are bool and True means "counts". Prompts and responses are
both left-aligned: position 0 is the first token and padding stands on the right.
"""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Bool, Float, Int, UInt8

__all__ = [
    "CorrectedBatch",
    "LossTotal",
    "PromptBatch",
    "RolloutBatch",
    "ScoredBatch",
    "VocabDivergence",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """Prompts to be answered, one row a *sample* (a prompt with ``G`` samples stands in ``G`` rows).

    Attributes:
      tokens: ``[B, P]`` int32 prompt ids, left-aligned; anything at masked slots.
      mask: ``[B, P]`` bool, True on prompt tokens. Every row has at least one.
      group_ids: ``[B]`` int32; rows with the same id answer the same prompt.
      seeds: ``[B]`` uint32; a row's sampling seed. The same prompt and seed give the same response in any slot.
    """

    tokens: Int[Array, "B P"]
    mask: Bool[Array, "B P"]
    group_ids: Int[Array, " B"]
    seeds: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """What an engine sampled, with everything that only the engine knows, recorded at sampling time.

    Attributes:
      prompt_tokens: ``[B, P]`` int32, left-aligned.
      prompt_mask: ``[B, P]`` bool.
      response_tokens: ``[B, T]`` int32, left-aligned; the end-of-sequence token, when sampled, is part of it.
      response_mask: ``[B, T]`` bool, from the engine's own bookkeeping (never from ``id != pad``).
      rollout_logps: ``[B, T]`` float32, log-prob of the sampled token under the distribution it was sampled from, that
        is after temperature and top-p (see ``processed_logps``).
      versions: ``[B, T]`` int32, the policy version (optimizer updates) whose weights produced each token.
      finished: ``[B]`` bool, True when the row ended by an end-of-sequence token rather than by its length limit.
      group_ids: ``[B]`` int32.
      hidden: ``[B, T, D]`` final hidden states from which each token was sampled, or None when not requested.
      support: ``[B, T, ceil(V/8)]`` uint8, the tokens that top-p left, one bit each (bit ``v % 8`` of byte ``v // 8``),
        or None when sampling was not truncated.
      routed_experts: ``[B, S, M, k]`` int16, the experts that ran, in each of the ``M`` blocks that have some; or None
        when not requested. ``S = P + T`` positions of a training row, prompt and response without a gap; -1 where none
        is recorded (the last sampled token, which was never run, and padding).
      top_tokens: ``[B, T, K]`` int32, the model's ``K`` most likely tokens, or None when not requested.
      top_logps: ``[B, T, K]`` float32, their log-probs under the model at temperature 1 over the whole vocabulary.
      temperature: the sampling temperature that ``rollout_logps`` contain (static).
      top_p: the nucleus mass that ``rollout_logps`` contain (static).
      processed_logps: False when ``rollout_logps`` are the model's at temperature 1 over the whole vocabulary, as some
        engines return them whatever they sample from (static). ``rescore`` refuses those of a rollout that was sampled
        otherwise.
    """

    prompt_tokens: Int[Array, "B P"]
    prompt_mask: Bool[Array, "B P"]
    response_tokens: Int[Array, "B T"]
    response_mask: Bool[Array, "B T"]
    rollout_logps: Float[Array, "B T"]
    versions: Int[Array, "B T"]
    finished: Bool[Array, " B"]
    group_ids: Int[Array, " B"]
    hidden: Float[Array, "B T D"] | None = None
    support: UInt8[Array, "B T V8"] | None = None
    routed_experts: Int[Array, "B S M k"] | None = None
    top_tokens: Int[Array, "B T K"] | None = None
    top_logps: Float[Array, "B T K"] | None = None
    temperature: float = dataclasses.field(default=1.0, metadata={"static": True})
    top_p: float = dataclasses.field(default=1.0, metadata={"static": True})
    processed_logps: bool = dataclasses.field(default=True, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """Both policies' view of the sampled tokens, at response positions.

    Attributes:
      proximal_logps: ``[B, T]`` float32, log π_train, recomputed by the training model before the update.
      rollout_logps: ``[B, T]`` float32, log π_roll, as the engine recorded it.
      response_mask: ``[B, T]`` bool.
      token_kl: ``[B, T]`` float32 KL(π_roll ‖ π_train) over the whole vocabulary in nats, or None.
      token_tv: ``[B, T]`` float32 total variation over the whole vocabulary, in [0, 1], or None.
      policy_entropy: ``[B, T]`` float32 entropy of π_train in nats, or None.
      rollout_entropy: ``[B, T]`` float32 entropy of π_roll in nats, or None.
      segment_ids: ``[B, T]`` int32 for packed rows (statistics and decisions are per segment), or None.
    """

    proximal_logps: Float[Array, "B T"]
    rollout_logps: Float[Array, "B T"]
    response_mask: Bool[Array, "B T"]
    token_kl: Float[Array, "B T"] | None = None
    token_tv: Float[Array, "B T"] | None = None
    policy_entropy: Float[Array, "B T"] | None = None
    rollout_entropy: Float[Array, "B T"] | None = None
    segment_ids: Int[Array, "B T"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrectedBatch:
    """What the correction decided. Constants for the gradient.

    Attributes:
      sequence_keep: ``[B]`` bool (``[B, T]`` for packed rows), True when the sequence is trained on.
      token_keep: ``[B, T]`` bool, True when the token is trained on (token masks only; see ``sequence_keep``).
      importance_weights: ``[B, T]`` float32, 0 at masked slots.
      metrics: name → ``(total, denominator)`` float32 pairs; divide once, after summing over microbatches and devices.
        Names that start with ``max/`` or ``min/`` hold ``(extremum, 1)``, or ``(0, 0)`` where nothing counts, and are
        combined by maximum or minimum.
    """

    sequence_keep: Bool[Array, "..."]
    token_keep: Bool[Array, "B T"]
    importance_weights: Float[Array, "B T"]
    metrics: dict[str, tuple[Array, Array]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossTotal:
    """A loss as a sum and a count, so that microbatches and devices add up to the whole batch.

    Attributes:
      total: scalar float32, the sum to be minimised (divided by ``denominator``).
      denominator: scalar float32, the count; 0 when nothing counts.
      aux: name → ``(total, denominator)`` pairs of the quantities worth reporting.
    """

    total: Float[Array, ""]
    denominator: Float[Array, ""]
    aux: dict[str, tuple[Array, Array]]

    @property
    def value(self) -> Float[Array, ""]:
        """``total / denominator``; 0 with zero gradients when the denominator is 0."""
        empty = self.denominator == 0
        safe = jax.numpy.where(empty, 1.0, self.denominator)
        return jax.numpy.where(empty, 0.0, self.total / safe)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabDivergence:
    """Full-vocabulary comparison of two policies at each position (any leading shape, float32, nats).

    Attributes:
      policy_logps: log-prob of the sampled token under the policy.
      rollout_logps: log-prob of the sampled token under the rollout policy.
      token_kl: KL(rollout ‖ policy).
      token_tv: total variation, in [0, 1]; None when it was not asked for.
      policy_entropy: entropy of the policy.
      rollout_entropy: entropy of the rollout policy.
    """

    policy_logps: Float[Array, "..."]
    rollout_logps: Float[Array, "..."]
    token_kl: Float[Array, "..."]
    token_tv: Float[Array, "..."] | None
    policy_entropy: Float[Array, "..."]
    rollout_entropy: Float[Array, "..."]
