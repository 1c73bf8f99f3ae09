"""Prompts as requests: checked, padded, and grouped into prefill calls in which samples of a prompt share its run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int32, UInt32

from trm_jax.types import PromptBatch

__all__ = ["Admission", "Requests"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admission:
    """One prefill call and what it starts.

    Attributes:
      rows: requests whose prompts are run, all different.
      slots: slots that start.
      requests: the request that each of them samples for.
      prompts: place in ``rows`` of its prompt.
    """

    rows: list[int]
    slots: list[int]
    requests: list[int]
    prompts: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requests:
    """The rows of a ``PromptBatch``, padded to the engine's length.

    Attributes:
      tokens: ``[B, P]``.
      lengths: ``[B]``.
      seeds: ``[B]`` sampling seeds.
    """

    tokens: Int32[np.ndarray, "B P"]
    lengths: Int32[np.ndarray, " B"]
    seeds: UInt32[np.ndarray, " B"]

    @classmethod
    def of(cls, prompts: PromptBatch, *, limit: int, vocab_size: int) -> Requests:
        """Checks and pads prompts.

        Args:
          prompts: left-aligned rows.
          limit: ``P``, the longest prompt allowed.
          vocab_size: token ids lie below it.

        Raises:
          ValueError: naming the first row that is empty, too long, not left-aligned or outside the vocabulary.
        """
        tokens, mask = np.asarray(prompts.tokens), np.asarray(prompts.mask)
        lengths = mask.sum(axis=1).astype(np.int32)
        for row, length in enumerate(lengths):
            if length < 1 or length > limit:
                raise ValueError(
                    f"prompt in row {row} has {length} tokens; the engine takes 1 to max_prompt_length={limit}. "
                    "Raise max_prompt_length or drop the prompt."
                )
            if not mask[row, :length].all():
                raise ValueError(f"prompt in row {row} is not left-aligned: its mask has a gap before token {length}.")
        bad = np.argwhere(mask & ((tokens < 0) | (tokens >= vocab_size)))
        if bad.size:
            row, column = bad[0]
            raise ValueError(
                f"prompt in row {row}, position {column}: token id {tokens[row, column]} is outside the vocabulary "
                f"[0, {vocab_size}). Encode prompts with this model's own tokenizer."
            )
        padded = np.zeros((tokens.shape[0], limit), np.int32)
        width = min(limit, tokens.shape[1])
        padded[:, :width] = np.where(mask, tokens, 0)[:, :width]
        return cls(tokens=padded, lengths=lengths, seeds=np.asarray(prompts.seeds, np.uint32))

    def __len__(self) -> int:
        return len(self.tokens)

    def prompt(self, request: int) -> Int32[np.ndarray, " n"]:
        """Its tokens, without padding."""
        return self.tokens[request, : self.lengths[request]]

    def neighbours(self, most: int) -> list[list[int]]:
        """Requests that stand side by side with one prompt, at most ``most`` together: one question to a server."""
        groups: list[list[int]] = []
        for row in range(len(self)):
            last = groups[-1] if groups else []
            if last and len(last) < most and np.array_equal(self.prompt(last[0]), self.prompt(row)):
                last.append(row)
            else:
                groups.append([row])
        return groups

    def admissions(self, taken: Sequence[tuple[int, int]], prefill_rows: int) -> Iterator[Admission]:
        """Splits ``(slot, request)`` pairs into prefill calls of at most ``prefill_rows`` different prompts."""
        row_of: dict[bytes, int] = {}
        current = Admission(rows=[], slots=[], requests=[], prompts=[])
        for slot, request in taken:
            prompt = self.prompt(request).tobytes()
            if prompt not in row_of:
                if len(current.rows) == prefill_rows:
                    yield current
                    row_of, current = {}, Admission(rows=[], slots=[], requests=[], prompts=[])
                row_of[prompt] = len(current.rows)
                current.rows.append(request)
            current.slots.append(slot)
            current.requests.append(request)
            current.prompts.append(row_of[prompt])
        if current.rows:
            yield current
