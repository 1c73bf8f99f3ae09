"""The exact oracle against a plain recursion over strings, by hand, and against its own samples."""

from __future__ import annotations

import decimal
import itertools
import math

import numpy as np
import pytest

from trm_jax.bounds import TabularPair
from trm_jax.divergences import k3, log_odds_displacement, ratio_from_displacement


class Plain:
    """The definitions, word by word, with tuples of tokens as contexts."""

    def __init__(self, pair: TabularPair) -> None:
        self.size, self.length = pair.vocabulary, pair.length
        self.tables = {"roll": pair.rollout, "theta": pair.policy}
        self.sequences = list(itertools.product(range(self.size), repeat=self.length))
        self.reward = dict(zip(self.sequences, map(float, pair.rewards), strict=True))

    def token(self, policy: str, context: tuple[int, ...], token: int) -> float:
        row = 0
        for earlier in context:
            row = row * self.size + earlier
        return float(self.tables[policy][len(context)][row, token])

    def probability(self, policy: str, sequence: tuple[int, ...]) -> float:
        return math.prod(self.token(policy, sequence[:t], y) for t, y in enumerate(sequence))

    def contexts(self, t: int) -> list[tuple[int, ...]]:
        return list(itertools.product(range(self.size), repeat=t))

    def mean(self, policy: str, values: dict[tuple[int, ...], float]) -> float:
        return sum(self.probability(policy, y) * value for y, value in values.items())

    def kl(self, context: tuple[int, ...]) -> float:
        total = 0.0
        for y in range(self.size):
            q, p = self.token("roll", context, y), self.token("theta", context, y)
            total += 0.0 if q == 0 else math.inf if p == 0 else q * math.log(q / p)
        return total

    def tv(self, context: tuple[int, ...]) -> float:
        pairs = [(self.token("roll", context, y), self.token("theta", context, y)) for y in range(self.size)]
        return 0.5 * sum(abs(p - q) for q, p in pairs)

    def value(self, context: tuple[int, ...]) -> float:
        if len(context) == self.length:
            return self.reward[context]
        return sum(self.token("roll", context, y) * self.value((*context, y)) for y in range(self.size))


def test_against_a_plain_recursion() -> None:
    pair = TabularPair.random(3, 3, seed=4, mismatch=0.7)
    plain = Plain(pair)
    returns = {name: plain.mean(name, plain.reward) for name in ("roll", "theta")}
    surrogate = 0.0
    for y in plain.sequences:
        ratios = [plain.token("theta", y[:t], y[t]) / plain.token("roll", y[:t], y[t]) for t in range(3)]
        surrogate += plain.probability("roll", y) * plain.reward[y] * sum(r - 1 for r in ratios)
    assert pair.rollout_return == pytest.approx(returns["roll"], rel=1e-12)
    assert pair.policy_return == pytest.approx(returns["theta"], rel=1e-12)
    assert pair.improvement == pytest.approx(returns["theta"] - returns["roll"], abs=1e-13)
    assert pair.surrogate == pytest.approx(surrogate, abs=1e-13)
    assert pair.error == pytest.approx(returns["theta"] - returns["roll"] - surrogate, abs=1e-13)
    everything = [c for t in range(3) for c in plain.contexts(t)]
    assert pair.max_token_kl == pytest.approx(max(map(plain.kl, everything)), rel=1e-10)
    assert pair.max_token_tv == pytest.approx(max(map(plain.tv, everything)), rel=1e-12)
    for t in range(3):
        shift = 0.5 * sum(abs(plain.probability("theta", c) - plain.probability("roll", c)) for c in plain.contexts(t))
        assert pair.context_tv_by_position[t] == pytest.approx(shift, abs=1e-14)
        for name, at in ((pair.mean_token_kl_by_position, plain.kl), (pair.mean_token_tv_by_position, plain.tv)):
            assert name[t] == pytest.approx(plain.mean("roll", {c: at(c) for c in plain.contexts(t)}), rel=1e-10)
    whole = [(plain.probability("roll", y), plain.probability("theta", y)) for y in plain.sequences]
    assert pair.sequence_tv == pytest.approx(0.5 * sum(abs(p - q) for q, p in whole), rel=1e-12)
    assert pair.sequence_kl == pytest.approx(sum(q * math.log(q / p) for q, p in whole), rel=1e-12)  # chain rule


