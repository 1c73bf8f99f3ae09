"""Marks of final answers, and the rewards that compare plain text."""

from __future__ import annotations

import time

import pytest

from trm_jax.data import Problem, exact_reward, marked_answer, number_reward, open_reward, option_reward
from trm_jax.data._answers import plain_answer, plain_number


def problem(reference: str, choices: int = 4) -> Problem:
    metadata = {"choices": [str(i) for i in range(choices)]}
    return Problem(prompt="?", reference=reference, source="made", index=0, metadata=metadata)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("nothing", None),
        (r"\boxed{1} #### 2", ("2", "hashes")),
        (r"#### 2 \boxed{1}", ("1", "box")),
        (r"#### 2 \boxed{1", (r"2 \boxed{1", "hashes")),
        ("Answer: 1\nanswer : 2 \nmore", ("2", "line")),
        ("**Answer:** 7", ("7", "line")),
        ("Answer: $\\boxed{5}$", ("5", "box")),
        ("The answer is: 3", ("3", "line")),
        ("So the answer is: 3", ("3", "line")),
        ("**Final Answer**: 7", ("7", "line")),
        ("> The final answer: **7**", ("7", "line")),
        ("To get the answer: add 3 and 4. It is 7", None),
        ("Answer:\nlook below", None),
        ("The answer is 3", None),
        ("####", ("", "hashes")),
        ("####\n 5\n6", ("5", "hashes")),
    ],
)
def test_of_several_marks_the_last_counts(response: str, answer: tuple[str, str] | None) -> None:
    assert marked_answer(response) == answer


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("007", "7"),
        ("0", "0"),
        ("-0", "0"),
        ("+3", "3"),
        ("$1,000", "1000"),
        ("1,00", "1,00"),
        ("3.10", "3.10"),
        ("a", "a"),
    ],
)
def test_numbers_lose_their_frills(text: str, plain: str) -> None:
    assert plain_number(text) == plain


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("$x$.", "x"), ("1...", "1..."), ("2E+5", r"2 \times 10^{5}"), ("-1.5e-7", r"-1.5 \times 10^{-7}"),
        ("3e", "3e"), (r"\$5", "5"), ("$a$ and $b$", "a and b"),
    ],
)  # fmt: skip
def test_answers_become_latex(text: str, plain: str) -> None:
    assert plain_answer(text) == plain


@pytest.mark.parametrize(
    ("response", "given"),
    [
        (r"so \boxed{C}", "C"),
        (r"\boxed{\text{(C)}}", "C"),
        (r"\boxed{C. Mitochondria}", "C"),
        (r"\boxed{(C) Mitochondria}", "C"),
        (r"\boxed{B, C}", None),
        (r"\boxed{BC}", None),
        ("\\boxed{B or C}\nC", None),  # a mark around anything else is not passed over
        (r"\boxed{Carbon}", None),
        (r"\boxed{}", None),
        (r"\boxed{B} then \boxed{C}", "C"),
        ("Answer: C", "C"),
        ("#### C", "C"),
        ("The answer is (C).", "C"),
        ("The correct option is B, no: the correct choice is C.", "C"),
        ("the answer is **C**", "C"),
        ("C", "C"),
        ("(C)", "C"),
        ("C.", "C"),
        ("C. Because mitochondria make it.", "C"),
        ("First A, then B.\nC", "C"),
        ("A dog.\nIt barks", None),
        ("answer is A's choice", None),
        ("c", None),
        ("", None),
        ("no idea", None),
    ],
)
def test_the_letter_that_is_chosen(response: str, given: str | None) -> None:
    assert [letter for letter in "ABCD" if option_reward(problem(letter), response) == 1.0] == (
        [given] if given else []
    )


def test_exact_answers() -> None:
    assert exact_reward(problem("x y"), "so\n#### x  y\nthat is it") == 1.0
    assert exact_reward(problem("x y"), "x\ny") == 1.0
    assert exact_reward(problem("x y"), "X y") == 0.0
    assert exact_reward(problem("x y"), "") == 0.0


HOSTILE = [
    "(" * 2_000_000,
    r"\boxed{" * 300_000,
    "\\boxed{" + "{" * 1_000_000,
    "9" * 3_000_000,
    "answer:" * 400_000,
    "answer is " * 300_000,
    "####" * 500_000,
    "\n" * 3_000_000,
    "__import__('os').system('false')",
    r"\boxed{__import__('os')._exit(3)}",
    "\x00\ud800" * 100_000,
]


@pytest.mark.parametrize("response", HOSTILE, ids=lambda text: repr(text[:12]))
def test_hostile_answers_cost_little_and_score_nothing(response: str) -> None:
    began = time.process_time()
    assert option_reward(problem("C"), response) == 0.0
    assert exact_reward(problem("C"), response) == 0.0
    assert number_reward(problem("42"), response) == 0.0
    # A few milliseconds; a quadratic search over the whole text would take minutes.
    assert time.process_time() - began < 2.0


def test_rewards_by_name() -> None:
    for kind, function in (("number", number_reward), ("option", option_reward), ("exact", exact_reward)):
        with open_reward(kind) as reward:  # type: ignore[arg-type]
            assert reward is function
    with pytest.raises(ValueError, match="no reward 'maths'; choose one of math, number"), open_reward("maths"):  # type: ignore[arg-type]
        pass


def test_math_by_name_closes_its_processes() -> None:
    pytest.importorskip("math_verify")
    with open_reward("math") as reward:
        assert reward(problem("1"), "#### 1") == 1.0
    with pytest.raises(ValueError, match="closed"):
        reward(problem("1"), "#### 1")
