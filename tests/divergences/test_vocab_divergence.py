"""Full-vocabulary KL, TV, entropies and log-probs from logits, against float64 numpy."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trm_jax import divergences
from trm_jax.types import VocabDivergence


def oracle(policy_logits: np.ndarray, rollout_logits: np.ndarray) -> dict[str, np.ndarray]:
    """Sums of non-negative terms in float64; -inf logits allowed."""

    def log_softmax(z: np.ndarray) -> np.ndarray:
        shifted = z - z.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    logp, logq = log_softmax(policy_logits.astype(float)), log_softmax(rollout_logits.astype(float))
    p, q = np.exp(logp), np.exp(logq)
    with np.errstate(invalid="ignore", divide="ignore"):
        d = logp - logq
        series = q * (d**2 / 2 + d**3 / 6 + d**4 / 24 + d**5 / 120)
        exact = np.where(np.isneginf(logp), np.inf, (p - q) - q * d)
        terms = np.where(q > 0, np.where(np.abs(d) < 1e-2, series, exact), p)
        entropies = [-np.sum(np.where(x > 0, x * lx, 0.0), -1) for x, lx in ((p, logp), (q, logq))]
    return {
        "kl": terms.sum(-1),
        "tv": 0.5 * np.abs(p - q).sum(-1),
        "policy_entropy": entropies[0],
        "rollout_entropy": entropies[1],
        "logp": logp,
        "logq": logq,
    }


def pair(scale: float, shift: float, seed: int = 0, rows: int = 40, vocabulary: int = 500) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    rollout = (scale * rng.normal(size=(rows, vocabulary))).astype(np.float32)
    policy = rollout + (shift * rng.normal(size=rollout.shape)).astype(np.float32)
    q = np.exp(rollout - rollout.max(-1, keepdims=True))
    tokens = np.array([rng.choice(vocabulary, p=row / row.sum()) for row in q.astype(float)])
    return policy, rollout, tokens


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("shift", [1e-3, 1e-2, 0.1, 1.0, 5.0])
def test_against_float64(scale: float, shift: float) -> None:
    policy, rollout, tokens = pair(scale, shift)
    out = divergences.vocab_divergence(policy, rollout, tokens)
    expected = oracle(policy, rollout)
    # Measured below 6e-6 (KL) and 5e-5 (TV); the margin is for other exponentials than this CPU's.
    np.testing.assert_allclose(out.token_kl, expected["kl"], rtol=5e-5)
    np.testing.assert_allclose(out.token_tv, expected["tv"], rtol=3e-4)
    np.testing.assert_allclose(out.policy_entropy, expected["policy_entropy"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out.rollout_entropy, expected["rollout_entropy"], rtol=1e-5, atol=1e-5)
    rows = np.arange(len(tokens))
    np.testing.assert_allclose(out.policy_logps, expected["logp"][rows, tokens], rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(out.rollout_logps, expected["logq"][rows, tokens], rtol=1e-5, atol=2e-6)


VOCABULARY = 151_936  # of Qwen; summing q (log q - log p) in float32 is off by more than the smallest values here


def large_logits(family: str, rng: np.random.Generator) -> np.ndarray:
    z = rng.normal(size=VOCABULARY)  # flat: 11.4 nats
    if family == "near_deterministic":
        z[1234] = 19.5  # all but about 1e-3
    elif family in ("peaked", "constant_offset"):
        z = 12 - 2.2 * np.log(1 + rng.permutation(VOCABULARY)) + 0.5 * z  # 1.7 nats
    return z


@pytest.mark.parametrize("family", ["peaked", "flat", "near_deterministic", "constant_offset"])
def test_small_divergences_of_a_large_vocabulary(family: str) -> None:
    rng = np.random.default_rng(7)
    rollout = large_logits(family, rng)
    q = np.exp(rollout - rollout.max())
    noise = rng.normal(size=VOCABULARY)
    noise -= q @ noise / q.sum()
    kl = 0.5 * (q @ noise**2 / q.sum())  # of a small step, in the square of the step
    tv = 0.5 * (q @ np.abs(noise) / q.sum())  # in the step
    steps = np.array([np.sqrt(1e-7 / kl), np.sqrt(1e-5 / kl), np.sqrt(1e-3 / kl), 1e-6 / tv])
    offset = 0.37 if family == "constant_offset" else 0.0
    policy = (rollout + steps[:, None] * noise + offset).astype(np.float32)
    rollouts = np.broadcast_to(rollout.astype(np.float32), policy.shape)
    out, expected = (
        divergences.vocab_divergence(policy, rollouts, np.full(4, int(q.argmax()))),
        oracle(policy, rollouts),
    )

    # Rounded to float32, the logits move by about the last step; the third is not small for near-deterministic rows.
    assert np.all((np.array([0.5e-7, 0.5e-5, 1e-5]) < expected["kl"][:3]) & (expected["kl"][:3] < 0.01))
    assert 0.5e-6 < expected["tv"][3] < 2e-6
    error = np.abs(np.asarray(out.token_kl, float) / expected["kl"] - 1)[:3]
    assert np.all(error <= [1e-2, 1e-3, 1e-3]), error
    np.testing.assert_allclose(out.token_tv, expected["tv"], rtol=1e-3)


def test_identical_logits_give_exactly_zero() -> None:
    policy, _, tokens = pair(5.0, 0.0)
    for dtype in (jnp.float32, jnp.bfloat16):
        logits = jnp.asarray(policy, dtype)
        out = divergences.vocab_divergence(logits, logits, tokens, temperature=0.7)
        np.testing.assert_array_equal(out.token_kl, 0.0)
        np.testing.assert_array_equal(out.token_tv, 0.0)
        np.testing.assert_array_equal(out.policy_logps, out.rollout_logps)


def test_a_constant_offset_changes_nothing() -> None:
    policy, rollout, tokens = pair(3.0, 1e-2)
    expected = oracle(policy, rollout)
    out = divergences.vocab_divergence(policy + np.float32(0.375), rollout, tokens)
    np.testing.assert_allclose(out.token_kl, expected["kl"], rtol=1e-2)  # the offset rounds logits of size 10
    np.testing.assert_allclose(out.token_tv, expected["tv"], rtol=1e-2)


def test_far_apart_policies_by_hand() -> None:
    # q = (1-a, a), p = (b, 1-b) with logits ±20: q ≈ token 0, p ≈ token 1. KL = 40 (1 - 2a) ≈ 40, TV ≈ 1.
    out = divergences.vocab_divergence(jnp.array([-20.0, 20.0]), jnp.array([20.0, -20.0]), jnp.array(0))
    np.testing.assert_allclose(out.token_kl, 40.0, rtol=1e-6)
    np.testing.assert_allclose(out.token_tv, 1.0, rtol=1e-6)
    # 150 nats apart float32 has no probability for the other token; the KL is still right.
    out = divergences.vocab_divergence(jnp.array([-75.0, 75.0]), jnp.array([75.0, -75.0]), jnp.array(0))
    np.testing.assert_allclose(out.token_kl, 150.0, rtol=1e-6)
    np.testing.assert_allclose(out.token_tv, 1.0, rtol=1e-6)


def test_unlikely_rollout_token_that_the_policy_prefers() -> None:
    # One token has q = e^-120, nothing in float32, but dominates the policy; the sampled token is another.
    rollout = np.array([0.0, 0.0, -120.0], np.float32)
    policy = np.array([0.0, 0.0, 5.0], np.float32)
    expected = oracle(policy, rollout)
    out = divergences.vocab_divergence(policy, rollout, jnp.array(0))
    np.testing.assert_allclose(out.token_kl, expected["kl"], rtol=1e-5)
    np.testing.assert_allclose(out.token_tv, expected["tv"], rtol=1e-5)


def test_supports() -> None:
    policy, rollout, tokens = pair(1.0, 0.1, rows=12, vocabulary=20)
    rng = np.random.default_rng(5)
    support = rng.random(rollout.shape) < 0.6
    support[np.arange(12), tokens] = True
    truncated = np.where(support, rollout, -np.inf).astype(np.float32)
    # Both restricted, as when the recorded support is applied on both sides.
    both = np.where(support, policy, -np.inf).astype(np.float32)
    # The rollout alone restricted (a full policy): finite, and the mass outside counts.
    for left in (both, policy):
        expected = oracle(left, truncated)
        out = divergences.vocab_divergence(left, truncated, tokens)
        np.testing.assert_allclose(out.token_kl, expected["kl"], rtol=1e-4)
        np.testing.assert_allclose(out.token_tv, expected["tv"], rtol=1e-4)
        np.testing.assert_allclose(out.rollout_entropy, expected["rollout_entropy"], rtol=1e-5)
    # The policy restricted where the rollout is not: the rollout can sample the impossible.
    out = divergences.vocab_divergence(truncated, rollout, tokens)
    np.testing.assert_array_equal(out.token_kl, np.inf)
    np.testing.assert_allclose(out.token_tv, oracle(truncated, rollout)["tv"], rtol=1e-4)


def test_token_outside_a_support() -> None:
    policy, rollout, tokens = pair(1.0, 0.1, rows=6, vocabulary=20)
    truncated = rollout.copy()
    truncated[np.arange(6), tokens] = -np.inf
    out = divergences.vocab_divergence(policy, truncated, tokens)
    expected = oracle(policy, truncated)
    np.testing.assert_array_equal(out.rollout_logps, -np.inf)
    np.testing.assert_allclose(out.token_kl, expected["kl"], rtol=1e-4)
    np.testing.assert_allclose(out.token_tv, expected["tv"], rtol=1e-4)


def test_temperature_divides_both() -> None:
    policy, rollout, tokens = pair(1.0, 0.3)
    hot = divergences.vocab_divergence(policy, rollout, tokens, temperature=0.5)
    expected = oracle(policy / 0.5, rollout / 0.5)
    np.testing.assert_allclose(hot.token_kl, expected["kl"], rtol=1e-4)
    # Logits [2, 0] at temperature 0.5 are [4, 0]: p = 1/(1 + e^-4) = 0.98201
    out = divergences.vocab_divergence(jnp.array([2.0, 0.0]), jnp.array([2.0, 0.0]), jnp.array(0), temperature=0.5)
    np.testing.assert_allclose(jnp.exp(out.policy_logps), 0.98201, rtol=1e-5)


def test_truncated_sampling_by_hand() -> None:
    # p = [.5, .3, .2], top-p .8 keeps {0, 1}: q = [.625, .375]. Unrestricted ratio .8; restricted on both sides 1.
    logits = jnp.log(jnp.array([0.5, 0.3, 0.2]))
    truncated = logits.at[2].set(-jnp.inf)
    naive = divergences.vocab_divergence(logits, truncated, jnp.array(1))
    np.testing.assert_allclose(jnp.exp(naive.policy_logps - naive.rollout_logps), 0.8, rtol=1e-6)
    np.testing.assert_allclose(naive.token_kl, -np.log(0.8), rtol=1e-5)
    np.testing.assert_allclose(naive.token_tv, 0.2, rtol=1e-5)
    both = divergences.vocab_divergence(truncated, truncated, jnp.array(1))
    assert both.policy_logps == both.rollout_logps
    assert both.token_kl == 0


def test_nearly_deterministic_rows_keep_relative_accuracy() -> None:
    logits = np.array([[0.0, -12.0, -14.0, -13.0]], np.float32)
    expected = oracle(logits, logits)
    out = divergences.vocab_divergence(logits, logits, np.array([0]))
    np.testing.assert_allclose(out.policy_logps, expected["logp"][:, 0], rtol=1e-5)
    np.testing.assert_allclose(out.policy_entropy, expected["policy_entropy"], rtol=1e-5)


@pytest.mark.parametrize("side", ["policy", "rollout"])
def test_nan_stays_in_its_row(side: str) -> None:
    policy, rollout, tokens = pair(1.0, 0.1, rows=3, vocabulary=10)
    (policy if side == "policy" else rollout)[1, 4] = np.nan
    out = divergences.vocab_divergence(policy, rollout, tokens)
    for value in (out.token_kl, out.token_tv):
        np.testing.assert_array_equal(np.isnan(value), [False, True, False])


def test_leading_axes_and_vmap() -> None:
    policy, rollout, tokens = pair(1.0, 0.1, rows=6, vocabulary=30)
    flat = divergences.vocab_divergence(policy, rollout, tokens)
    shaped = divergences.vocab_divergence(policy.reshape(2, 3, 30), rollout.reshape(2, 3, 30), tokens.reshape(2, 3))
    mapped = jax.vmap(divergences.vocab_divergence)(policy, rollout, tokens)
    for a, b, c in zip(*map(jax.tree.leaves, (flat, shaped, mapped)), strict=True):
        np.testing.assert_allclose(b.reshape(-1), a, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(c, a, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("without_run_time_types")
def test_refused_inputs() -> None:
    z = jnp.zeros((2, 3))
    with pytest.raises(ValueError, match="temperature"):
        divergences.vocab_divergence(z, z, jnp.zeros(2, int), temperature=0.0)
    with pytest.raises(ValueError, match=r"must have one shape, given policy_logits \[2, 3\], rollout_logits \[2, 4\]"):
        divergences.vocab_divergence(z, jnp.zeros((2, 4)), jnp.zeros(2, int))
    with pytest.raises(TypeError, match="tokens must be integers, given dtype float32"):
        divergences.vocab_divergence(z, z, jnp.zeros(2))
    with pytest.raises(ValueError, match=r"logits must be \[..., V\], with V at least 1, given \[2, 0\]"):
        divergences.vocab_divergence(z[:, :0], z[:, :0], jnp.zeros(2, int))
    with pytest.raises(ValueError, match=r"tokens must be \[2\]"):
        divergences.vocab_divergence(z, z, jnp.zeros(3, int))


@pytest.mark.parametrize("token", [-1, -100, 3, 1000])
def test_a_token_that_does_not_exist_has_no_log_probs_and_the_row_keeps_its_divergence(token: int) -> None:
    z, other = jnp.array([[0.0, 1.0, 2.0]]), jnp.array([[0.5, 0.0, 2.0]])
    out = divergences.vocab_divergence(z, other, jnp.array([token]))
    want = divergences.vocab_divergence(z, other, jnp.array([2]))
    for name in ("policy_logps", "rollout_logps"):
        assert jnp.isnan(getattr(out, name)[0]), name
    for name in ("token_kl", "token_tv", "policy_entropy", "rollout_entropy"):
        np.testing.assert_array_equal(getattr(out, name), getattr(want, name), err_msg=name)


def test_an_id_outside_the_vocabulary_is_nan_in_any_integer_type() -> None:
    logits = np.zeros((3, 300), np.float32)
    for dtype in (np.int8, np.int16, np.int32):
        out = divergences.vocab_divergence(logits, logits, np.array([1, -3, 100], dtype))
        np.testing.assert_array_equal(np.isnan(out.policy_logps), [False, True, False])


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.uint32, np.int32])
def test_the_token_s_logit_alone_decides_its_log_prob(dtype: type) -> None:
    """Outside: NaN without a slope, as the row's NaN is; of a token that the policy has not, ``-inf``."""
    logits = np.zeros((4, 5), np.float32)
    logits[1, 4], logits[2, 0] = -np.inf, np.nan
    tokens = np.array([2, 4, 3, np.iinfo(dtype).max], dtype)

    def total(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        logps = inspect.unwrap(divergences.vocab_divergence)(z, jnp.zeros_like(z), tokens).policy_logps
        return jnp.sum(jnp.where(np.arange(4) < 2, logps, 0.0)), logps

    slopes, logps = jax.grad(total, has_aux=True)(jnp.asarray(logits))
    np.testing.assert_allclose(logps, [-np.log(5), -np.inf, np.nan, np.nan], rtol=1e-6)
    # 1 - 1/5 of the token, -1/5 of the others; of four tokens alike -1/4 and nothing for the one outside.
    np.testing.assert_allclose(slopes[0], [-0.2, -0.2, 0.8, -0.2, -0.2], rtol=1e-5)
    np.testing.assert_allclose(slopes[1], [-0.25] * 4 + [0.0], rtol=1e-5)
    np.testing.assert_array_equal(slopes[2:], 0.0)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_logits_may_be_sharded_over_the_vocabulary(axis_type: AxisType) -> None:
    """The values and slopes of one device, and no implicit promotion, however the axes are typed."""
    rng = np.random.default_rng(0)
    logits, other = rng.normal(size=(2, 4, 16)).astype(np.float32)
    tokens = np.array([0, 15, 7, -1], np.int16)

    def total(policy: jax.Array, rollout: jax.Array, tokens: jax.Array) -> tuple[jax.Array, VocabDivergence]:
        out = divergences.vocab_divergence(policy, rollout, tokens, temperature=0.7)
        return jnp.sum(jnp.where(tokens >= 0, out.policy_logps, 0.0) + out.token_kl + out.token_tv), out

    run = jax.jit(jax.grad(total, (0, 1), has_aux=True))
    want = run(logits, other, tokens)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(axis_type,) * 2)
    rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec("data", "tensor"))
    with jax.numpy_dtype_promotion("strict"):
        found = run(jax.device_put(logits, whole), jax.device_put(other, whole), jax.device_put(tokens, rows))
    # float32 sums in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, want)


