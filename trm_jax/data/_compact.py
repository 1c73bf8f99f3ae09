"""Compact forms of some reasoning-gym datasets: short prompts over few characters, with worked demonstrations.

Each form turns a generated entry into a prompt such as ``3+7-1+9=`` and a demonstration such as ``10,9,18``, reads the
answer out of a response (the part after the last comma) and bounds the lengths from the dataset's parameters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from trm_jax.data._arithmetic import LARGEST_OFFSET, running_values

__all__ = ["COMPACT_FORMS", "CompactForm", "last_item"]

Entry = Mapping[str, Any]
Bounds = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompactForm:
    """How one dataset is written compactly.

    Attributes:
      description: what prompt and response look like.
      alphabet: the characters of both.
      write: entry → (prompt, demonstration, expression of the chain or None).
      extract: response → answer for the dataset's scorer.
      bounds: dataset configuration → longest prompt and response in characters, or None when only a sample can tell.
      required: parameter values without which the form does not hold, with the reason.
    """

    description: str
    alphabet: str
    write: Callable[[Entry], tuple[str, str, str | None]]
    extract: Callable[[str], str]
    bounds: Callable[[Any], Bounds] | None
    required: Mapping[str, tuple[Any, str]] = dataclasses.field(default_factory=dict)


def last_item(response: str) -> str:
    """The part after the last comma, without surrounding white space.

    Args:
      response: a policy's response.

    Returns:
      The answer; the whole response when it has no comma.

    Example:
      >>> last_item("10,9,18")
      '18'
    """
    return response.rpartition(",")[2].strip()


def _write_chain(entry: Entry) -> tuple[str, str, str | None]:
    expression = entry["metadata"]["expression"].replace(" ", "")
    return f"{expression}=", ",".join(running_values(expression)), expression


def _digits(value: int) -> int:
    return len(str(abs(value)))


def _chain_bounds(config: Any, *, decimals: int = 0) -> Bounds:
    """Longest expression and running totals of a sum, errors of the largest offset at every step included."""
    terms, largest = config.max_terms, 10**config.max_digits - (0 if decimals else 1)
    point = decimals + 1 if decimals else 0
    signs = terms if config.allow_negation else 0
    prompt = terms * (config.max_digits + point) + (terms - 1) + signs + 1
    lowest = -largest if config.allow_negation else 0
    totals = []
    for count in range(min(2, terms), terms + 1):
        highest_total = count * largest + LARGEST_OFFSET * max(1, count - 1)
        lowest_total = lowest - (count - 1) * largest
        totals.append(max(_digits(highest_total), _digits(lowest_total) + (lowest_total < 0)) + point)
    return prompt, sum(totals) + len(totals) - 1


def _decimal_chain_bounds(config: Any) -> Bounds:
    # A negative term may carry its decimal part towards zero or away from it: the sign is counted for every term.
    return _chain_bounds(config, decimals=config.max_decimal_places)


def _product_bounds(config: Any) -> Bounds:
    terms, digits = config.max_terms, config.max_digits
    sign = 1 if config.allow_negation else 0
    prompt = terms * (digits + sign) + (terms - 1) + 1
    value, totals = 10**digits - 1, []
    for _ in range(terms - 1):
        value = value * (10**digits - 1) + LARGEST_OFFSET
        totals.append(_digits(value) + sign)
    return prompt, sum(totals) + len(totals) - 1 if totals else digits + sign


def _write_gcd(entry: Entry) -> tuple[str, str, str | None]:
    numbers = entry["metadata"]["numbers"]
    current, steps = numbers[0], []
    for number in numbers[1:]:
        remainders = _euclid(current, number)
        current = remainders[-1]
        steps.extend(remainders)
    return ",".join(map(str, numbers)) + "=", ",".join(map(str, steps)), None


def _euclid(a: int, b: int) -> list[int]:
    """The non-zero remainders of Euclid's algorithm, or the divisor when the first remainder is already zero."""
    high, low = max(a, b), min(a, b)
    remainders = []
    while low:
        high, low = low, high % low
        if low:
            remainders.append(low)
    return remainders or [high]


