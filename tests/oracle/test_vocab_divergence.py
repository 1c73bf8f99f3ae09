"""`vocab_divergence` against loops over the vocabulary in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import divergences

from .batches import SCALES, close
from .reference import divergences as oracle

FIELDS = oracle.Vocab._fields


def logits(seed: int, scale: float, rows: int = 12, vocabulary: int = 40):
    rng = np.random.default_rng(seed)
    rollout = rng.normal(size=(rows, vocabulary)) * 3
    policy = rollout + scale * rng.normal(size=rollout.shape)
    return policy.astype(np.float32), rollout.astype(np.float32), rng.integers(0, vocabulary, rows)


def place(*rows):
    """Short rows of logits in an array of the usual shape: -inf beyond them, and rows of one token to fill up."""
    out = np.full((12, 40), -np.inf, np.float32)
    out[:, 0] = 0.0
    for i, values in enumerate(rows):
        out[i, : len(values)] = values
    return out


def compare(got, policy, rollout, tokens, temperature, *, relative, absolute=0.0):
    expected = [oracle.vocab(a, b, y, temperature) for a, b, y in zip(policy, rollout, tokens, strict=True)]
    for name, column in zip(FIELDS, np.array(expected).T, strict=True):
        close(getattr(got, name), column, relative=relative, absolute=absolute)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_every_field(scale, temperature):
    """1% of a KL of 1e-9, where the logits of the two sides agree to four digits and the temperature rounds them once
    more; a difference of float32 log-softmaxes would be off by 1e-7 absolute. 0.1% elsewhere."""
    policy, rollout, tokens = logits(5, scale)
    got = divergences.vocab_divergence(policy, rollout, tokens, temperature=temperature)
    compare(got, policy, rollout, tokens, temperature, relative=1e-2 if scale < 1e-3 else 1e-3, absolute=1e-12)


@pytest.mark.parametrize("shift", [0.0, 40.0])
def test_large_vocabulary_keeps_one_percent(shift):
    """Section 1: a KL near 1e-7 over V = 150k keeps 1%; the level of the logits does not matter."""
    policy, rollout, tokens = logits(6, 4.5e-4, rows=2, vocabulary=150_000)
    policy = policy + np.float32(shift)
    got = divergences.vocab_divergence(policy, rollout, tokens)
    with np.errstate(over="ignore"):
        d = [x.astype(float) - np.log(np.exp(x.astype(float)).sum(-1, keepdims=True)) for x in (policy, rollout)]
    kl = (np.exp(d[1]) * (np.expm1(d[0] - d[1]) - (d[0] - d[1]))).sum(-1)
    assert (kl < 2e-7).all() or shift  # adding 40 rounds the logits to 4e-6: another pair, of about the same KL
    close(got.token_kl, kl, relative=1e-2)
    close(got.token_tv, 0.5 * np.abs(np.exp(d[0]) - np.exp(d[1])).sum(-1), relative=1e-2)


def test_supports_of_either_side():
    """Top-k supports as -inf: policy mass outside the rollout support leaves the KL finite, the reverse does not."""
    policy, rollout, tokens = logits(7, 0.5)
    tokens = np.argmax(rollout, -1)
    narrow = np.where(rollout < np.sort(rollout, -1)[:, -6:-5], -np.inf, rollout)
    got = divergences.vocab_divergence(policy, narrow, tokens)
    compare(got, policy, narrow, tokens, 1.0, relative=1e-5, absolute=1e-7)
    assert np.isfinite(got.token_kl).all()
    inside = np.where(np.isinf(narrow), -np.inf, policy)
    compare(
        divergences.vocab_divergence(inside, narrow, tokens), inside, narrow, tokens, 1.0, relative=1e-5, absolute=1e-7
    )
    reverse = divergences.vocab_divergence(narrow, rollout, tokens)
    assert np.isposinf(reverse.token_kl).all()
    assert (np.asarray(reverse.token_tv) <= 1).all()
    compare(reverse, narrow, rollout, tokens, 1.0, relative=1e-5, absolute=1e-7)


def test_disjoint_supports():
    """No common token: TV is 1, KL is infinite, the sampled token has no policy probability."""
    policy, rollout = place([0, 0, -np.inf, -np.inf]), place([-np.inf, -np.inf, 0, 0])
    got = divergences.vocab_divergence(policy, rollout, np.array([2] + [0] * 11))
    close(got.token_tv[0], 1.0, relative=1e-6)
    assert np.isposinf(got.token_kl[0])
    assert np.isneginf(got.policy_logps[0])
    close(got.rollout_logps[0], np.log(0.5), relative=1e-6)
    close([got.policy_entropy[0], got.rollout_entropy[0]], [np.log(2.0)] * 2, relative=1e-6)


def test_temperature_divides_the_logits():
    """Logits (2, 0) at temperature .5 are (4, 0): p = 1/(1 + e^-4) = .98201."""
    got = divergences.vocab_divergence(place([2, 0]), place([0, 0]), np.zeros(12, int), temperature=0.5)
    close(np.exp(got.policy_logps[0]), 0.98201, relative=1e-5)
    close(got.token_kl[0], np.log(0.5) - 0.5 * (np.log(0.98201379) + np.log(0.01798621)), relative=1e-5)


@pytest.mark.parametrize("policy_dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_logits_do_not_lower_the_precision_of_the_sums(policy_dtype):
    """Whatever dtype the logits have, the numbers are those of their values."""
    policy, rollout, tokens = logits(8, 0.3)
    low = [jnp.asarray(x, policy_dtype) for x in (policy, rollout)]
    got = divergences.vocab_divergence(*low, tokens)
    compare(got, *[np.asarray(x.astype(jnp.float32)) for x in low], tokens, 1.0, relative=1e-3)


def test_gradient_of_the_kl():
    """d KL(q || p) / d z_policy = p - q; of TV: half of sum_v sign(p - q) p (1[v = j] - p_j)."""
    policy, rollout, tokens = logits(9, 0.7)
    p, q = [np.exp(np.array([oracle.log_softmax(row, 1.0) for row in z])) for z in (policy, rollout)]

    def totals(z):
        out = divergences.vocab_divergence(z, rollout, tokens)
        return jnp.stack([out.token_kl.sum(), out.token_tv.sum(), out.policy_logps.sum()])

    of_kl, of_tv, of_logps = jax.jit(jax.jacrev(totals))(policy)
    close(of_kl, p - q, relative=1e-4, absolute=1e-6)
    sign = np.sign(p - q)
    tv = 0.5 * (sign * p - p * (sign * p).sum(-1, keepdims=True))
    close(of_tv, tv, relative=1e-4, absolute=1e-6)
    one_hot = np.eye(40)[tokens]
    close(of_logps, one_hot - p, relative=1e-4, absolute=1e-6)