TIED = np.array([3.0, -1.0, 3.0, 0.5, 2.0])
PAIRS = {
    "generic": (np.array([0.3, -1.0, 2.0, 0.5, 1.1]), np.array([0.1, -0.7, 1.5, 0.9, 1.0])),
    "two tops": (TIED, np.array([2.5, -1.2, 3.1, 0.5, 1.0])),
    "one token moved": (TIED + np.array([0, 0, 0, 0.5, 0]), TIED),
    "zeros": (np.zeros(5), np.array([0.4, 0.0, -0.3, 0.2, 0.0])),
    "far apart": (np.array([9.0, -8.0, 0.0, 1.0, 2.0]), np.array([-7.0, 6.0, 0.5, 0.0, 1.0])),
    "a token that neither has": (np.array([0.3, -np.inf, 2.0, 0.5, 1.1]), np.array([0.1, -np.inf, 1.5, 0.9, 1.0])),
    "a token that the policy has": (np.array([0.3, -1.0, 2.0, 0.5, 1.1]), np.array([0.1, -np.inf, 1.5, 0.9, 1.0])),
}


@pytest.mark.parametrize("name", PAIRS)
def test_gradients_are_central_differences(name: str) -> None:
    """In either policy's logits, of every output; ties, equal log-ratios and ``-inf`` change no derivative."""
    temperature, token, step = 0.7, 2, 1e-5
    pair = [z.astype(np.float32).astype(float) for z in PAIRS[name]]

    def values(policy: np.ndarray, rollout: np.ndarray) -> np.ndarray:
        out = oracle(policy[None] / temperature, rollout[None] / temperature)
        names = ("kl", "tv", "policy_entropy", "rollout_entropy")
        return np.array([*(out[name][0] for name in names), out["logp"][0, token], out["logq"][0, token]])

    def outputs(policy: jax.Array, rollout: jax.Array) -> jax.Array:
        out = divergences.vocab_divergence(policy, rollout, jnp.array(token), temperature=temperature)
        entropies = (out.policy_entropy, out.rollout_entropy)
        return jnp.stack([out.token_kl, out.token_tv, *entropies, out.policy_logps, out.rollout_logps])

    jacobians = jax.jacrev(outputs, (0, 1))(*(jnp.asarray(z, jnp.float32) for z in pair))
    for side, jacobian in enumerate(jacobians):
        for v in np.flatnonzero(np.isfinite(pair[side])):
            ends = []
            for sign in (step, -step):
                moved = [z.copy() for z in pair]
                moved[side][v] += sign
                ends.append(values(*moved))
            want = (ends[0] - ends[1]) / (2 * step)
            if name == "one token moved":  # equal tokens are at the kink of |p - q| only together
                want[1] = jacobian[1, v]
            # Float32 softmaxes of logits up to 9: a few roundings of 1e-6 in derivatives of order one.
            np.testing.assert_allclose(jacobian[:, v], want, rtol=1e-4, atol=2e-5, err_msg=f"{side} {v}")
        assert np.all(np.asarray(jacobian)[:, np.isneginf(pair[side])] == 0)


