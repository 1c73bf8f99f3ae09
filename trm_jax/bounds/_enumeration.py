"""Two small tabular autoregressive policies: every sequence and every context, enumerated in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from trm_jax.bounds._arrays import excess

__all__ = ["MAX_SEQUENCES", "Array", "Enumeration", "log_ratio"]

MAX_SEQUENCES = 4096
"""Largest ``V^T`` that is enumerated."""

Array = np.ndarray


def log_ratio(q: Array, p: Array) -> Array:
    """``log(p/q)``, with full relative accuracy when p is near q; ``-inf`` where p = 0, ``+inf`` where only q = 0."""
    both = (q > 0) & (p > 0)
    q_safe, p_safe = np.where(both, q, 1.0), np.where(both, p, 1.0)
    change = (p_safe - q_safe) / q_safe
    near = np.abs(change) < 0.5
    finite = np.where(near, np.log1p(np.where(near, change, 0.0)), np.log(p_safe) - np.log(q_safe))
    return np.where(both, finite, np.where(p > 0, np.inf, -np.inf))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Enumeration:
    """What ``TabularPair`` documents, checked; which sequences and contexts there are, how likely and how far apart.

    Attributes:
      rollout: T arrays, ``[V^t, V]`` at position t: π_roll, rows that sum to 1.
      policy: likewise π_θ.
      rewards: ``[N]`` in [0, 1].
    """

    rollout: Sequence[Float[Array, "_ V"]]
    policy: Sequence[Float[Array, "_ V"]]
    rewards: Float[Array, " N"]

    def __post_init__(self) -> None:
        length = len(self.rollout)
        if length < 1 or len(self.policy) != length:
            raise ValueError(f"both policies need the same T >= 1 positions, given {length} and {len(self.policy)}")
        size = self.rollout[0].shape[-1]
        if size**length > MAX_SEQUENCES:
            raise ValueError(
                f"V^T must be at most {MAX_SEQUENCES}, given {size}^{length}: every sequence is enumerated"
            )
        for name, tables in (("rollout", self.rollout), ("policy", self.policy)):
            for position, table in enumerate(tables):
                if table.shape != (size**position, size):
                    raise ValueError(
                        f"{name}[{position}] must have shape [{size**position}, {size}], given {list(table.shape)}"
                    )
                if not (np.all(table >= 0) and np.allclose(table.sum(axis=1), 1.0, rtol=0, atol=1e-9)):
                    raise ValueError(f"{name}[{position}] must hold distributions: rows of probabilities that sum to 1")
        if self.rewards.shape != (size**length,) or not np.all((self.rewards >= 0) & (self.rewards <= 1)):
            raise ValueError(f"rewards must be [{size**length}] values in [0, 1], one for each sequence")

    @property
    def length(self) -> int:
        """T."""
        return len(self.rollout)

    @property
    def vocabulary(self) -> int:
        """V."""
        return int(self.rollout[0].shape[-1])

    @functools.cached_property
    def sequences(self) -> Int[Array, "N T"]:
        """All sequences, in the order of ``rewards``."""
        return np.stack(np.unravel_index(np.arange(len(self.rewards)), (self.vocabulary,) * self.length), axis=1)

    def _contexts(self, tables: Sequence[Array]) -> tuple[Array, ...]:
        """``d_t``: probability of each context of each position, and of each sequence at the end."""
        levels = [np.ones(1)]
        for table in tables:
            levels.append((levels[-1][:, None] * table).ravel())
        return tuple(levels)

    @functools.cached_property
    def rollout_contexts(self) -> tuple[Array, ...]:
        """``d_t^roll``: T + 1 arrays ``[V^t]``; the last is the distribution of sequences."""
        return self._contexts(self.rollout)

    @functools.cached_property
    def policy_contexts(self) -> tuple[Array, ...]:
        """``d_t^θ``: T + 1 arrays ``[V^t]``; the last is the distribution of sequences."""
        return self._contexts(self.policy)

    @functools.cached_property
    def _context_differences(self) -> tuple[Array, ...]:
        """``d_t^θ - d_t^roll``, summed from small differences."""
        levels = [np.zeros(1)]
        for base, q, p in zip(self.rollout_contexts, self.rollout, self.policy, strict=False):
            levels.append((base[:, None] * (p - q) + levels[-1][:, None] * p).ravel())
        return tuple(levels)

    @functools.cached_property
    def _reachable(self) -> tuple[Array, ...]:
        levels = [np.ones(1, dtype=bool)]
        for q, p in zip(self.rollout, self.policy, strict=True):
            levels.append((levels[-1][:, None] & (p + q > 0)).ravel())
        return tuple(levels)

    def _per_sequence(self, levels: Sequence[Array]) -> Array:
        """``[N, T]``: at each sequence and position the value of its context."""
        size = len(self.rewards)
        return np.stack([np.repeat(level, size // len(level)) for level in levels], axis=1)

    @functools.cached_property
    def _context_kl(self) -> tuple[Array, ...]:
        levels = []
        for q, p in zip(self.rollout, self.policy, strict=True):
            change = log_ratio(q, p)
            both = np.isfinite(change)
            # Terms q log(q/p) - q + p, none negative: p for a token that only π_θ draws, inf for one of π_roll alone.
            terms = np.where(both, q * excess(np.where(both, change, 0.0), np), p)
            levels.append(np.where(np.any((q > 0) & (p == 0), axis=1), np.inf, terms.sum(axis=1)))
        return tuple(levels)

    @functools.cached_property
    def _context_tv(self) -> tuple[Array, ...]:
        return tuple(0.5 * np.abs(p - q).sum(axis=1) for q, p in zip(self.rollout, self.policy, strict=True))

    def _largest(self, levels: Sequence[Array]) -> float:
        return float(max(level[seen].max() for level, seen in zip(levels, self._reachable, strict=False)))

    def _expected(self, levels: Sequence[Array]) -> Array:
        """Per position, E_roll of a context's value; a value of infinity at probability 0 adds nothing."""
        pairs = zip(self.rollout_contexts, levels, strict=False)
        return np.array([float(d[d > 0] @ level[d > 0]) for d, level in pairs])
