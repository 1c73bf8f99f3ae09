"""Divergences from two hidden states and heads: against float64 numpy on the same logits, chunking, constants."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import ops
from trm_jax.types import VocabDivergence

N, D, V = 29, 10, 83


def operands(shift: float, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(N, D)).astype(np.float32)
    head = rng.normal(size=(V, D)).astype(np.float32)
    other_hidden = hidden + (shift * rng.normal(size=hidden.shape)).astype(np.float32)
    other_head = head + (shift * rng.normal(size=head.shape)).astype(np.float32)
    return other_hidden, other_head, hidden, head, rng.integers(0, V, N)


def oracle(
    args: tuple[np.ndarray, ...], temperature: float, support: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    logs = []
    for hidden, head in (args[:2], args[2:4]):
        z = hidden.astype(float) @ head.astype(float).T / temperature
        z = z if support is None else np.where(support, z, -np.inf)
        logs.append(z - np.log(np.exp(z).sum(-1, keepdims=True)))
    logp, logq = logs
    p, q = np.exp(logp), np.exp(logq)
    with np.errstate(invalid="ignore"):
        kl = np.where(q > 0, q * (logq - logp), 0.0).sum(-1)
        entropy_p, entropy_q = (-np.where(x > 0, x * lx, 0.0).sum(-1) for x, lx in ((p, logp), (q, logq)))
    rows = np.arange(N)
    return {
        "policy_logps": logp[rows, args[4]],
        "rollout_logps": logq[rows, args[4]],
        "token_kl": kl,
        "token_tv": 0.5 * np.abs(p - q).sum(-1),
        "policy_entropy": entropy_p,
        "rollout_entropy": entropy_q,
    }


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
@pytest.mark.parametrize("restricted", [False, True])
def test_against_float64(implementation: str, restricted: bool) -> None:
    args = operands(0.05)
    support = None
    if restricted:
        support = np.random.default_rng(1).random((N, V)) < 0.5
        support[np.arange(N), args[4]] = True
    bits = None if support is None else np.packbits(support, axis=1, bitorder="little")
    out = ops.linear_vocab_divergence(*args, temperature=0.8, support=bits, implementation=implementation, chunk_size=8)
    for name, want in oracle(args, 0.8, support).items():
        # 2e-4: float32 products move logits by 1e-6, which a KL of 1e-3 sees to first order in its square root.
        np.testing.assert_allclose(getattr(out, name), want, rtol=2e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "chunk_size", [pytest.param(1, marks=pytest.mark.slow), 7, pytest.param(29, marks=pytest.mark.slow), 500]
)
def test_chunking_does_not_matter(chunk_size: int) -> None:
    args = operands(0.05)
    got = ops.linear_vocab_divergence(*args, chunk_size=chunk_size)
    want = ops.linear_vocab_divergence(*args, implementation="reference")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Products of other shapes round logits of 17 by 2e-6, of which a KL of 1e-2 sees 2e-5.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_without_tv_the_kl_is_the_same_in_one_pass() -> None:
    for shift in (1e-2, 1.0):
        args = operands(shift)
        fast, full = (ops.linear_vocab_divergence(*args, with_tv=flag) for flag in (False, True))
        assert fast.token_tv is None
        # The same sums, to the bit here; a compiler that fuses them otherwise rounds differences of 1e-2 by 1e-6.
        np.testing.assert_allclose(fast.token_kl, full.token_kl, rtol=1e-4)
        np.testing.assert_array_equal(fast.policy_logps, full.policy_logps)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_on_policy_is_exactly_zero(dtype: jnp.dtype) -> None:
    _, _, hidden, head, tokens = operands(0.0)
    h, w = jnp.asarray(hidden, dtype), jnp.asarray(head, dtype)
    for with_tv in (True, False):
        out = ops.linear_vocab_divergence(h, w, h, w, tokens, with_tv=with_tv, chunk_size=8)
        np.testing.assert_array_equal(out.token_kl, 0.0)
        if with_tv:
            np.testing.assert_array_equal(out.token_tv, 0.0)
        np.testing.assert_array_equal(out.policy_logps, out.rollout_logps)


def test_other_widths_and_dtypes_of_the_engine() -> None:
    args = operands(0.0)
    wide_hidden = np.concatenate([args[2], np.zeros((N, 3), np.float32)], axis=1)
    wide_head = np.concatenate([args[3], np.ones((V, 3), np.float32)], axis=1)
    out = ops.linear_vocab_divergence(*args[:2], wide_hidden, wide_head, args[4])
    np.testing.assert_allclose(out.token_kl, 0.0, atol=1e-9)
    rounded = jnp.asarray(args[3], jnp.bfloat16)
    got = ops.linear_vocab_divergence(*args[:3], rounded, args[4])
    want = oracle((*args[:3], np.asarray(rounded, np.float32), args[4]), 1.0)
    np.testing.assert_allclose(got.token_kl, want["token_kl"], rtol=1e-2)  # 2e-6 KL against logit noise of 1e-6


def test_constants_for_the_gradient() -> None:
    args = operands(0.1)

    def total(h: jax.Array, w: jax.Array) -> jax.Array:
        out = ops.linear_vocab_divergence(h, w, *args[2:])
        return jnp.sum(out.token_kl + out.token_tv + out.policy_logps)

    for grad in jax.grad(total, (0, 1))(*map(jnp.asarray, args[:2])):
        np.testing.assert_array_equal(grad, 0.0)


def test_token_outside_the_support_is_impossible_on_both_sides() -> None:
    args = operands(0.1)
    support = np.ones((N, V), bool)
    support[2, args[4][2]] = False
    support[5] = False
    out = ops.linear_vocab_divergence(*args, support=np.packbits(support, axis=1, bitorder="little"))
    for logps in (out.policy_logps, out.rollout_logps):
        np.testing.assert_array_equal(np.isneginf(logps), np.isin(np.arange(N), [2, 5]))
    assert np.all(np.isfinite(out.token_kl))
    assert out.token_kl[5] == 0
    assert out.token_tv[5] == 0


FORMS = ["reference", "chunked", pytest.param("pallas_tpu", marks=pytest.mark.slow)]


@pytest.mark.parametrize("implementation", FORMS)
def test_illegal_ids_have_divergences_but_no_log_probs(implementation: str) -> None:
    args = operands(0.1)
    padded = args[4].copy()
    padded[3], padded[7] = -100, V
    options = {"implementation": implementation, "interpret": True}
    out, want = (ops.linear_vocab_divergence(*args[:4], ids, **options) for ids in (padded, args[4]))
    illegal = np.isin(np.arange(N), (3, 7))
    for name in ("policy_logps", "rollout_logps"):
        expected = np.where(illegal, np.nan, getattr(want, name))
        np.testing.assert_allclose(getattr(out, name), expected, rtol=1e-6, err_msg=name)
    for name in ("token_kl", "token_tv", "policy_entropy", "rollout_entropy"):
        # The kernel takes the token's own addend out of its sums and puts it back, exactly to a few roundings.
        np.testing.assert_allclose(getattr(out, name), getattr(want, name), rtol=1e-3, err_msg=name)


@pytest.mark.parametrize("implementation", FORMS)
def test_mass_where_the_rollouts_probability_underflows(implementation: str) -> None:
    """The policy has 0.3 on a token of rollout probability e^-120 / 396, and the rollout's 0.7 times: KL = -ln 0.7.

    Both have one most likely token, of weight 198 beside 198 of weight 1: their logits there are the same.
    """
    rollout = np.zeros((200, 2), np.float32)
    rollout[0] = np.log(198)
    policy = rollout.copy()
    rollout[7], policy[7] = -120.0, np.log(0.3 / 0.7 * 396)
    eye = np.eye(2, dtype=np.float32)
    out = ops.linear_vocab_divergence(
        eye, policy, eye, rollout, np.zeros(2, int), implementation=implementation, interpret=True
    )
    # 1e-4: logits of 120 have 8e-6 of rounding.
    np.testing.assert_allclose(out.token_kl, [-np.log(0.7)] * 2, rtol=1e-4)
    np.testing.assert_allclose(out.token_tv, [0.3] * 2, rtol=1e-4)


def kernel_calls(jaxpr: Any) -> list[Any]:
    """Every Pallas call in a program, those in programs that it calls too."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            found.append(equation)
            continue
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                found += kernel_calls(inner)
    return found