@pytest.mark.parametrize("ban", [-80.0, -100.0, -1e9])
@pytest.mark.parametrize("mass", [1e-5, 1e-3, 0.04, 0.6])
def test_a_token_that_the_rollout_practically_bans_counts_in_full(mass: float, ban: float) -> None:
    """Its rollout probability underflows float32: by hand, TV is its mass and KL ``-log(1 - mass)``."""
    policy = np.log(np.array([[1 - mass, mass]])).astype(np.float32)
    rollout = np.array([[0.0, ban]], np.float32)
    out = divergences.vocab_divergence(policy, rollout, np.array([0]))
    exact = np.exp(policy.astype(float))
    exact /= exact.sum()
    np.testing.assert_allclose(out.token_tv, exact[:, 1], rtol=1e-5)
    np.testing.assert_allclose(out.token_kl, -np.log(exact[:, 0]), rtol=1e-4)


@pytest.mark.parametrize("x64", [False, True])
def test_an_id_beyond_32_bits_is_not_wrapped_around(x64: bool) -> None:
    logits, tokens = np.zeros((3, 5), np.float32), np.array([np.iinfo(np.int64).min, 2**32 + 3, 3])
    with jax.enable_x64(x64):
        for ids in (tokens, jnp.asarray(tokens)) if x64 else (tokens,):  # without x64 JAX has cut them already
            out = divergences.vocab_divergence(logits, logits, ids)
            np.testing.assert_array_equal(np.isnan(out.policy_logps), [True, True, False])


