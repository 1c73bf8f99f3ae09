"""`correct`: every preset and compositions of them, against the oracle's masks and weights."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import correction
from trm_jax.types import ScoredBatch

from .batches import batch, close, spoil
from .reference import masks, weights
from .reference.rows import decide, sequences, spread

OPTIONS = {  # in the middle of the data at scale 0.3, so that every criterion both keeps and rejects
    "max_token_kl": 0.2,
    "mean_token_kl": 0.08,
    "max_token_tv": 0.17,
    "max_k2": 0.2,
    "mean_k3": 0.05,
    "ln_trm_threshold": 0.25,
    "horizon_token_kl": 0.02,
    "horizon_token_tv": 0.03,
    "ser_threshold": 0.18,
    "geometric_low": 0.95,
    "geometric_high": 1.1,
    "max_abs_log_ratio": 0.3,
    "geo_mis_low": 0.9,
    "geo_mis_high": 1.05,
    "tis_cap": 1.2,
    "icepop_low": 0.8,
    "icepop_high": 1.3,
    "kpop_threshold": 0.01,
    "seq_cap": 1.4,
    "cis_lambda": 0.6,
    "cis_kappa": 0.02,
    "exact_low": 0.6,
    "exact_high": 1.7,
}
PRESETS = {  # name: (masks, weight)
    "none": ((), "none"),
    **{name: ((), name) for name in ("exact", "tis", "icepop", "kpop", "seq_tis", "seq_mis", "geo_mis", "cis")},
    "cis_two_sided": ((), "cis_two_sided"),
    **{name: ((name,), "none") for name in ("trm_max", "trm_avg", "trm_tv", "trm_sample", "ln_trm", "ser")},
    "trm_combined": (("trm_max", "trm_avg"), "none"),
    "token_mask": (("token_mask",), "none"),
}
COMPOSED = [
    "trm_max + cis",
    "trm_avg + tis",
    "ln_trm + icepop",
    "trm_combined + seq_tis",
    "token_mask + exact",
    "ser + kpop",
]


@pytest.fixture(autouse=True)
def uncompiled():
    """Op by op: hundreds of configurations, each of which would compile; one test below compiles."""
    with jax.disable_jit():
        yield


def scored(data, **changes):
    fields = {
        name: getattr(data, name) for name in ("proximal", "rollout", "response_mask", "token_kl", "token_tv")
    } | changes
    proximal, rollout = fields.pop("proximal"), fields.pop("rollout")
    arrays = {k: None if v is None else jnp.asarray(v) for k, v in fields.items()}
    return ScoredBatch(proximal_logps=jnp.asarray(proximal), rollout_logps=jnp.asarray(rollout), **arrays)


def oracle_keep(names, data, log_ratio, segment_ids):
    """One decision a sequence (or a segment), of all sequence criteria on the original mask."""
    o = OPTIONS
    rules = {
        "trm_max": (masks.trm_max, data.token_kl, {"threshold": o["max_token_kl"]}),
        "trm_avg": (masks.trm_avg, data.token_kl, {"threshold": o["mean_token_kl"]}),
        "trm_tv": (masks.trm_max, data.token_tv, {"threshold": o["max_token_tv"]}),
        "trm_sample": (masks.trm_sample, log_ratio, {"max_k2": o["max_k2"], "mean_k3": o["mean_k3"]}),
        "ln_trm": (
            masks.ln_trm,
            log_ratio,
            {
                "threshold": o["ln_trm_threshold"],
                "max_token_kl": o["horizon_token_kl"],
                "max_token_tv": o["horizon_token_tv"],
            },
        ),
        "ser": (masks.ser, log_ratio, {"threshold": o["ser_threshold"]}),
    }
    shape = data.response_mask.shape if segment_ids is not None else data.response_mask.shape[:1]
    keep = np.ones(shape, bool)
    for name in names:
        if name in rules:
            accept, values, options = rules[name]
            keep &= decide(accept, data.response_mask, values, segment_ids=segment_ids, **options)
    return keep


def oracle_token_keep(names, data, log_ratio):
    if "token_mask" not in names:
        return data.response_mask
    return data.response_mask & (np.abs(log_ratio.astype(float)) <= OPTIONS["max_abs_log_ratio"])


def oracle_weights(name, data, log_ratio, segment_ids, numerator):
    o, mask = OPTIONS, data.response_mask
    segments = {"segment_ids": segment_ids}
    pair = (numerator, data.rollout)
    cis = {"cis_lambda": o["cis_lambda"], "cis_kappa": o["cis_kappa"]}
    return {
        "none": lambda: mask.astype(float),
        "exact": lambda: spread(weights.exact, mask, log_ratio, low=o["exact_low"], high=o["exact_high"]),
        "tis": lambda: spread(weights.tis, mask, log_ratio, cap=o["tis_cap"]),
        "icepop": lambda: spread(weights.icepop, mask, log_ratio, low=o["icepop_low"], high=o["icepop_high"]),
        "kpop": lambda: spread(weights.kpop, mask, *pair, threshold=o["kpop_threshold"]),
        "seq_tis": lambda: spread(weights.seq_tis, mask, log_ratio, cap=o["seq_cap"], **segments),
        "seq_mis": lambda: spread(weights.seq_mis, mask, log_ratio, cap=o["seq_cap"], **segments),
        "geo_mis": lambda: spread(
            weights.geo_mis, mask, log_ratio, low=o["geo_mis_low"], high=o["geo_mis_high"], **segments
        ),
        "cis": lambda: spread(weights.cis, mask, *pair, **cis),
        "cis_two_sided": lambda: spread(weights.cis, mask, *pair, two_sided=True, **cis),
    }[name]()


def parts(name):
    """The masks and the weight of a preset or of a composition "mask + weight"."""
    names = [PRESETS[part] for part in name.split(" + ")]
    chosen = [weight for _, weight in names if weight != "none"]
    return tuple(itertools.chain.from_iterable(m for m, _ in names)), chosen[0] if chosen else "none"


def check(got, name, data, numerator, *, segment_ids=None):
    mask_names, weight = parts(name)
    log_ratio = numerator - data.rollout
    keep = oracle_keep(mask_names, data, log_ratio, segment_ids)
    mask = data.response_mask
    if segment_ids is None:
        counted = mask.any(1)
        np.testing.assert_array_equal(np.asarray(got.sequence_keep)[counted], keep[counted])
        keep = keep[:, None] & mask
    else:
        np.testing.assert_array_equal(np.asarray(got.sequence_keep)[mask], keep[mask])
    trained = keep & mask
    np.testing.assert_array_equal(
        np.asarray(got.token_keep)[trained], oracle_token_keep(mask_names, data, log_ratio)[trained]
    )
    want = oracle_weights(weight, data, log_ratio, segment_ids, numerator)
    close(np.asarray(got.importance_weights)[trained], want[trained], relative=2e-5, absolute=1e-30)
    close(np.asarray(got.importance_weights)[~mask], 0.0, relative=0)
    return keep[mask]


@pytest.mark.parametrize("name", [*PRESETS, *COMPOSED])
def test_preset_against_the_oracle(name):
    """With garbage at the masked slots, which the oracle does not look at."""
    data = batch(0, 0.3)
    fields = ("proximal", "rollout", "token_kl", "token_tv")
    dirty = {k: spoil(getattr(data, k), data.response_mask) for k in fields}
    got = correction.correct(scored(data, **dirty), correction.preset(name, **OPTIONS))
    decided = check(got, name, data, data.proximal)
    if parts(name)[0] and name.split(" + ")[0] != "token_mask":
        assert set(decided.tolist()) == {True, False}


def test_compiled_is_the_same():
    """The compiler may reorder sums: 2e-6 of weights, and equal decisions."""
    data, config = batch(3, 0.3), correction.preset("trm_combined + seq_tis", **OPTIONS)
    plain = correction.correct(scored(data), config)
    with jax.disable_jit(False):
        compiled = correction.correct(scored(data), config)
    for name in ("sequence_keep", "token_keep"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(compiled, name))
    close(plain.importance_weights, compiled.importance_weights, relative=2e-6)


@pytest.mark.parametrize(
    "name",
    [
        "trm_combined + seq_tis",
        pytest.param("ln_trm + geo_mis", marks=pytest.mark.slow),
        pytest.param("ser + seq_mis", marks=pytest.mark.slow),
    ],
)
def test_packed_rows(name):
    config = correction.preset(name, **OPTIONS)
    data = batch(0, 0.3)
    got = correction.correct(scored(data, segment_ids=data.segment_ids), config)
    decided = check(got, name, data, data.proximal, segment_ids=data.segment_ids)
    assert set(decided.tolist()) == {True, False}


@pytest.mark.parametrize("name", ["ser + kpop", "trm_sample", "cis"])
def test_bypass_takes_the_policy_as_numerator(name):
    """numerator="policy": ratios are pi_theta / pi_roll, and so is p of the cap."""
    data = batch(5, 0.3)
    config = correction.preset(name, numerator="policy", **OPTIONS)
    got = correction.correct(scored(data), config, policy_logps=jnp.asarray(data.policy))
    check(got, name, data, data.policy)


def test_defaults_are_the_published_ones():
    """CIS Table 8 and the text of CIS section 5."""
    published = {
        "exact_low": 1e-6,
        "exact_high": 1e6,
        "tis_cap": 2.0,
        "icepop_low": 0.5,
        "icepop_high": 5.0,
        "kpop_threshold": 2.0,
        "seq_cap": 2.0,
        "cis_lambda": 2.3,
        "cis_kappa": 5e-3,
    }
    for name in correction.presets:
        assert {k: getattr(correction.presets[name], k) for k in published} == published


@pytest.mark.parametrize("name", list(PRESETS))
def test_preset_is_its_masks_and_weight(name):
    config = correction.presets[name]
    mask_names, weight = PRESETS[name]
    assert config.weight == weight
    assert len(config.masks) == len(mask_names)
    assert correction.preset(name) == config


def test_log_probs_above_zero_are_clamped_and_counted():
    """bf16 rounds the log of a probability near 1 to something above 0: read as 0, on both sides."""
    data = batch(7, 0.3)
    above = data._replace(proximal=data.proximal.copy(), rollout=data.rollout.copy())
    above.proximal[0, 1] = above.rollout[0, 2] = 2.0**-8
    clamped = above._replace(proximal=np.minimum(above.proximal, 0), rollout=np.minimum(above.rollout, 0))
    config = correction.preset("tis")
    got = correction.correct(scored(above), config)
    want = correction.correct(scored(clamped), config)
    np.testing.assert_array_equal(got.importance_weights, want.importance_weights)
    count, tokens = got.metrics["illegal/clamped_fraction"]
    assert (float(count), float(tokens)) == (2.0, data.response_mask.sum())


ILLEGAL = {"nan_proximal": ("proximal", np.nan), "nan_rollout": ("rollout", np.nan), "sentinel": ("rollout", -9999.0)}


@pytest.mark.parametrize(
    ("kind", "name"),
    [*itertools.product(ILLEGAL, ["trm_max + cis"]), ("nan_proximal", "none"), ("sentinel", "geo_mis")],
)
def test_illegal_log_probs_reject_their_sequence_and_are_counted(kind, name):
    field, value = ILLEGAL[kind]
    data = batch(8, 1e-3)
    spoiled = getattr(data, field).copy()
    spoiled[0, 3] = value
    kl = np.zeros_like(data.token_kl)
    config = correction.preset(name, sentinel=-9999.0)
    got = correction.correct(scored(data, **{field: spoiled}, token_kl=kl), config)
    keep = np.asarray(got.sequence_keep)
    assert not keep[0]
    assert keep[data.response_mask.any(1)][1:].all()
    assert np.isfinite(got.importance_weights).all()
    assert float(got.importance_weights[0, 3]) == 0.0
    assert float(got.metrics["rejected/non_finite"][0]) == 1.0
    with pytest.raises(ValueError, match=r"(?i)nan|sentinel|-9999|finite"):
        correction.correct(
            scored(data, **{field: spoiled}, token_kl=kl),
            correction.preset(name, sentinel=-9999.0, non_finite="raise"),
        )


@pytest.mark.parametrize("name", [n for n in PRESETS if not PRESETS[n][0]])
def test_zero_probabilities_at_valid_slots(name):
    """p = 0: weight 0 under every operator. q = 0: the operator's cap, nothing infinite."""
    data = batch(9, 1e-3)
    proximal, rollout = data.proximal.copy(), data.rollout.copy()
    proximal[0, 1] = rollout[1, 2] = -np.inf
    got = correction.correct(scored(data, proximal=proximal, rollout=rollout), correction.preset(name))
    applied = np.asarray(got.importance_weights) * np.asarray(got.token_keep) * np.asarray(got.sequence_keep)[:, None]
    assert np.isfinite(applied).all()
    assert applied[0, 1] == 0.0
    cap = {
        "exact": 1e6,
        "tis": 2.0,
        "seq_tis": 2.0,
        "cis": 1 + 2.3 * max(-np.expm1(float(proximal[1, 2])), 5e-3),
        "cis_two_sided": 1 + 2.3 * max(-np.expm1(float(proximal[1, 2])), 5e-3),
        "none": 1.0,
    }.get(name, 0.0)
    close(applied[1, 2], cap, relative=1e-5)
    assert float(got.metrics["illegal/proximal_zero_fraction"][0]) == 1.0
    assert float(got.metrics["illegal/rollout_zero_fraction"][0]) == 1.0


def test_missing_divergence_is_an_error_not_a_keep():
    data = batch(10, 0.1)
    for name, field in (("trm_max", "token_kl"), ("trm_avg", "token_kl"), ("trm_tv", "token_tv")):
        with pytest.raises(ValueError, match=field):
            correction.correct(scored(data, **{field: None}), correction.preset(name))


@pytest.mark.parametrize(
    "change",
    [{"tis_cap": np.inf}, {"exact_high": np.inf}, {"seq_cap": np.inf}, {"cis_lambda": np.inf}, {"icepop_low": 9.0}],
)
def test_a_missing_cap_is_an_error_of_configuration(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        correction.CorrectionConfig(**change)


def test_ppl_gap():
    """(1/N) sum_i [mean_t log pi_train - mean_t log pi_roll] over the sequences that have tokens (section 8)."""
    data = batch(11, 0.3)
    gaps = []
    for slots in sequences(data.response_mask):
        if slots:
            gaps.append(np.mean([float(data.proximal[s]) - float(data.rollout[s]) for s in slots]))
    total, count = correction.correct(scored(data), correction.preset("none")).metrics["logps/ppl_gap"]
    close(total / count, np.mean(gaps), relative=1e-5)
