"""Tasks from reasoning-gym: forms, bounds, split and reward."""

from __future__ import annotations

import dataclasses
import importlib.util
import runpy
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trm_jax.data import (
    PRINTABLE_ASCII,
    ReasoningGymTask,
    _generated_task,
    corrupt_demonstration,
    held_out,
    reasoning_gym_task,
    reasoning_gym_tasks,
)
from trm_jax.data._compact import COMPACT_FORMS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is an extra")

SUMS = {"min_terms": 4, "max_terms": 4, "max_digits": 1}

FORMS: list[tuple[str, dict[str, Any]]] = [
    ("chain_sum", {}),
    ("chain_sum", SUMS),
    ("chain_sum", {"min_terms": 1, "max_terms": 1}),
    ("chain_sum", {"max_terms": 12, "max_digits": 1, "allow_negation": True}),
    ("decimal_chain_sum", {}),
    ("decimal_chain_sum", {"max_digits": 1, "allow_negation": True, "max_decimal_places": 2}),
    ("products", {}),
    ("products", {"max_terms": 4, "allow_negation": True}),
    ("basic_arithmetic", {}),
    ("gcd", {}),
    ("gcd", {"max_numbers": 4, "max_value": 20}),
    ("lcm", {"max_numbers": 3}),
    ("count_bits", {}),
    ("count_bits", {"max_n": 255}),
    ("prime_factorization", {}),
    ("fraction_simplification", {}),
    ("simple_equations", {}),
]


def test_every_compact_form_is_tried() -> None:
    assert {name for name, _ in FORMS} == set(COMPACT_FORMS)
    names = reasoning_gym_tasks()
    assert names[: len(COMPACT_FORMS)] == list(COMPACT_FORMS)
    assert len(names) == len(set(names)) > 100


@pytest.mark.parametrize(("name", "params"), FORMS)
def test_demonstrations_are_right_within_alphabet_and_bounds_also_when_corrupted(
    name: str, params: dict[str, Any]
) -> None:
    task = reasoning_gym_task(name, params=params)
    spec, tokenizer, rng = task.spec, task.tokenizer(), np.random.default_rng(0)
    assert spec.alphabet == tokenizer.alphabet
    wrong = 0
    problems = list(task.train(60 if name == "simple_equations" else 300))
    for problem in problems:
        corrupted = corrupt_demonstration(problem, rng, 1.0)
        assert task(problem, problem.demonstration or "") == 1.0
        wrong += task(problem, corrupted) == 0.0
        assert len(tokenizer.encode(problem.prompt)) <= spec.max_prompt_chars
        for response in (problem.demonstration or "", corrupted):
            assert len(tokenizer.encode(response)) <= spec.max_response_chars
    assert task.scoring_errors == 0
    # Only in expressions with products can two errors cancel, and they seldom do.
    assert wrong == len(problems) if name not in ("products", "basic_arithmetic") else wrong > 0.9 * len(problems)


def test_chain_sums_are_written_with_running_totals() -> None:
    task = reasoning_gym_task("chain_sum", params=SUMS)
    # Four one-digit terms: "d+d+d+d=" has 8 characters. The longest totals are three negative ones, -9, -18 and -27:
    # 2 + 3 + 3 and two commas, 10.
    assert (task.spec.max_prompt_chars, task.spec.max_response_chars, task.spec.bounds) == (8, 10, "exact")
    assert task.tokenizer().vocab_size == 16
    for problem in task.train(50):
        expression = problem.prompt.removesuffix("=")
        totals = [eval(expression[: 3 + 2 * i]) for i in range(3)]
        assert problem.demonstration == ",".join(map(str, totals))
        assert problem.reference == str(totals[-1])


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("10,9,18", 1.0),
        ("18", 1.0),
        ("1,2,18", 1.0),  # only the last total counts
        ("10,9,18,", 0.0),
        ("10,9,+18", 1.0),
        ("10,9,17", 0.0),
        ("18,9", 0.0),
        ("10,9,18=", 0.0),  # reasoning-gym's partial credit, 2/3, is no success
        ("the answer is 18", 0.0),
        ("10,9,18\N{REPLACEMENT CHARACTER}", 0.0),
        ("", 0.0),
        ("," * 100_000, 0.0),
    ],
)
def test_chain_sum_rewards(response: str, reward: float) -> None:
    task = reasoning_gym_task("chain_sum", params=SUMS)
    problem = dataclasses.replace(task.train(1)[0], prompt="3+7-1+9=", reference="18")
    assert task(problem, response) == reward


def test_train_and_test_prompts_are_disjoint_whatever_the_seed() -> None:
    test = reasoning_gym_task("chain_sum", params=SUMS, seed=1).test(300)
    held = {problem.prompt for problem in test}
    assert len(held) == 300
    for seed in (1, 2):
        train = {problem.prompt for problem in reasoning_gym_task("chain_sum", params=SUMS, seed=seed).train(4000)}
        assert len(train) > 1000
        assert not held & train


