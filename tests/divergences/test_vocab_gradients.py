"""Gradients of `vocab_divergence` against float64: moves of one token, underflow, second derivatives, improper rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax.divergences import vocab_divergence
from trm_jax.types import VocabDivergence

NAMES = [field.name for field in dataclasses.fields(VocabDivergence)]


def log_softmax(z: np.ndarray) -> np.ndarray:
    """In float64; the top stays out of the sum, so that nearly deterministic rows keep their digits."""
    gap = z.astype(float) - z.max(-1, keepdims=True)
    rest = np.where(gap < 0, np.exp(gap), 0.0).sum(-1, keepdims=True)
    return gap - np.log1p(rest + (gap == 0).sum(-1, keepdims=True) - 1)


def slopes(policy: np.ndarray, rollout: np.ndarray) -> dict[str, list[np.ndarray]]:
    """By hand, in the policy's and the rollout's logits.

    KL: ``p - q`` and ``q (log q/p - KL)``. TV, with the signs ``s`` of ``p - q``: ``½ p (s - E_p s)`` and
    ``-½ q (s - E_q s)``. Where KL is infinite its second one is NaN.
    """
    log_p, log_q = log_softmax(policy), log_softmax(rollout)
    p, q = np.exp(log_p), np.exp(log_q)
    d = np.where(q > 0, log_p, 0.0) - np.where(q > 0, log_q, 0.0)
    excess = np.where(q > 0, q * np.expm1(d), p)  # p - q, with its digits where they are near
    sign = 0.5 * np.sign(excess)
    of_policy, of_rollout = (pi * (sign - (pi * sign).sum(-1, keepdims=True)) for pi in (p, q))
    with np.errstate(invalid="ignore"):
        kl = (excess - q * d).sum(-1, keepdims=True)
        return {"token_kl": [excess, -q * (d + kl)], "token_tv": [of_policy, -of_rollout]}


@jax.jit
def gradients(policy: jax.Array, rollout: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Of the sum of each output over all rows, whatever it is in any of them."""

    def totals(*logits: jax.Array) -> jax.Array:
        out = vocab_divergence(*logits, jnp.zeros(policy.shape[:-1], int))
        return jnp.stack([getattr(out, name) for name in NAMES]).sum(-1)

    return dict(zip(NAMES, zip(*jax.jacrev(totals, (0, 1))(policy, rollout), strict=True), strict=True))


def test_one_token_that_moves_alone() -> None:
    """All others then differ by 1e-6 of themselves or less: two rounded softmaxes do not even say which way."""
    rollout = np.random.default_rng(0).normal(size=(3, 20_000)).astype(np.float32)
    for row, mass in zip(rollout, (5e-6, 1e-4, 1e-3), strict=True):
        row[7] = np.log(mass / (1 - mass) * np.exp(np.delete(row, 7).astype(float)).sum())
    policy = rollout.copy()
    policy[:, 7] += np.float32([0.2, 0.01, 0.001])
    found = gradients(policy, rollout)
    for name, pair in slopes(policy, rollout).items():
        for got, want in zip(found[name], pair, strict=True):
            off = np.abs(got - want).sum(-1) / np.abs(want).sum(-1)
            assert np.all(off < 1e-4), (name, off)


def with_few_tokens(*logits: float) -> np.ndarray:
    """As the first of three rows of six: the shape of the tests below."""
    out = np.zeros((3, 6), np.float32)
    out[0] = [*logits, *[-np.inf] * (6 - len(logits))]
    return out


def test_nearly_deterministic_rows() -> None:
    """All mass but 4e-9 is one token's: beside it, ``1 - s`` has no digit of what the others have."""
    pair = with_few_tokens(20.0, 0.0, 1.0), with_few_tokens(20.0, 0.5, 0.7)
    found = gradients(*pair)
    for name, want in slopes(*pair).items():
        np.testing.assert_allclose(found[name], want, rtol=1e-4, err_msg=name)


def test_a_policy_probability_that_underflows() -> None:
    """``q (log q/p - KL)`` at q = ½, ½ and log p = 0, -200: KL = 100 - log 2, and ½ (-log 2 - KL) = -50."""
    found = gradients(with_few_tokens(200.0, 0.0), with_few_tokens(0.0, 0.0))["token_kl"]
    of_policy, of_rollout = (x[0, :2] for x in found)
    np.testing.assert_allclose(of_policy, [0.5, -0.5], rtol=1e-6)
    np.testing.assert_allclose(of_rollout, [-50.0, 50.0], rtol=1e-6)
    assert abs(of_rollout.sum()) < 1e-4  # a constant on all logits changes nothing; 50 has 4e-6 of rounding


