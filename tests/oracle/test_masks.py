"""Every mask against loops over rows and positions: scales, dtypes, garbage, packed rows and the ends of the range."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trm_jax import correction

from .batches import SCALES, batch, first, head, row, spoil
from .reference import masks as oracle
from .reference.rows import decide

# name: (function, oracle, which array it reads, options as a function of the level of the threshold)
MASKS = {
    "trm_max": (correction.max_kl_mask, oracle.trm_max, "token_kl", lambda x: {"threshold": x * x}),
    "trm_avg": (correction.mean_kl_mask, oracle.trm_avg, "token_kl", lambda x: {"threshold": x * x}),
    "trm_tv": (correction.max_tv_mask, oracle.trm_max, "token_tv", lambda x: {"threshold": min(x, 1.0)}),
    "trm_sample": (
        correction.sampled_mask,
        oracle.trm_sample,
        "log_ratio",
        lambda x: {"max_k2": 3 * x * x, "mean_k3": x * x},
    ),
    "max_k2": (correction.sampled_mask, oracle.trm_sample, "log_ratio", lambda x: {"max_k2": x * x, "mean_k3": None}),
    "mean_k3": (correction.sampled_mask, oracle.trm_sample, "log_ratio", lambda x: {"mean_k3": x * x, "max_k2": None}),
    "ln_trm": (
        correction.length_neutral_mask,
        oracle.ln_trm,
        "log_ratio",
        lambda x: {"threshold": x, "max_token_kl": 0.02, "max_token_tv": 0.03},
    ),
    "ser": (correction.sequence_error_ratio_mask, oracle.ser, "log_ratio", lambda x: {"threshold": x}),
    "geometric": (
        correction.geometric_mask,
        oracle.geometric,
        "log_ratio",
        lambda x: {"low": float(np.exp(-x / 2)), "high": float(np.exp(min(x, 80.0)))},
    ),
}
LEVELS = [0.02, 0.3, 0.7, 1.5, 20.0]  # of the threshold, in units of the scale


def expected(name, data, level, *, segment_ids=None):
    _, accept, field, options = MASKS[name]
    values = getattr(data, field)
    return decide(accept, data.response_mask, values, segment_ids=segment_ids, **options(level))


def nonempty(data):
    return data.response_mask.any(1)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_mask_against_loops(name, dtype):
    function, _, field, options = MASKS[name]
    seen = set()
    for scale in SCALES:
        for seed, level in enumerate(LEVELS):
            data = batch(seed, scale, dtype)
            keep = np.asarray(function(getattr(data, field), data.response_mask, **options(level * scale)))
            assert keep.dtype == bool
            assert keep.shape == (6,)
            rows = nonempty(data)
            want = expected(name, data, level * scale)
            np.testing.assert_array_equal(keep[rows], want[rows], err_msg=f"scale {scale}, seed {seed}, level {level}")
            seen |= set(want[rows].tolist())
    assert seen == {True, False}


@pytest.mark.parametrize("name", MASKS)
def test_packed_rows_decide_by_segment(name):
    function, _, field, options = MASKS[name]
    split = 0
    for seed in range(6):
        data = batch(seed, 0.3)
        keep = function(getattr(data, field), data.response_mask, segment_ids=data.segment_ids, **options(0.25))
        want = expected(name, data, 0.25, segment_ids=data.segment_ids)
        np.testing.assert_array_equal(np.asarray(keep)[data.response_mask], want[data.response_mask])
        split += sum(len(set(row[m].tolist())) > 1 for row, m in zip(want, data.response_mask, strict=True))
    assert split, "some row must hold an accepted and a rejected segment"


@pytest.mark.parametrize("name", MASKS)
def test_masked_slots_do_not_count(name):
    function, _, field, options = MASKS[name]
    for seed, level in enumerate(LEVELS):
        data = batch(seed, 0.3)
        values, rows = getattr(data, field), nonempty(data)
        keep = function(spoil(values, data.response_mask), data.response_mask, **options(level * 0.3))
        np.testing.assert_array_equal(np.asarray(keep)[rows], expected(name, data, level * 0.3)[rows])


@pytest.mark.parametrize("name", MASKS)
def test_one_nan_rejects_its_sequence_and_no_other(name):
    function, _, field, options = MASKS[name]
    data = batch(3, 1e-2)
    for t in range(6):  # not the last token, which weighs 0 under ln_trm: see the next test
        values = getattr(data, field).copy()
        values[0, t] = np.nan
        keep = np.asarray(function(values, data.response_mask, **options(1e3)))
        assert not keep[0]
        assert keep[nonempty(data)][1:].all()


def test_a_nan_at_the_last_token_rejects_although_its_horizon_is_zero():
    for values in ([np.nan], [0.0, 0.0, 0.0, np.nan]):
        assert not decision(correction.length_neutral_mask, values, threshold=1.0, max_token_kl=0.1, max_token_tv=0.1)


def decision(function, values, **options):
    """Of one sequence."""
    return bool(np.asarray(function(row(*values), head(len(values)), **options))[0])


@pytest.mark.parametrize("name", ["trm_sample", "max_k2", "mean_k3", "geometric"])
@pytest.mark.parametrize("infinite", [np.inf, -np.inf])
def test_infinite_log_ratio_rejects(name, infinite):
    """p = 0 or q = 0 at one token: k2, k3 and the geometric mean leave every band."""
    function, _, _, options = MASKS[name]
    assert not decision(function, [0.0, infinite, 0.0], **options(2.0))
    assert decision(function, [0.0, 0.0, 0.0], **options(2.0))


def test_zero_policy_probability_has_a_deviation_of_one():
    """abs(0 - 1) = 1 on one of four tokens: SER is 1/4, so 0.3 keeps and 0.2 rejects; ln_trm: w = (.3, .2, .1, 0), the
    second token gives .2/.6 = 1/3; an infinite ratio is rejected by both."""
    horizon = {"max_token_kl": 2.0, "max_token_tv": 0.1}
    for infinite, possible in ((-np.inf, True), (np.inf, False)):
        values = [0.0, infinite, 0.0, 0.0]
        for threshold, kept in ((0.3, possible), (0.2, False)):
            assert decision(correction.sequence_error_ratio_mask, values, threshold=threshold) is kept
        for threshold, kept in ((0.34, possible), (0.33, False)):
            assert decision(correction.length_neutral_mask, values, threshold=threshold, **horizon) is kept


def test_length_neutral_by_hand():
    """T = 4, eps = .1, delta = .02: w = (min(1, .3, sqrt(.03)), min(.2, sqrt(.02)), min(.1, sqrt(.01)), 0)
    = (.17321, .14142, .1, 0), Z = .41463. Ratios (1.5, 1, .8, 9): W = .5*.17321 + .2*.1 + 8*0 = .10660; W/Z = .25710.
    A masked slot in between changes neither T nor t."""
    x, mask = row(*np.log([1.5, 1.0, 7.0, 0.8, 9.0])), head(5)
    mask[0, 2] = False
    for threshold, want in ((0.2572, True), (0.2570, False)):
        keep = correction.length_neutral_mask(x, mask, threshold=threshold, max_token_kl=0.02, max_token_tv=0.1)
        assert bool(np.asarray(keep)[0]) is want


def test_threshold_itself_is_kept():
    """`<=`, exactly: values that float32 and float64 hold without rounding."""
    half = [0.5] * 4
    for function in (correction.max_kl_mask, correction.mean_kl_mask, correction.max_tv_mask):
        assert decision(function, half, threshold=0.5)
        assert not decision(function, half, threshold=0.4999)
    assert decision(correction.sampled_mask, half, max_k2=0.125)
    assert first(correction.token_outlier_mask(row(*half), head(4), max_abs_log_ratio=0.5), 4) == [True] * 4


def test_token_outliers():
    data = batch(0, 3.0)
    log_ratio = spoil(data.log_ratio, data.response_mask, np.nan)
    got = np.asarray(correction.token_outlier_mask(log_ratio, data.response_mask, max_abs_log_ratio=1.0))
    for slot in zip(*np.nonzero(data.response_mask), strict=True):
        assert got[slot] == oracle.token_outlier(float(log_ratio[slot]), max_abs_log_ratio=1.0)
    assert not got[~data.response_mask].any(), "True means: a token that counts"
    ends = row(np.nan, np.inf, -np.inf, 1.1, -1.1, 0.9, -0.9)
    keep = correction.token_outlier_mask(ends, head(7), max_abs_log_ratio=1.0)
    assert first(keep, 7) == [False] * 5 + [True] * 2


VALUES = st.one_of(st.floats(-3, 3, width=32), st.sampled_from([-np.inf, np.inf, 88.0, -100.0]))


@settings(deadline=None, max_examples=40)
@given(st.lists(VALUES, min_size=1, max_size=4), st.sampled_from(list(MASKS)))
def test_padding_and_holes_change_nothing(values, name):
    """The decision on y_1..y_T is that of the same tokens spread over a longer row with garbage between them."""
    function, _, _, options = MASKS[name]
    wide, mask = row(*[np.nan] * 7), head(0)
    wide[0, 0 : 2 * len(values) : 2], mask[0, 0 : 2 * len(values) : 2] = values, True
    spread = bool(np.asarray(function(wide, mask, **options(0.5)))[0])
    assert decision(function, values, **options(0.5)) is spread
