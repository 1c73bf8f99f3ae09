"""Problems to prompt batches: one row a sample, each with its own seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from jaxtyping import Array

from trm_jax.data._problem import Problem
from trm_jax.data._tokenizer import Tokenizer
from trm_jax.types import PromptBatch

__all__ = ["encode_prompts"]


def encode_prompts(
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int,
    samples_per_prompt: int,
    seed: int,
    step: int,
    first_group: int = 0,
) -> PromptBatch:
    """Prompts as ids, each standing in ``G`` rows: row ``i·G + j`` is sample ``j`` of prompt ``i``.

    A row's sampling seed is drawn from ``(seed, step)`` at place ``(first_group + i)·G + j``: the same step of the same
    run has the same seeds however its prompts are spread over processes.

    Args:
      problems: ``N`` problems, at least one.
      tokenizer: makes the ids.
      max_prompt_length: ``P``, prompt positions in tokens.
      samples_per_prompt: ``G``, at least 1.
      seed: the run's seed, 0 or more.
      step: the step, 0 or more.
      first_group: group id of the first problem; a process that holds the second half of a step of 32 passes 16.

    Returns:
      A batch of ``N·G`` rows, as numpy arrays: tokens int32, mask bool, group_ids int32, seeds uint32.

    Raises:
      ValueError: no problems, a number out of its range, or a prompt longer than the limit, by name.

    Example:
      >>> from trm_jax.data import CharTokenizer
      >>> problem = Problem(prompt="1+2=", reference="3", source="example", index=0)
      >>> batch = encode_prompts([problem], CharTokenizer("0123+="), max_prompt_length=5, samples_per_prompt=2, seed=0,
      ...                        step=0)
      >>> batch.tokens.tolist(), batch.group_ids.tolist()
      ([[1, 4, 2, 5, 7], [1, 4, 2, 5, 7]], [0, 0])
    """
    if len(problems) == 0:
        raise ValueError("there are no problems to encode; at least one is required")
    for name, value, least in (
        ("max_prompt_length", max_prompt_length, 1),
        ("samples_per_prompt", samples_per_prompt, 1),
        ("seed", seed, 0),
        ("step", step, 0),
        ("first_group", first_group, 0),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    rows = len(problems)
    tokens = np.full((rows, max_prompt_length), tokenizer.pad_id, np.int32)
    mask = np.zeros((rows, max_prompt_length), np.bool_)
    for row, problem in enumerate(problems):
        ids = tokenizer.encode(problem.prompt)
        if not ids:
            raise ValueError(f"the prompt of problem {problem.name} has no tokens; at least one is required")
        if len(ids) > max_prompt_length:
            raise ValueError(
                f"the prompt of problem {problem.name} takes {len(ids)} tokens, more than "
                f"max_prompt_length={max_prompt_length}; raise the limit or drop long prompts (drop_long_prompts)"
            )
        tokens[row, : len(ids)] = ids
        mask[row, : len(ids)] = True
    group_ids = np.arange(first_group, first_group + rows, dtype=np.int32)
    last = (first_group + rows) * samples_per_prompt
    seeds = np.random.SeedSequence((seed, step)).generate_state(last)[first_group * samples_per_prompt :]
    return PromptBatch(
        tokens=cast(Array, np.repeat(tokens, samples_per_prompt, axis=0)),
        mask=cast(Array, np.repeat(mask, samples_per_prompt, axis=0)),
        group_ids=cast(Array, np.repeat(group_ids, samples_per_prompt)),
        seeds=cast(Array, seeds),
    )
