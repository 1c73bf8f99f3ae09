"""Prompts through an engine to answers as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from trm_jax.data import Tokenizer
from trm_jax.rollout import Engine
from trm_jax.types import PromptBatch, RolloutBatch

__all__ = ["Answer", "KnownIds", "ask", "read_answers"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One response.

    Attributes:
      text: without the end token, and up to the first stop string.
      tokens: sampled, the end token included, and what follows a stop string where the engine did not stop there.
      finished: whether it ended by itself (by an end token or a stop string), and not at the length limit.
    """

    text: str
    tokens: int
    finished: bool


class KnownIds:
    """A tokenizer to which ids beyond its own, of a padded embedding, are no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``."""
        return list(self._tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids that have one."""
        return self._tokenizer.decode([i for i in ids if i < self._tokenizer.vocab_size])


def ask(engine: Engine, prompts: PromptBatch, tokenizer: Tokenizer, *, stop: Sequence[str] = ()) -> list[Answer]:
    """The engine's answer to every row of ``prompts``.

    Args:
      engine: with weights.
      prompts: rows of ids.
      tokenizer: writes ids as text and knows the end tokens; ids beyond its own, of a padded embedding, write nothing.
      stop: texts at which an answer ends; what an engine that does not know them has sampled beyond is cut off.

    Returns:
      One answer a row.
    """
    return read_answers(engine.generate(prompts), tokenizer, stop=stop)


def read_answers(rollout: RolloutBatch, tokenizer: Tokenizer, *, stop: Sequence[str] = ()) -> list[Answer]:
    """The responses of a rollout as text; arguments and result as for ``ask``."""
    tokens, mask = np.asarray(rollout.response_tokens), np.asarray(rollout.response_mask)
    answers, words = [], KnownIds(tokenizer)
    for row, keep, finished in zip(tokens, mask, np.asarray(rollout.finished), strict=True):
        ids = [int(token) for token in row[keep]]
        text = words.decode([token for token in ids if token not in tokenizer.eos_ids])
        ends = [place for word in stop if (place := text.find(word)) >= 0]
        answers.append(
            Answer(text=text[: min(ends)] if ends else text, tokens=len(ids), finished=bool(finished) or bool(ends))
        )
    return answers