@pytest.mark.parametrize("with_tv", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_sweeps_of_the_kernel_and_the_heads_that_each_reads(with_tv: bool, shared: bool) -> None:
    args = operands(0.1)

    def run(policy_hidden: jax.Array, head: jax.Array, hidden: jax.Array, other: jax.Array) -> VocabDivergence:
        heads = (head, head if shared else other)
        options = {"implementation": "pallas_tpu", "interpret": True, "with_tv": with_tv}
        out = ops.linear_vocab_divergence(policy_hidden, heads[0], hidden, heads[1], args[4], **options)
        assert (out.token_tv is None) is not with_tv
        return out

    calls = kernel_calls(jax.make_jaxpr(run)(args[0], args[1], args[2], args[3]).jaxpr)
    assert len(calls) == (2 if with_tv else 1)  # the total variation needs the normalisers first
    for call in calls:
        heads = [x for x in call.invars if sorted(x.aval.shape) == [D, V]]
        assert len(heads) == (1 if shared else 2)


def test_nan_stays_in_its_row() -> None:
    args = operands(0.1)
    args[0][4] = np.nan
    out = ops.linear_vocab_divergence(*args, chunk_size=8)
    np.testing.assert_array_equal(np.isnan(out.token_kl), np.arange(N) == 4)