def test_masked_quantities_against_a_plain_loop() -> None:
    pair = TabularPair.random(2, 4, seed=9, mismatch=0.5)
    plain, keep = Plain(pair), np.random.default_rng(1).random(16) < 0.6
    expected = dict.fromkeys(("surrogate", "error", "rejected", "rate"), 0.0)
    for y, kept in zip(plain.sequences, keep, strict=True):
        weight = plain.probability("roll", y)
        u = [plain.token("theta", y[:t], y[t]) / plain.token("roll", y[:t], y[t]) - 1 for t in range(4)]
        deviation = sum(map(abs, u))
        expected["surrogate"] += weight * kept * plain.reward[y] * sum(u)
        expected["error"] += weight * kept * (math.exp(deviation) - 1 - deviation)
        expected["rejected"] += weight * (not kept) * plain.reward[y]
        expected["rate"] += weight * (not kept)
    assert pair.masked_surrogate(keep) == pytest.approx(expected["surrogate"], abs=1e-13)
    assert pair.accepted_error(keep) == pytest.approx(expected["error"], rel=1e-12)
    assert pair.rejected_return(keep) == pytest.approx(expected["rejected"], rel=1e-12)
    assert pair.rejection_rate(keep) == pytest.approx(expected["rate"], rel=1e-12)
    for row, y in enumerate(plain.sequences):
        assert tuple(pair.sequences[row]) == y
        contexts = [y[:t] for t in range(4)]
        np.testing.assert_allclose(pair.token_kl[row], [plain.kl(c) for c in contexts], rtol=1e-10)
        np.testing.assert_allclose(pair.token_tv[row], [plain.tv(c) for c in contexts], rtol=1e-12)


def coin(h: float) -> list[np.ndarray]:
    row = [0.5 - h, 0.5 + h]
    return [np.array([row]), np.array([row, row])]


@pytest.mark.parametrize("h", [0.25, 2.0**-10, 2.0**-30, 2.0**-45])
def test_error_by_hand_keeps_its_digits(h: float) -> None:
    # Two fair coins, π_θ gives 1/2 + h to heads, R = 1 for two heads. J = (1/2+h)² - 1/4 = h + h²;
    # L' = 1/4·(2h + 2h) = h; Error = h². At h = 2^-30 that is 8.7e-19, below the rounding of J.
    pair = TabularPair(rollout=coin(0.0), policy=coin(h), rewards=np.array([0.0, 0.0, 0.0, 1.0]))
    assert pair.surrogate == pytest.approx(h, rel=1e-14, abs=0)
    assert pair.error == pytest.approx(h * h, rel=1e-14, abs=0)
    assert pair.improvement == pytest.approx(h + h * h, rel=1e-14, abs=0)
    # KL = -(1/2) log(1 - 4h²), about 2h²
    assert pair.max_token_kl == pytest.approx(-0.5 * math.log1p(-4 * h * h), rel=1e-12, abs=0)


@pytest.mark.parametrize("h", [1e-1, 1e-3, 1e-7, 1e-12])
def test_kl_keeps_its_digits(h: float) -> None:
    # Against fifty decimal digits, from the very float64 that the tables hold: Σ q log(q/p) - q + p.
    q, p = np.array([[0.3, 0.6, 0.1]]), np.array([[0.3 + h, 0.6 - h, 0.1]])
    with decimal.localcontext(prec=50):
        exact = [(decimal.Decimal(float(a)), decimal.Decimal(float(b))) for a, b in zip(q[0], p[0], strict=True)]
        expected = float(sum(a * (a / b).ln() - a + b for a, b in exact))
    pair = TabularPair(rollout=[q], policy=[p], rewards=np.zeros(3))
    assert pair.max_token_kl == pytest.approx(expected, rel=1e-12, abs=0)


