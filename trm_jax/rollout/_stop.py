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


_MARGIN = 8
"""Characters that the first tokens of a tail may lose: a part of a character, or the space before a word."""


class StopStrings:
    """Watches one growing response; decodes its tail, and all of it only where a string ends there.

    Args:
      codec: its tokenizer.
      stop: the strings; any of them ends it.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str]) -> None:
        self._codec, self._stop, self._ids = codec, tuple(stop), list[int]()
        self._tail = 0  # from here on, the tokens of a string that is not complete

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
        if not self._has_stop(self._ids[self._tail :]) or not self._has_stop(self._ids):
            self._tail = len(self._ids) - self._tail_length()
            return None
        return next(count for count in range(1, len(ids) + 1) if self._has_stop(self._ids[: before + count]))

    def _has_stop(self, ids: Sequence[int]) -> bool:
        text = self._codec.decode(ids)
        return any(string in text for string in self._stop)

    def _tail_length(self) -> int:
        """Tokens, from the last one on, whose text is longer than any of the strings."""
        size, enough = _MARGIN, max(map(len, self._stop), default=0) + _MARGIN
        while size < len(self._ids) and len(self._codec.decode(self._ids[-size:])) < enough:
            size *= 2
        return min(size, len(self._ids))
