"""`TabularPair` against enumeration with dictionaries, and the inequalities of FORMULAS section 9 on exact values."""

import math

import numpy as np
import pytest

from trm_jax import bounds
from trm_jax.bounds import TabularPair

from .batches import close
from .reference import bounds as formulas
from .reference.tabular import Pair, accepted_error, deviation, random_tables

EXACT = 1e-10
SHAPES = [(2, 5), (3, 3), (5, 2), (4, 1)]
MISMATCH = [1e-4, 0.03, 0.5, 3.0]


def both(*arguments, **options):
    rollout, policy, rewards = random_tables(*arguments, **options)
    return TabularPair(rollout=rollout, policy=policy, rewards=rewards), Pair(rollout, policy, rewards)


PAIRS = [(seed, v, t, m) for seed, (v, t) in enumerate(SHAPES) for m in MISMATCH]


@pytest.mark.parametrize("arguments", PAIRS)
def test_quantities(arguments):
    package, exact = both(*arguments)
    close(package.improvement, exact.improvement, relative=1e-9, absolute=1e-14)
    close(package.surrogate, exact.surrogate, relative=1e-9, absolute=1e-14)
    close(package.error, exact.error, relative=1e-7, absolute=1e-15)
    close(package.max_token_kl, exact.max_token_kl, relative=1e-9)
    close(package.max_token_tv, exact.max_token_tv, relative=1e-9)
    close(package.mean_token_tv_by_position, exact.mean_tv, relative=1e-9)
    close(package.mean_token_kl_by_position, exact.mean_kl, relative=1e-7)
    close(package.sequence_kl, exact.sequence_kl, relative=1e-7)
    close(package.sequence_tv, exact.sequence_tv, relative=1e-9)
    close(package.context_tv_by_position, [exact.total_variation(t) for t in range(exact.length)], relative=1e-9)


@pytest.mark.parametrize("arguments", PAIRS)
def test_per_sequence_tables(arguments):
    package, exact = both(*arguments)
    assert [tuple(row) for row in np.asarray(package.sequences).tolist()] == exact.sequences
    close(package.log_ratio, [np.log(exact.ratios(y)) for y in exact.sequences], relative=1e-9, absolute=1e-14)
    for name, function in (("token_kl", exact.token_kl), ("token_tv", exact.token_tv)):
        expected = [[function(y[:t]) for t in range(exact.length)] for y in exact.sequences]
        close(getattr(package, name), expected, relative=1e-7)


@pytest.mark.parametrize("arguments", PAIRS)
def test_masked_terms(arguments):
    package, exact = both(*arguments)
    keep = {y: max(exact.token_kl(y[:t]) for t in range(exact.length)) for y in exact.sequences}
    threshold = float(np.median(list(keep.values())))
    keep = {y: value <= threshold for y, value in keep.items()}
    mask = np.array([keep[y] for y in exact.sequences])
    close(
        package.masked_surrogate(mask),
        exact.rollout_mean(lambda y: keep[y] * exact.rewards[y] * (sum(exact.ratios(y)) - exact.length)),
        relative=1e-8,
        absolute=1e-14,
    )
    close(
        package.accepted_error(mask),
        exact.rollout_mean(lambda y: keep[y] * accepted_error(exact.ratios(y))),
        relative=1e-5,
    )
    rejected = exact.rollout_mean(lambda y: (not keep[y]) * exact.rewards[y])
    close(package.rejected_return(mask), rejected, relative=1e-9, absolute=1e-15)
    close(package.rejection_rate(mask), exact.rollout_mean(lambda y: not keep[y]), relative=1e-9, absolute=1e-15)


@pytest.mark.parametrize("zeros", [0.0, 0.3])
@pytest.mark.parametrize("arguments", PAIRS)
def test_error_within_every_bound(arguments, zeros):
    """Error and divergences of the oracle, bounds of the package: also where a policy gives probability 0."""
    package, exact = both(*arguments, zeros=zeros)
    scalars = {
        "max_token_kl": exact.max_token_kl,
        "max_token_tv": exact.max_token_tv,
        "sequence_kl": exact.sequence_kl,
        "sequence_tv": exact.sequence_tv,
    }
    got = bounds.unified_bound(exact.length, **scalars, mean_token_tv_by_position=np.array(exact.mean_tv))
    # With zeros L' misses the policy mass that the rollout policy cannot reach: only coverage of the rollout makes
    # J - J_roll - L' the error of the theorems.
    if zeros == 0 or covered(exact):
        for name, bound in got.bounds.items():
            assert abs(exact.error) <= bound * (1 + 1e-9) + 1e-15, name
    assert got.adaptive <= min(got.coupling, got.pinsker_marginal_kl, got.pinsker_marginal_tv) * (1 + 1e-12)
    close(package.max_token_kl, exact.max_token_kl, relative=1e-7)
    close(package.max_token_tv, exact.max_token_tv, relative=1e-7)


def covered(exact):
    return all(q > 0 or p == 0 for c in exact.reachable() for q, p in zip(exact.q[c], exact.p[c], strict=True))


