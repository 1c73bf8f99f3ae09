"""What must hold of an answer besides, where reasoning-gym's own scorer (0.1.25) takes wrong ones for right."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

from trm_jax.data._problem import Problem

__all__ = ["MUST_HOLD"]

_FRACTION = re.compile(r"[-+]?(?:\d{1,40}(?:\.\d{0,40}|/0*[1-9]\d{0,40})?|\.\d{1,40})", re.ASCII)
_TOLERANCE = Fraction(1, 10_000)  # the scorer's own


_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _same_text(given: str, problem: Problem) -> bool:
    """The scorer compares truth values, and every text is true in Python."""
    return given.casefold() == problem.reference.casefold()


def _near(given: str, problem: Problem) -> bool:
    """The scorer gives the first digits alone its full score (0 for 0.21), and computes ``10^n`` for ``1e n``."""
    number = given.replace(",", "").strip()
    return bool(_FRACTION.fullmatch(number)) and abs(Fraction(number) - Fraction(problem.reference)) <= _TOLERANCE


def _no_nan(given: str, problem: Problem) -> bool:
    """The scorer takes the smaller of 1 and a function of the distance, which for NaN is 1."""
    return "nan" not in given.casefold()


def _from_the_numbers(given: str, problem: Problem) -> bool:
    """The scorer takes any four numbers, and drops what stands behind the point of their value."""
    numbers = sorted(map(int, re.findall(r"\d+", given[:1000])))
    return numbers == sorted(problem.metadata["numbers"]) and _value(ast.parse(given, mode="eval").body) == 24


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not plain arithmetic")


MUST_HOLD: Mapping[str, Callable[[str, Problem], bool]] = {
    "coin_flip": _near,
    "complex_arithmetic": _no_nan,
    "game_of_life_halting": _same_text,
    "puzzle24": _from_the_numbers,
}
"""Dataset → whether an answer may be right."""
