"""The tokenizer protocol, and a character-level tokenizer over a declared alphabet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

__all__ = ["PRINTABLE_ASCII", "CharTokenizer", "Tokenizer"]

PRINTABLE_ASCII = "".join(chr(code) for code in range(32, 127)) + "\n"
"""The 95 printable ASCII characters and the newline."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SHOWN = 60


@runtime_checkable
class Tokenizer(Protocol):
    """What this package asks of a tokenizer: text to ids and back, a padding id and the ids that end a response."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is in ``[0, vocab_size)``."""
        ...

    @property
    def pad_id(self) -> int:
        """The id written at masked slots. A policy may sample it; masks are never derived from it."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a response; never empty."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without a beginning or an end mark."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, up to the first end-of-sequence id."""
        ...


class CharTokenizer:
    """One token a character of a declared alphabet, then end-of-sequence, then padding.

    Character ``i`` of the alphabet has id ``i``; with ``n`` characters, end-of-sequence is ``n`` and padding ``n + 1``.

    Args:
      alphabet: the characters, each once, in the order that fixes their ids.

    Raises:
      ValueError: the alphabet is empty or names a character twice.

    Example:
      >>> tokenizer = CharTokenizer("0123456789+-,=")
      >>> tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id
      (16, 14, 15)
      >>> tokenizer.encode("3+7=")
      [3, 10, 7, 13]
      >>> tokenizer.decode([1, 0, 14, 15, 15])
      '10'
    """

    def __init__(self, alphabet: str) -> None:
        if not alphabet:
            raise ValueError("alphabet is empty; name at least one character")
        repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
        if repeated:
            raise ValueError(f"alphabet names {repeated} more than once; each character must stand once: {alphabet!r}")
        self._alphabet = alphabet
        self._ids = {character: position for position, character in enumerate(alphabet)}

    @property
    def alphabet(self) -> str:
        """The characters, in id order."""
        return self._alphabet

    @property
    def vocab_size(self) -> int:
        """Characters plus two."""
        return len(self._alphabet) + 2

    @property
    def eos_id(self) -> int:
        """The end-of-sequence id."""
        return len(self._alphabet)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The end-of-sequence id alone, as a set."""
        return frozenset({self.eos_id})

    @property
    def pad_id(self) -> int:
        """The padding id."""
        return len(self._alphabet) + 1

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the alphabet, its order or the layout of the special ids."""
        layout = json.dumps({"kind": "char", "alphabet": self._alphabet, "specials": ["eos", "pad"]}, sort_keys=True)
        return hashlib.sha256(layout.encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without special ids.

        Args:
          text: any text over the alphabet; the empty text gives an empty list.

        Returns:
          One id a character.

        Raises:
          ValueError: a character is not in the alphabet; the message names it, its position and the text.

        Example:
          >>> CharTokenizer("abc").encode("cab")
          [2, 0, 1]
        """
        ids = self._ids
        try:
            return [ids[character] for character in text]
        except KeyError:
            position = next(i for i, character in enumerate(text) if character not in ids)
            shown = text if len(text) <= _SHOWN else text[max(0, position - 20) : position + 20] + " (shortened)"
            raise ValueError(
                f"character {text[position]!r} at position {position} of {shown!r} is not in the alphabet "
                f"{self._alphabet!r}; add it to the alphabet or remove it from the text"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` up to the first end-of-sequence id.

        A padding id before that was sampled by the policy (padding after the end is never reached), so it shows as
        the replacement character U+FFFD instead of vanishing: dropping it would repair a wrong answer.

        Args:
          ids: ids in ``[0, vocab_size)``, those of the response mask.

        Returns:
          The text.

        Raises:
          ValueError: an id is out of range.

        Example:
          >>> CharTokenizer("abc").decode([0, 4, 1, 3, 2])
          'a�b'
        """
        characters = []
        for position, token in enumerate(ids):
            token = int(token)
            if token == self.eos_id:
                break
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"id {token} at position {position} is outside [0, {self.vocab_size})")
            characters.append(_REPLACEMENT if token == self.pad_id else self._alphabet[token])
        return "".join(characters)

    def __repr__(self) -> str:
        return f"CharTokenizer({self._alphabet!r})"
