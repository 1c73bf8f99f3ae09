"""Certificates: their estimates against loops, their confidence limits against the truth over many samples."""

import functools

import jax
import numpy as np
import pytest

from trm_jax.bounds import certify

from .batches import close, spoil
from .reference import certificate as oracle
from .reference.tabular import Pair, random_tables


@functools.cache
def pair(seed, vocabulary, length, mismatch):
    return Pair(*random_tables(seed, vocabulary, length, mismatch))


def rare_loss(probability):
    """One token; the policy drops the one rewarded answer: J(theta) - J(roll) = -probability."""
    rollout = [np.array([[1 - probability, probability]])]
    return Pair(rollout, [np.array([[1.0, 0.0]])], np.array([0.0, 1.0]))


def keeps(exact, share):
    """The mask trm_max that keeps about this share of the sequences, by row of `exact.sequences`."""
    largest = [max(exact.token_kl(y[:t]) for t in range(exact.length)) for y in exact.sequences]
    return np.array(largest) <= sorted(largest)[round(share * (len(largest) - 1))]


def columns(exact):
    """Per sequence of the enumeration: probability, log ratios, rewards, token KLs."""
    probability = np.array([exact.probability(exact.q, y) for y in exact.sequences])
    with np.errstate(divide="ignore"):
        log_ratio = np.log(
            [
                exact.ratios(y) if p > 0 else [1.0] * exact.length
                for y, p in zip(exact.sequences, probability, strict=True)
            ]
        )
    token_kl = np.array([[exact.token_kl(y[:t]) for t in range(exact.length)] for y in exact.sequences])
    return probability / probability.sum(), log_ratio, np.array([exact.rewards[y] for y in exact.sequences]), token_kl


@pytest.mark.parametrize("mismatch", [0.03, 0.5, 2.0])
@pytest.mark.parametrize("quantile", [0.4, 1.0])
def test_estimates_are_means_over_all_sequences(mismatch, quantile):
    exact = pair(0, 3, 3, mismatch)
    kept = keeps(exact, quantile)
    probability, log_ratio, rewards, token_kl = columns(exact)
    rows = np.random.default_rng(1).choice(len(rewards), 400, p=probability)
    got = certify(
        log_ratio[rows], np.ones((400, 3), bool), kept[rows], rewards[rows], token_kl=token_kl[rows], confidence=0.9
    )
    assert (got.n, got.confidence) == (400, 0.9)
    for name in oracle.TERMS:
        values = oracle.sample_values(name, log_ratio[rows], kept[rows], rewards[rows], float(got.deviation_cut))
        close(got.terms[name].estimate, np.mean(values), relative=1e-5, absolute=1e-12)
        worse = got.terms[name].limit < got.terms[name].estimate
        assert worse == (got.terms[name].side == "lower")
    assert got.lower_limit <= got.terms["masked_surrogate"].estimate + got.terms["accepted_error"].estimate
    close(got.sampled_max_token_kl, token_kl[rows].max(), relative=1e-6)


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_limits_by_their_theorems(confidence):
    """Three cuts make 3 * 3 + 2 means, which share the error; ranges [-c, c], [0, psi(c)], [0, 1] by boundedness."""
    exact = pair(1, 3, 2, 0.15)
    kept = keeps(exact, 0.7)
    probability, log_ratio, rewards, _ = columns(exact)
    for n in (12, 500):
        rows = np.random.default_rng(n).choice(len(rewards), n, p=probability)
        sample = (log_ratio[rows], kept[rows], rewards[rows])
        got = certify(sample[0], np.ones((n, 2), bool), *sample[1:], confidence=confidence)
        cut = float(got.deviation_cut)
        ranges = {
            "masked_surrogate": (-cut, cut),
            "accepted_error": (0.0, np.exp(cut) - 1 - cut),
            "rejected_return": (0.0, 1.0),
            "rejection_rate": (0.0, 1.0),
        }
        for name, (low, high) in ranges.items():
            values, term = oracle.sample_values(name, *sample, cut), got.terms[name]
            sign = -1 if term.side == "lower" else 1
            limit = oracle.upper_limit([sign * v for v in values], low, high, (1 - confidence) / 11)
            close(term.limit, sign * limit, relative=1e-6, absolute=1e-9)
        by_cut = [got.terms[k].limit for k in ("masked_surrogate", "accepted_error", "rejected_return")]
        routes = (by_cut[0] - by_cut[1] - by_cut[2], got.terms["accepted_gain"].limit, -1.0)
        close(got.lower_limit, max(routes), relative=1e-9)


def violations(exact, kept, n, *, confidence, runs, seed):
    """How often, of `runs` samples of size n, a limit lies on the wrong side of the truth."""
    probability, log_ratio, rewards, _ = columns(exact)
    keep = dict(zip(exact.sequences, kept.tolist(), strict=True))
    truth = functools.cache(lambda name, cut: oracle.exact_mean(name, exact, keep.__getitem__, cut))
    rng, mask = np.random.default_rng(seed), np.ones((n, exact.length), bool)
    wrong = dict.fromkeys(["lower_limit", *oracle.TERMS], 0)
    for _ in range(runs):
        rows = rng.choice(len(rewards), n, p=probability)
        got = certify(log_ratio[rows], mask, kept[rows], rewards[rows], confidence=confidence)
        wrong["lower_limit"] += bool(got.lower_limit > exact.improvement + 1e-12)
        for name in oracle.TERMS:
            term, value = got.terms[name], truth(name, float(got.deviation_cut))
            wrong[name] += bool(term.limit > value + 1e-9 if term.side == "lower" else term.limit < value - 1e-9)
    return wrong