@pytest.mark.usefixtures("without_run_time_types")
def test_an_id_beyond_31_bits_is_no_token_without_the_checks_either() -> None:
    """Cut to int32, the largest of uint32 is -1, which an index counts from the end."""
    logits, ids = jnp.zeros((3, 5)), jnp.array([2**32 - 1, 2**31 + 3, 3], jnp.uint32)
    one = divergences.softmax_statistics(logits, ids)
    both = divergences.logits_divergence(logits, logits, ids, with_tv=False)
    for logps in (one.logps, both.policy_logps, both.rollout_logps):
        np.testing.assert_array_equal(np.isnan(logps), [True, True, False])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokens": None}, TypeError, "tokens must be an array, given None"),
        ({"tokens": 1}, TypeError, r"tokens must be an array of integers, given 1: pass jax\.numpy\.asarray"),
        ({"tokens": [1]}, TypeError, "tokens must be an array, given a list"),
        ({"policy_logits": None}, TypeError, "policy_logits must be an array, given None"),
        ({"rollout_logits": None}, TypeError, "rollout_logits must be an array, given None"),
        ({"temperature": None}, TypeError, "temperature must be a number, given None"),
        ({"temperature": "1"}, TypeError, "temperature must be a number, given '1'"),
        ({"temperature": 1e-9}, ValueError, r"temperature must lie in \[1e-06, inf\), given 1e-09: pass 1\.0"),
        ({"temperature": float("nan")}, ValueError, r"temperature must lie in \[1e-06, inf\), given nan"),
    ],
)
def test_refusals_say_what_was_given(change: dict[str, object], error: type[Exception], message: str) -> None:
    given = {"policy_logits": jnp.zeros(3), "rollout_logits": jnp.zeros(3), "tokens": jnp.array(0)} | change
    with pytest.raises(error, match=message):
        inspect.unwrap(divergences.vocab_divergence)(**given)


