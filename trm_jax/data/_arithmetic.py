"""Worked arithmetic: the value after each operation of an expression, right or with errors that carry on."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

__all__ = ["LARGEST_OFFSET", "format_number", "running_values"]

Number = int | Fraction

_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
LARGEST_OFFSET = 3
"""The largest amount by which a corrupted number is off."""


def running_values(expression: str, *, rng: np.random.Generator | None = None, probability: float = 0.0) -> list[str]:
    """The result of each operation of an arithmetic expression, in the order of evaluation; the last is its value.

    For a chain of sums these are the running totals: ``3+7-1+9`` gives 10, 9, 18. Division of whole numbers rounds
    down, as reasoning-gym evaluates it; the negation of a parenthesis counts as an operation.

    With ``rng``, each result is made wrong with the given probability by adding 1, 2 or 3 (as if a term of a sum had
    been misread), and later operations carry on from the wrong one. All offsets are upwards, so that in a chain of
    sums two errors never cancel: the last total is right exactly when no error was made.

    Args:
      expression: numbers, ``+ - * /`` and parentheses.
      rng: source of the errors; None for the right values.
      probability: chance of an error at each operation, in [0, 1].

    Returns:
      One text a result; the value alone, wrong with the same probability, when the expression has no operation.

    Raises:
      ValueError: anything but arithmetic, or a division by zero.

    Example:
      >>> running_values("3+7-1+9")
      ['10', '9', '18']
      >>> running_values("(2-5)*4/6")
      ['-3', '-12', '-2']
      >>> running_values("3+7", rng=np.random.default_rng(0), probability=1.0)[0] in ("11", "12", "13")
      True
    """
    # Whole numbers stay whole numbers (fast, and division rounds down); decimals are exact fractions.
    whole = "." not in expression
    operations = {**_OPERATIONS, ast.Div: operator.floordiv if whole else operator.truediv}
    values: list[Number] = []

    def erring(value: Number) -> Number:
        if rng is not None and rng.random() < probability:
            return value + int(rng.integers(1, LARGEST_OFFSET + 1))
        return value

    def evaluate(node: ast.expr) -> Number:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            text = expression[node.col_offset : node.end_col_offset]
            return int(text) if whole else Fraction(text)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            inner = evaluate(node.operand)
            inner = -inner if isinstance(node.op, ast.USub) else inner
            if not isinstance(node.operand, ast.Constant):
                values.append(inner)
            return inner
        if isinstance(node, ast.BinOp) and type(node.op) in operations:
            left, right = evaluate(node.left), evaluate(node.right)
            if isinstance(node.op, ast.Div) and right == 0:
                if rng is None:
                    raise ValueError(f"division by zero in {expression!r}")
                right = 1  # an error before this one made the divisor vanish
            value = erring(operations[type(node.op)](left, right))
            values.append(value)
            return value
        raise ValueError(f"{expression!r} is not arithmetic on numbers with + - * / and parentheses")

    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    total = evaluate(tree.body)
    if not values:
        values.append(erring(total))
    return [format_number(value) for value in values]


def format_number(value: Number) -> str:
    """Shortest exact text of a number: an integer, a terminating decimal, or ``numerator/denominator``.

    Args:
      value: the number.

    Returns:
      Its text.

    Example:
      >>> format_number(Fraction("-2.50")), format_number(Fraction(4, 2)), format_number(Fraction(1, 3))
      ('-2.5', '2', '1/3')
    """
    if value.denominator == 1:
        return str(value.numerator)
    rest = value.denominator
    places = 0
    while rest % 2 == 0 or rest % 5 == 0:
        rest //= 10 if rest % 10 == 0 else (2 if rest % 2 == 0 else 5)
        places += 1
    if rest != 1:
        return f"{value.numerator}/{value.denominator}"
    digits = str(abs(value.numerator) * 10**places // value.denominator).zfill(places + 1)
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
