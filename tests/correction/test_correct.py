"""From a scored batch to decisions: what composes with what, illegal log-probs, metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from trm_jax import correction
from trm_jax.types import CorrectedBatch, ScoredBatch


def scored(logp: np.ndarray, logq: np.ndarray, mask: np.ndarray | None = None, **fields: np.ndarray) -> ScoredBatch:
    logp, logq = np.asarray(logp, np.float32), np.asarray(logq, np.float32)
    return ScoredBatch(
        proximal_logps=logp,
        rollout_logps=logq,
        response_mask=np.ones(logp.shape, bool) if mask is None else mask,
        **fields,
    )


def value(corrected: CorrectedBatch, name: str) -> float:
    total, count = corrected.metrics[name]
    return float(total) / float(count)


def from_ratios(ratios: list[list[float]]) -> ScoredBatch:
    log_ratio = np.log(ratios)
    return scored(-20.0 + 0.5 * log_ratio, -20.0 - 0.5 * log_ratio)


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Op by op, where each of many configurations would compile."""
    with jax.disable_jit():
        yield


@pytest.mark.usefixtures("uncompiled")
def test_weight_names_dispatch_to_their_functions() -> None:
    rng = np.random.default_rng(0)
    logp, logq = -rng.gamma(1.0, 1.0, (3, 5)), -rng.gamma(1.0, 1.0, (3, 5))
    batch, mask = scored(logp, logq), np.ones((3, 5), bool)
    p, q = batch.proximal_logps, batch.rollout_logps
    expected = {
        "none": np.ones((3, 5)),
        "exact": correction.exact_weights(p - q, mask),
        "tis": correction.truncated_weights(p - q, mask, cap=1.5),
        "icepop": correction.masked_weights(p - q, mask, low=0.7, high=3.0),
        "kpop": correction.bernoulli_kl_weights(p, q, mask, threshold=0.4),
        "seq_tis": correction.sequence_truncated_weights(p - q, mask, cap=1.2),
        "seq_mis": correction.sequence_masked_weights(p - q, mask, cap=1.2),
        "geo_mis": correction.geometric_masked_weights(p - q, mask, low=0.5, high=1.5, token_weight="ratio"),
        "cis": correction.calibrated_weights(p, q, mask, cis_lambda=1.6, cis_kappa=0.1),
        "cis_two_sided": correction.calibrated_weights(p, q, mask, cis_lambda=1.6, cis_kappa=0.1, two_sided=True),
    }
    base = correction.CorrectionConfig(
        tis_cap=1.5,
        icepop_low=0.7,
        icepop_high=3.0,
        kpop_threshold=0.4,
        seq_cap=1.2,
        geo_mis_low=0.5,
        geo_mis_high=1.5,
        geo_mis_token_weight="ratio",
        cis_lambda=1.6,
        cis_kappa=0.1,
    )
    for name, want in expected.items():
        got = correction.correct(batch, dataclasses.replace(base, weight=name)).importance_weights
        np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=name)


def test_mask_names_dispatch_to_their_functions() -> None:
    rng = np.random.default_rng(1)
    shape = (30, 4)
    logp = -rng.gamma(1.0, 1.0, shape)
    logq = np.minimum(logp + 0.2 * rng.normal(size=shape), 0.0)
    kl, tv = rng.gamma(0.5, 0.05, shape).astype(np.float32), rng.beta(1.0, 9.0, shape).astype(np.float32)
    batch, mask = scored(logp, logq, token_kl=kl, token_tv=tv), np.ones(shape, bool)
    x = batch.proximal_logps - batch.rollout_logps
    base = correction.CorrectionConfig(
        max_token_kl=0.06,
        mean_token_kl=0.02,
        max_token_tv=0.2,
        max_k2=0.04,
        mean_k3=0.03,
        ln_trm_threshold=0.15,
        horizon_token_kl=0.02,
        horizon_token_tv=0.05,
        ser_threshold=0.13,
        geometric_low=0.95,
        geometric_high=1.1,
    )
    expected = {
        "trm_max": correction.max_kl_mask(kl, mask, threshold=0.06),
        "trm_avg": correction.mean_kl_mask(kl, mask, threshold=0.02),
        "trm_tv": correction.max_tv_mask(tv, mask, threshold=0.2),
        "trm_sample": correction.sampled_mask(x, mask, max_k2=0.04, mean_k3=0.03),
        "ln_trm": correction.length_neutral_mask(x, mask, threshold=0.15, max_token_kl=0.02, max_token_tv=0.05),
        "ser": correction.sequence_error_ratio_mask(x, mask, threshold=0.13),
        "geometric": correction.geometric_mask(x, mask, low=0.95, high=1.1),
    }
    config = dataclasses.replace(base, masks=tuple(expected))
    one_by_one = jax.tree.map(lambda values: values[:, None], batch)  # metrics of a row name the masks that reject it
    out = jax.vmap(lambda row: correction.correct(row, config))(one_by_one)
    for name, want in expected.items():
        assert 0 < np.sum(want) < 30, name
        rejected, rows = out.metrics[f"rejected/{name}"]
        np.testing.assert_array_equal(rejected, 1 - np.asarray(want), err_msg=name)
        np.testing.assert_array_equal(rows, 1)
    np.testing.assert_array_equal(out.sequence_keep[:, 0], np.all(list(expected.values()), axis=0))


