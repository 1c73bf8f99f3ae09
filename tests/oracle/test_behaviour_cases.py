"""Eighteen situations in which trainers have gone wrong, each with its right values worked out by hand."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import correction, divergences, losses
from trm_jax.types import ScoredBatch

from .batches import GARBAGE, close, first, head, row

CAP = 1 + 2.3 * (1 - math.exp(-2.0))  # of cis at proximal -2: 1 + 2.3 * .864665 = 2.98873
RATIO_LOSSES = [losses.clipped_surrogate, losses.gspo, losses.cispo, losses.dppo]
AGGREGATIONS = ["token_mean", "sequence_mean", "constant_length"]
DENOMINATORS = ["original", "kept"]
WEIGHT_PRESETS = ["none", "exact", "tis", "icepop", "kpop", "seq_tis", "seq_mis", "geo_mis", "cis", "cis_two_sided"]
MASKS = ("trm_max", "trm_avg", "trm_tv", "trm_sample", "ln_trm", "ser", "geometric", "token_outlier")


def surrogate(function, policy, old, mask, advantages=None, **options):
    """Any of the losses; advantages 1 unless given."""
    advantages = np.ones(policy.shape[0], np.float32) if advantages is None else advantages
    if function is losses.masked_surrogate:
        options.setdefault("sequence_keep", np.ones(policy.shape[0], bool))
    return function(policy, old, advantages, mask, **options)


def scored(proximal, rollout, mask, **fields):
    arrays = {k: jnp.asarray(v) for k, v in fields.items()}
    return ScoredBatch(
        proximal_logps=jnp.asarray(proximal),
        rollout_logps=jnp.asarray(rollout),
        response_mask=jnp.asarray(mask),
        **arrays,
    )


def logs(*ratios):
    return row(*np.log(ratios))


@pytest.mark.parametrize(
    ("low", "high", "inside", "outside"), [(0.6, 1.4, 0.65, 1.5), (0.5, 5.0, 0.51, 5.1), (0.9, 3.0, 2.9, 0.35)]
)
def test_case_01_bounds_act_on_the_ratio(low, high, inside, outside):
    """[.6, 1.4] rejects 1.5 (1/1.5 = .667 would pass) and keeps .65 (1/.65 = 1.54 would not); so for tokens, products
    and geometric means. The other bands are not reciprocal either: 1/5.1 = .196, and .35 -> 2.86 would pass [.9, 3]."""
    for ratio, kept in ((inside, True), (outside, False)):
        weight = correction.masked_weights(logs(ratio), head(1), low=low, high=high)
        close(first(weight, 1), [ratio * kept], relative=1e-6)
        product = logs(ratio**0.25, ratio**0.5, ratio**0.25)
        weight = correction.sequence_masked_weights(product, head(3), low=low, cap=high)
        close(first(weight, 3), [ratio * kept] * 3, relative=1e-6)
        mean = logs(ratio * 1.1, ratio / 1.1)
        assert bool(correction.geometric_mask(mean, head(2), low=low, high=high)[0]) is kept
        weight = correction.geometric_masked_weights(mean, head(2), low=low, high=high)
        close(first(weight, 2), [float(kept)] * 2, relative=1e-6)


def test_case_02_group_baseline():
    """Rewards 1, 1, 0, 0, the second rejected. All: mean .5, std (ddof 1) sqrt(1/3) = .57735: +-.866. Kept (1, 0, 0):
    mean 1/3: .667, -.333, -.333; std sqrt((4/9 + 1/9 + 1/9)/2) = .57735: 1.155, -.577, -.577; loo 1, -.5, -.5."""
    rewards, ids = np.float32([1, 1, 0, 0, 0, 0, 0, 0]), np.array([0] * 4 + [1] * 4)
    keep, rows = np.arange(8) != 1, np.array([0, 2, 3])

    def advantages(normalize, scope):
        return losses.group_advantages(rewards, ids, normalize=normalize, scope=scope, sequence_keep=keep)[rows]

    close(advantages("std", "all"), [0.866025, -0.866025, -0.866025], relative=1e-5)
    close(advantages("none", "all"), [0.5, -0.5, -0.5], relative=1e-6)
    close(advantages("loo", "all"), [2 / 3, -2 / 3, -2 / 3], relative=1e-6)
    close(advantages("std", "kept"), [1.154701, -0.577350, -0.577350], relative=1e-5)
    close(advantages("none", "kept"), [2 / 3, -1 / 3, -1 / 3], relative=1e-6)
    close(advantages("loo", "kept"), [1.0, -0.5, -0.5], relative=1e-6)
    full = losses.group_advantages(rewards, ids, sequence_keep=keep)[:6]
    old = np.full((6, 7), -1.0, np.float32)
    mask = np.zeros((6, 7), bool)
    mask[:4, :2] = True
    gradient = jax.grad(lambda p: losses.clipped_surrogate(p, old, full, mask, sequence_keep=keep[:6]).value)(old)
    assert not np.asarray(gradient)[1].any(), "the rejected row contributes nothing"
    close(gradient[rows, 0], [-0.866025 / 8, 0.866025 / 8, 0.866025 / 8], relative=1e-5)


@pytest.mark.parametrize("rollout", [-90.0, -91.0, -92.0, -200.0, -1e4, -np.inf])
def test_case_03_overflow(rollout):
    """Proximal -2, log ratio 88 and more: e^89 = 4.5e38 is no float32. tis 2, cis 2.98873; at a masked slot nothing."""
    proximal, behind = row(-2.0, -2.0), row(-2.0, rollout)
    for count, tis, cis in ((1, [1, 0], [1, 0]), (2, [1, 2], [1, CAP])):
        close(first(correction.truncated_weights(proximal - behind, head(count)), 2), tis, relative=1e-6)
        close(first(correction.calibrated_weights(proximal, behind, head(count)), 2), cis, relative=1e-6)
    for function in [*RATIO_LOSSES, losses.masked_surrogate]:
        value, gradient = jax.value_and_grad(lambda p, f=function: surrogate(f, p, behind, head(1)).value)(proximal)
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(np.asarray(gradient) != 0, head(1))
        assert float(surrogate(function, proximal, behind, head(0)).value) == 0.0


@pytest.mark.parametrize("function", [*RATIO_LOSSES, losses.masked_surrogate])
def test_case_04_garbage_at_masked_slots_reaches_no_gradient(function):
    """Log-probs -1 and -1.1 at the valid slots; NaN, infinities and -1e9 at the masked ones, on each side in turn."""
    mask = np.zeros((6, 7), bool)
    mask[0, [0, 6]] = True
    garbage = np.resize(GARBAGE, (6, 7)).astype(np.float32)
    clean = [np.full(mask.shape, x, np.float32) for x in (-1.0, -1.1)]
    expected = jax.grad(lambda p: surrogate(function, p, clean[1], mask).value)(clean[0])
    for dirty in ([True, False], [False, True], [True, True]):
        policy, old = [np.where(mask, x, garbage) if d else x for x, d in zip(clean, dirty, strict=True)]
        gradient = np.asarray(jax.grad(lambda p, old=old: surrogate(function, p, old, mask).value)(policy))
        assert not gradient[~mask].any()
        close(gradient, expected, relative=1e-6)


@pytest.mark.parametrize(("proximal", "rollout"), [(0.0, 0.0), (-1e-7, 0.0), (0.0, -1e-7), (-6e-8, 0.0)])
def test_case_05_saturation(proximal, rollout):
    """p = q = 1: KL 0, weight 1. 1 - p = 1e-7 against q = 1, where 1 - q is known to be below 6e-8: tiny and kept."""
    pair = (row(proximal), row(rollout))
    for p, q in (pair, pair[::-1]):
        kl = first(divergences.binary_kl(p, q), 1)[0]
        assert 0 <= kl < 1e-5
        assert kl == 0 or proximal != rollout
        close(first(divergences.binary_tv(p, q), 1), [abs(proximal - rollout)], relative=1e-2)
    assert first(correction.bernoulli_kl_weights(*pair, head(1)), 1) == [pytest.approx(1.0, rel=1e-6)]


@pytest.mark.parametrize("proximal", [-0.7, -2.0])
def test_case_05_saturation_still_sees_a_large_difference(proximal):
    """q = 1 within rounding but p = .5: (1-p) log((1-p)/(1-q)) >= .5 log(.5/6e-8) - .35 = 7.6 > 2, so KPop drops it."""
    pair = (row(proximal), row(0.0))
    assert first(divergences.binary_kl(*pair), 1)[0] > 2
    assert first(correction.bernoulli_kl_weights(*pair, head(1)), 1) == [0.0]


def cis(proximal, rollout, **options):
    count = len(proximal)
    return first(correction.calibrated_weights(row(*proximal), row(*rollout), head(count), **options), count)


def test_case_06_cis_edges():
    """k = 1 is never cut. p = 1, k = e^.5 = 1.6487: cap 1 + 2.3 * .005 = 1.0115. lambda = 0: min(k, 1)."""
    assert cis([np.log(0.5)], [np.log(0.5)]) == [1.0]
    close(cis([0.0], [-0.5]), [1.0115], relative=1e-6)
    proximal, rollout = [-0.1, -1.0, -3.0, -0.5], [-0.2, -0.8, -4.0, -0.5]
    close(cis(proximal, rollout, cis_lambda=0.0), [1.0, np.exp(-0.2), 1.0, 1.0], relative=1e-6)
    p = np.log([0.01, 0.2, 0.5, 0.8, 0.9, 0.99, 0.994])  # until 1 - p reaches the floor
    assert (np.diff(cis(p, [-90.0] * 7)) < 0).all()
    close(cis(p - 0.05, p), [np.exp(-0.05)] * 7, relative=2e-6)


def test_case_07_bfloat16_saturation():
    """log p = -.001: 1 - p = 9.995e-4. In bfloat16 the log itself is -131/131072 = -.00099945, so 1 - p = 9.98953e-4,
    while e^-.00099945 would round to 1 there."""
    for dtype, expected in ((jnp.float32, 9.995002e-4), (jnp.bfloat16, 9.989529e-4)):
        logp, zero, far = [jnp.asarray(row(x), dtype) for x in (-0.001, 0.0, -8.0)]
        close(first(divergences.binary_tv(logp, zero), 1), [expected], relative=1e-5)
        cap = correction.calibrated_weights(logp, far, head(1), cis_kappa=0.0)
        close(first(cap, 1), [1 + 2.3 * expected], relative=1e-7)
        displacement = divergences.log_odds_displacement(logp, jnp.asarray(row(np.log(0.5))))
        close(first(displacement, 1), [math.log((1 - expected) / expected)], relative=1e-5)


def test_case_08_temperature():
    """Logits (2, 0) at temperature .5: p = 1/(1 + e^-4) = .98201, not 1/(1 + e^-2) = .8808; their ratio is 1.115."""
    logits = np.float32([[2, 0]])
    cold = divergences.vocab_divergence(logits, logits, np.array([0]), temperature=0.5)
    raw = divergences.vocab_divergence(logits, logits, np.array([0]))
    close(np.exp(cold.policy_logps), [0.982014], relative=1e-5)
    close(cold.rollout_logps, cold.policy_logps, relative=0)
    close(np.exp(cold.policy_logps - raw.rollout_logps), [1.114915], relative=1e-5)
    for refused in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature"):
            divergences.vocab_divergence(logits, logits, np.array([0]), temperature=refused)


def test_case_09_truncated_sampling():
    """p = (.5, .3, .2), top-p .8: the engine renormalises over {0, 1}: .625, .375. Naive ratio .5/.625 = .8 on both
    tokens; with the support as -inf on both sides the ratio is 1 and the KL 0."""
    full, tokens = np.log(np.float32([[0.5, 0.3, 0.2]] * 2)), np.array([0, 1])
    support = np.where([True, True, False], full, -np.inf).astype(np.float32)
    naive = divergences.vocab_divergence(full, support, tokens)
    close(np.exp(naive.policy_logps - naive.rollout_logps), [0.8, 0.8], relative=1e-6)
    close(naive.token_kl, [-math.log(0.8)] * 2, relative=1e-5)
    close(naive.token_tv, [0.2] * 2, relative=1e-5)
    both = divergences.vocab_divergence(support, support, tokens)
    close(np.exp(both.policy_logps - both.rollout_logps), [1.0, 1.0], relative=0)
    close(both.token_kl, [0.0, 0.0], relative=0)


def test_case_10_length():
    """Mean log ratio -.001: the product is e^(-length/1000) = .990, .905, .368, .00034, the geometric mean .999 always;
    the per-token averages decide alike at every length."""
    lengths = np.array([10, 100, 1000, 8000])
    x, mask = np.full((4, 8000), -0.001, np.float32), np.arange(8000) < lengths[:, None]
    # A float32 near 8, and 8,000 times that of .001: each up to 5e-7 away. One by one, 8,000 additions are off by 4e-4.
    for packed in ({}, {"segment_ids": np.zeros(x.shape, np.int32)}):
        weights = correction.sequence_truncated_weights(x, mask, **packed)[:, 0]
        close(weights, np.exp(-lengths / 1000), relative=1e-6)

    def alike(function, kept, **options):
        np.testing.assert_array_equal(function(x, mask, **options), [kept] * 4)

    for low, kept in ((0.9985, True), (0.9995, False)):
        alike(correction.geometric_mask, kept, low=low, high=1.01)
    for threshold, kept in ((0.00101, True), (0.00099, False)):  # abs(e^-.001 - 1) = .0009995
        alike(correction.length_neutral_mask, kept, threshold=threshold, max_token_kl=1e-4, max_token_tv=5e-3)
        alike(correction.sequence_error_ratio_mask, kept, threshold=threshold)
    for threshold, kept in ((5.1e-7, True), (4.9e-7, False)):  # k3 = .001^2 / 2 = 5e-7
        alike(correction.sampled_mask, kept, mean_k3=threshold)


def test_case_11_denominator():
    """Ratios e^(.1, -1.5, .8, -10, .3) = 1.105, .223, 2.226, 4.5e-5, 1.350; [.5, 2] keeps tokens 0 and 4, sum 2.4550:
    over the kept 2.4550/2 = 1.2275, over the original 2.4550/5 = .4910. A token's loss is -A r = 1 (A = -1, r = 1)."""
    x = row(0.1, -1.5, 0.8, -10.0, 0.3)
    weights = correction.masked_weights(x, head(5), low=0.5, high=2.0)
    close(first(weights, 5), [math.exp(0.1), 0, 0, 0, math.exp(0.3)], relative=1e-6)
    policy = np.full_like(x, -1.0)
    for denominator, expected in (("kept", 1.227515), ("original", 0.491006)):
        options = {"importance_weights": weights, "denominator": denominator}
        got = surrogate(losses.clipped_surrogate, policy, policy, head(5), np.full(6, -1, np.float32), **options)
        close(got.value, expected, relative=1e-5)