@pytest.mark.parametrize("arguments", PAIRS)
def test_lemmas_on_exact_contexts(arguments):
    _, exact = both(*arguments)
    delta, eps = exact.max_token_kl, exact.max_token_tv
    for c in exact.q:
        if len(c) < exact.length:
            limit = bounds.advantage_bound(max_token_kl=delta, max_token_tv=eps)
            assert abs(exact.advantage(c)) <= limit + 1e-12
            assert abs(exact.advantage(c)) <= 2 * exact.token_tv(c) + 1e-12
    for t in range(1, exact.length + 1):
        shift = exact.total_variation(t - 1)
        limits = {
            "max_token_kl": delta,
            "max_token_tv": eps,
            "sequence_kl": exact.sequence_kl,
            "sequence_tv": exact.sequence_tv,
        }
        for k, v in limits.items():
            assert shift <= bounds.context_shift_bound(t, **{k: v}) + 1e-12


@pytest.mark.parametrize("arguments", PAIRS)
def test_chain_rule_martingale_and_unbiasedness(arguments):
    _, exact = both(*arguments)
    for t in range(exact.length + 1):
        close(exact.prefix_kl(t), math.fsum(exact.mean_kl[:t]), relative=1e-8, absolute=1e-14)
    for c in exact.q:
        mean = math.fsum(q * (exact.value((*c, v)) - exact.value(c)) for v, q in enumerate(exact.q[c]))
        assert abs(mean) < 1e-12
    weighted = exact.rollout_mean(lambda y: exact.rewards[y] * math.prod(exact.ratios(y)))
    plain = exact.rollout_mean(lambda y: exact.rewards[y])
    close(weighted - plain, exact.improvement, relative=1e-9, absolute=1e-14)
    k3 = exact.rollout_mean(lambda y: math.fsum(r - 1 - math.log(r) for r in exact.ratios(y)))
    close(k3, exact.sequence_kl, relative=1e-6, absolute=1e-14)


@pytest.mark.parametrize("arguments", PAIRS)
@pytest.mark.parametrize("quantile", [0.0, 0.5, 1.0])
def test_section_8_inequalities(arguments, quantile):
    """J - J_roll >= L'_masked - B_A - E[(1-M) R], no less than with r, or r + D_TV^seq, for it; term by term too."""
    _, exact = both(*arguments)
    largest = {y: max(exact.token_kl(y[:t]) for t in range(exact.length)) for y in exact.sequences}
    threshold = float(np.quantile(list(largest.values()), quantile))
    keep = {y: value <= threshold for y, value in largest.items()}
    surrogate = exact.rollout_mean(lambda y: keep[y] * exact.rewards[y] * math.fsum(r - 1 for r in exact.ratios(y)))
    remainder = exact.rollout_mean(lambda y: keep[y] * accepted_error(exact.ratios(y)))
    rejected = exact.rollout_mean(lambda y: (not keep[y]) * exact.rewards[y])
    rate = exact.rollout_mean(lambda y: not keep[y])
    assert exact.improvement >= surrogate - remainder - rejected - 1e-12
    assert rejected <= rate + 1e-12
    assert exact.improvement >= surrogate - remainder - (rate + exact.sequence_tv) - 1e-12
    for y in exact.sequences:
        ratios = exact.ratios(y)
        gap = abs(math.prod(ratios) - 1 - math.fsum(r - 1 for r in ratios))
        assert gap <= math.expm1(deviation(ratios)) - deviation(ratios) + 1e-12


@pytest.mark.parametrize("arguments", PAIRS)
def test_length_neutral_statistic_bounds_the_error(arguments):
    """abs(Error) <= 2 E[W(y)] with W = sum_t abs(rho_t - 1) w_t (TRM F.2)."""
    _, exact = both(*arguments)
    horizon = [
        min(1.0, s * exact.max_token_tv, math.sqrt(s * exact.max_token_kl / 2)) for s in range(exact.length - 1, -1, -1)
    ]
    weighted = exact.rollout_mean(
        lambda y: math.fsum(abs(r - 1) * w for r, w in zip(exact.ratios(y), horizon, strict=True))
    )
    assert abs(exact.error) <= 2 * weighted + 1e-14
    close(
        2 * weighted,
        formulas.adaptive(exact.mean_tv, max_token_kl=exact.max_token_kl, max_token_tv=exact.max_token_tv),
        relative=1e-8,
    )


def test_no_function_of_the_sequence_kl_bounds_the_maximum():
    """Proposition 3.10: c* has probability p and KL 1, zero elsewhere: delta = 1, D_KL^seq = p. T = 2, V = 2."""
    for p in (0.1, 1e-3):
        x = policy_at_kl_one()
        rollout = [np.array([[p, 1 - p]]), np.full((2, 2), 0.5)]
        policy = [np.array([[p, 1 - p]]), np.array([[x, 1 - x], [0.5, 0.5]])]
        pair = TabularPair(rollout=rollout, policy=policy, rewards=np.zeros(4))
        close(pair.max_token_kl, 1.0, relative=1e-9)
        close(pair.sequence_kl, p, relative=1e-9)


def policy_at_kl_one():
    """x with KL((1/2, 1/2) || (x, 1-x)) = -log(2 sqrt(x (1-x))) = 1: x (1-x) = e^-2 / 4."""
    return (1 - math.sqrt(1 - math.exp(-2.0))) / 2
