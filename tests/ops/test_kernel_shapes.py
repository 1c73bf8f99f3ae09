"""Kernels behind the public operators, in the interpreter: every class of shape, values and gradients in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import ops

KERNEL: dict[str, bool | str] = {"implementation": "pallas_tpu", "interpret": True}
# N, D, V: a block has 128 tokens and 128 rows of the head, and 256 rows of it are gathered at a time; a width of 768 is
# read in pieces of 256.
SHAPES = [
    (300, 5, 260),
    *(
        pytest.param(shape, marks=pytest.mark.slow)
        for shape in ((1, 3, 7), (300, 3, 7), (9, 768, 140), (2, 3, 32_001), (1, 4, 49_152), (3, 2, 151_936))
    ),
]


def operands(shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Hidden states of two policies, a head, and tokens, the last of them the vocabulary's last; logits about 2."""
    n, d, v = shape
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(n, d)), 2.0 / np.sqrt(d) * rng.normal(size=(v, d))
    other = hidden + 0.05 * rng.normal(size=(n, d))
    tokens = rng.integers(0, v, n)
    tokens[-1] = v - 1
    return *(x.astype(np.float32) for x in (hidden, other, head)), tokens


def log_softmax(hidden: np.ndarray, head: np.ndarray) -> np.ndarray:
    z = hidden.astype(float) @ head.astype(float).T
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_logps_and_gradients(shape: tuple[int, int, int]) -> None:
    hidden, _, head, tokens = operands(shape)
    n, rows = shape[0], np.arange(shape[0])
    cotangents = np.random.default_rng(1).normal(size=(3, n)).astype(np.float32)

    def total(h: jax.Array, w: jax.Array) -> tuple[jax.Array, ops.LinearLogps]:
        out = ops.linear_logps(h, w, tokens, **KERNEL)
        return sum(jnp.sum(x * c) for x, c in zip(out, cotangents, strict=True)), out

    (_, out), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, head)
    log_p = log_softmax(hidden, head)
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(-1)
    # 1e-5: logits of size 10 carry 1e-6 from their float32 product, and sums of V terms little more.
    np.testing.assert_allclose(out.logps, log_p[rows, tokens], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out.entropy, entropy, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        out.logsumexp, (hidden.astype(float) * head[tokens]).sum(-1) - log_p[rows, tokens], rtol=1e-5, atol=1e-5
    )
    a, b, c = (x[:, None].astype(float) for x in cotangents)
    dz = (b - a) * p - c * p * (log_p + entropy[:, None])
    dz[rows, tokens] += a[:, 0]
    for got, want in zip(gradients, (dz @ head, dz.T @ hidden), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("shape", SHAPES)
def test_divergence(shape: tuple[int, int, int]) -> None:
    """Of 300 tokens two have ids that are none: their divergences are those of any other."""
    hidden, other, head, tokens = operands(shape)
    rows = np.arange(shape[0])
    run = functools.partial(ops.linear_vocab_divergence, **KERNEL)
    given = tokens.copy()
    illegal = np.isin(rows, (1, 290)) if shape[0] == 300 else rows < 0
    given[illegal] = np.array([-100, shape[2]])[: illegal.sum()]
    out = jax.jit(run)(other, head, hidden, head, given)
    log_p, log_q = log_softmax(other, head), log_softmax(hidden, head)
    p, q = np.exp(log_p), np.exp(log_q)
    # The kernel's series of close policies is exact to 6e-4; float32 products move logits by 1e-6, which a KL of 1e-3
    # sees to first order in its square root, 2e-4.
    np.testing.assert_allclose(out.token_kl, (q * (log_q - log_p)).sum(-1), rtol=8e-4, atol=1e-7)
    np.testing.assert_allclose(out.token_tv, 0.5 * np.abs(p - q).sum(-1), rtol=2e-4, atol=1e-6)
    for side, log in (("policy", log_p), ("rollout", log_q)):
        want = np.where(illegal, np.nan, log[rows, tokens])
        np.testing.assert_allclose(getattr(out, f"{side}_logps"), want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(getattr(out, f"{side}_entropy"), -(np.exp(log) * log).sum(-1), rtol=1e-5, atol=1e-5)