def test_equal_policies() -> None:
    pair = TabularPair.random(3, 4, seed=2, mismatch=0.0)
    zero = (pair.error, pair.surrogate, pair.improvement, pair.max_token_kl, pair.max_token_tv, pair.sequence_tv)
    assert zero == (0.0,) * 6
    assert not np.any(pair.log_ratio)


def test_disjoint_supports() -> None:
    # π_roll always draws 0, π_θ always 1; R = 1 for (1, 1): J goes from 0 to 1 and no sample of π_roll can show it.
    # L' = Σ_t E_roll[g_t]: after (0) no reward can be had, so g(0) = 0; at the start V_roll(1, 0) = 0, so g = 0 too.
    ones, twos = [np.array([[1.0, 0.0]] * n) for n in (1, 2)], [np.array([[0.0, 1.0]] * n) for n in (1, 2)]
    pair = TabularPair(rollout=ones, policy=twos, rewards=np.array([0.0, 0.0, 0.0, 1.0]))
    assert (pair.improvement, pair.surrogate, pair.error) == (1.0, 0.0, 1.0)
    assert (pair.max_token_kl, pair.max_token_tv, pair.sequence_kl, pair.sequence_tv) == (math.inf, 1.0, math.inf, 1.0)
    np.testing.assert_array_equal(pair.mean_token_tv_by_position, [1.0, 1.0])
    np.testing.assert_array_equal(pair.log_ratio[0], [-math.inf, -math.inf])
    np.testing.assert_array_equal(pair.log_ratio[3], [math.inf, math.inf])


def test_unreachable_contexts_do_not_count() -> None:
    # Token 1 is never drawn by either policy, so what they would do after it is of no matter.
    first = np.array([[1.0, 0.0]])
    pair = TabularPair(
        rollout=[first, np.array([[0.5, 0.5], [1.0, 0.0]])],
        policy=[first, np.array([[0.5, 0.5], [0.0, 1.0]])],
        rewards=np.ones(4),
    )
    assert (pair.max_token_kl, pair.max_token_tv) == (0.0, 0.0)


@pytest.mark.parametrize("p", [0.5, 1e-3, 1e-9])
def test_proposition_3_10(p: float) -> None:
    # After token 1, of probability p, KL = -(1/2) log(4a(1-a)) = 1 for a = (1 - √(1 - e^-2))/2; elsewhere 0.
    a = (1 - math.sqrt(1 - math.exp(-2))) / 2
    first, fair = np.array([[1 - p, p]]), [0.5, 0.5]
    pair = TabularPair(
        rollout=[first, np.array([fair, fair])], policy=[first, np.array([fair, [a, 1 - a]])], rewards=np.ones(4)
    )
    assert pair.max_token_kl == pytest.approx(1.0, rel=1e-12)
    assert pair.sequence_kl == pytest.approx(p, rel=1e-12)


@pytest.mark.parametrize("seed", [0, 10])
def test_monte_carlo_agrees_within_its_standard_error(seed: int) -> None:
    pair = TabularPair.random(3, 4, seed=seed, mismatch=0.4)
    sample = pair.sample(100_000, seed=seed + 1)
    u = np.expm1(sample.log_ratio)
    deviation = np.abs(u).sum(axis=1)
    keep, kept = np.abs(np.expm1(pair.log_ratio)).sum(axis=1) <= 1.0, deviation <= 1.0
    assert 0.1 < kept.mean() < 0.9
    product = np.exp(sample.log_ratio.sum(axis=1))
    cases = {
        "J(π_roll)": (sample.rewards, pair.rollout_return),
        "J(π_θ), exact weights": (sample.rewards * product, pair.policy_return),
        "L'": (sample.rewards * u.sum(axis=1), pair.surrogate),
        "L' masked": (kept * sample.rewards * u.sum(axis=1), pair.masked_surrogate(keep)),
        "B_A": (kept * (np.exp(deviation) - 1 - deviation), pair.accepted_error(keep)),
        "rejected return": (~kept * sample.rewards, pair.rejected_return(keep)),
        "rejection rate": (~kept * 1.0, pair.rejection_rate(keep)),
        "D_KL^seq": (sample.token_kl.sum(axis=1), pair.sequence_kl),
        "D_KL^seq by k3": (np.asarray(k3(sample.log_ratio), float).sum(axis=1), pair.sequence_kl),
        "last D̄_t": (sample.token_tv[:, -1], pair.mean_token_tv_by_position[-1]),
    }
    for name, (values, exact) in cases.items():
        standard_error = values.std(ddof=1) / math.sqrt(len(values))
        assert abs(values.mean() - exact) < 4 * standard_error, name  # 4: one in 800 for twenty draws of new seeds