def test_criteria_see_the_original_mask() -> None:
    # Nine tokens of ratio 1 and one of 1e-6: the token mask drops the last, but the geometric mean still sees
    # log(1e-6)/10 = -1.38 and rejects; on the nine survivors it would have been 0.
    batch = from_ratios([[1.0] * 9 + [1e-6]])
    config = correction.CorrectionConfig(
        masks=("token_outlier", "geometric"), max_abs_log_ratio=math.log(2.0), geometric_low=0.99, geometric_high=1.01
    )
    out = correction.correct(batch, config)
    np.testing.assert_array_equal(out.token_keep, [[True] * 9 + [False]])
    np.testing.assert_array_equal(out.sequence_keep, [False])


def test_raw_and_applied_weights_have_distinct_names() -> None:
    # (0.606531 + 12.182494 + 0.818731)/3 = 4.535919; capped at 5: 2.141754; masked to [.5, 5]: 0.475087
    batch = from_ratios([[0.606531, 12.182494, 0.818731]])
    tis = correction.correct(batch, correction.preset("tis", tis_cap=5.0))
    icepop = correction.correct(batch, correction.preset("icepop"))
    for out in (tis, icepop):
        np.testing.assert_allclose(value(out, "ratio/raw_mean"), 4.535919, rtol=1e-5)
    np.testing.assert_allclose(value(tis, "weight/applied_mean"), 2.141754, rtol=1e-5)
    np.testing.assert_allclose(value(icepop, "weight/applied_mean"), 0.475087, rtol=1e-5)
    np.testing.assert_allclose(value(tis, "weight/capped_fraction"), 1 / 3)
    np.testing.assert_allclose(value(icepop, "weight/dropped_fraction"), 1 / 3)
    np.testing.assert_allclose(value(icepop, "weight/capped_fraction"), 0.0)
    assert value(tis, "max/weight") == 5.0
    np.testing.assert_allclose(value(tis, "max/ratio"), 12.182494, rtol=1e-5)


def test_effective_sample_fraction() -> None:
    # weights 1, 2, 2 (cap): (1+2+2)²/(3 · (1+4+4)) = 25/27
    out = correction.correct(from_ratios([[1.0, 3.0, 4.0]]), correction.preset("tis"))
    np.testing.assert_allclose(correction.effective_sample_fraction(out.metrics), 25 / 27, rtol=1e-6)


def test_sampled_metrics_by_hand() -> None:
    # Ratios 1.5 and 0.5: k3 = .5 - ln 1.5 = .094535 and -.5 + ln 2 = .193147; k1 sum = -ln .75 = .287682
    out = correction.correct(from_ratios([[1.5, 0.5]]), correction.preset("none"))
    np.testing.assert_allclose(value(out, "kl/k3_mean"), (0.094535 + 0.193147) / 2, rtol=1e-5)
    np.testing.assert_allclose(value(out, "kl/k1_mean"), 0.287682 / 2, rtol=1e-5)
    np.testing.assert_allclose(value(out, "max/k2"), 0.5 * math.log(2.0) ** 2, rtol=1e-5)


def test_perplexity_gap_is_a_mean_of_sequence_means() -> None:
    # Row 0 (one token): -1 against -2, gap 1. Row 1 (two tokens): means -2 and -2.5, gap .5. Mean .75, not 2/3.
    mask = np.array([[True, False], [True, True], [False, False]])
    out = correction.correct(
        scored([[-1, 9], [-1, -3], [0, 0]], [[-2, 9], [-2, -3], [0, 0]], mask), correction.preset("none")
    )
    np.testing.assert_allclose(value(out, "logps/ppl_gap"), 0.75, rtol=1e-6)
    np.testing.assert_allclose(value(out, "logps/proximal_mean"), -1.5, rtol=1e-6)
    np.testing.assert_allclose(value(out, "logps/rollout_mean"), -2.25, rtol=1e-6)