def test_the_split_is_the_hash_of_the_prompt() -> None:
    # printf '3+7-1+9=' | sha256sum gives ed2fec3d...86517c3c, which is 828 modulo 1000.
    assert held_out("3+7-1+9=", test_permille=829)
    assert not held_out("3+7-1+9=", test_permille=828)
    share = np.mean([held_out(f"{i}=", test_permille=100) for i in range(5000)])
    assert abs(share - 0.1) < 0.02  # the standard deviation is sqrt(0.09/5000) = 0.004


def test_problems_are_lazy_indexed_and_the_same_in_another_task_object() -> None:
    one = reasoning_gym_task("chain_sum", seed=3).train(10**9)
    other = reasoning_gym_task("chain_sum", seed=3).train(10**9)
    assert len(one) == 10**9
    assert one[123_456_789] == other[123_456_789]
    assert one[-1].index == 10**9 - 1
    assert [p.index for p in one[5:8]] == [5, 6, 7]
    assert one[0] != reasoning_gym_task("chain_sum", seed=4).train(10**9)[0]
    with pytest.raises(IndexError):
        one[10**9]


def test_a_smaller_test_set_is_the_beginning_of_a_larger_one() -> None:
    task = reasoning_gym_task("chain_sum")
    assert task.test(5) == task.test(20)[:5]


def test_exhausted_prompts_are_reported() -> None:
    tiny = reasoning_gym_task("chain_sum", params={"min_terms": 1, "max_terms": 1, "max_digits": 1})  # 10 prompts
    with pytest.raises(ValueError, match=r"gave only \d different held-out prompts .* 11 were asked for"):
        tiny.test(11)
    with pytest.raises(ValueError, match="gave only 0 different held-out prompts"):
        reasoning_gym_task("chain_sum", test_permille=0).test(1)
    everything = reasoning_gym_task(
        "chain_sum", params={"min_terms": 1, "max_terms": 1, "max_digits": 1}, test_permille=999
    )
    with pytest.raises(ValueError, match=r"all of 64 draws for training problem 0 .* were held out"):
        everything.train(1)[0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sums", {}, "no task 'chain_sums'; did you mean 'chain_sum'"),
        ("qqqq", {}, "trm-jax tasks"),
        ("composite", {}, "no task 'composite'"),
        ("chain_sum", {"params": {"terms": 3}}, "has no parameter 'terms'; it has allow_negation, max_digits"),
        ("chain_sum", {"params": {"seed": 3}}, "must not name 'seed'"),
        ("chain_sum", {"params": {"min_terms": 9}}, r"refuses params .* max_terms must be >= min_terms"),
        ("chain_sum", {"params": {"min_terms": "two"}}, "must be of type int"),
        ("chain_sum", {"seed": -1}, "seed must be 0 or more"),
        ("chain_sum", {"test_permille": 1000}, r"test_permille must be in \[0, 999\]"),
        ("chain_sum", {"alphabet": "0123456789+-="}, r"alphabet lacks \[','\]"),
        ("basic_arithmetic", {"params": {"allow_parentheses": False}}, "ignore operator precedence"),
        ("list_functions", {}, "does not follow its seed"),
    ],
)
def test_bad_requests_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reasoning_gym_task(name, **options)


def test_sizes_must_be_positive() -> None:
    task = reasoning_gym_task("chain_sum")
    for ask in (task.train, task.test):
        with pytest.raises(ValueError, match="size must be at least 1, got 0"):
            ask(0)


def test_datasets_that_depend_on_the_hash_seed_need_it_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match="PYTHONHASHSEED"):
        reasoning_gym_task("word_ladder")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert isinstance(reasoning_gym_task("word_ladder"), ReasoningGymTask)


def test_other_datasets_have_the_question_as_prompt_and_the_bare_answer_as_demonstration() -> None:
    task = reasoning_gym_task("calendar_arithmetic")
    problem = task.train(10)[0]
    assert task.spec.alphabet == PRINTABLE_ASCII
    assert task.spec.bounds == "sampled"
    assert problem.demonstration == problem.reference
    assert task(problem, problem.reference) == 1.0
    assert task(problem, f"Well. <answer> {problem.reference} </answer>") == 1.0
    assert task(problem, f"Well. <answer>{problem.reference}") == 0.0


def test_characters_outside_the_alphabet_are_found_before_training() -> None:
    with pytest.raises(ValueError, match=r"characters outside its alphabet: '°'; pass an alphabet"):
        _ = reasoning_gym_task("simple_geometry").spec
    assert "°" in reasoning_gym_task("simple_geometry", alphabet=PRINTABLE_ASCII + "°").spec.alphabet


