"""The exact oracle: divergences, returns and the surrogate of two small tabular policies, to the last digit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from trm_jax.bounds._arrays import excess
from trm_jax.bounds._enumeration import Array, Enumeration, log_ratio
from trm_jax.checks import in_range

__all__ = ["TabularPair", "TabularSample"]


class TabularSample(NamedTuple):
    """Sequences drawn from π_roll, in the form that ``certify`` and the masks read.

    Attributes:
      tokens: ``[B, T]`` int.
      log_ratio: ``[B, T]`` float64, ``log π_θ - log π_roll`` of the sampled tokens.
      response_mask: ``[B, T]`` bool, all True.
      rewards: ``[B]`` float64, in [0, 1].
      token_kl: ``[B, T]`` float64, KL(π_roll ‖ π_θ) at each context, nats.
      token_tv: ``[B, T]`` float64, total variation at each context.
    """

    tokens: Int[Array, "B T"]
    log_ratio: Float[Array, "B T"]
    response_mask: Bool[Array, "B T"]
    rewards: Float[Array, " B"]
    token_kl: Float[Array, "B T"]
    token_tv: Float[Array, "B T"]


def _softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    normalised: Array = weights / weights.sum(axis=-1, keepdims=True)
    return normalised


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TabularPair(Enumeration):
    """π_roll, π_θ and a reward on sequences of T tokens out of V, with ``V^T <= 4096``: everything exact (float64).

    Contexts of position t (0-based here) are numbered by their tokens in base V, first token most significant; so are
    sequences, ``N = V^T`` of them. Probabilities may be 0 on either side. A context is *reachable* when each of its
    tokens has probability under at least one of the policies; the maxima run over those.

    Small differences are formed before they are summed, so ``error`` and ``surrogate`` keep their digits for policies
    that nearly agree.

    Methods that take ``sequence_keep`` want ``[N]`` bool, the mask's decision on every sequence, and give expectations
    under π_roll.

    Attributes:
      rollout: T arrays, ``[V^t, V]`` at position t: π_roll, rows that sum to 1.
      policy: likewise π_θ.
      rewards: ``[N]`` in [0, 1].

    Raises:
      ValueError: on shapes that do not fit, rows that are not distributions, rewards outside [0, 1], more than 4096
        sequences.

    >>> half = np.array([[0.5, 0.5]])
    >>> pair = TabularPair(rollout=[half], policy=[np.array([[0.25, 0.75]])], rewards=np.array([0.0, 1.0]))
    >>> print(pair.improvement, pair.surrogate, pair.error, pair.max_token_tv)
    0.25 0.25 0.0 0.25
    >>> keep = np.array([True, False])
    >>> print(pair.masked_surrogate(keep), pair.rejected_return(keep), pair.rejection_rate(keep))
    0.0 0.5 0.5
    """

    @classmethod
    def from_logits(
        cls,
        rollout_logits: Sequence[Float[Array, "_ V"]],
        policy_logits: Sequence[Float[Array, "_ V"]],
        rewards: Float[Array, " N"],
    ) -> TabularPair:
        """The pair whose distributions are softmaxes of these, ``-inf`` allowed (not for a whole row).

        Args:
          rollout_logits: T arrays, ``[V^t, V]`` at position t.
          policy_logits: likewise.
          rewards: ``[N]`` in [0, 1].

        Raises:
          ValueError: as the class.

        >>> pair = TabularPair.from_logits([np.zeros((1, 2))], [np.log([[1.0, 3.0]])], np.array([0.0, 1.0]))
        >>> print(pair.improvement)
        0.25
        """
        rollout = tuple(_softmax(np.asarray(z, dtype=np.float64)) for z in rollout_logits)
        policy = tuple(_softmax(np.asarray(z, dtype=np.float64)) for z in policy_logits)
        return cls(rollout=rollout, policy=policy, rewards=np.asarray(rewards, dtype=np.float64))

    @classmethod
    def random(
        cls, vocabulary: int, length: int, *, seed: int, mismatch: float = 0.1, spread: float = 1.0
    ) -> TabularPair:
        """Normal logits of standard deviation ``spread``, to which π_θ adds ``mismatch`` times others; uniform rewards.

        Args:
          vocabulary: V.
          length: T.
          seed: of ``numpy.random.default_rng``.
          mismatch: standard deviation of the difference in logits, at least 0; 0 makes the policies equal.
          spread: standard deviation of π_roll's logits, at least 0.

        Raises:
          ValueError: on an option out of range, or more than 4096 sequences.

        >>> print(TabularPair.random(2, 3, seed=0, mismatch=0.0).max_token_kl)
        0.0
        """
        in_range("mismatch", mismatch, low=0.0, high_open=True)
        in_range("spread", spread, low=0.0, high_open=True)
        rng = np.random.default_rng(seed)
        shapes = [(vocabulary**t, vocabulary) for t in range(length)]
        logits = [spread * rng.normal(size=shape) for shape in shapes]
        moved = [z + mismatch * rng.normal(size=z.shape) for z in logits]
        return cls.from_logits(logits, moved, rng.random(vocabulary**length))

    # Divergences.

    @property
    def max_token_kl(self) -> float:
        """δ, over all reachable contexts; ``inf`` when π_θ excludes a token that π_roll can draw there."""
        return self._largest(self._context_kl)

    @property
    def max_token_tv(self) -> float:
        """ε, over all reachable contexts."""
        return self._largest(self._context_tv)

    @property
    def mean_token_kl_by_position(self) -> Float[Array, " T"]:
        """E_roll[D_KL(c_t)]."""
        return self._expected(self._context_kl)

    @property
    def mean_token_tv_by_position(self) -> Float[Array, " T"]:
        """D̄_t = E_roll[D_TV(c_t)]."""
        return self._expected(self._context_tv)

    @property
    def context_tv_by_position(self) -> Float[Array, " T"]:
        """``‖d_t^θ - d_t^roll‖_TV``; 0 at the first position."""
        return np.array([0.5 * np.abs(difference).sum() for difference in self._context_differences[:-1]])

    @property
    def sequence_kl(self) -> float:
        """D_KL^seq = Σ_t E_roll[D_KL(c_t)]."""
        return float(self.mean_token_kl_by_position.sum())

    @property
    def sequence_tv(self) -> float:
        """D_TV^seq."""
        return float(0.5 * np.abs(self._context_differences[-1]).sum())

    # Returns and the surrogate.

    @property
    def rollout_return(self) -> float:
        """J(π_roll)."""
        return float(self.rollout_contexts[-1] @ self.rewards)

    @property
    def policy_return(self) -> float:
        """J(π_θ)."""
        return float(self.policy_contexts[-1] @ self.rewards)

    @functools.cached_property
    def expected_advantages(self) -> tuple[Array, ...]:
        """``g_t(c) = E_{y~π_θ}[A_t(c, y)]``, with the advantage of π_roll: T arrays ``[V^t]``."""
        value, levels = self.rewards, []
        for q, p in zip(reversed(self.rollout), reversed(self.policy), strict=True):
            following = value.reshape(q.shape)
            value = (q * following).sum(axis=1)
            levels.append(((p - q) * (following - value[:, None])).sum(axis=1))
        return tuple(reversed(levels))

    def _sum_of_advantages(self, levels: Sequence[Array]) -> float:
        return float(sum(d @ g for d, g in zip(levels, self.expected_advantages, strict=False)))

    @property
    def improvement(self) -> float:
        """J(π_θ) - J(π_roll), as ``Σ_t E_θ[g_t]``."""
        return self._sum_of_advantages(self.policy_contexts)

    @property
    def surrogate(self) -> float:
        """L'(π_θ) = ``Σ_t E_roll[g_t]``.

        Equal to ``E_roll[R Σ_t (ρ_t - 1)]`` when π_θ draws only what π_roll can draw. Otherwise samples miss a part of
        it; the theorems on ``error`` hold for this form.
        """
        return self._sum_of_advantages(self.rollout_contexts)

    @property
    def error(self) -> float:
        """Error = J(π_θ) - J(π_roll) - L'(π_θ), as ``Σ_t (E_θ - E_roll)[g_t]``."""
        return self._sum_of_advantages(self._context_differences)

    # Per-sequence values, for masks.

    @functools.cached_property
    def log_ratio(self) -> Float[Array, "N T"]:
        """``log π_θ - log π_roll`` of each token of each sequence; ``-inf`` where p = 0, ``+inf`` where only q = 0."""
        pairs = zip(self.rollout, self.policy, strict=True)
        return self._per_sequence([log_ratio(q, p).ravel() for q, p in pairs])

    @functools.cached_property
    def token_kl(self) -> Float[Array, "N T"]:
        """D_KL(c_t) along each sequence, nats."""
        return self._per_sequence(self._context_kl)

    @functools.cached_property
    def token_tv(self) -> Float[Array, "N T"]:
        """D_TV(c_t) along each sequence."""
        return self._per_sequence(self._context_tv)

    def rollout_mean(self, values: Float[Array, " N"] | Bool[Array, " N"]) -> float:
        """E_roll of a value of sequences; what stands at sequences of probability 0 is not looked at."""
        weights = self.rollout_contexts[-1]
        return float(weights[weights > 0] @ np.asarray(values, dtype=np.float64)[weights > 0])

    def masked_surrogate(self, sequence_keep: Bool[Array, " N"]) -> float:
        """L'_masked = ``E_roll[M R Σ_t (ρ_t - 1)]``."""
        finite = np.where(self.log_ratio < np.inf, self.log_ratio, 0.0)
        return self.rollout_mean(np.where(sequence_keep, self.rewards * np.expm1(finite).sum(axis=1), 0.0))

    def accepted_error(self, sequence_keep: Bool[Array, " N"]) -> float:
        """B_A = ``E_roll[M (e^U - 1 - U)]``, ``U = Σ_t |ρ_t - 1|``; ``inf`` when it overflows."""
        finite = np.where(self.log_ratio < np.inf, self.log_ratio, 0.0)
        deviation = np.where(sequence_keep, np.abs(np.expm1(finite)).sum(axis=1), 0.0)
        with np.errstate(over="ignore"):
            return self.rollout_mean(excess(deviation, np))

    def rejected_return(self, sequence_keep: Bool[Array, " N"]) -> float:
        """``E_roll[(1 - M) R]``."""
        return self.rollout_mean(np.where(sequence_keep, 0.0, self.rewards))

    def rejection_rate(self, sequence_keep: Bool[Array, " N"]) -> float:
        """``r = Pr_roll[M = 0]``."""
        return self.rollout_mean(~sequence_keep)

    def sample(self, size: int, *, seed: int) -> TabularSample:
        """Independent sequences from π_roll.

        Args:
          size: how many.
          seed: of ``numpy.random.default_rng``.

        Returns:
          ``TabularSample`` of ``size`` sequences.

        >>> TabularPair.random(2, 3, seed=0).sample(5, seed=1).log_ratio.shape
        (5, 3)
        """
        weights = self.rollout_contexts[-1]
        drawn = np.random.default_rng(seed).choice(len(weights), size=size, p=weights / weights.sum())
        return TabularSample(
            tokens=self.sequences[drawn],
            log_ratio=self.log_ratio[drawn],
            response_mask=np.ones((size, self.length), dtype=bool),
            rewards=self.rewards[drawn],
            token_kl=self.token_kl[drawn],
            token_tv=self.token_tv[drawn],
        )
