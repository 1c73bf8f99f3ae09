"""Completions as the pipeline's batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from trm_jax.models import TransformerConfig
from trm_jax.rollout import EngineConfig, Recording, SamplingConfig
from trm_jax.serve._client import ServingError
from trm_jax.serve._requests import Completion
from trm_jax.types import PromptBatch, RolloutBatch

__all__ = ["batch_of"]


def batch_of(
    prompts: PromptBatch,
    rows: Sequence[Completion],
    *,
    shape: TransformerConfig,
    config: EngineConfig,
    recording: Recording,
    sampling: SamplingConfig,
    dtype: Any,
) -> RolloutBatch:
    """A ``RolloutBatch`` with a row a completion.

    Args:
      prompts: what was asked, left-aligned.
      rows: a whole sample for every row of ``prompts``.
      shape: the model's.
      config: lengths.
      recording: what else was asked for.
      sampling: what was sampled from.
      dtype: of hidden states.

    Raises:
      ServingError: a completion without something that was asked for, or of another shape.
    """
    count, length, width = len(rows), config.max_response_length, config.max_prompt_length
    real = np.asarray(prompts.mask)
    prompt_lengths = real.sum(axis=1)
    arrays: dict[str, Any] = {
        "tokens": np.zeros((count, length), np.int32),
        "versions": np.full((count, length), -1, np.int32),
        "logps": np.zeros((count, length), np.float32),
    }
    if recording.hidden:
        arrays["hidden"] = np.zeros((count, length, shape.d_model), dtype)
    if recording.top_logps:
        arrays["top_tokens"] = np.zeros((count, length, recording.top_logps), np.int32)
        arrays["top_logps"] = np.zeros((count, length, recording.top_logps), np.float32)
    support = np.zeros((count, length, -(-shape.vocab_size // 8)), np.uint8) if sampling.cuts else None
    routes = None
    if recording.routes:
        routes = np.full((count, config.sequence_length, shape.moe_layers, shape.experts_per_token), -1, np.int16)
    for row, done in enumerate(rows):
        n = done.tokens.size
        for name, array in arrays.items():
            array[row, :n] = _of_shape(name, getattr(done, name), (n, *array.shape[2:]))
        if routes is not None:
            ran = int(prompt_lengths[row]) + n - 1
            routes[row, :ran] = _of_shape("routed_experts", done.routed_experts, (ran, *routes.shape[2:]))
        if support is not None:
            if done.support_tokens is None or done.support_offsets is None:
                raise ServingError(f"the server sent no support although {sampling} cuts it.")
            kept = np.zeros((n, shape.vocab_size), bool)
            kept[np.repeat(np.arange(n), np.diff(done.support_offsets)), done.support_tokens] = True
            support[row, :n] = np.packbits(kept, axis=1, bitorder="little")
    lengths = np.array([done.tokens.size for done in rows], np.int32)
    padded = np.zeros((count, width), np.int32)
    padded[:, : real.shape[1]] = np.where(real, prompts.tokens, 0)[:, :width]
    on_device = {name: jnp.asarray(array) for name, array in arrays.items()}
    return RolloutBatch(
        prompt_tokens=jnp.asarray(padded),
        prompt_mask=jnp.asarray(np.arange(width)[None, :] < prompt_lengths[:, None]),
        response_tokens=on_device["tokens"],
        response_mask=jnp.asarray(np.arange(length)[None, :] < lengths[:, None]),
        rollout_logps=on_device["logps"],
        versions=on_device["versions"],
        finished=jnp.asarray([done.finish == "stop" for done in rows], bool),
        group_ids=jnp.asarray(prompts.group_ids, jnp.int32),
        hidden=on_device.get("hidden"),
        support=None if support is None else jnp.asarray(support),
        routed_experts=None if routes is None else jnp.asarray(routes),
        top_tokens=on_device.get("top_tokens"),
        top_logps=on_device.get("top_logps"),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
    )


def _of_shape(name: str, found: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    if found is None or found.shape != shape:
        raise ServingError(
            f"{name} was asked for with shape {shape}; the server sent {'nothing' if found is None else found.shape}."
        )
    return found