@jax.jit
def hessians(pair: jax.Array) -> dict[str, jax.Array]:
    def distances(pair: jax.Array) -> dict[str, jax.Array]:
        out = vocab_divergence(*pair, jnp.array(0), temperature=0.7)
        return {"token_kl": out.token_kl, "token_tv": out.token_tv}

    found: dict[str, jax.Array] = jax.hessian(distances)(pair)
    return found


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(([0.3, -1.0, 2.0, 0.5, 1.1], [0.1, -0.7, 1.5, 0.9, 1.0]), id="near"),
        # Log-ratios beyond 1: there p - q is a difference.
        pytest.param(([3.0, -2.0, 0.4, 1.0, -0.6], [-1.5, 2.0, 0.5, 0.1, 1.0]), id="far"),
        pytest.param(([0.3, -1.0, 2.0, 0.5, 1.1], [0.1, -np.inf, 1.5, 0.9, 1.0]), id="a token of the policy alone"),
    ],
)
def test_second_derivatives(pair: tuple[list[float], list[float]]) -> None:
    """Central differences of the float64 gradient, within the logits of one policy and across both."""
    logits, step = np.array(pair, np.float32), 1e-5
    for name, got in hessians(logits).items():
        for side, v in np.argwhere(np.isfinite(logits)):
            ends = []
            for sign in (step, -step):
                moved = logits.astype(float)
                moved[side, v] += sign
                ends.append(np.stack(slopes(*moved / 0.7)[name]) / 0.7)
            want = (ends[0] - ends[1]) / (2 * step)
            # A few roundings of float32 in entries of order one.
            np.testing.assert_allclose(got[:, :, side, v], want, rtol=1e-4, atol=1e-5, err_msg=f"{name} {side} {v}")


ROWS = np.random.default_rng(1).normal(size=(2, 3, 6)).astype(np.float32)  # of the policy, of the rollout
SIDES = ("policy", "rollout")


def close(got: jax.Array, want: np.ndarray, message: str) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6, err_msg=message)


@pytest.mark.parametrize("value", [-np.inf, np.nan, np.inf])
@pytest.mark.parametrize("bad", [0, 1], ids=SIDES)
def test_a_row_without_a_softmax_has_no_slope(bad: int, value: float) -> None:
    """No token at all, or a NaN or an infinity among them: nor does it reach the rows beside it."""
    pair = ROWS.copy()
    pair[bad, 1, slice(None) if value == -np.inf else 4] = value
    found, clean = gradients(*pair), np.array([0, 2])
    for name, sides in slopes(*ROWS).items():
        for got, want in zip(found[name], sides, strict=True):
            np.testing.assert_array_equal(got[1], 0.0, err_msg=name)
            close(got[clean], want[clean], name)
    for name in (f"{SIDES[bad]}_logps", f"{SIDES[bad]}_entropy"):
        np.testing.assert_array_equal(found[name][bad][1], 0.0, err_msg=name)


def test_an_infinite_divergence_has_no_slope() -> None:
    """Token 4 of row 1 is the rollout's alone. TV is finite there, and has its slopes."""
    pair, clean = ROWS.copy(), np.array([0, 2])
    pair[0, 1, 4] = -np.inf
    found, want = gradients(*pair), slopes(*pair)
    for side in (0, 1):
        np.testing.assert_array_equal(found["token_kl"][side][1], 0.0)
        close(found["token_kl"][side][clean], want["token_kl"][side][clean], SIDES[side])
        close(found["token_tv"][side], want["token_tv"][side], SIDES[side])


@pytest.mark.parametrize("value", [-np.inf, np.nan, np.inf, None])
@pytest.mark.parametrize("bad", [0, 1], ids=SIDES)
def test_the_other_policy_of_such_a_row_keeps_its_own_slopes(bad: int, value: float | None) -> None:
    """``1[v = 0] - π`` of the log-prob, ``-π (log π + H)`` of the entropy. None: the other has one token alone."""
    pair, other = ROWS.copy(), 1 - bad
    pair[bad, 1, slice(None) if value == -np.inf else 4] = -np.inf if value is None else value
    log_pi = log_softmax(ROWS[other])
    pi = np.exp(log_pi)
    found = gradients(*pair)
    close(found[f"{SIDES[other]}_logps"][other], np.eye(6)[0] - pi, "log-probs")
    close(found[f"{SIDES[other]}_entropy"][other], -pi * (log_pi - (pi * log_pi).sum(-1, keepdims=True)), "entropies")
    for what in ("logps", "entropy"):
        np.testing.assert_array_equal(found[f"{SIDES[other]}_{what}"][bad], 0.0, err_msg=what)
