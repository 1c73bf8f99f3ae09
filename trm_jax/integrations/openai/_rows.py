"""Rows of prompts into requests, and their samples back into rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from trm_jax.integrations.openai._samples import SENTINEL, Sample, two_logps
from trm_jax.rollout import EngineConfig, Requests
from trm_jax.types import PromptBatch, RolloutBatch

__all__ = ["Group", "groups_of", "support_fault", "to_rollout"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Neighbouring rows with one prompt.

    Attributes:
      prompt: token ids.
      rows: their places in the batch.
      seeds: their seeds.
    """

    prompt: list[int]
    rows: list[int]
    seeds: list[int]


def groups_of(prompts: PromptBatch, *, limit: int, vocab_size: int, together: bool) -> list[Group]:
    """The rows as requests.

    Args:
      prompts: left-aligned rows.
      limit: longest prompt.
      vocab_size: ids lie below it.
      together: rows of one prompt that stand side by side form one request; otherwise every row is one.

    Raises:
      ValueError: naming the first row that is empty, too long, not left-aligned or outside the vocabulary.
    """
    requests = Requests.of(prompts, limit=limit, vocab_size=vocab_size)
    return [
        Group(prompt=requests.prompt(rows[0]).tolist(), rows=rows, seeds=requests.seeds[rows].tolist())
        for rows in requests.neighbours(len(requests) if together else 1)
    ]


def support_fault(sample: Sample, asked: int) -> str:
    """Why the tokens that could be drawn are not all known; "" when they are.

    A list that ends before ``asked`` entries, or in one of mass 0, is whole; so is one of mass 1.
    """
    if len(sample.top) != len(sample.tokens):
        return f"{len(sample.tokens)} tokens have {len(sample.top)} lists of top log-probs"
    for at, (token, top) in enumerate(zip(sample.tokens, sample.top, strict=True)):
        kept = {i: logp for i, logp in top.items() if logp > SENTINEL}
        if token not in kept:
            return f"token {at} (id {token}) is not among those that its support holds"
        if fault := two_logps(token, sample.logps[at], kept):
            return f"token {at}: {fault}"
        mass = sum(np.exp(list(kept.values())))
        if len(kept) == len(top) >= asked and abs(mass - 1) > 1e-4:
            return f"the {asked} tokens of support_tokens hold {mass:.4f} of the mass at token {at}: ask for more"
        if abs(mass - 1) > 1e-2:
            return f"the support of token {at} has mass {mass:.4f}, not 1"
    return ""


def to_rollout(
    prompts: PromptBatch,
    rows: Sequence[Sample],
    config: EngineConfig,
    *,
    version: int,
    eos_ids: Sequence[int],
    support_size: int | None,
    **static: Any,
) -> RolloutBatch:
    """A batch in the engine's lengths.

    Args:
      prompts: what was asked.
      rows: a sample a row.
      config: lengths.
      version: of every token.
      eos_ids: a row is finished when its last id is one of them.
      support_size: ``V`` when supports are recorded, None otherwise.
      static: ``temperature``, ``top_p`` and ``processed_logps`` of the batch.
    """
    count, length, width = len(rows), config.max_response_length, config.max_prompt_length
    tokens, versions = np.zeros((count, length), np.int32), np.full((count, length), -1, np.int32)
    logps, mask = np.zeros((count, length), np.float32), np.zeros((count, length), bool)
    support = None if support_size is None else np.zeros((count, length, -(-support_size // 8)), np.uint8)
    for row, done in enumerate(rows):
        n = len(done.tokens)
        tokens[row, :n], logps[row, :n], versions[row, :n], mask[row, :n] = done.tokens, done.logps, version, True
        if support is not None and support_size is not None:
            if not done.top:  # a faulty row: its log-probs are NaN, and nothing may be made of its support
                support[row, :n] = 255
                continue
            kept = np.zeros((n, support_size), bool)
            for at, top in enumerate(done.top):
                kept[at, [i for i, logp in top.items() if logp > SENTINEL]] = True
            support[row, :n] = np.packbits(kept, axis=1, bitorder="little")
    real = np.asarray(prompts.mask)
    padded = np.zeros((count, width), np.int32)
    used = min(width, real.shape[1])
    padded[:, :used] = np.where(real, np.asarray(prompts.tokens), 0)[:, :used]
    return RolloutBatch(
        prompt_tokens=jnp.asarray(padded),
        prompt_mask=jnp.asarray(np.arange(width)[None, :] < real.sum(axis=1)[:, None]),
        response_tokens=jnp.asarray(tokens),
        response_mask=jnp.asarray(mask),
        rollout_logps=jnp.asarray(logps),
        versions=jnp.asarray(versions),
        finished=jnp.asarray([bool(done.tokens) and done.tokens[-1] in eos_ids for done in rows]),
        group_ids=jnp.asarray(prompts.group_ids, jnp.int32),
        support=None if support is None else jnp.asarray(support),
        **static,
    )
