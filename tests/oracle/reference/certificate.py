"""What a certificate estimates (FORMULAS section 8), from a sample and exactly, for the accepted region
A = {M = 1, U <= cut}: any region will do, since R >= 0 bounds the gain outside A by -E[1{not A} R]."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from .divergences import exp
from .tabular import Context, Pair, accepted_error, deviation

# name of the term: its value for one sequence, from (kept by the mask, in A, reward, ratios)
TERMS: dict[str, Callable[[bool, bool, float, Sequence[float]], float]] = {
    "masked_surrogate": lambda kept, inside, reward, ratios: inside * reward * math.fsum(r - 1 for r in ratios),
    "accepted_error": lambda kept, inside, reward, ratios: accepted_error(ratios) if inside else 0.0,
    "rejected_return": lambda kept, inside, reward, ratios: (not inside) * reward,
    "rejection_rate": lambda kept, inside, reward, ratios: float(not kept),
}


def value(term: str, kept: bool, reward: float, ratios: Sequence[float], cut: float) -> float:
    return TERMS[term](kept, kept and deviation(ratios) <= cut, reward, ratios)


def sample_values(term: str, log_ratios: Any, keep: Any, rewards: Any, cut: float) -> list[float]:
    """One value for EVERY sampled sequence, rejected ones included."""
    rows = zip(log_ratios, keep, rewards, strict=True)
    return [value(term, bool(kept), float(reward), [exp(x) for x in row], cut) for row, kept, reward in rows]


def exact_mean(term: str, pair: Pair, keep: Callable[[Context], bool], cut: float) -> float:
    return pair.rollout_mean(lambda y: value(term, keep(y), pair.rewards[y], pair.ratios(y), cut))


def binary_kl(x: float, mean: float) -> float:
    """kl of two coins."""
    heads = x * math.log(x / mean) if x > 0 else 0.0
    return heads + ((1 - x) * math.log((1 - x) / (1 - mean)) if x < 1 else 0.0)


def chernoff(mean: float, n: int, error: float) -> float:
    """Largest mu with n kl(mean, mu) <= log(1/error) (Hoeffding 1963, Theorem 1), by bisection."""
    low, high = mean, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if 0 < middle < 1 and n * binary_kl(mean, middle) > math.log(1 / error):
            high = middle
        else:
            low = middle
    return high


def empirical_bernstein(values: Sequence[float], error: float) -> float:
    """mean + sqrt(2 V log(2/error)/n) + 7 log(2/error)/(3 (n-1)) for values in [0, 1] (Maurer and Pontil 2009)."""
    n, mean = len(values), math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    log = math.log(2 / error)
    return mean + math.sqrt(2 * variance * log / n) + 7 * log / (3 * (n - 1))


def upper_limit(values: Sequence[float], low: float, high: float, error: float) -> float:
    """The better of the two limits, each at half of the error, for values in [low, high]."""
    scaled = [(v - low) / (high - low) for v in values]
    mean = math.fsum(scaled) / len(scaled)
    best = min(chernoff(mean, len(scaled), error / 2), empirical_bernstein(scaled, error / 2))
    return low + (high - low) * best