def test_kept_fractions_count_sequences_and_tokens() -> None:
    mask = np.array([[True, True, True], [True, False, False], [False, False, False]])
    kl = np.where(np.array([[False, True, False], [False] * 3, [False] * 3]), 1.0, 0.0).astype(np.float32)
    out = correction.correct(
        scored(np.zeros((3, 3)), np.zeros((3, 3)), mask, token_kl=kl), correction.preset("trm_max")
    )
    np.testing.assert_array_equal(out.sequence_keep, [False, True, True])
    assert [float(x) for x in out.metrics["sequences/kept_fraction"]] == [1.0, 2.0]  # the empty row is no sample
    assert [float(x) for x in out.metrics["tokens/kept_fraction"]] == [1.0, 4.0]
    assert [float(x) for x in out.metrics["rejected/trm_max"]] == [1.0, 2.0]
    assert value(out, "max/token_kl") == 1.0
    np.testing.assert_allclose(value(out, "kl/token_mean"), 0.25)


@pytest.mark.parametrize("name", ["none", "cis", "seq_tis", "trm_sample"])
@pytest.mark.parametrize("bad", [np.nan, -9999.0, np.inf, 3.0])
@pytest.mark.parametrize("side", ["proximal", "rollout"])
def test_illegal_log_probs_reject_and_count(name: str, bad: float, side: str) -> None:
    sides = {"proximal": np.full((3, 4), -1.0), "rollout": np.full((3, 4), -1.0)}
    sides[side][1, 2] = bad
    out = correction.correct(scored(sides["proximal"], sides["rollout"]), correction.preset(name, sentinel=-9999.0))
    np.testing.assert_array_equal(out.sequence_keep, [True, False, True])
    assert out.importance_weights[1, 2] == 0
    assert not out.token_keep[1, 2]
    np.testing.assert_allclose(value(out, "rejected/non_finite"), 1 / 3)
    kind = "nan" if math.isnan(bad) else "sentinel" if bad == -9999.0 else "above_zero"
    for other in ("nan", "sentinel", "above_zero"):
        assert float(out.metrics[f"illegal/{other}_fraction"][0]) == (1.0 if other == kind else 0.0)
    assert all(np.isfinite(float(total)) for total, _ in out.metrics.values())


def test_rounding_above_zero_is_clamped_and_counted() -> None:
    out = correction.correct(scored([[0.004, -1.0]], [[-0.5, 0.02]]), correction.preset("tis"))
    np.testing.assert_allclose(out.importance_weights, [[np.exp(0.5), np.exp(-1.0)]], rtol=1e-6)
    np.testing.assert_array_equal(out.sequence_keep, [True])
    assert float(out.metrics["illegal/clamped_fraction"][0]) == 2.0


def test_zero_probabilities_are_legal_and_counted() -> None:
    out = correction.correct(scored([[-np.inf, -1.0, -1.0]], [[-1.0, -np.inf, -1.0]]), correction.preset("cis"))
    cap = 1 + 2.3 * (1 - math.exp(-1.0))
    np.testing.assert_allclose(out.importance_weights, [[0.0, cap, 1.0]], rtol=1e-6)
    np.testing.assert_array_equal(out.sequence_keep, [True])
    assert float(out.metrics["illegal/proximal_zero_fraction"][0]) == 1.0
    assert float(out.metrics["illegal/rollout_zero_fraction"][0]) == 1.0


def test_a_sentinel_counts_only_when_declared() -> None:
    batch = scored([[-1.0, -1.0]], [[-1.0, -9999.0]])
    assert correction.correct(batch, correction.preset("tis")).sequence_keep[0]
    assert not correction.correct(batch, correction.preset("tis", sentinel=-9999.0)).sequence_keep[0]


def test_raise_policy() -> None:
    config = correction.preset("tis", non_finite="raise")
    batch = scored([[-1.0, np.nan]], [[-1.0, -1.0]])
    with pytest.raises(ValueError, match=r"proximal_logps holds 1 NaN.*row 0, position 1"):
        correction.correct(batch, config)
    with pytest.raises(ValueError, match=r"outside jax\.jit"):
        jax.jit(correction.correct, static_argnums=1)(batch, config)
    masked = dataclasses.replace(batch, response_mask=np.array([[True, False]]))
    np.testing.assert_array_equal(correction.correct(masked, config).importance_weights, [[1.0, 0.0]])


