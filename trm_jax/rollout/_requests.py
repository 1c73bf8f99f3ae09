"""Prompts as requests: checked, padded, and grouped into prefill calls in which samples of a prompt share its run."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int32, UInt32

from trm_jax.rollout._config import EngineConfig
from trm_jax.types import PromptBatch

__all__ = ["Admission", "Requests"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admission:
    """One prefill call: the prompts to run, and which slot starts which request from which of them.

    Attributes:
      prompts: ``[R, P]``; the last rows may repeat the first.
      noise_seeds: ``[R]`` seeds of the router's noise. They depend on the prompt alone: samples of one prompt share a
        prefill, and it must not matter whose request ran it.
      slots: ``[C]``; entries past the placements point behind the last slot, where a scatter drops them.
      requests: ``[C]`` row of the request that each slot starts.
      rows: ``[C]`` row of ``prompts`` that holds its prompt.
    """

    prompts: Int32[np.ndarray, "R P"]
    noise_seeds: UInt32[np.ndarray, " R"]
    slots: Int32[np.ndarray, " C"]
    requests: Int32[np.ndarray, " C"]
    rows: Int32[np.ndarray, " C"]


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

    def admissions(self, taken: Sequence[tuple[int, int]], config: EngineConfig) -> Iterator[Admission]:
        """Splits ``(slot, request)`` pairs into prefill calls of at most ``prefill_rows`` different prompts."""
        row_of: dict[bytes, int] = {}
        rows: list[int] = []
        placements: list[tuple[int, int, int]] = []
        for slot, request in taken:
            prompt = self._prompt(request)
            if prompt not in row_of:
                if len(rows) == config.prefill_rows:
                    yield self._admission(rows, placements, config)
                    row_of, rows, placements = {}, [], []
                row_of[prompt] = len(rows)
                rows.append(request)
            placements.append((slot, request, row_of[prompt]))
        if rows:
            yield self._admission(rows, placements, config)

    def _admission(self, rows: list[int], placements: list[tuple[int, int, int]], config: EngineConfig) -> Admission:
        """Fixed shapes, so that every call runs the same program."""
        padded = np.array(rows + [rows[0]] * (config.prefill_rows - len(rows)))
        table = np.zeros((3, config.slots), np.int32)
        table[0] = config.slots
        table[:, : len(placements)] = np.array(placements, np.int32).T
        noise = np.array([zlib.crc32(self._prompt(request)) for request in padded], np.uint32)
        return Admission(
            prompts=self.tokens[padded], noise_seeds=noise, slots=table[0], requests=table[1], rows=table[2]
        )

    def _prompt(self, request: int) -> bytes:
        return self.tokens[request, : self.lengths[request]].tobytes()
