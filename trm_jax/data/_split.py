"""Train and test sides by a hash of the prompt, and problems made on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import overload

from trm_jax.data._problem import Problem

__all__ = ["LazyProblems", "held_out"]


def held_out(prompt: str, *, test_permille: int) -> bool:
    """Whether a prompt belongs to the test set: sha256 of its text, modulo 1000, below ``test_permille``.

    The same prompt falls on the same side in every run, whatever the seed: no test prompt is ever trained on.

    Args:
      prompt: the prompt's text.
      test_permille: size of the test side, in thousandths of all prompts.

    Returns:
      True for the test side.

    Example:
      >>> held_out("1+2=", test_permille=1000), held_out("1+2=", test_permille=0)
      (True, False)
    """
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest(), "big") % 1000 < test_permille


class LazyProblems(Sequence[Problem]):
    """A sequence whose problems are made when they are asked for.

    Args:
      make: index in [0, size) → problem; the same problem every time.
      size: the length.
    """

    def __init__(self, make: Callable[[int], Problem], size: int) -> None:
        self._make = make
        self._size = size

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(self._size)[index]]
        return self._make(range(self._size)[index])

    def __iter__(self) -> Iterator[Problem]:
        return (self._make(i) for i in range(self._size))