def test_sample_is_what_the_tables_say() -> None:
    pair = TabularPair.random(2, 3, seed=5)
    sample = pair.sample(50, seed=1)
    again = pair.sample(50, seed=1)
    np.testing.assert_array_equal(sample.tokens, again.tokens)
    assert sample.response_mask.all()
    plain = Plain(pair)
    for row, tokens in enumerate(map(tuple, sample.tokens.tolist())):
        assert sample.rewards[row] == plain.reward[tokens]
        ratio = [plain.token("theta", tokens[:t], y) / plain.token("roll", tokens[:t], y) for t, y in enumerate(tokens)]
        np.testing.assert_allclose(np.exp(sample.log_ratio[row]), ratio, rtol=1e-12)


def test_exact_identities_of_estimators_and_weights() -> None:
    pair = TabularPair.random(4, 3, seed=7, mismatch=1.0)
    # E_roll[k3] at each position is the mean KL: k3 is float32, 1e-5 covers 64 terms.
    estimate = [pair.rollout_mean(np.asarray(k3(pair.log_ratio[:, t]), float)) for t in range(3)]
    np.testing.assert_allclose(estimate, pair.mean_token_kl_by_position, rtol=1e-5)
    # Exact weights: E_roll[ρ R] = J(π_θ), and E_roll[ρ] = 1.
    product = np.exp(pair.log_ratio.sum(axis=1))
    assert pair.rollout_mean(product) == pytest.approx(1.0, rel=1e-12)
    assert pair.rollout_mean(product * pair.rewards) == pytest.approx(pair.policy_return, rel=1e-12)
    # CIS: k = p + (1 - p) e^ε for every token of every context (float32 in the library).
    p, q = (np.concatenate([table.ravel() for table in tables]) for tables in (pair.policy, pair.rollout))
    ratio = ratio_from_displacement(np.log(p), log_odds_displacement(np.log(p), np.log(q)))
    np.testing.assert_allclose(ratio, p / q, rtol=2e-5)


def test_illegal_pairs_are_refused() -> None:
    row = np.array([[0.5, 0.5]])
    with pytest.raises(ValueError, match="at most 4096"):
        TabularPair.random(2, 13, seed=0)
    with pytest.raises(ValueError, match="same T >= 1"):
        TabularPair(rollout=[row], policy=[], rewards=np.zeros(2))
    with pytest.raises(ValueError, match=r"policy\[0\] must have shape \[1, 2\]"):
        TabularPair(rollout=[row], policy=[np.array([[0.5, 0.5], [0.5, 0.5]])], rewards=np.zeros(2))
    with pytest.raises(ValueError, match=r"rollout\[0\] must hold distributions"):
        TabularPair(rollout=[np.array([[0.5, 0.6]])], policy=[row], rewards=np.zeros(2))
    with pytest.raises(ValueError, match="rewards must be"):
        TabularPair(rollout=[row], policy=[row], rewards=np.array([0.0, 1.5]))
    with pytest.raises(ValueError, match="mismatch"):
        TabularPair.random(2, 2, seed=0, mismatch=-1.0)