@pytest.mark.parametrize("function", [*RATIO_LOSSES, losses.masked_surrogate])
@pytest.mark.parametrize(("aggregation", "denominator"), [*itertools.product(AGGREGATIONS, DENOMINATORS)])
def test_case_12_everything_masked(function, aggregation, denominator):
    policy, old = row(-1.0, np.nan), row(-2.0, -np.inf)
    for arrays in ({"mask": head(0)}, {"mask": head(2), "sequence_keep": np.zeros(6, bool)}):
        options = {"aggregation": aggregation, "denominator": denominator, "constant_length": 4}
        value, gradient = jax.value_and_grad(
            lambda p, arrays=arrays, options=options: surrogate(function, p, old, **arrays, **options).value
        )(policy)
        assert float(value) == 0.0
        assert not np.asarray(gradient).any()


def test_case_13_packing():
    """Three tokens of log ratio +.1, then four of -.1: products e^.3 = 1.34986 and e^-.4 = .67032, geometric means
    1.105 and .905. As one sequence the mean is -.0143, and the geometric mask would keep it."""
    x, mask, segments = row(*[0.1] * 3, *[-0.1] * 4), head(7), np.tile([3] * 3 + [8] * 4, (6, 1))
    packed = {"segment_ids": segments}
    weight = correction.sequence_truncated_weights
    close(first(weight(x, mask, **packed), 7), [1.349859] * 3 + [0.670320] * 4, relative=1e-5)
    close(first(weight(x, mask), 7), [math.exp(-0.1)] * 7, relative=1e-5)
    close(first(weight(x, mask, cap=1.2, **packed), 7), [1.2] * 3 + [0.670320] * 4, relative=1e-5)
    weight = correction.sequence_masked_weights(x, mask, cap=1.2, **packed)
    close(first(weight, 7), [0.0] * 3 + [0.670320] * 4, relative=1e-5)
    keep = correction.geometric_mask(x, mask, low=0.95, high=1.2, **packed)
    assert first(keep, 7) == [True] * 3 + [False] * 4
    assert bool(correction.geometric_mask(x, mask, low=0.95, high=1.2)[0])
    # k3(.1) = e^.1 - 1.1 = .0051709; k3(-.1) = e^-.1 - .9 = .0048374
    assert first(correction.sampled_mask(x, mask, mean_k3=0.005, **packed), 7) == [False] * 3 + [True] * 4
    loss = surrogate(losses.gspo, x - 1, row(*[-1.0] * 7), mask, clip_low=1.0, clip_high=9.0, **packed)
    close(loss.value, -(math.exp(0.1) + math.exp(-0.1)) / 2, relative=1e-5)