def assert_covers(wrong, confidence, runs):
    """No more than 1 - confidence, plus three binomial standard errors."""
    allowed = 1 - confidence
    ceiling = runs * allowed + 3 * np.sqrt(runs * allowed * (1 - allowed))
    assert max(wrong.values()) <= ceiling, wrong


CASES = {  # name: (pair, which sequences are kept, n)
    "near": (pair(2, 2, 3, 0.1), keeps(pair(2, 2, 3, 0.1), 1.0), 60),
    "masked": (pair(3, 3, 2, 0.6), keeps(pair(3, 3, 2, 0.6), 0.5), 60),
    "far": (pair(4, 2, 3, 2.0), keeps(pair(4, 2, 3, 2.0), 0.6), 25),
    "rare loss": (rare_loss(0.05), np.array([True, True]), 20),
    "rarer loss": (rare_loss(0.01), np.array([True, True]), 40),
    "rejected loss": (rare_loss(0.05), np.array([True, False]), 20),
}


@pytest.mark.parametrize("case", CASES)
def test_limits_cover_the_truth(case):
    exact, kept, n = CASES[case]
    assert_covers(violations(exact, kept, n, confidence=0.8, runs=120, seed=5), 0.8, 120)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95])
def test_limits_cover_the_truth_over_many_samples(case, confidence):
    exact, kept, n = CASES[case]
    assert_covers(violations(exact, kept, n, confidence=confidence, runs=800, seed=6), confidence, 800)


def test_limits_tighten_with_n_and_loosen_with_confidence():
    exact = pair(5, 3, 2, 0.05)
    kept = keeps(exact, 1.0)
    probability, log_ratio, rewards, _ = columns(exact)
    rows = np.random.default_rng(7).choice(len(rewards), 100_000, p=probability)

    def limit(n, confidence):
        some = rows[:n]
        return float(
            certify(
                log_ratio[some], np.ones((n, 2), bool), kept[some], rewards[some], confidence=confidence
            ).lower_limit
        )

    by_n = [limit(n, 0.95) for n in (30, 300, 3000, 100_000)]
    assert by_n == sorted(by_n)
    assert by_n[-1] <= exact.improvement
    by_confidence = [limit(300, c) for c in (0.5, 0.9, 0.99, 0.9999)]
    assert by_confidence == sorted(by_confidence, reverse=True)
    assert exact.improvement - by_n[-1] < 0.02, "100,000 samples of a near pair leave little"


def test_one_rejected_sequence_refutes_the_precondition():
    """Theorem 4.2(3): if anything is rejected, the precondition has failed."""
    log_ratio, mask, rewards = np.zeros((5, 3)), np.ones((5, 3), bool), np.ones(5)
    got = certify(log_ratio, mask, np.array([True] * 4 + [False]), rewards, token_kl=np.zeros((5, 3)))
    assert not got.precondition_holds
    assert certify(log_ratio, mask, np.ones(5, bool), rewards).precondition_holds


def test_masked_slots_do_not_count():
    rng = np.random.default_rng(8)
    log_ratio = rng.normal(size=(50, 4)) * 0.05
    mask = np.arange(4) < rng.integers(1, 5, (50, 1))
    keep, rewards = rng.random(50) < 0.8, rng.random(50)
    clean = certify(np.where(mask, log_ratio, 0.0), mask, keep, rewards, token_kl=np.where(mask, 0.1, 0.0))
    dirty = certify(spoil(log_ratio, mask), mask, keep, rewards, token_kl=spoil(np.full((50, 4), 0.1), mask))
    assert jax.tree.leaves(clean) == jax.tree.leaves(dirty)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_unknown_ratio_is_a_rejected_sequence(bad):
    """Never evidence: the limit is no higher than if the mask had rejected the row."""
    rng = np.random.default_rng(9)
    log_ratio, mask = rng.normal(size=(40, 3)) * 0.02, np.ones((40, 3), bool)
    keep, rewards = np.ones(40, bool), np.ones(40)
    spoiled = log_ratio.copy()
    spoiled[0, 1] = bad
    try:
        got = certify(spoiled, mask, keep, rewards)
    except ValueError:
        return
    honest = certify(log_ratio, mask, np.arange(40) > 0, rewards)
    assert got.lower_limit <= honest.lower_limit + 1e-12
    assert got.terms["rejection_rate"].estimate == honest.terms["rejection_rate"].estimate


def test_rewards_outside_the_unit_interval_are_refused():
    arrays = (np.zeros((3, 2)), np.ones((3, 2), bool), np.ones(3, bool))
    for rewards in ([0.0, 1.0, 1.5], [-0.1, 0.0, 1.0], [0.0, np.nan, 1.0]):
        with pytest.raises(ValueError, match="rewards"):
            certify(*arrays, np.array(rewards))
