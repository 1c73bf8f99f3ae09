"""Certificates: limits by hand, terms against plain loops, coverage by simulation, what they refuse to claim."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax.bounds import Certificate, TabularPair, TabularSample, certify
from trm_jax.bounds._limits import upper_limits

NAMES = ["masked_surrogate", "accepted_error", "rejected_return", "accepted_gain", "rejection_rate"]


def upper(values: np.ndarray, error: float, low: float = 0.0, high: float = 1.0, xp: Any = np) -> float:
    counted = xp.ones(len(values), bool)
    ends = xp.asarray([low], dtype=float), xp.asarray([high], dtype=float)
    return float(
        upper_limits(xp.asarray(values)[:, None], counted, low=ends[0], high=ends[1], error=error, xp=xp)[1][0]
    )


_JITTED = jax.jit(certify)


# Limits on a mean.


@pytest.mark.parametrize("xp", [np, jnp])
def test_limits_by_hand(xp: Any) -> None:
    # All zeros, n = 100, error 0.1, half of it: 1 - 0.05^(1/100) = 1 - e^(-0.0299573) = 0.029513 (Chernoff wins:
    # Bernstein's 7 log(40)/(3·99) is 0.087).
    assert upper(np.zeros(100), 0.1, xp=xp) == pytest.approx(0.029513, abs=2e-6)
    # On the range [-1, 3]: -1 + 4·0.029513 = -0.881948
    assert upper(np.full(100, -1.0), 0.1, -1.0, 3.0, xp=xp) == pytest.approx(-0.881948, abs=1e-5)
    # Constant 0.5, n = 1000, error 0.04: V = 0, 0.5 + 7 log(2/0.02)/(3·999) = 0.5 + 32.23619/2997 = 0.510756
    assert upper(np.full(1000, 0.5), 0.04, xp=xp) == pytest.approx(0.510756, abs=2e-6)
    # Half 0.4, half 0.6, n = 1000: V = 0.01·1000/999; √(2·0.01001001·4.60517/1000) = 0.0096019; 0.520358
    assert upper(np.repeat([0.4, 0.6], 500), 0.04, xp=xp) == pytest.approx(0.520358, abs=2e-6)
    # n = 1: only Chernoff, 1 - 0.05; all ones: the end of the range
    assert upper(np.zeros(1), 0.1, xp=xp) == pytest.approx(0.95, abs=2e-6)
    assert upper(np.ones(50), 0.1, xp=xp) == 1.0


def test_chernoff_limit_solves_its_equation() -> None:
    # 3 ones of 10, error 0.2, half of it: 10 kl(0.3, μ) = log 10; Bernstein has nothing to say at n = 10.
    limit = upper(np.repeat([1.0, 0.0], [3, 7]), 0.2)
    kl = 0.3 * math.log(0.3 / limit) + 0.7 * math.log(0.7 / (1 - limit))
    assert limit > 0.3
    assert 10 * kl == pytest.approx(math.log(10), rel=1e-9)


@pytest.mark.parametrize("n", [1, 2, 7, 30, 200])
@pytest.mark.parametrize("error", [0.3, 0.05])
def test_limits_cover_every_coin_exactly(n: int, error: float) -> None:
    heads = np.arange(n + 1)
    limit = np.array([upper(np.repeat([1.0, 0.0], [k, n - k]), error) for k in heads])
    assert np.all(np.diff(limit) >= 0)
    for p in np.concatenate(
        [np.linspace(0.001, 0.999, 199), limit[:-1] + 1e-9]
    ):  # coverage is least just above a limit
        log = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in heads]
        mass = np.exp(log + heads * math.log(p) + (n - heads) * math.log1p(-p)) if p < 1 else (heads == n) * 1.0
        assert mass[limit >= p].sum() >= 1 - error - 1e-9


def test_limits_ignore_rows_that_do_not_count() -> None:
    values = np.array([[0.2], [np.nan], [0.4], [1e30]])
    counted, ends = np.array([True, False, True, False]), (np.zeros(1), np.ones(1))
    mean, limit = upper_limits(
        np.where(counted[:, None], values, 0.9), counted, low=ends[0], high=ends[1], error=0.1, xp=np
    )
    assert mean[0] == pytest.approx(0.3)
    assert limit[0] == pytest.approx(upper(np.array([0.2, 0.4]), 0.1))
    nothing = upper_limits(np.zeros((2, 1)), np.zeros(2, bool), low=ends[0], high=ends[1], error=0.1, xp=np)
    assert (nothing[0][0], nothing[1][0]) == (0.0, 1.0)


# The certificate.


def batch(seed: int, rows: int = 40, length: int = 6) -> dict[str, Any]:
    """Random lengths, garbage where nothing counts, rejected rows, an empty row; -inf, NaN, +inf at response tokens."""
    rng = np.random.default_rng(seed)
    mask = np.arange(length) < rng.integers(1, length + 1, size=(rows, 1))
    mask[3] = False
    log_ratio = rng.normal(scale=rng.choice([0.01, 0.1, 0.5], size=(rows, 1)), size=(rows, length))
    log_ratio[0, 0], log_ratio[1, 0], log_ratio[2, 0] = -np.inf, np.nan, np.inf
    log_ratio[~mask] = rng.choice([np.nan, np.inf, -np.inf, 1e30], size=int((~mask).sum()))
    rewards = rng.random(rows)
    rewards[3] = np.nan
    return {
        "log_ratio": log_ratio,
        "response_mask": mask,
        "sequence_keep": rng.random(rows) < 0.8,
        "rewards": rewards,
    }


def plain_terms(data: dict[str, Any], cut: float, cap: float = 2.0) -> dict[str, float]:
    totals, n = dict.fromkeys(NAMES, 0.0), 0
    for ratios, mask, keep, reward in zip(
        data["log_ratio"], data["response_mask"], data["sequence_keep"], data["rewards"], strict=True
    ):
        valid = [float(x) for x, m in zip(ratios, mask, strict=True) if m]
        if not valid:
            continue
        n += 1
        kept = bool(keep) and all(x < math.inf for x in valid)
        u = [math.exp(x) - 1 for x in valid] if kept else []
        deviation = sum(map(abs, u))
        inside = kept and deviation <= cut
        totals["masked_surrogate"] += inside * reward * sum(u)
        totals["accepted_error"] += (math.exp(deviation) - 1 - deviation) if inside else 0.0
        totals["rejected_return"] += (not inside) * reward
        totals["accepted_gain"] += (reward * min(math.prod(1 + x for x in u), cap) if kept else 0.0) - reward
        totals["rejection_rate"] += not kept
    return {name: total / n for name, total in totals.items()}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cut", [0.05, 0.5, 3.0])
def test_terms_against_a_plain_loop(seed: int, cut: float) -> None:
    data = batch(seed)
    certificate = certify(**data, deviation_cuts=(cut,), ratio_cap=1.3)
    expected = plain_terms(data, cut, 1.3)
    assert {name: float(t.estimate) for name, t in certificate.terms.items()} == pytest.approx(expected, abs=1e-13)
    assert (certificate.n, certificate.confidence, certificate.deviation_cut) == (39, 0.95, cut)
    sides = {name: term.side for name, term in certificate.terms.items()}
    assert sides == dict(zip(NAMES, ["lower", "upper", "upper", "lower", "upper"], strict=True))
    for term in certificate.terms.values():
        assert term.limit < term.estimate if term.side == "lower" else term.limit > term.estimate


def parts(certificate: Certificate) -> dict[str, float]:
    return {name: float(term.limit) for name, term in certificate.terms.items()}


def test_lower_limit_is_put_together_from_its_parts() -> None:
    good = TabularPair.random(2, 4, seed=0, mismatch=0.02).sample(3000, seed=1)
    for data in (batch(0), arguments(good, np.ones(3000, bool))):
        certificate = certify(**data)
        limit = parts(certificate)
        surrogate = limit["masked_surrogate"] - limit["accepted_error"] - limit["rejected_return"]
        assert float(certificate.lower_limit) == pytest.approx(max(surrogate, limit["accepted_gain"], -1.0), abs=1e-12)
        singles = [certify(**data, deviation_cuts=(c,)).terms["rejected_return"].estimate for c in (0.0625, 0.25, 1.0)]
        assert singles[0] >= singles[1] >= singles[2]  # a larger cut rejects less


def test_certificate_by_hand() -> None:
    # 1,000 sequences of one token with ρ = 1.01 and R = 1. One cut 0.02: m = 5 means, half of 0.05/5: 0.005 each.
    # Bernstein with V = 0: 7 log(400)/(3·999) = 41.940252/2997 = 0.01399408 of the range.
    # surrogate: 0.01, range 0.04: limit 0.01 - 0.000559763 = 0.009440237
    # error: e^0.01 - 1.01 = 5.016708e-5, range e^0.02 - 1.02 = 2.0134003e-4; Bernstein + 2.8176e-6: 5.29847e-5
    # rejected: 0, range 1: Chernoff 1 - 0.005^(1/1000) = 1 - e^(-0.005298317) = 0.005284306
    # in all 0.009440237 - 0.0000529847 - 0.005284306 = 0.004102946; the other route: 0.01 - 2·0.01399408 < 0
    rows = 1000
    certificate = certify(
        np.full((rows, 1), math.log(1.01)),
        np.ones((rows, 1), bool),
        np.ones(rows, bool),
        np.ones(rows),
        deviation_cuts=(0.02,),
    )
    assert parts(certificate) == pytest.approx(
        {
            "masked_surrogate": 0.009440237,
            "accepted_error": 5.29847e-5,
            "rejected_return": 0.005284306,
            "accepted_gain": 0.01 - 2 * 0.01399408,
            "rejection_rate": 0.005284306,
        },
        abs=2e-8,
    )
    assert float(certificate.lower_limit) == pytest.approx(0.004102946, abs=3e-8)


def arguments(sample: TabularSample, keep: np.ndarray) -> dict[str, Any]:
    return {
        "log_ratio": sample.log_ratio,
        "response_mask": sample.response_mask,
        "sequence_keep": keep,
        "rewards": sample.rewards,
    }


def rare_catastrophe() -> TabularPair:
    """Equal policies but after a token of probability 1/500, where π_θ gives the reward away: ρ is 1/599 or 599."""
    first, fair, sure = np.array([[0.998, 0.002]]), [0.5, 0.5], [1 - 1 / 600, 1 / 600]
    return TabularPair(
        rollout=[first, np.array([fair, sure])],
        policy=[first, np.array([fair, sure[::-1]])],
        rewards=np.array([0.5, 0.5, 1.0, 0.0]),
    )


COVERED = {
    "close": (TabularPair.random(2, 4, seed=0, mismatch=0.02), 1e-3),
    "apart": (TabularPair.random(3, 3, seed=1, mismatch=0.5), 0.1),
    "far": (TabularPair.random(3, 4, seed=2, mismatch=2.0), 1.0),
    "rare": (rare_catastrophe(), 1e9),
    "rare, masked": (rare_catastrophe(), 0.3),
}


@pytest.mark.parametrize("name", list(COVERED))
@pytest.mark.parametrize(("n", "confidence"), [(30, 0.8), pytest.param(400, 0.95, marks=pytest.mark.slow)])
def test_coverage(name: str, n: int, confidence: float) -> None:
    pair, threshold = COVERED[name]
    keep = pair.token_kl.max(axis=1) <= threshold
    deviation = np.abs(np.expm1(pair.log_ratio)).sum(axis=1)
    product = np.exp(pair.log_ratio.sum(axis=1))
    gain = pair.rollout_mean(np.where(keep, pair.rewards * np.minimum(product, 2.0), 0.0) - pair.rewards)
    exact = {}
    for cut in (0.0625, 0.25, 1.0):
        inside = keep & (deviation <= cut)
        terms = pair.masked_surrogate(inside), pair.accepted_error(inside), pair.rejected_return(inside)
        exact[cut] = dict(zip(NAMES, [*terms, gain, pair.rejection_rate(keep)], strict=True))
    repetitions, sound = 300, 0
    for seed in range(repetitions):
        sample = pair.sample(n, seed=seed)
        certificate = certify(**arguments(sample, sample.token_kl.max(axis=1) <= threshold), confidence=confidence)
        truth = exact[float(certificate.deviation_cut)]
        held = float(certificate.lower_limit) <= pair.improvement and -1 <= certificate.lower_limit <= 1
        for term_name, term in certificate.terms.items():
            off = truth[term_name] - float(term.limit)
            held &= off >= -1e-12 if term.side == "lower" else off <= 1e-12
        sound += held
    assert sound / repetitions >= confidence


def test_plug_in_estimates_would_not_cover() -> None:
    # What a limit is for: the mean of the samples claims more than is true far more often than 5% of the time.
    pair = rare_catastrophe()
    wrong = 0
    for seed in range(100):
        sample = pair.sample(100, seed=seed)
        wrong += float(np.mean(sample.rewards * np.expm1(sample.log_ratio.sum(axis=1)))) > pair.improvement
    assert wrong > 50


def test_limits_close_in_on_the_truth() -> None:
    # A certificate that always said -1 would cover too. Small mismatch: everything but sampling noise is certified.
    pair = TabularPair.random(2, 4, seed=0, mismatch=0.02)
    gaps = []
    for n in (300, 3000, 100_000):
        sample = pair.sample(n, seed=3)
        gaps.append(pair.improvement - float(certify(**arguments(sample, np.ones(n, bool))).lower_limit))
    assert 0.1 > gaps[0] > gaps[1] > gaps[2] > 0
    assert gaps[2] < 2e-3


def test_an_improvement_can_be_proven() -> None:
    # ρ = 1.5 or 0.5 with equal chance, R = 1 for the first: the truth is 0.25.
    rng = np.random.default_rng(0)
    log_ratio = np.log(rng.choice([0.5, 1.5], size=(2000, 1)))
    data = (log_ratio, np.ones((2000, 1), bool), np.ones(2000, bool), (log_ratio[:, 0] > 0) * 1.0)
    assert 0.2 < float(certify(*data).lower_limit) < 0.25
    # Less confidence gives more; rejecting everything leaves -J(π_roll) = -0.5 and less.
    assert certify(*data, confidence=0.5).lower_limit > certify(*data).lower_limit
    rejected = certify(data[0], data[1], np.zeros(2000, bool), data[3])
    assert -0.6 < float(rejected.lower_limit) < -0.5
    assert rejected.terms["rejection_rate"].limit == 1.0


# What is not claimed.


def test_precondition_is_refuted_by_any_rejection() -> None:
    # Theorem 4.2: where the precondition holds nothing is rejected, so one rejection is enough, whatever was stated.
    sample = TabularPair.random(2, 3, seed=0, mismatch=0.01).sample(50, seed=0)
    keep = np.ones(50, bool)
    assert certify(**arguments(sample, keep)).precondition_holds is True
    keep[17] = False
    for stated in ({}, {"token_kl": sample.token_kl, "max_token_kl": 1.0}):
        certificate = certify(**arguments(sample, keep), **stated)
        assert certificate.precondition_holds is False
        assert certificate.precondition_stated is bool(stated)


def test_precondition_is_never_proven_by_samples() -> None:
    pair = TabularPair.random(2, 3, seed=0, mismatch=0.01)
    sample = pair.sample(50, seed=0)
    data = arguments(sample, np.ones(50, bool))
    certificate = certify(**data, token_kl=sample.token_kl)
    assert (certificate.precondition_holds, certificate.precondition_stated) == (True, False)
    assert certificate.sampled_max_token_kl == sample.token_kl.max() <= pair.max_token_kl
    assert certify(**data).sampled_max_token_kl is None
    # None of 50 rejected: what can be said is a rate. m = 11 means: 1 - (0.05/22)^(1/50) = 0.114617
    assert float(certificate.terms["rejection_rate"].limit) == pytest.approx(0.114617, abs=1e-6)
    # With δ stated for all contexts it stands until a sample contradicts it.
    stated = certify(**data, token_kl=sample.token_kl, max_token_kl=pair.max_token_kl)
    assert (stated.precondition_holds, stated.precondition_stated) == (True, True)
    assert stated.lower_limit == certificate.lower_limit  # and the limit does not lean on it
    below = 0.99 * sample.token_kl.max()
    contradicted = certify(**data, token_kl=sample.token_kl, max_token_kl=below)
    assert (contradicted.precondition_holds, contradicted.precondition_stated) == (False, True)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_precondition_fails_closed(value: float) -> None:
    sample = TabularPair.random(2, 3, seed=0, mismatch=0.01).sample(50, seed=0)
    data = {**arguments(sample, np.ones(50, bool)), "token_kl": sample.token_kl, "max_token_kl": 1.0}
    assert certify(**data).precondition_holds is True
    for name in ("log_ratio", "token_kl"):
        if (name, value) == ("token_kl", -np.inf):
            continue
        broken = data[name].copy()
        broken[7, 1] = value
        assert certify(**{**data, name: broken}).precondition_holds is False, name
    masked = sample.response_mask.copy()
    masked[7, 2] = False
    garbage = {**data, "response_mask": masked, "log_ratio": data["log_ratio"].copy()}
    garbage["log_ratio"][7, 2] = value
    assert certify(**garbage).precondition_holds is True


def test_a_rare_context_is_not_proven_away() -> None:
    # Proposition 3.10: KL = 1 behind a token of probability 1e-6, which no sample shows.
    first, a = np.array([[1 - 1e-6, 1e-6]]), (1 - math.sqrt(1 - math.exp(-2))) / 2
    second = [np.array([[0.5, 0.5], row]) for row in ([0.5, 0.5], [a, 1 - a])]
    pair = TabularPair(rollout=[first, second[0]], policy=[first, second[1]], rewards=np.ones(4))
    sample = pair.sample(1000, seed=0)
    certificate = certify(**arguments(sample, sample.token_kl.max(axis=1) <= 1e-3), token_kl=sample.token_kl)
    assert certificate.sampled_max_token_kl == 0.0 < pair.max_token_kl
    # It holds in the sample, and is false: nobody stated it, and the rate says how little the sample knows.
    assert (certificate.precondition_holds, certificate.precondition_stated) == (True, False)
    assert 1e-6 < certificate.terms["rejection_rate"].limit < 0.01


# Inputs.


@pytest.mark.parametrize("reward", [-0.01, 1.01, np.nan, np.inf])
def test_rewards_outside_the_range_are_refused(reward: float) -> None:
    data = batch(0)
    data["rewards"][5] = reward
    with pytest.raises(ValueError, match=r"rewards must lie in \[0, 1\].*map rewards"):
        certify(**data)
    with pytest.raises(ValueError, match="rewards must lie in"):
        certify(**{name: jnp.asarray(value) for name, value in data.items()})
    assert jnp.isnan(_JITTED(**data).lower_limit)


def test_illegal_options_are_named() -> None:
    data = batch(0)
    for option, value in (
        ("confidence", 1.0),
        ("confidence", 0.0),
        ("ratio_cap", 1.0),
        ("deviation_cuts", (0.1, 0.0)),
        ("deviation_cuts", ()),
        ("max_token_kl", -1.0),
        ("max_token_kl", math.nan),
    ):
        with pytest.raises(ValueError, match=option):
            certify(**data, **{option: value})


def test_padding_changes_nothing() -> None:
    data = batch(0)
    plain = certify(**data, token_kl=np.abs(data["log_ratio"]))
    rows, length = data["log_ratio"].shape
    padded = {
        "log_ratio": np.full((rows + 3, length + 5), np.nan),
        "response_mask": np.zeros((rows + 3, length + 5), bool),
        "sequence_keep": np.zeros(rows + 3, bool),
        "rewards": np.full(rows + 3, 77.0),
    }
    for name in ("log_ratio", "response_mask"):
        padded[name][:rows, 5:] = data[name]
    for name in ("sequence_keep", "rewards"):
        padded[name][:rows] = data[name]
    wide = certify(**padded, token_kl=np.abs(padded["log_ratio"]))
    assert (wide.n, wide.precondition_holds) == (plain.n, plain.precondition_holds)
    assert float(wide.lower_limit) == pytest.approx(float(plain.lower_limit), abs=1e-14)
    assert parts(wide) == pytest.approx(parts(plain), abs=1e-14)


def packed(data: dict[str, Any], sequences_a_row: int) -> dict[str, Any]:
    """Several sequences a row, their slots shuffled together: segments need not be contiguous."""
    rows = len(data["log_ratio"]) // sequences_a_row
    length = data["log_ratio"].shape[1]
    order = np.random.default_rng(1).permuted(np.tile(np.arange(sequences_a_row * length), (rows, 1)), axis=1)
    out = {name: np.take_along_axis(data[name].reshape(rows, -1), order, 1) for name in ("log_ratio", "response_mask")}
    for name in ("sequence_keep", "rewards"):
        out[name] = np.take_along_axis(np.repeat(data[name], length).reshape(rows, -1), order, 1)
    ids = np.repeat(np.arange(sequences_a_row) * 7 - 3, length)
    return {**out, "segment_ids": ids[order]}


@pytest.mark.parametrize(("seed", "sequences_a_row"), [(0, 4), (1, 4), (2, 40)])
def test_packed_rows_are_their_sequences(seed: int, sequences_a_row: int) -> None:
    data = batch(seed)
    rows = packed(data, sequences_a_row)
    one, many = certify(**data, token_kl=np.abs(data["log_ratio"])), certify(**rows, token_kl=np.abs(rows["log_ratio"]))
    assert (many.n, many.precondition_holds, many.deviation_cut) == (one.n, False, one.deviation_cut)
    assert parts(many) == pytest.approx(parts(one), abs=1e-13)  # sums in another order
    assert many.lower_limit.dtype == np.float64


def test_packed_rows_under_jit() -> None:
    rows = packed(batch(0), 4)
    exact, traced = certify(**rows), _JITTED(**{name: jnp.asarray(value) for name, value in rows.items()})
    assert int(traced.n) == exact.n
    assert parts(traced) == pytest.approx(parts(exact), abs=1e-4)  # float32, as for unpacked rows below


def test_packed_rows_read_the_last_response_token() -> None:
    rows = packed(batch(0), 4)
    exact = parts(certify(**rows))
    for row, segment in np.ndindex(10, 4):
        slots = np.flatnonzero((rows["segment_ids"][row] == segment * 7 - 3) & rows["response_mask"][row])
        rows["rewards"][row, slots[:-1]] = 55.0
        rows["sequence_keep"][row, slots[:-1]] ^= True
    assert parts(certify(**rows)) == exact


def test_shapes_of_sequences_are_told() -> None:
    data, rows = batch(0), packed(batch(0), 4)
    by_token = {"sequence_keep": np.ones((40, 6), bool), "rewards": np.zeros((40, 6))}
    with pytest.raises(ValueError, match=r"sequence_keep must be \[B\] = \[40\].*\(not given here\), given \[40, 6\]"):
        certify(**data | by_token)
    by_row = {"sequence_keep": np.ones(10, bool), "rewards": np.zeros(10)}
    with pytest.raises(ValueError, match=r"sequence_keep must be.* \[10, 24\] with segment_ids \(given here\), given"):
        certify(**rows | by_row)


def test_order_of_rows_changes_nothing() -> None:
    data, order = batch(2), np.random.default_rng(0).permutation(40)
    moved = certify(**{name: value[order] for name, value in data.items()})
    assert parts(moved) == pytest.approx(parts(certify(**data)), abs=1e-14)


def test_empty_input_certifies_nothing() -> None:
    for shape in ((0, 3), (2, 0), (2, 3)):
        mask = np.zeros(shape, bool)
        data = (np.full(shape, np.nan), mask, np.ones(shape[0], bool), np.full(shape[0], np.nan))
        certificate = certify(*data, token_kl=np.full(shape, np.nan), max_token_kl=1.0)
        assert (certificate.n, certificate.lower_limit, certificate.precondition_holds) == (0, -1.0, False)
        assert certificate.terms["rejection_rate"].limit == 1.0


def test_jit_equals_eager_equals_float64() -> None:
    data = batch(0)
    data["rewards"][3] = 0.0
    exact = certify(**data)
    arrays = {name: jnp.asarray(value) for name, value in data.items()}
    eager, traced = certify(**arrays), _JITTED(**arrays)
    assert isinstance(traced.lower_limit, jax.Array)
    assert (int(traced.n), traced.confidence) == (exact.n, exact.confidence)
    assert bool(traced.precondition_holds) == bool(eager.precondition_holds) == exact.precondition_holds
    whole = {**arrays, "log_ratio": jnp.zeros_like(arrays["log_ratio"]), "sequence_keep": jnp.ones(40, bool)}
    assert bool(_JITTED(**whole).precondition_holds)
    for name in NAMES:
        np.testing.assert_allclose(traced.terms[name].limit, eager.terms[name].limit, atol=2e-6)
        # float32 against float64: 1e-4 of limits of order 1, whose roots are found by halving
        np.testing.assert_allclose(eager.terms[name].limit, exact.terms[name].limit, atol=1e-4)
    np.testing.assert_allclose(traced.lower_limit, exact.lower_limit, atol=1e-4)


def test_certificate_is_a_constant_for_the_gradient() -> None:
    data = {name: jnp.asarray(value) for name, value in batch(0).items()}
    data["rewards"] = jnp.nan_to_num(data["rewards"])

    def limit(log_ratio: jax.Array, rewards: jax.Array) -> jax.Array:
        return certify(**{**data, "log_ratio": log_ratio, "rewards": rewards}).lower_limit

    for gradient in jax.grad(limit, argnums=(0, 1))(data["log_ratio"], data["rewards"]):
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))
