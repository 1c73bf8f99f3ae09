"""Problems, task lengths and batches of rewards."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trm_jax.data import Problem, TaskSpec, score_batch


def problem(index: int = 0, reference: str = "3") -> Problem:
    return Problem(prompt="1+2=", reference=reference, source="made", index=index)


def test_an_empty_prompt_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="problem 7 of made has an empty prompt"):
        Problem(prompt="", reference="3", source="made", index=7)


def test_score_batch_gives_one_float32_a_row_in_order() -> None:
    rewards = score_batch(lambda p, r: 0.25 * p.index + (r == p.reference), [problem(0), problem(2)], ["3", "4"])
    assert rewards.dtype == np.float32
    # row 0: 0.25·0 + 1; row 1: 0.25·2 + 0
    np.testing.assert_array_equal(rewards, [1.0, 0.5])


def test_score_batch_of_nothing_is_empty() -> None:
    assert score_batch(lambda p, r: 1.0, [], []).shape == (0,)


def test_score_batch_refuses_unequal_lists_and_rewards_that_are_not_finite() -> None:
    with pytest.raises(ValueError, match="1 problems but 2 responses"):
        score_batch(lambda p, r: 1.0, [problem()], ["a", "b"])
    with pytest.raises(ValueError, match=r"reward of made\[4\] \(row 1\) is nan"):
        score_batch(lambda p, r: math.nan if p.index == 4 else 1.0, [problem(), problem(4)], ["a", "b"])


def test_score_batch_hands_a_whole_batch_to_a_reward_that_takes_one() -> None:
    class Whole:
        def __call__(self, problem: Problem, response: str) -> float:
            raise AssertionError("one by one")

        def score_batch(self, problems: list[Problem], responses: list[str]) -> list[float]:
            return [float(len(response)) for response in responses]

    np.testing.assert_array_equal(score_batch(Whole(), [problem(), problem()], ["ab", "c"]), [2.0, 1.0])


@pytest.mark.parametrize(
    ("prompt", "response", "message"),
    [(7, 5, "max_prompt_length=7 .* 8 characters"), (8, 4, "max_response_length=4 .* 5 in all")],
)
def test_lengths_that_cannot_fit_are_refused_with_what_is_needed(prompt: int, response: int, message: str) -> None:
    spec = TaskSpec(name="t", description="", alphabet="01", max_prompt_chars=8, max_response_chars=4, bounds="exact")
    spec.check_lengths(max_prompt_length=8, max_response_length=5)
    with pytest.raises(ValueError, match=message):
        spec.check_lengths(max_prompt_length=prompt, max_response_length=response)