def _gcd_bounds(config: Any) -> Bounds:
    most, count = config.max_value, config.max_numbers
    # Lamé: consecutive Fibonacci numbers take the most divisions; and every second remainder is at most half as large.
    high, low = 1, 1
    while high + low <= most:
        high, low = high + low, high
    steps = len(_euclid(high, low))
    fold = sum(_digits(most >> (step // 2)) + 1 for step in range(steps))
    return count * (_digits(most) + 1), fold * (count - 1)


def _write_lcm(entry: Entry) -> tuple[str, str, str | None]:
    numbers = entry["metadata"]["numbers"]
    current, steps = numbers[0], []
    for number in numbers[1:]:
        current = math.lcm(current, number)
        steps.append(current)
    return ",".join(map(str, numbers)) + "=", ",".join(map(str, steps)), None


def _lcm_bounds(config: Any) -> Bounds:
    digits, count = _digits(config.max_value), config.max_numbers
    return count * (digits + 1), sum(digits * n + 1 for n in range(2, count + 1))


def _write_count_bits(entry: Entry) -> tuple[str, str, str | None]:
    number = entry["metadata"]["number"]
    return f"{number}=", f"{number:b},{number.bit_count()}", None


def _count_bits_bounds(config: Any) -> Bounds:
    bits = config.max_n.bit_length()
    return _digits(config.max_n) + 1, bits + 1 + _digits(bits + LARGEST_OFFSET)


def _write_factors(entry: Entry) -> tuple[str, str, str | None]:
    metadata = entry["metadata"]
    return f"{metadata['number']}=", "*".join(map(str, metadata["factors"])), None


def _factors_bounds(config: Any) -> Bounds:
    most_factors = config.max_value.bit_length() - 1  # all of them 2
    digits = _digits(config.max_value)
    return digits + 1, max(2 * most_factors - 1, digits + most_factors) + 1


def _write_fraction(entry: Entry) -> tuple[str, str, str | None]:
    m = entry["metadata"]
    prompt = f"{m['numerator']}/{m['denominator']}="
    return prompt, f"{m['simplified_numerator']}/{m['simplified_denominator']}", None


def _fraction_bounds(config: Any) -> Bounds:
    digits = _digits(config.max_value * config.max_factor)
    return 2 * digits + 2, 2 * _digits(config.max_value) + 2


def _write_equation(entry: Entry) -> tuple[str, str, str | None]:
    equation = entry["metadata"]["equation"].replace(" ", "").replace(entry["metadata"]["variable"], "x")
    return f"{equation},x=", entry["answer"], None


COMPACT_FORMS: dict[str, CompactForm] = {
    "chain_sum": CompactForm(
        description="sums and differences of whole numbers, '3+7-1+9=' to the running totals '10,9,18'",
        alphabet="0123456789+-,=",
        write=_write_chain,
        extract=last_item,
        bounds=_chain_bounds,
    ),
    "decimal_chain_sum": CompactForm(
        description="sums and differences of decimal numbers, '1.5+2.25=' to the running totals '3.75'",
        alphabet="0123456789+-,=.",
        write=_write_chain,
        extract=last_item,
        bounds=_decimal_chain_bounds,
    ),
    "products": CompactForm(
        description="products of whole numbers, '3*4*5=' to the running products '12,60'",
        alphabet="0123456789*-,=",
        write=_write_chain,
        extract=last_item,
        bounds=_product_bounds,
    ),
    "basic_arithmetic": CompactForm(
        description="arithmetic with parentheses, '-(2+3)*4=' to the result of each operation '5,-5,-20'",
        alphabet="0123456789+-*/(),=",
        write=_write_chain,
        extract=last_item,
        bounds=None,
        required={
            "allow_parentheses": (True, "without parentheses reasoning-gym's answers ignore operator precedence"),
        },
    ),
    "gcd": CompactForm(
        description="greatest common divisor, '12,18=' to the remainders of Euclid's algorithm '6'",
        alphabet="0123456789,=",
        write=_write_gcd,
        extract=last_item,
        bounds=_gcd_bounds,
    ),
    "lcm": CompactForm(
        description="least common multiple, '4,6,9=' to the running multiples '12,36'",
        alphabet="0123456789,=",
        write=_write_lcm,
        extract=last_item,
        bounds=_lcm_bounds,
    ),
    "count_bits": CompactForm(
        description="number of one bits, '11=' to the binary form and the count '1011,3'",
        alphabet="0123456789,=",
        write=_write_count_bits,
        extract=last_item,
        bounds=_count_bits_bounds,
    ),
    "prime_factorization": CompactForm(
        description="prime factors, '12=' to '2*2*3'",
        alphabet="0123456789*=",
        write=_write_factors,
        extract=lambda response: response.strip().replace("*", " × "),
        bounds=_factors_bounds,
    ),
    "fraction_simplification": CompactForm(
        description="fractions in lowest terms, '12/18=' to '2/3'",
        alphabet="0123456789/=",
        write=_write_fraction,
        extract=str.strip,
        bounds=_fraction_bounds,
    ),
    "simple_equations": CompactForm(
        description="linear equations in one unknown, '2*x+3=11,x=' to '4'",
        alphabet="0123456789+-*x,=",
        write=_write_equation,
        extract=str.strip,
        bounds=None,
    ),
}
"""Dataset name → its compact form."""
