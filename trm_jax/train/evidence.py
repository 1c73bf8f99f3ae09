"""What a run leaves for a person to look at: samples as text, the reason of a skipped update, a batch that broke."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32

__all__ = ["NonFiniteError", "skip_reason", "write_evidence", "write_samples"]


class NonFiniteError(RuntimeError):
    """Log-probs, loss or gradient were not finite; the batch is on disk and the weights are those before its update."""


def write_samples(directory: Path, step: int, samples: Sequence[dict[str, object]]) -> str:
    """``samples/step<N>.json``: prompts, responses and rewards; a sentence when the disk refuses, else ""."""
    path = directory / "samples" / f"step{step:08d}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(samples, indent=1, ensure_ascii=False), encoding="utf-8")
    except OSError as error:
        return f"could not write {path}: {error.strerror}; the run goes on."
    return ""


def skip_reason(
    rewards: Float32[np.ndarray, "groups samples"],
    sequence_keep: Bool[np.ndarray, "..."],
    answered: Bool[np.ndarray, " B"],
) -> str:
    """Why nothing was left to train on, and what to do if it goes on.

    Args:
      rewards: of all that was sampled.
      sequence_keep: of the correction.
      answered: rows with response tokens: those that were not dropped for their age.

    >>> skip_reason(np.array([[0, 1]], np.float32), np.array([True, True]), np.array([True, True]))
    "every token's weight or advantage is 0"
    """
    if not answered.any():
        return (
            "every sample was older than rollout.max_staleness allows. If this goes on, lower rollout.queue or raise "
            "max_staleness"
        )
    rewards = rewards[answered.reshape(rewards.shape).any(axis=1)]
    if not sequence_keep.any():
        return (
            "the correction rejected every sequence. If this goes on, the two policies are further apart than the mask "
            "allows: lower rollout.lag, use a finer rollout.numerics.weight_format, or raise the threshold"
        )
    if not np.ptp(rewards, axis=1).any():
        return (
            f"all rewards within every group are equal (mean {rewards.mean():.2f}), so every advantage is 0. If this "
            "goes on, the task is too hard or too easy for the policy, or samples_per_prompt is too small"
        )
    return "every token's weight or advantage is 0"


def write_evidence(path: Path, batch: Any, **more: np.ndarray) -> str:
    """The batch that broke, as arrays that ``np.load`` reads; says where it is, or why it could not be written."""
    arrays: dict[str, Any] = {
        jax.tree_util.keystr(key, simple=True, separator="."): _readable(value)
        for key, value in jax.tree_util.tree_leaves_with_path(batch)
    }
    try:
        np.savez_compressed(path, **(arrays | more))
    except OSError as error:
        return f"The batch could not be written to {path} ({error.strerror})."
    return f"The batch is in {path}."


def _readable(value: Any) -> np.ndarray:
    """An array that ``np.load`` reads without extra packages."""
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == jnp.bfloat16 else array
