"""How old samples are when the policy learns from them, and what becomes of those that are too old."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int32

from trm_jax.types import RolloutBatch

__all__ = ["UNKNOWN", "Ages", "drop_stale", "token_ages"]

UNKNOWN = np.iinfo(np.int32).max
"""Age of a token whose weights no trainer made (version -1: a server's own first weights)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ages:
    """Of the samples of one step.

    Attributes:
      mean: over their tokens, in updates.
      oldest: the oldest token's.
      dropped_groups: prompts left out, because one of their samples was too old.
    """

    mean: float
    oldest: int
    dropped_groups: int


def token_ages(rollout: RolloutBatch, version: int) -> Int32[np.ndarray, "B T"]:
    """``version - versions`` in updates where there is a token, 0 elsewhere.

    Args:
      rollout: with the version of every token.
      version: of the policy that learns from them.
    """
    versions, mask = np.asarray(rollout.versions), np.asarray(rollout.response_mask)
    ages = np.where(versions < 0, UNKNOWN, version - versions)
    return np.where(mask, ages, 0).astype(np.int32)


def drop_stale(rollout: RolloutBatch, *, version: int, most: int) -> tuple[RolloutBatch, Ages]:
    """Takes the response tokens from every group that has a sample older than ``most`` updates.

    A sample is as old as its oldest token. A group goes whole, for its advantages are taken among its samples; what is
    left of it, rows without response tokens, counts nowhere. A rollout without such a group comes back as it is.

    Args:
      rollout: rows ``[B]`` in groups.
      version: of the policy when the step that learns from them begins.
      most: ``rollout.max_staleness``.

    >>> rollout = RolloutBatch(
    ...     prompt_tokens=jnp.zeros((3, 1), jnp.int32),
    ...     prompt_mask=jnp.ones((3, 1), bool),
    ...     response_tokens=jnp.zeros((3, 2), jnp.int32),
    ...     response_mask=jnp.array([[True, True], [True, False], [True, True]]),
    ...     rollout_logps=jnp.zeros((3, 2)),
    ...     versions=jnp.array([[3, 5], [5, 0], [4, 5]]),
    ...     finished=jnp.ones(3, bool),
    ...     group_ids=jnp.array([0, 0, 1]),
    ... )
    >>> kept, ages = drop_stale(rollout, version=5, most=1)  # row 0 began two updates ago, and row 1 goes with it
    >>> print(kept.response_mask.any(axis=1), ages)
    [False False  True] Ages(mean=0.6, oldest=2, dropped_groups=1)
    """
    ages, mask = token_ages(rollout, version), np.asarray(rollout.response_mask)
    groups = np.asarray(rollout.group_ids)
    old = np.unique(groups[ages.max(axis=1) > most])
    count = int(mask.sum())
    known = ages[mask & (ages < UNKNOWN)]
    found = Ages(
        mean=float(known.mean()) if known.size else 0.0,
        oldest=int(known.max()) if known.size else 0,
        dropped_groups=int(old.size),
    )
    if not old.size or not count:
        return rollout, found
    kept: Bool[np.ndarray, " B"] = ~np.isin(groups, old)
    return dataclasses.replace(rollout, response_mask=jnp.asarray(mask & kept[:, None])), found
