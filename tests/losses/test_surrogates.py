"""Each loss by hand and against a float64 loop, its gradient, its denominators, its edges."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import losses
from trm_jax.types import LossTotal

B, T = 5, 7
ONE = np.ones((1, 1), bool)


def batch(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    proximal = -rng.gamma(1.0, 1.0, (B, T)) - 0.5
    mask = rng.random((B, T)) < 0.8
    mask[:, 0] = True
    return {
        "policy": proximal + 0.4 * rng.normal(size=(B, T)),
        "proximal": proximal,
        "advantages": rng.normal(size=B),
        "mask": mask,
        "weights": rng.gamma(2.0, 0.5, (B, T)) * (rng.random((B, T)) < 0.9),
        "sequence_keep": np.array([True, False, True, True, True]),
        "token_keep": rng.random((B, T)) < 0.9,
    }


def token_loss(name: str, r: float, a: float, policy: float, proximal: float) -> float:
    if name == "clipped_surrogate":
        return max(-a * r, -a * min(max(r, 0.8), 1.28))
    if name == "dual":
        loss = max(-a * r, -a * min(max(r, 0.8), 1.28))
        return min(loss, -a * 1.2) if a < 0 else loss
    if name == "cispo":
        return -min(max(r, 0.7), 1.1) * a * policy
    if name == "masked_surrogate":
        return -a * r
    assert name == "dppo"
    away = r > 1 if a > 0 else r < 1
    return 0.0 if away and abs(math.exp(policy) - math.exp(proximal)) > 0.05 else -a * r


CALLS = {
    "clipped_surrogate": lambda p, q, a, m, **k: losses.clipped_surrogate(p, q, a, m, **k),
    "dual": lambda p, q, a, m, **k: losses.clipped_surrogate(p, q, a, m, dual_clip=1.2, **k),
    "cispo": lambda p, q, a, m, **k: losses.cispo(p, q, a, m, clip_low=0.3, clip_high=0.1, **k),
    "dppo": lambda p, q, a, m, **k: losses.dppo(p, q, a, m, threshold=0.05, **k),
    "masked_surrogate": lambda p, q, a, m, **k: losses.masked_surrogate(p, q, a, m, k.pop("sequence_keep"), **k),
}


def expected_total(name: str, d: dict[str, Any], aggregation: str, denominator: str) -> tuple[float, float]:
    """A loop over sequences and tokens in float64."""
    total, tokens, sequences = 0.0, 0, 0
    for b in range(B):
        original = d["mask"][b]
        active = original & d["token_keep"][b] & d["sequence_keep"][b] & (d["weights"][b] != 0)
        counted = original if denominator == "original" else active
        row = sum(
            d["weights"][b, t]
            * token_loss(name, math.exp(d["policy"][b, t] - d["proximal"][b, t]), d["advantages"][b],
                         d["policy"][b, t], d["proximal"][b, t])
            for t in np.flatnonzero(active)
        )  # fmt: skip
        total += row / max(counted.sum(), 1) if aggregation == "sequence_mean" else row
        tokens += counted.sum()
        sequences += counted.any()
    return total, {"token_mean": tokens, "sequence_mean": sequences, "constant_length": sequences * 20}[aggregation]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
@pytest.mark.parametrize("denominator", ["original", "kept"])
def test_against_float64(name: str, aggregation: str, denominator: str) -> None:
    d = batch()
    out = CALLS[name](
        d["policy"],
        d["proximal"],
        d["advantages"],
        d["mask"],
        importance_weights=d["weights"],
        sequence_keep=d["sequence_keep"],
        token_keep=d["token_keep"],
        aggregation=aggregation,
        denominator=denominator,
        constant_length=20,
    )
    total, count = expected_total(name, d, aggregation, denominator)
    np.testing.assert_allclose(out.total, total, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out.denominator, count)
    np.testing.assert_allclose(out.value, total / count, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("advantage", [-1.3, 0.7])
@pytest.mark.parametrize(("clip_low", "clip_high"), [(0.01, 0.02), (0.5, 0.5)])
def test_gspo_against_float64(advantage: float, clip_low: float, clip_high: float) -> None:
    d = batch()
    a = np.full(B, advantage)
    out = losses.gspo(d["policy"], d["proximal"], a, d["mask"], clip_low=clip_low, clip_high=clip_high)
    total = 0.0
    for b in range(B):
        s = math.exp(np.mean((d["policy"] - d["proximal"])[b][d["mask"][b]]))
        total += max(-advantage * s, -advantage * min(max(s, 1 - clip_low), 1 + clip_high))
    np.testing.assert_allclose(out.total, total, rtol=1e-5)
    assert out.denominator == B


def test_gspo_gradient_is_shared_by_the_sequence() -> None:
    # T = 2, log r = .2, 0: s = e^.1; d(-A s)/dlogp_t = -A s / T = e^.1/2 each, for A = -1.
    grad = jax.grad(
        lambda p: losses.gspo(p, jnp.full((1, 2), -1.0), np.array([-1.0]), np.ones((1, 2), bool), clip_high=0.5).value
    )(jnp.array([[-0.8, -1.0]]))
    np.testing.assert_allclose(grad, np.full((1, 2), math.exp(0.1) / 2), rtol=1e-5)


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "slope"),
    [
        (-1.0, 1.5, 1.5, 1.5),  # the open side of PPO: unclipped, gradient -A r
        (-1.0, 0.5, 0.8, 0.0),  # max(.5, .8): clipped, no gradient
        (1.0, 1.5, -1.28, 0.0),
        (1.0, 0.5, -0.5, -0.5),
        (-1.0, 900.0, 900.0, 900.0),  # π_roll = .001, π_θ = .9
        (0.0, 1.5, 0.0, 0.0),
    ],
)
def test_clipping_by_hand(advantage: float, ratio: float, value: float, slope: float) -> None:
    def loss(policy: jax.Array) -> jax.Array:
        return losses.clipped_surrogate(policy, jnp.full((1, 1), -8.0), np.array([advantage]), ONE).value

    got, grad = jax.value_and_grad(loss)(jnp.full((1, 1), -8.0 + math.log(ratio)))
    np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(grad, [[slope]], rtol=1e-5, atol=1e-7)


def test_dual_clip_bounds_the_open_side() -> None:
    def loss(policy: jax.Array) -> LossTotal:
        return losses.clipped_surrogate(policy, jnp.full((1, 1), -8.0), np.array([-1.0]), ONE, dual_clip=3.0)

    policy = jnp.full((1, 1), -8.0 + math.log(900.0))
    assert loss(policy).value == 3.0
    np.testing.assert_array_equal(jax.grad(lambda p: loss(p).value)(policy), 0.0)
    assert loss(policy).aux["clip/dual_fraction"][0] == 1.0


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    # r = 1: value -mean A, gradient -A / tokens, whatever clipping, weights of 1 and masks that keep; to the bit.
    logp = jnp.asarray(-np.random.default_rng(0).gamma(1.0, 1.0, (B, T)), jnp.float32)
    mask, a = np.ones((B, T), bool), np.linspace(-1.0, 1.0, B).astype(np.float32)

    def loss(p: jax.Array, **options: Any) -> jax.Array:
        return losses.clipped_surrogate(p, logp, a, mask, **options).value

    plain = jax.value_and_grad(loss)(logp)
    corrected = jax.value_and_grad(
        lambda p: loss(p, importance_weights=np.ones((B, T)), sequence_keep=np.ones(B, bool), token_keep=mask)
    )(logp)
    for x, y in zip(plain, corrected, strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_allclose(plain[1], np.repeat(-a[:, None], T, 1) / (B * T), rtol=1e-6)


def test_denominator_by_hand() -> None:
    # log ratios [.1, -1.5, .8, -10, .3], band [.5, 2]: k = 1.105, .223, 2.226, 4.5e-5, 1.350 keeps {0, 4}.
    # Unit token loss: sum 1.105 + 1.350 = 2.455; over the two kept 1.2275; over all five 0.491.
    k = np.exp([[0.1, -1.5, 0.8, -10.0, 0.3]])
    weights = np.where((k >= 0.5) & (k <= 2.0), k, 0.0)
    logp, mask, a = np.full((1, 5), -1.0), np.ones((1, 5), bool), np.array([-1.0])
    for denominator, expected in (("kept", 1.2275), ("original", 0.4910)):
        out = losses.clipped_surrogate(logp, logp, a, mask, importance_weights=weights, denominator=denominator)
        np.testing.assert_allclose(out.total, 2.4550, atol=1e-4)
        np.testing.assert_allclose(out.value, expected, atol=1e-4)


def test_masked_surrogate_divides_by_all_sampled_sequences() -> None:
    # Two sequences of ratios (1.5, .5) and (2, 2), A = 1, -1, the second rejected: -(1.5 + .5)/2 = -1.
    policy, rollout = np.log([[1.5, 0.5], [2.0, 2.0]]) - 3, np.full((2, 2), -3.0)
    out = losses.masked_surrogate(
        policy, rollout, np.array([1.0, -1.0]), np.ones((2, 2), bool), np.array([True, False])
    )
    np.testing.assert_allclose(out.value, -1.0, rtol=1e-6)


def test_masks_act_the_same_under_every_aggregation() -> None:
    d = batch()
    for aggregation in ("token_mean", "sequence_mean", "constant_length"):
        options = {"aggregation": aggregation, "constant_length": 20}
        masked = losses.clipped_surrogate(
            d["policy"], d["proximal"], d["advantages"], d["mask"], sequence_keep=d["sequence_keep"], **options
        )
        zeroed = losses.clipped_surrogate(
            d["policy"], d["proximal"], d["advantages"] * d["sequence_keep"], d["mask"], **options
        )
        np.testing.assert_allclose(masked.value, zeroed.value, rtol=1e-6)


def test_advantages_of_tokens() -> None:
    d = batch()
    spread = np.repeat(d["advantages"][:, None], T, axis=1)
    spread[~d["mask"]] = np.nan
    for name in CALLS:
        options = {"sequence_keep": d["sequence_keep"]}
        a = CALLS[name](d["policy"], d["proximal"], d["advantages"], d["mask"], **dict(options))
        b = CALLS[name](d["policy"], d["proximal"], spread, d["mask"], **dict(options))
        np.testing.assert_array_equal(a.total, b.total, err_msg=name)


@pytest.mark.parametrize("name", [*CALLS, "gspo"])
def test_everything_masked_gives_zero(name: str) -> None:
    d = batch()
    call = CALLS.get(name, lambda p, q, a, m, **k: losses.gspo(p, q, a, m, **k))
    for mask, keep in ((np.zeros((B, T), bool), np.ones(B, bool)), (d["mask"], np.zeros(B, bool))):
        for denominator in ("original", "kept"):

            def loss(p: jax.Array, mask: Any = mask, keep: Any = keep, denominator: str = denominator) -> jax.Array:
                return call(p, d["proximal"], d["advantages"], mask, sequence_keep=keep, denominator=denominator).value

            value, grad = jax.value_and_grad(loss)(jnp.asarray(d["policy"], jnp.float32))
            assert value == 0
            np.testing.assert_array_equal(grad, 0.0)


@pytest.mark.parametrize("name", [*CALLS, "gspo"])
def test_rejected_sequences_may_hold_anything(name: str) -> None:
    d = batch()
    call = CALLS.get(name, lambda p, q, a, m, **k: losses.gspo(p, q, a, m, **k))
    dirty = {k: np.array(d[k]) for k in ("policy", "proximal", "advantages")}
    dirty["policy"][1], dirty["proximal"][1], dirty["advantages"][1] = np.nan, -np.inf, np.nan
    values = []
    for source in (d, dirty):

        def loss(p: jax.Array, source: dict[str, Any] = source) -> jax.Array:
            return call(p, source["proximal"], source["advantages"], d["mask"], sequence_keep=d["sequence_keep"]).value

        values.append(jax.value_and_grad(loss)(jnp.asarray(source["policy"], jnp.float32)))
    np.testing.assert_array_equal(values[0][0], values[1][0])
    np.testing.assert_array_equal(values[0][1], values[1][1])


@pytest.mark.parametrize("name", [*CALLS, "gspo"])
def test_nan_at_a_kept_token_is_seen(name: str) -> None:
    d = batch()
    call = CALLS.get(name, lambda p, q, a, m, **k: losses.gspo(p, q, a, m, **k))
    d["policy"][0, 0] = np.nan
    out = call(d["policy"], d["proximal"], d["advantages"], d["mask"], sequence_keep=d["sequence_keep"])
    assert jnp.isnan(out.total)


@pytest.mark.parametrize("name", CALLS)
def test_overflowing_ratios_stay_finite(name: str) -> None:
    policy = jnp.array([[-1.0, -jnp.inf]])
    proximal = jnp.array([[-500.0, -1.0]])
    for a in (1.0, -1.0):

        def loss(p: jax.Array, a: float = a) -> jax.Array:
            return CALLS[name](p, proximal, np.array([a]), np.ones((1, 2), bool), sequence_keep=np.array([True])).value

        value, grad = jax.value_and_grad(loss)(policy)
        assert jnp.isfinite(value)
        assert jnp.all(jnp.isfinite(grad))


def test_constants_carry_no_gradient() -> None:
    d = batch()
    policy, proximal, weights = (jnp.asarray(d[k], jnp.float32) for k in ("policy", "proximal", "weights"))
    a = jnp.asarray(d["advantages"], jnp.float32)

    def loss(q: jax.Array, a: jax.Array, w: jax.Array) -> jax.Array:
        return losses.clipped_surrogate(policy, q, a, d["mask"], importance_weights=w).value

    for grad in jax.grad(loss, (0, 1, 2))(proximal, a, weights):
        np.testing.assert_array_equal(grad, 0.0)


def test_aux_by_hand() -> None:
    # Ratios 1.5, 1, .5 with A = 1: clipped where r > 1.28, one of three; mean ratio 1.
    # k3 = (.5 - ln 1.5) + 0 + (-.5 + ln 2) = .094535 + .193147
    policy = np.log([[1.5, 1.0, 0.5]]) - 3
    out = losses.clipped_surrogate(policy, np.full((1, 3), -3.0), np.array([1.0]), np.ones((1, 3), bool))
    aux = {name: float(total / count) for name, (total, count) in out.aux.items()}
    np.testing.assert_allclose(aux["clip/fraction"], 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(aux["ratio/update_mean"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(aux["max/update_ratio"], 1.5, rtol=1e-6)
    np.testing.assert_allclose(aux["kl/update_k3_mean"], 0.287682 / 3, rtol=1e-5)
    assert aux["tokens/active_fraction"] == 1.0


def test_reference_penalty() -> None:
    # log π_ref/π_θ = ln 2: k3 = 2 - 1 - ln 2 = .306853; β = .1, loss -1 + .0306853; gradient β(1 - 2) - 1 = -1.1
    def loss(policy: jax.Array) -> LossTotal:
        reference = jnp.full((1, 1), -1.0 + math.log(2.0))
        return losses.clipped_surrogate(
            policy, jnp.full((1, 1), -1.0), np.array([1.0]), ONE, reference_logps=reference, reference_coef=0.1
        )

    out = loss(jnp.full((1, 1), -1.0))
    np.testing.assert_allclose(out.value, -1 + 0.0306853, rtol=1e-6)
    np.testing.assert_allclose(out.aux["kl/reference_k3_mean"][0], 0.306853, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda p: loss(p).value)(jnp.full((1, 1), -1.0)), [[-1.1]], rtol=1e-6)


def test_dppo_with_a_given_divergence() -> None:
    # A = 1. Token 0: r > 1, far: masked. Token 1: r < 1, far, moves back: kept. Token 2: r > 1, near: kept.
    # Token 3: r > 1, unknown divergence: masked.
    policy, proximal = np.log([[1.5, 0.5, 1.2, 1.1]]) - 3, np.full((1, 4), -3.0)
    out = losses.dppo(
        policy,
        proximal,
        np.array([1.0]),
        np.ones((1, 4), bool),
        threshold=0.1,
        token_divergence=np.array([[0.3, 0.3, 0.05, np.nan]]),
    )
    np.testing.assert_allclose(out.total, -(0.5 + 1.2), rtol=1e-6)
    assert out.aux["clip/fraction"][0] == 2.0
    assert out.denominator == 4.0


def test_packed_rows_have_their_own_lengths() -> None:
    # Segments of 1 and 3 tokens, unit loss: sequence_mean 1 each over 2 sequences; constant_length 4 / (2·5).
    logp, mask = np.full((1, 5), -1.0), np.array([[True] * 4 + [False]])
    segments = np.array([[3, 8, 8, 8, 8]])
    a = np.array([-1.0])
    out = losses.clipped_surrogate(logp, logp, a, mask, aggregation="sequence_mean", segment_ids=segments)
    assert (out.total, out.denominator) == (2.0, 2.0)
    out = losses.clipped_surrogate(logp, logp, a, mask, aggregation="constant_length", segment_ids=segments)
    assert (out.total, out.denominator) == (4.0, 10.0)
    keep = np.array([[True, False, False, False, False]])
    out = losses.clipped_surrogate(logp, logp, a, mask, sequence_keep=keep, denominator="kept", segment_ids=segments)
    assert (out.total, out.denominator) == (1.0, 1.0)


@pytest.mark.usefixtures("without_run_time_types")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 1.5}, "clip_low must lie in"),
        ({"clip_high": -0.1}, "clip_high must lie in"),
        ({"dual_clip": 1.0}, "dual_clip must lie in"),
        ({"constant_length": 0}, "constant_length must lie in"),
        ({"reference_coef": 0.1}, "reference_logps missing"),
        ({"reference_logps": np.zeros((B, T))}, "reference_logps given"),
        ({"sequence_keep": np.ones(B + 1, bool)}, "sequence_keep"),
        ({"advantages": np.zeros(B + 1)}, "advantages must be"),
        ({"importance_weights": np.zeros((B, T + 1))}, "importance_weights"),
        ({"aggregation": "mean"}, "aggregation"),
        ({"denominator": "all"}, "denominator"),
    ],
)
def test_refused_inputs(options: dict[str, Any], message: str) -> None:
    d = batch()
    given = {
        "policy_logps": d["policy"],
        "proximal_logps": d["proximal"],
        "advantages": d["advantages"],
        "response_mask": d["mask"],
    } | options
    with pytest.raises(ValueError, match=message):
        losses.clipped_surrogate(**given)


def test_dppo_masks_no_token_without_an_advantage() -> None:
    """Far below its anchor, with A = 0: nothing would move, so nothing is masked; with A < 0 it is."""
    logp, logq, mask = np.log([[0.1, 0.9]]), np.log([[0.9, 0.1]]), np.ones((1, 2), bool)
    for advantage, masked in ((0.0, 0), (-1.0, 1), (1.0, 1)):
        loss = losses.dppo(logp, logq, np.array([advantage]), mask, threshold=0.2)
        assert float(loss.aux["clip/fraction"][0]) == masked
