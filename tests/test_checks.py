"""The messages of refused inputs say what was given and what is required."""

from __future__ import annotations

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import checks


def test_same_shape_names_every_array() -> None:
    with pytest.raises(ValueError, match=r"token_kl \[2, 3\], response_mask \[2, 4\]"):
        checks.same_shape(token_kl=np.zeros((2, 3)), response_mask=np.zeros((2, 4)))


def test_same_shape_leaves_out_none() -> None:
    assert checks.same_shape(a=np.zeros((2, 3)), b=None) == (2, 3)


@pytest.mark.parametrize("given", [[0.0, 1.0], (0.0, 1.0)])
def test_shape_of_refuses_lists(given: object) -> None:
    message = rf"rewards must be an array, given a {type(given).__name__}: pass jax.numpy.asarray\(rewards\)"
    with pytest.raises(TypeError, match=message):
        checks.shape_of("rewards", given)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=message):
        checks.same_shape(token_kl=np.zeros(2), rewards=given)  # type: ignore[arg-type]
    assert checks.shape_of("threshold", 0.5) == ()


def test_bool_mask_refuses_numbers() -> None:
    with pytest.raises(TypeError, match=r"response_mask must be bool .* given dtype float64"):
        checks.bool_mask(response_mask=np.ones(3))
    checks.bool_mask(response_mask=np.ones(3, bool), token_keep=None)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
def test_in_range_refuses(value: float) -> None:
    with pytest.raises(ValueError, match=r"threshold must lie in \[0, 1\], given"):
        checks.in_range("threshold", value, low=0.0, high=1.0)


def test_in_range_accepts_closed_ends_and_none() -> None:
    for value in (0.0, 1.0, None):
        checks.in_range("threshold", value, low=0.0, high=1.0)


def test_in_range_open_ends() -> None:
    with pytest.raises(ValueError, match=r"cap must lie in \(0, inf\)"):
        checks.in_range("cap", math.inf, low=0.0, low_open=True, high_open=True)


@pytest.mark.parametrize("value", ["0.5", b"1", None, [0.5], np.zeros(2), object()])
def test_number_refuses_what_is_none(value: object) -> None:
    with pytest.raises(TypeError, match="cap must be a number, given"):
        checks.number("cap", value)


def test_number_takes_every_kind_of_scalar() -> None:
    for value in (2, 2.0, np.float32(2), np.array(2.0), jnp.float32(2), Fraction(2)):
        assert type(checks.number("cap", value)) is float
        assert checks.in_range("cap", value, low=2.0) == 2.0  # type: ignore[arg-type]


def test_required_names_the_array_that_is_missing() -> None:
    checks.required(proximal_logps=np.zeros(1))
    with pytest.raises(TypeError, match="rollout_logps must be an array, given None"):
        checks.required(proximal_logps=np.zeros(1), rollout_logps=None)


def test_ordered_names_both_ends() -> None:
    with pytest.raises(ValueError, match=r"low must be below high, given low=2.0 and high=1.0"):
        checks.ordered("low", 2.0, "high", 1.0)
    with pytest.raises(ValueError, match="must be below"):
        checks.ordered("low", 1.0, "high", 1.0)


def test_known_name_hints_only_at_near_names() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'trm_max'\?"):
        checks.known_name("preset", "trm-max", ("trm_max", "cis"))
    with pytest.raises(ValueError, match="unknown preset 'zzzz': choose one of trm_max, cis"):
        checks.known_name("preset", "zzzz", ("trm_max", "cis"))


def test_rows_of_tokens_have_two_axes() -> None:
    checks.rows_of_tokens((0, 3))
    for shape in ((), (3,), (2, 2, 3)):
        with pytest.raises(ValueError, match=r"response_mask must be \[B, T\], given"):
            checks.rows_of_tokens(shape)
