"""Every importance weight against loops, with its ends, its gradient (zero) and packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import correction

from .batches import SCALES, batch, close, first, head, row, spoil
from .reference import weights as oracle
from .reference.rows import spread

PAIR = ("proximal", "rollout")
# name: (function, oracle, arrays it reads, options)
WEIGHTS = {
    "exact": (correction.exact_weights, oracle.exact, ("log_ratio",), {}),
    "exact_narrow": (correction.exact_weights, oracle.exact, ("log_ratio",), {"low": 0.7, "high": 1.2}),
    "tis": (correction.truncated_weights, oracle.tis, ("log_ratio",), {}),
    "tis_low": (correction.truncated_weights, oracle.tis, ("log_ratio",), {"cap": 0.9}),
    "icepop": (correction.masked_weights, oracle.icepop, ("log_ratio",), {}),
    "icepop_narrow": (correction.masked_weights, oracle.icepop, ("log_ratio",), {"low": 0.9, "high": 1.05}),
    "kpop": (correction.bernoulli_kl_weights, oracle.kpop, PAIR, {}),
    "kpop_narrow": (correction.bernoulli_kl_weights, oracle.kpop, PAIR, {"threshold": 1e-3}),
    "seq_tis": (correction.sequence_truncated_weights, oracle.seq_tis, ("log_ratio",), {}),
    "seq_tis_low": (correction.sequence_truncated_weights, oracle.seq_tis, ("log_ratio",), {"cap": 0.8}),
    "seq_mis": (correction.sequence_masked_weights, oracle.seq_mis, ("log_ratio",), {}),
    "seq_mis_band": (correction.sequence_masked_weights, oracle.seq_mis, ("log_ratio",), {"cap": 1.5, "low": 0.9}),
    "geo_mis": (correction.geometric_masked_weights, oracle.geo_mis, ("log_ratio",), {}),
    "geo_mis_ratio": (
        correction.geometric_masked_weights,
        oracle.geo_mis,
        ("log_ratio",),
        {"low": 0.9, "high": 1.2, "token_weight": "ratio"},
    ),
    "cis": (correction.calibrated_weights, oracle.cis, PAIR, {}),
    "cis_two_sided": (correction.calibrated_weights, oracle.cis, PAIR, {"two_sided": True}),
    "cis_floor": (correction.calibrated_weights, oracle.cis, PAIR, {"cis_kappa": 0.1}),
    "cis_no_floor": (correction.calibrated_weights, oracle.cis, PAIR, {"cis_kappa": 0.0, "cis_lambda": 0.45}),
}
SEQUENCE = [name for name in WEIGHTS if name.startswith(("seq", "geo"))]


def arrays(name, data):
    return [getattr(data, field) for field in WEIGHTS[name][2]]


def expected(name, data, **segments):
    _, weigh, _, options = WEIGHTS[name]
    return spread(weigh, data.response_mask, *arrays(name, data), **options, **segments)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_weights_against_loops(name, dtype):
    """2e-5: e^x turns the float32 rounding of a log ratio of 30 (2e-6) and of sums of them into a relative error."""
    function, _, _, options = WEIGHTS[name]
    for scale in SCALES:
        data = batch(1, scale, dtype)
        got = np.asarray(function(*arrays(name, data), data.response_mask, **options))
        assert got.dtype == np.float32
        close(got, expected(name, data), relative=2e-5, absolute=1e-30)


@pytest.mark.parametrize("name", WEIGHTS)
def test_masked_slots_weigh_nothing(name):
    function, _, _, options = WEIGHTS[name]
    data = batch(2, 0.3)
    spoiled = [spoil(x, data.response_mask) for x in arrays(name, data)]
    got = function(*spoiled, data.response_mask, **options)
    close(got, expected(name, data), relative=2e-5)


@pytest.mark.parametrize("name", SEQUENCE)
def test_products_stay_within_their_segment(name):
    function, _, _, options = WEIGHTS[name]
    apart = 0.0
    for scale in (0.05, 0.3):
        data = batch(3, scale)
        want = expected(name, data, segment_ids=data.segment_ids)
        got = function(*arrays(name, data), data.response_mask, segment_ids=data.segment_ids, **options)
        close(got, want, relative=2e-5)
        apart = max(apart, np.abs(want - expected(name, data)).max())
    assert apart > 0.01, "segments must matter in this example"


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_constants(name):
    """At every side of every cap: the scales reach from no clipping to clipping everywhere."""
    function, _, _, options = WEIGHTS[name]

    def total(*inputs):
        return jnp.sum(function(*inputs[:-1], inputs[-1], **options) * 3.0)

    places = tuple(range(len(WEIGHTS[name][2])))
    for scale in (1e-2, 0.3, 3.0):
        data = batch(4, scale)
        for gradient in jax.grad(total, argnums=places)(*arrays(name, data), data.response_mask):
            close(gradient, np.zeros(gradient.shape), relative=0)


def test_unit_weights():
    data = batch(5, 3.0)
    got = correction.unit_weights(spoil(data.log_ratio, data.response_mask, np.nan), data.response_mask)
    np.testing.assert_array_equal(got, data.response_mask.astype(np.float32))


ENDS = {  # weight at (p = 0, q = 1/2) and at (p = 1/2, q = 0): probability 0 weighs 0, and an infinite ratio its cap
    "exact": (0.0, 1e6),
    "tis": (0.0, 2.0),
    "icepop": (0.0, 0.0),
    "kpop": (0.0, 0.0),
    "seq_tis": (0.0, 2.0),
    "seq_mis": (0.0, 0.0),
    "geo_mis": (0.0, 0.0),
    "cis": (0.0, 1 + 2.3 * 0.5),
    "cis_two_sided": (0.0, 1 + 2.3 * 0.5),
}


def weigh(name, proximal, rollout):
    """Weights of one sequence by name, from log-probs; options as in `WEIGHTS`."""
    function, _, fields, options = WEIGHTS.get(name, (correction.unit_weights, None, ("log_ratio",), {}))
    pair = (row(*proximal), row(*rollout))
    with np.errstate(invalid="ignore"):
        inputs = pair if fields == PAIR else [pair[0] - pair[1]]
    return first(function(*inputs, head(len(proximal)), **options), len(proximal))


@pytest.mark.parametrize("name", ENDS)
def test_zero_probabilities(name):
    half = np.log(0.5)
    for (proximal, rollout), want in zip([(-np.inf, half), (half, -np.inf)], ENDS[name], strict=True):
        close(weigh(name, [proximal], [rollout]), [want], relative=1e-6)


@pytest.mark.parametrize("name", [*ENDS, "unit"])
def test_a_nan_never_weighs_one(name):
    assert weigh(name, [np.nan, -0.7], [-0.7, -0.7])[0] == 0.0
    assert weigh(name, [-0.7, -0.7], [-0.7, np.nan])[1] == 0.0


@pytest.mark.parametrize("name", ["tis", "cis", "exact", "seq_tis"])
def test_monotone_in_the_log_ratio_up_to_infinity(name):
    weights = [weigh(name, [-0.7], [-0.7 - x])[0] for x in (0.0, 1, 5, 40, 86, 87, 88, 89, 90, 200, 1e4, np.inf)]
    assert np.isfinite(weights).all()
    assert (np.diff(weights) >= 0).all()
    assert weights[-1] == weights[-4] == max(weights)


def test_cap_of_cis_falls_with_the_confidence():
    """Cap 1 + 2.3 max(1 - p, .005): p = .1, .5, .9, .99, .999, 1 give 3.07, 2.15, 1.23, 1.023, 1.0115, 1.0115."""
    got = weigh("cis", np.log([0.1, 0.5, 0.9, 0.99, 0.999, 1.0]), [-60.0] * 6)
    close(got, [3.07, 2.15, 1.23, 1.023, 1.0115, 1.0115], relative=1e-6)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (correction.exact_weights, {"high": np.inf}),
        (correction.truncated_weights, {"cap": np.inf}),
        (correction.sequence_truncated_weights, {"cap": np.inf}),
        (correction.masked_weights, {"low": 2.0, "high": 0.5}),
        (correction.truncated_weights, {"cap": np.nan}),
    ],
)
def test_a_missing_cap_is_refused(function, options):
    """API: q = 0 needs a cap; without one the weight would be infinite."""
    with pytest.raises(ValueError, match=next(iter(options)) if len(options) == 1 else "low"):
        function(row(0.0, 0.0), head(2), **options)
