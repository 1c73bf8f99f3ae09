"""Worked arithmetic, right and wrong."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trm_jax.data import Problem, corrupt_demonstration
from trm_jax.data._arithmetic import format_number, running_values


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("3+7-1+9", "10,9,18"),
        ("4-1-7", "3,-4"),
        ("3--6*-9", "54,-51"),  # -6·-9 = 54 first, then 3 - 54
        ("-(2+3)*4", "5,-5,-20"),
        ("-((846-743)*9)", "103,927,-927"),
        ("7/2", "3"),  # rounds down
        ("-7/2", "-4"),
        ("4.4439+1.2537-7.8993", "5.6976,-2.2017"),
        ("0.5-0.25", "0.25"),
        ("1.5-2.5+1", "-1,0"),
        ("41", "41"),
        ("-41", "-41"),
        ("99999999999999999999999999999999*10", "999999999999999999999999999999990"),
    ],
)
def test_running_values(expression: str, expected: str) -> None:
    assert ",".join(running_values(expression)) == expected


@pytest.mark.parametrize("expression", ["1+", "a+1", "f(1)", "2**3", "1 if 1 else 2", "", "1/0", "True+1"])
def test_anything_but_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"arithmetic|division by zero"):
        running_values(expression)


@given(st.fractions(max_denominator=10**6))
def test_numbers_are_written_exactly(value: Fraction) -> None:
    assert Fraction(format_number(value)) == value


def chain(expression: str) -> Problem:
    values = running_values(expression)
    return Problem(
        prompt=f"{expression}=",
        reference=values[-1],
        demonstration=",".join(values),
        source="made",
        index=0,
        metadata={"chain": expression},
    )


def test_errors_of_a_chain_carry_on() -> None:
    # Each total must be the one before it, as written, plus the term, plus an error of 0, 1, 2 or 3.
    terms = [3, 7, -1, 9, -4]
    seen = set()
    for seed in range(200):
        text = corrupt_demonstration(chain("3+7-1+9-4"), np.random.default_rng(seed), 0.5)
        before = terms[0]
        for term, total in zip(terms[1:], map(int, text.split(",")), strict=True):
            seen.add(total - before - term)
            before = total
    assert seen == {0, 1, 2, 3}


def test_a_chain_of_n_sums_is_right_with_probability_one_minus_p_to_the_n() -> None:
    problem = chain("3+7-1+9")
    rng = np.random.default_rng(0)
    draws = 4000
    right = sum(corrupt_demonstration(problem, rng, 0.3).endswith(",18") for _ in range(draws))
    # 0.7³ = 0.343; the standard deviation of the mean is sqrt(0.343·0.657/4000) = 0.0075, four of them 0.03
    assert abs(right / draws - 0.343) < 0.03


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_probabilities_zero_and_one_are_certain(probability: float) -> None:
    for text in ("10", "2*2*3", "137/725", "0x5b993", "Friday", "ab", "aaa", "7", "007", "x=-9,y"):
        problem = Problem(prompt="?", reference=text, demonstration=text, source="made", index=0)
        for seed in range(20):
            corrupted = corrupt_demonstration(problem, np.random.default_rng(seed), probability)
            assert (corrupted == text) == (probability == 0.0)
            assert len(corrupted) <= len(text) + 1
            assert set(corrupted) <= set(text) | set("0123456789")


def test_leading_zeros_stay() -> None:
    problem = Problem(prompt="?", reference="x007", demonstration="x007", source="made", index=0)
    assert corrupt_demonstration(problem, np.random.default_rng(0), 1.0) in {"x008", "x009", "x010"}


def test_a_divisor_that_vanishes_by_an_error_does_not_stop_the_chain() -> None:
    problem = chain("8/(1-3)")
    texts = {corrupt_demonstration(problem, np.random.default_rng(seed), 1.0) for seed in range(50)}
    assert any(text.startswith("0,") for text in texts)  # -2 + 2 = 0: the case is met


def test_bad_requests_are_refused() -> None:
    bare = Problem(prompt="?", reference="1", source="made", index=3)
    with pytest.raises(ValueError, match=r"made\[3\] has no demonstration"):
        corrupt_demonstration(bare, np.random.default_rng(0), 0.5)
    with pytest.raises(ValueError, match=r"probability must be in \[0, 1\], got 1.5"):
        corrupt_demonstration(chain("1+1"), np.random.default_rng(0), 1.5)