@pytest.mark.parametrize(("name", "field"), [("trm_max", "token_kl"), ("trm_avg", "token_kl"), ("trm_tv", "token_tv")])
def test_a_missing_divergence_says_what_to_do(name: str, field: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs {field}.*hidden states.*trm_sample"):
        correction.correct(scored([[-1.0]], [[-1.0]]), correction.preset(name))


def test_numerator_policy() -> None:
    batch = scored([[-1.0, -1.0]], [[-1.0, -1.0]])
    policy = np.log([[1.5, 0.5]]) - 1.0
    out = correction.correct(batch, correction.preset("tis", numerator="policy"), policy_logps=policy)
    np.testing.assert_allclose(out.importance_weights, [[1.5, 0.5]], rtol=1e-6)
    with pytest.raises(ValueError, match="policy_logps missing"):
        correction.correct(batch, correction.preset("tis", numerator="policy"))
    with pytest.raises(ValueError, match="policy_logps given"):
        correction.correct(batch, correction.preset("tis"), policy_logps=policy)


def test_packed_rows_decide_per_segment() -> None:
    # Two segments of one row with log ratio +.1 and -.1 a token: means +.1 and -.1, never 0.
    log_ratio = np.array([[0.1, 0.1, 0.1, -0.1, -0.1, 0.0]])
    mask = np.array([[True] * 5 + [False]])
    segments = np.array([[4, 4, 4, 9, 9, 0]])
    batch = scored(log_ratio - 1, np.full((1, 6), -1.0), mask, segment_ids=segments)
    config = correction.CorrectionConfig(masks=("geometric",), weight="seq_tis", geometric_low=0.95, geometric_high=1.2)
    out = correction.correct(batch, config)
    np.testing.assert_array_equal(out.sequence_keep[0, :5], [True, True, True, False, False])
    expected = [[math.exp(0.3)] * 3 + [math.exp(-0.2)] * 2 + [0.0]]
    np.testing.assert_allclose(out.importance_weights, expected, rtol=1e-6)
    assert [float(x) for x in out.metrics["sequences/kept_fraction"]] == [1.0, 2.0]
    np.testing.assert_allclose(value(out, "logps/ppl_gap"), 0.0, atol=1e-7)
    assert correction.correct(
        batch, correction.preset("geometric", geometric_low=0.85, geometric_high=1.2)
    ).sequence_keep.all()


def test_empty_batch_keeps_and_reports_nothing() -> None:
    mask = np.zeros((2, 3), bool)
    batch = scored(
        np.full((2, 3), np.nan), np.full((2, 3), -np.inf), mask, token_kl=np.full((2, 3), np.nan, np.float32)
    )
    out = correction.correct(batch, correction.preset("trm_max + cis"))
    np.testing.assert_array_equal(out.importance_weights, 0.0)
    assert not np.any(out.token_keep)
    assert all(float(total) == 0 for total, _ in out.metrics.values())


def test_entropies_are_reported_when_present() -> None:
    mask = np.array([[True, False]])
    entropy = np.array([[2.0, np.nan]], np.float32)
    out = correction.correct(
        scored([[-1.0, 0.0]], [[-1.0, 0.0]], mask, policy_entropy=entropy, rollout_entropy=entropy + 1),
        correction.preset("none"),
    )
    assert value(out, "entropy/policy_mean") == 2.0
    assert value(out, "entropy/rollout_mean") == 3.0


def test_refused_records() -> None:
    with pytest.raises(ValueError, match="token_kl"):
        correction.correct(
            scored([[-1.0]], [[-1.0]], token_kl=np.zeros((1, 2), np.float32)), correction.preset("trm_max")
        )
    with pytest.raises(TypeError, match="bool"):
        correction.correct(scored([[-1.0]], [[-1.0]], np.ones((1, 1))), correction.preset("none"))


def test_a_sentinel_is_known_in_the_type_that_carries_it() -> None:
    """-9999 is -9984 in bfloat16."""
    logps = jax.numpy.array([[-1.0, -9999.0], [-1.0, -2.0]], jax.numpy.bfloat16)
    batch = ScoredBatch(
        proximal_logps=jax.numpy.full((2, 2), -1.0), rollout_logps=logps, response_mask=np.ones((2, 2), bool)
    )
    out = correction.correct(batch, correction.preset("tis", sentinel=-9999.0))
    np.testing.assert_array_equal(out.sequence_keep, [False, True])
    assert float(out.metrics["illegal/sentinel_fraction"][0]) == 1
