"""Shards of the vocabulary, merged: against the whole in float64, where shards are empty, tied, NaN or decisive."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax.divergences import vocab_divergence
from trm_jax.ops._held import divergence_of_rows, softmax_of_rows
from trm_jax.ops._partials import merge_softmax
from trm_jax.ops._support import in_support, shard_support, unpack_support
from trm_jax.types import VocabDivergence

N, V, SHARDS = 12, 60, 4
AXIS = "shards"


def by_shard(logits: np.ndarray) -> jax.Array:
    """``[SHARDS, N, V / SHARDS]``."""
    return jnp.asarray(logits.reshape(len(logits), SHARDS, -1).swapaxes(0, 1))


def local_tokens(tokens: np.ndarray, vocabulary: int = V) -> jax.Array:
    return jnp.asarray(tokens)[None, :] - jnp.arange(SHARDS)[:, None] * (vocabulary // SHARDS)


def merged_softmax(logits: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, ...]:
    """``(logps, logsumexp, entropy)`` through a merge of shards."""

    def one(z: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        whole, logps = merge_softmax(*softmax_of_rows(z, y, 1.0), 1.0, AXIS)
        return logps, whole.logsumexp(1.0), whole.entropy

    out = jax.jit(jax.vmap(one, axis_name=AXIS))(by_shard(logits), local_tokens(tokens))
    for x in out:  # every shard knows the same
        np.testing.assert_array_equal(x, np.broadcast_to(np.asarray(x)[:1], x.shape))
    return tuple(np.asarray(x)[0] for x in out)


def merged_divergence(
    policy: np.ndarray, rollout: np.ndarray, tokens: np.ndarray, *, temperature: float = 1.0, ragged: bool = False
) -> VocabDivergence:
    one = functools.partial(divergence_of_rows, temperature=temperature, ragged=ragged, with_tv=True, axis=AXIS)
    run = jax.jit(jax.vmap(lambda p, r, y: one(p, r, y, None), axis_name=AXIS))
    return jax.tree.map(lambda x: x[0], run(by_shard(policy), by_shard(rollout), local_tokens(tokens, policy.shape[1])))


def test_softmax_against_float64() -> None:
    rng = np.random.default_rng(0)
    logits, tokens = 5 * rng.normal(size=(N, V)).astype(np.float32), rng.integers(0, V, N)
    logits[0, :15] = logits[1, 15:] = -np.inf  # an empty shard; all but one shard empty
    tokens[:2] = (20, 3)
    logits[2, [3, 17, 59]] = 30.0  # the top in three shards
    z = logits.astype(float)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    logps, lse, entropy = merged_softmax(logits, tokens)
    # 1e-6: one float32 rounding of a log-prob of 10 and of a normaliser of 30.
    np.testing.assert_allclose(logps, log_p[np.arange(N), tokens], atol=2e-6)
    np.testing.assert_allclose(lse, np.log(np.exp(z).sum(-1)), rtol=2e-7)
    np.testing.assert_allclose(entropy, -(np.exp(log_p) * np.maximum(log_p, -1e3)).sum(-1), atol=2e-6)


def test_nearly_deterministic_rows_keep_their_digits() -> None:
    # 1 - p = 59 e^-30 = 5.5e-12 is far below the rounding of the normaliser (30 · 6e-8).
    logits = np.zeros((N, V), np.float32)
    tokens = np.arange(N) * 5
    logits[np.arange(N), tokens] = 30.0
    logps, _, entropy = merged_softmax(logits, tokens)
    rest = 59 * np.exp(-30.0)
    np.testing.assert_allclose(logps, -rest, rtol=1e-5)
    np.testing.assert_allclose(entropy, rest * 31, rtol=1e-5)  # Σ p log 1/p = rest · 30 + rest


def test_empty_and_undefined_rows() -> None:
    logits, tokens = np.zeros((N, V), np.float32), np.full(N, 7)
    logits[0] = -np.inf
    logits[1, 40] = np.nan
    logits[2, 7] = -np.inf
    logps, lse, entropy = merged_softmax(logits, tokens)
    assert (logps[0], lse[0], entropy[0]) == (-np.inf, -np.inf, 0.0)
    assert np.isnan([logps[1], lse[1], entropy[1]]).all()
    assert logps[2] == -np.inf
    np.testing.assert_allclose(lse[2], np.log(59), rtol=1e-6)
    np.testing.assert_allclose(logps[3:], -np.log(60), rtol=1e-6)


@pytest.mark.parametrize("distance", [1e-4, 1e-2, 3.0])
def test_divergence_against_the_whole_in_float64(distance: float) -> None:
    rng = np.random.default_rng(1)
    rollout = 3 * rng.normal(size=(N, V)).astype(np.float32)
    policy = rollout + (distance * rng.normal(size=(N, V))).astype(np.float32)
    tokens = rng.integers(0, V, N)
    out = merged_divergence(policy, rollout, tokens, temperature=0.7)
    p, q = (
        np.exp(z / 0.7 - np.log(np.exp(z / 0.7).sum(-1, keepdims=True)))
        for z in (policy.astype(float), rollout.astype(float))
    )
    # 1e-3 of a KL of 1e-9: float32 logits of 10 differ by 1e-4 to within 5e-7, and d is about as accurate.
    np.testing.assert_allclose(out.token_kl, (q * np.log(q / p)).sum(-1), rtol=1e-2 if distance < 1e-3 else 1e-3)
    np.testing.assert_allclose(out.token_tv, 0.5 * np.abs(p - q).sum(-1), rtol=1e-2 if distance < 1e-3 else 1e-3)
    np.testing.assert_allclose(out.policy_logps, np.log(p[np.arange(N), tokens]), atol=5e-6)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_shards_of_policies_an_offset_apart(temperature: float) -> None:
    """Shards count from the top of all, before the temperature: quotients of tops near 40 round by 2e-6, a fifth of
    these gaps."""
    rng = np.random.default_rng(6)
    rollout = rng.normal(size=(N, 40 * V)).astype(np.float32)
    policy = (rollout + 1e-5 * rng.normal(size=rollout.shape) + 40).astype(np.float32)
    out = merged_divergence(policy, rollout, np.arange(N), temperature=temperature)
    z, z_roll = (x.astype(float) / temperature for x in (policy, rollout))
    p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (z, z_roll))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    np.testing.assert_allclose(out.token_tv, 0.5 * np.abs(p - q).sum(-1), rtol=1e-3)
    np.testing.assert_allclose(out.token_kl, (q * np.log1p((q - p) / p)).sum(-1), rtol=1e-3)


def test_identical_policies_are_exactly_zero_apart() -> None:
    rng = np.random.default_rng(2)
    logits = 10 * rng.normal(size=(N, V)).astype(np.float32)
    logits[3, :15] = -np.inf
    for temperature in (1.0, 0.7):
        out = merged_divergence(logits, logits.copy(), rng.integers(0, V, N), temperature=temperature, ragged=True)
        np.testing.assert_array_equal(out.token_kl, 0.0)
        np.testing.assert_array_equal(out.token_tv, 0.0)


def test_supports_that_differ() -> None:
    """Mass that only the policy has, in a shard where the rollout has none; then mass that only the rollout has."""
    rng = np.random.default_rng(3)
    policy = rng.normal(size=(N, V)).astype(np.float32)
    policy[: N // 2, :15] -= 7.0  # a mass of 1e-4, which the difference of two normalisers would lose
    rollout = policy.copy()
    rollout[:, :15] = -np.inf
    tokens = rng.integers(15, V, N)
    out = merged_divergence(policy, rollout, tokens, ragged=True)
    p = np.exp(policy.astype(float))
    inside = p[:, 15:].sum(-1) / p.sum(-1)
    np.testing.assert_allclose(out.token_kl, -np.log(inside), rtol=1e-4)  # the policy renormalised on its last 45
    np.testing.assert_allclose(out.token_tv, 1 - inside, rtol=1e-4)
    reverse = merged_divergence(rollout, policy, tokens, ragged=True)
    np.testing.assert_array_equal(reverse.token_kl, np.inf)
    np.testing.assert_allclose(reverse.token_tv, 1 - inside, rtol=1e-4)


def test_shards_equal_the_formula_on_whole_logits() -> None:
    rng = np.random.default_rng(4)
    policy, rollout = (3 * rng.normal(size=(N, V)).astype(np.float32) for _ in range(2))
    policy[0, 20] = np.nan
    tokens = rng.integers(0, V, N)
    got, want = merged_divergence(policy, rollout, tokens), vocab_divergence(policy, rollout, jnp.asarray(tokens))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # NaN of one policy leaves the other's statistics alone.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("start", [0, 1, 7, 8, 13, 96])
def test_support_of_a_shard(start: int) -> None:
    rng = np.random.default_rng(5)
    support = rng.random((N, 101)) < 0.5
    bits = jnp.asarray(np.packbits(support, axis=1, bitorder="little"))
    width = 17
    got = unpack_support(shard_support(bits, jnp.int32(start), width), width)
    want = np.zeros((N, width), bool)
    want[:, : 101 - start] = support[:, start : start + width]
    np.testing.assert_array_equal(got, want)
    tokens = rng.integers(0, 101, N)
    np.testing.assert_array_equal(in_support(bits, jnp.asarray(tokens)), support[np.arange(N), tokens])