@pytest.mark.parametrize("function", [*RATIO_LOSSES, losses.masked_surrogate])
@pytest.mark.parametrize(("aggregation", "denominator"), [*itertools.product(AGGREGATIONS, DENOMINATORS)])
def test_case_14_masks_act_the_same_in_every_aggregation(function, aggregation, denominator):
    """Row 1 is rejected and token (0, 2) dropped: no gradient there, one everywhere else, in whatever mode."""
    rng = np.random.default_rng(0)
    policy = -rng.uniform(1, 2, (6, 7)).astype(np.float32)
    old = policy - rng.uniform(-1e-4, 1e-4, policy.shape).astype(np.float32)
    sequence_keep = np.array([True, False, True, True, True, False])
    token_keep = np.ones((6, 7), bool)
    token_keep[0, 2] = False
    options = {"aggregation": aggregation, "denominator": denominator, "constant_length": 4}
    gradient = jax.grad(
        lambda p: (
            surrogate(
                function, p, old, np.ones((6, 7), bool), sequence_keep=sequence_keep, token_keep=token_keep, **options
            ).value
        )
    )(policy)
    np.testing.assert_array_equal(np.asarray(gradient) != 0, sequence_keep[:, None] & token_keep)


@pytest.fixture
def uncompiled():
    """Op by op, for the tests that would compile a correction for each of many configurations."""
    with jax.disable_jit():
        yield


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_case_15_raw_and_applied_weights_have_distinct_names(order):
    """Ratios e^(-.5, 2.5, -.2) = .606531, 12.182494, .818731. Raw mean 4.5359; cap 5: 2.1418; band [.5, 5]: .4751."""
    log_ratio = row(*np.array([-0.5, 2.5, -0.2])[list(order)])
    batch = scored(log_ratio - 4, row(*[-4.0] * 3), head(3))
    for name, options, applied in (
        ("tis", {"tis_cap": 5.0}, 2.141754),
        ("icepop", {"icepop_low": 0.5, "icepop_high": 5.0}, 0.475087),
    ):
        metrics = correction.correct(batch, correction.preset(name, **options)).metrics
        means = {
            key: float(total / count) for key, (total, count) in metrics.items() if key.startswith(("ratio", "weight"))
        }
        close(means["ratio/raw_mean"], 4.535919, relative=1e-5)
        close(means["weight/applied_mean"], applied, relative=1e-5)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("weight", "masks", "dtype"),
    [
        (weight, (), jnp.bfloat16)  # whose values are float32 values too
        if weight in ("exact", "geo_mis")
        else pytest.param(weight, (), jnp.bfloat16, marks=pytest.mark.slow)
        for weight in WEIGHT_PRESETS
    ]
    + [("none", MASKS, dtype) for dtype in (jnp.float32, jnp.bfloat16)]
    + [(weight, (), jnp.float32) for weight in ("kpop", "cis", "seq_tis")],
)
def test_case_16_on_policy(weight, masks, dtype):
    """Equal log-probs, saturated ones included: every weight exactly 1, every mask keeps, and the corrected update is
    the uncorrected one to the bit."""
    rng = np.random.default_rng(1)
    logp = -(10.0 ** rng.uniform(-8, 1.5, (6, 7)))
    logp[0, :2] = 0.0
    logp = jnp.asarray(logp, dtype)
    mask = np.arange(7) < np.array([[7], [1], [4], [5], [3], [6]])
    zero = jnp.zeros(logp.shape)
    policy, advantages = logp.astype(jnp.float32) - 0.01, np.float32([1, -1, 0.5, -0.3, 2, -2])
    config = correction.CorrectionConfig(masks=masks, weight=weight)
    got = correction.correct(scored(logp, logp, mask, token_kl=zero, token_tv=zero), config)
    np.testing.assert_array_equal(got.sequence_keep, [True] * 6)
    np.testing.assert_array_equal(np.asarray(got.token_keep)[mask], True)
    np.testing.assert_array_equal(np.asarray(got.importance_weights), mask.astype(np.float32))
    arrays = {k: getattr(got, k) for k in ("sequence_keep", "token_keep", "importance_weights")}

    def loss(policy, **arrays):
        return losses.clipped_surrogate(policy, logp, advantages, mask, **arrays).value

    plain, corrected = jax.value_and_grad(loss)(policy), jax.value_and_grad(loss)(policy, **arrays)
    for a, b in zip(plain, corrected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_case_16_on_policy_divergences_are_exactly_zero(dtype):
    rng = np.random.default_rng(1)
    logp = jnp.asarray(np.append(-(10.0 ** rng.uniform(-8, 1.5, 40)), [0.0, -0.0]), dtype)
    for function in (divergences.binary_kl, divergences.binary_tv, divergences.log_odds_displacement):
        assert not np.asarray(function(logp, logp)).any()
    for function in (divergences.k1, divergences.k2, divergences.k3):
        assert not np.asarray(function(logp - logp)).any()
    logits = jnp.asarray(rng.normal(size=(5, 17)) * 4, jnp.float32)
    for temperature in (1.0, 0.7):
        same = divergences.vocab_divergence(logits, logits, np.arange(5), temperature=temperature)
        assert not np.asarray(same.token_kl).any()
        assert not np.asarray(same.token_tv).any()
        np.testing.assert_array_equal(same.policy_logps, same.rollout_logps)


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "slope"),
    [
        (-1.0, 1.5, 1.5, 1.5),
        (-1.0, 0.5, 0.8, 0.0),
        (1.0, 1.5, -1.28, 0.0),
        (1.0, 0.5, -0.5, -0.5),
        (-1.0, 900.0, 900.0, 900.0),
    ],
)
def test_case_17_ppo_side(advantage, ratio, value, slope):
    """Loss max(-A r, -A clip(r, .8, 1.28)); the slope in log pi is -A r on the unclipped side, else 0."""
    close(clipped(advantage, ratio), (value, slope), relative=1e-5)