def test_a_scorer_that_raises_gives_zero_and_is_counted() -> None:
    task = reasoning_gym_task("prime_factorization", compact=False)
    problem = task.train(1)[0]
    assert task(problem, "I do not know") == 0.0
    assert task.scoring_errors == 1
    assert task(problem, problem.reference) == 1.0
    assert task.scoring_errors == 1


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("game_of_life_halting", "so <answer>{}</answer>", ("???", "not {}", "")),
        ("coin_flip", "{}", ("0", "2", "{}1e0", "1e30000000", "-1e-30000000", "1/0", "nan", "")),
        ("complex_arithmetic", "{}", ("nan", "nan + nani", "NaN", "inf", "")),
    ],
)
def test_answers_that_a_scorer_takes_for_right_wrongly(name: str, right: str, wrong: tuple[str, ...]) -> None:
    task = reasoning_gym_task(name, compact=False)
    problems = [task.train(8)[i] for i in range(8)]
    assert len({problem.reference for problem in problems}) > 1
    began = time.process_time()
    for problem in problems:
        assert task(problem, right.format(problem.reference)) == 1.0
        assert [task(problem, text.format(problem.reference)) for text in wrong] == [0.0] * len(wrong)
        others = {other.reference for other in problems} - {problem.reference}
        assert not any(task(problem, other) for other in others)
    assert time.process_time() - began < 2  # 10 to the power of 30,000,000 takes minutes


def test_a_puzzle_is_solved_with_its_own_numbers_and_exactly() -> None:
    task = reasoning_gym_task("puzzle24")
    first, second = (task.train(64)[i] for i in range(2))
    assert [task(first, first.reference), task(second, second.reference)] == [1.0, 1.0]
    assert [task(first, text) for text in (second.reference, "6*4*1*1", "24", f"{first.reference} + 0")] == [0.0] * 4
    # 5·5 - 1/3 is 24 and two thirds, of which reasoning-gym's scorer sees the 24 alone.
    near = dataclasses.replace(first, metadata={**first.metadata, "numbers": [5, 5, 1, 3]})
    assert task(near, "5*5 - 1/3") == 0.0
    assert task(dataclasses.replace(near, metadata={"numbers": [5, 5, 1, 1]}), "5*5 - 1**1") == 0.0
    assert task(dataclasses.replace(near, metadata={"numbers": [5, 5, 1, 1]}), "5*5 - 1/1") == 1.0


def test_a_chance_may_be_given_as_a_fraction() -> None:
    task = reasoning_gym_task("coin_flip")
    half = dataclasses.replace(task.train(1)[0], reference="0.5")
    assert [task(half, text) for text in ("1/2", ".5", "0.50005", "0.5002", "5/10.0")] == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_puzzles_with_many_solutions_have_no_demonstration() -> None:
    problem = reasoning_gym_task("rush_hour").train(1)[0]
    assert (problem.reference, problem.demonstration) == ("", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["countdown", "puzzle24", "simple_integration", "polynomial_multiplication", "n_queens", "spiral_matrix"],
)
def test_scorers_that_evaluate_answers_run_apart_and_refuse_code(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    if name == "polynomial_multiplication":
        monkeypatch.setenv("PYTHONHASHSEED", "0")
    task = reasoning_gym_task(name, compact=False)
    problem = task.train(1)[0]
    assert task(problem, problem.reference) == 1.0
    assert task(problem, f"so <answer>{problem.reference}</answer>") == 1.0
    assert task(problem, "1") == 0.0
    mark = tmp_path / "was here"
    for code in (
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
        f"open({str(mark)!r}, 'w')",
        f"[].__class__.__base__.__subclasses__() or open({str(mark)!r}, 'w')",
        f"preview(1, filename={str(mark)!r})",
    ):
        assert task(problem, code) == 0.0
    assert not mark.exists()


@pytest.mark.slow
def test_answers_that_run_away_cost_bounded_time() -> None:
    task = reasoning_gym_task("countdown", compact=False)
    problem = task.train(1)[0]
    began = time.monotonic()
    for heavy in ("9**9**9**9", "(" * 5000 + "1" + ")" * 5000, "1+" * 1_000_000 + "1", "9" * 2_000_000):
        assert task(problem, heavy) == 0.0
    # At most each meets its limit of 6 s, and a worker starts anew; on a busy machine that takes its time.
    assert time.monotonic() - began < 300
    assert task(problem, problem.reference) == 1.0


def test_only_the_end_of_a_long_answer_is_scored() -> None:
    task = reasoning_gym_task("chain_sum", compact=False)
    problem = task.train(1)[0]
    assert task(problem, "x" * 5_000_000 + f"<answer>{problem.reference}</answer>") == 1.0
    assert task(problem, f"<answer>{problem.reference}</answer>" + "x" * 5_000_000) == 0.0


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("20*28 + 98", True),
        ("-(3 - 1.5)/x**2 + sin(x) + C", True),
        ("log(x)*exp(-x)", True),
        ("1 if x else 2", False),
        ("x.y", False),
        ("f(x)", False),
        ("sin(x, evaluate=False)", False),
        ("__import__", False),
        ("[1]", False),
        ("'text'", False),
        ("True", False),
        ("lambda: 1", False),
        ("x := 1", False),
        ("", False),
        ("1 +", False),
    ],
)
def test_what_counts_as_arithmetic(text: str, plain: bool) -> None:
    program = runpy.run_path(str(_generated_task._PROGRAM))
    assert program["is_arithmetic"](text) is plain
