"""Divergences of FORMULAS sections 1 and 7 in float64, one token at a time."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .rows import float64


def exp(x: float) -> float:
    """e^x, infinite beyond the range instead of an exception."""
    return math.exp(x) if x < 709.0 else (math.inf if not math.isnan(x) else x)


def one_minus(log_p: float) -> float:
    """1 - p = -expm1(log p), exact for p near 1."""
    return -math.expm1(log_p)


def log_one_minus(log_p: float) -> float:
    return math.log(one_minus(log_p)) if log_p < 0 else -math.inf


def excess(x: float) -> float:
    """e^x - 1 - x without cancellation: the series for small x."""
    if abs(x) < 1e-2:
        return math.fsum(x**n / math.factorial(n) for n in range(2, 10))
    return math.inf if x == -math.inf or x >= 709.0 else math.expm1(x) - x


def k1(log_ratio: float) -> float:
    """k1 = -log rho (section 1)."""
    return -log_ratio


def k2(log_ratio: float) -> float:
    """k2 = (log rho)^2 / 2 (section 1)."""
    return 0.5 * log_ratio * log_ratio


def k3(log_ratio: float) -> float:
    """k3 = rho - 1 - log rho (section 1)."""
    return excess(log_ratio)


def binary_kl(log_p: float, log_q: float) -> float:
    """KL_B(p || q) = p log(p/q) + (1-p) log((1-p)/(1-q)), with 0 log 0 = 0 (section 1)."""
    total = 0.0
    if log_p > -math.inf:
        total += math.exp(log_p) * (log_p - log_q)
    if log_p < 0:
        total += one_minus(log_p) * (log_one_minus(log_p) - log_one_minus(log_q))
    return total


def binary_tv(log_p: float, log_q: float) -> float:
    """TV_B = |p - q|, from the difference of the logarithms (section 1)."""
    high, low = max(log_p, log_q), min(log_p, log_q)
    return 0.0 if high == low else math.exp(high) * -math.expm1(low - high)


def logit(log_p: float) -> float:
    """log p - log(1 - p) (section 1, numerics)."""
    return log_p - log_one_minus(log_p)


def log_odds_displacement(log_p: float, log_q: float) -> float:
    """epsilon = logit p - logit q (section 7)."""
    return logit(log_p) - logit(log_q)


def ratio_from_displacement(log_p: float, displacement: float) -> float:
    """k = p + (1 - p) e^epsilon (section 7)."""
    return math.exp(log_p) + one_minus(log_p) * exp(displacement)


class TopK(NamedTuple):
    kl_lower: float
    tv_lower: float
    tv_upper: float


def topk(policy_logps: Sequence[float], rollout_logps: Sequence[float]) -> TopK:
    """Over {top-K tokens, rest}: KL_coarse <= KL and TV_coarse <= TV <= TV_coarse + min(rests) (section 1)."""
    p, q = [math.exp(x) for x in policy_logps], [math.exp(x) for x in rollout_logps]
    rest_p, rest_q = max(0.0, 1 - math.fsum(p)), max(0.0, 1 - math.fsum(q))
    kl = math.fsum(kl_term(y, x) for x, y in zip([*p, rest_p], [*q, rest_q], strict=True))
    tv = 0.5 * math.fsum(abs(x - y) for x, y in zip([*p, rest_p], [*q, rest_q], strict=True))
    return TopK(kl, tv, tv + min(rest_p, rest_q))


def kl_term(q: float, p: float) -> float:
    """q log(q/p) with 0 log 0 = 0, infinite where p alone is 0."""
    if q == 0:
        return 0.0
    return math.inf if p == 0 else q * math.log(q / p)


class Vocab(NamedTuple):
    policy_logps: float
    rollout_logps: float
    token_kl: float
    token_tv: float
    policy_entropy: float
    rollout_entropy: float


def log_softmax(logits: Any, temperature: float) -> list[float]:
    z = [float(x) / temperature for x in float64(logits)]
    top = max(z)
    lse = top + math.log(math.fsum(math.exp(x - top) for x in z))
    return [x - lse for x in z]


def vocab(policy_logits: Any, rollout_logits: Any, token: int, temperature: float = 1.0) -> Vocab:
    """Log-probs, KL(rollout || policy), TV and entropies of two rows of logits (sections 0 and 1)."""
    lp, lq = log_softmax(policy_logits, temperature), log_softmax(rollout_logits, temperature)
    kl = tv = 0.0
    for a, b in zip(lp, lq, strict=True):
        if b > -math.inf:  # rollout mass here: q (e^d - 1 - d) with d = log p - log q; the linear parts add up to 0
            kl += math.exp(b) * excess(a - b) if a > -math.inf else math.inf
        if max(a, b) > -math.inf:
            tv += 0.5 * binary_tv(a, b)
    outside = math.fsum(math.exp(a) for a, b in zip(lp, lq, strict=True) if b == -math.inf)
    kl += outside  # sum of q (e^d - 1) over the rollout support is -(policy mass outside it)
    return Vocab(lp[token], lq[token], kl, tv, entropy(lp), entropy(lq))


def entropy(logps: Sequence[float]) -> float:
    """-sum p log p with 0 log 0 = 0, in nats."""
    return -math.fsum(math.exp(x) * x for x in logps if x > -math.inf)


def each(function: Any, *arrays: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A formula of one token at every slot of its arrays."""
    columns = np.broadcast_arrays(*[float64(a) for a in arrays])
    out = np.empty(columns[0].shape)
    for slot in np.ndindex(out.shape):
        out[slot] = function(*[float(c[slot]) for c in columns])
    return out