def clipped(advantage, ratio, **options):
    """Value and slope of the loss of one token."""
    old, advantages = row(-7.0), np.full(6, advantage, np.float32)
    value, gradient = jax.value_and_grad(
        lambda p: surrogate(losses.clipped_surrogate, p, old, head(1), advantages, **options).value
    )(old + np.log(np.float32(ratio)))
    return float(value), first(gradient, 1)[0]


def test_case_17_dual_clip_bounds_the_open_side():
    """A = -1, c = 3: the loss is at most 3, without gradient beyond; A > 0 is untouched."""
    for ratio, value, slope in ((900.0, 3.0, 0.0), (2.5, 2.5, 2.5)):
        close(clipped(-1.0, ratio, dual_clip=3.0), (value, slope), relative=1e-5)
    close(clipped(1.0, 0.5, dual_clip=3.0), (-0.5, -0.5), relative=1e-5)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("outlier", "kept"), [(1e-6, False), (0.92, True), (1e6, False)])
def test_case_18_criteria_are_computed_on_the_original_mask(outlier, kept):
    """Nine ratios of 1 and one of 1e-6: mean log ratio log(1e-6)/10 = -1.3816, geometric mean .2512, outside the band
    [.99, 1.01], though the token criterion would leave nine perfect tokens. .92: e^(log(.92)/10) = .99170 is inside."""
    x = np.log(np.array([[1.0] * 9 + [outlier]], np.float32))
    batch = scored(x - 15, np.full_like(x, -15), np.ones(x.shape, bool))
    options = {"max_abs_log_ratio": math.log(2), "geometric_low": 0.99, "geometric_high": 1.01}
    for masks in (("token_outlier", "geometric"), ("geometric", "token_outlier")):
        got = correction.correct(batch, correction.CorrectionConfig(masks=masks, **options))
        assert bool(got.sequence_keep[0]) is kept
        np.testing.assert_array_equal(got.token_keep, [[True] * 9 + [abs(math.log(outlier)) <= math.log(2)]])
