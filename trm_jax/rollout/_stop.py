"""Stop strings: they end a response in its decoded text, whatever the borders of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["StopStrings", "TextCodec"]


class TextCodec(Protocol):
    """Text to ids and back; every tokenizer of ``trm_jax.data`` is one."""

    def encode(self, text: str) -> Sequence[int]:
        """Ids of ``text``."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``."""


class StopStrings:
    """Watches one growing response.

    Args:
      codec: its tokenizer.
      stop: the strings; any of them ends it.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str]) -> None:
        self._codec, self._stop, self._ids = codec, tuple(stop), list[int]()

    def take(self, ids: Sequence[int]) -> int | None:
        """How many of the ids that came now belong to the response: up to the one that completes a string, else None.

        >>> from types import SimpleNamespace
        >>> letters = SimpleNamespace(decode=lambda ids: "".join("ab."[i] for i in ids))
        >>> watch = StopStrings(letters, ["a."])
        >>> watch.take([0, 1, 0]), watch.take([2, 0, 2])
        (None, 1)
        """
        before = len(self._ids)
        self._ids += ids
        if not self._ends(len(self._ids)):
            return None
        return next(count for count in range(1, len(ids) + 1) if self._ends(before + count))

    def _ends(self, length: int) -> bool:
        text = self._codec.decode(self._ids[:length])
        return any(string in text for string in self._stop)