def test_a_traced_temperature_is_refused() -> None:
    with pytest.raises(TypeError, match=r"temperature is compiled into the program .*static_argnames of jax\.jit"):
        jax.jit(inspect.unwrap(divergences.vocab_divergence))(jnp.zeros(3), jnp.zeros(3), jnp.array(0), temperature=1.0)


def test_the_lowest_temperature_is_finite() -> None:
    logits = jnp.array([0.0, 1.0, 2e3]), jnp.array([0.0, 2.0, 1e3])
    out = divergences.vocab_divergence(*logits, jnp.array(2), temperature=1e-6)
    np.testing.assert_array_equal(jnp.array([out.policy_logps, out.token_kl, out.token_tv]), 0.0)


def test_a_mask_that_is_finite_takes_a_token_out() -> None:
    """Sums with the lowest finite number overflow: it means what ``-inf`` means, on either side."""
    z = jnp.array([[0.0, 1.0, 2.0, 3.0]])
    masked, absent = (z.at[0, 3].set(value) for value in (jnp.finfo(jnp.float32).min, -jnp.inf))
    for pair, want in ((((z, masked)), (z, absent)), ((masked, z), (absent, z)), ((masked, masked), (absent, absent))):
        got, expected = (divergences.vocab_divergence(*x, jnp.array([1]), temperature=0.5) for x in (pair, want))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)
