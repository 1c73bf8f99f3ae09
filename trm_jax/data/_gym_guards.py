"""What must hold of an answer besides, where reasoning-gym's own scorer (0.1.25) takes wrong ones for right."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction

__all__ = ["MUST_HOLD"]

_FRACTION = re.compile(r"[-+]?(?:\d{1,40}(?:\.\d{0,40}|/0*[1-9]\d{0,40})?|\.\d{1,40})", re.ASCII)
_TOLERANCE = Fraction(1, 10_000)  # the scorer's own


def _same_text(given: str, reference: str) -> bool:
    """The scorer compares truth values, and every text is true in Python."""
    return given.casefold() == reference.casefold()


def _near(given: str, reference: str) -> bool:
    """The scorer gives the first digits alone its full score (0 for 0.21), and computes ``10^n`` for ``1e n``."""
    number = given.replace(",", "").strip()
    return bool(_FRACTION.fullmatch(number)) and abs(Fraction(number) - Fraction(reference)) <= _TOLERANCE


def _no_nan(given: str, reference: str) -> bool:
    """The scorer takes the smaller of 1 and a function of the distance, which for NaN is 1."""
    return "nan" not in given.casefold()


MUST_HOLD: Mapping[str, Callable[[str, str], bool]] = {
    "coin_flip": _near,
    "complex_arithmetic": _no_nan,
    "game_of_life_halting": _same_text,
}
"""Dataset → whether an answer may be right, given the reference."""
