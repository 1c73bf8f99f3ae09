"""Importance weights of FORMULAS section 6 (CIS Table 8): the weights of one sequence from its response tokens.

Log-probs at the ends (API, last section): p = 0 weighs 0, q = 0 is cut by the cap of the operator, NaN weighs 0 here
and rejects its sequence in `correct`.
"""

import math

from .divergences import binary_kl, exp, one_minus
from .masks import Values, geometric


def token(weight: float, log_ratio: float) -> float:
    """The weight of a token, 0 where the training engine gives it no probability, or where the ratio is NaN."""
    return 0.0 if math.isnan(log_ratio) or log_ratio == -math.inf else weight


def exact(log_ratio: Values, *, low: float = 1e-6, high: float = 1e6) -> list[float]:
    """clamp(k_t, low, high)."""
    return [token(min(max(exp(x), low), high), x) for x in log_ratio]


def tis(log_ratio: Values, *, cap: float = 2.0) -> list[float]:
    """min(k_t, C)."""
    return [token(min(exp(x), cap), x) for x in log_ratio]


def icepop(log_ratio: Values, *, low: float = 0.5, high: float = 5.0) -> list[float]:
    """k_t where low <= k_t <= high, else 0."""
    return [exp(x) if low <= exp(x) <= high else 0.0 for x in log_ratio]


def kpop(proximal: Values, rollout: Values, *, threshold: float = 2.0) -> list[float]:
    """k_t where max(KL_B(p || q), KL_B(q || p)) <= phi, else 0."""
    out = []
    for p, q in zip(proximal, rollout, strict=True):
        near = p > -math.inf and q > -math.inf and max(binary_kl(p, q), binary_kl(q, p)) <= threshold
        out.append(exp(p - q) if near else 0.0)
    return out


def seq_tis(log_ratio: Values, *, cap: float = 2.0) -> list[float]:
    """min(K, C) on every token, K = prod_t k_t."""
    return [token(min(exp(math.fsum(log_ratio)), cap), x) for x in log_ratio]


def seq_mis(log_ratio: Values, *, cap: float = 2.0, low: float = 0.0) -> list[float]:
    """K where low <= K <= C, else 0, on every token."""
    product = exp(math.fsum(log_ratio))
    return [product if low <= product <= cap else 0.0 for _ in log_ratio]


def geo_mis(log_ratio: Values, *, low: float = 0.99, high: float = 1.01, token_weight: str = "unit") -> list[float]:
    """1 or k_t, where K^(1/T) lies in the band, else 0."""
    inside = geometric(log_ratio, low=low, high=high)
    return [(1.0 if token_weight == "unit" else exp(x)) if inside else 0.0 for x in log_ratio]


def cis(
    proximal: Values, rollout: Values, *, cis_lambda: float = 2.3, cis_kappa: float = 5e-3, two_sided: bool = False
) -> list[float]:
    """min(k_t, 1 + lambda max(1 - p_t, kappa)); two-sided: raised to at least (1 + p_t)/2 (CIS Table 2)."""
    out = []
    for p, q in zip(proximal, rollout, strict=True):
        weight = min(exp(p - q), 1 + cis_lambda * max(one_minus(p), cis_kappa))
        out.append(token(max(weight, (1 + math.exp(p)) / 2) if two_sided else weight, p - q))
    return out
