"""Masks of FORMULAS section 4 (TRM section 4 and appendix F): the decision on one sequence from the values of its
response tokens, in order. Every comparison is `statistic <= threshold`: a NaN is rejected."""

import math
from collections.abc import Sequence

from .divergences import exp, k2, k3

Values = Sequence[float]


def mean(values: Values) -> float:
    """Over the response tokens of this sequence, never over the padded length."""
    return sum(values) / len(values)


def maximum(values: Values) -> float:
    """NaN as soon as one value is NaN: Python's max would depend on the order."""
    return math.nan if any(math.isnan(x) for x in values) else max(values)


def deviation(log_ratio: float) -> float:
    """abs(rho - 1)."""
    return abs(exp(log_ratio) - 1) if abs(log_ratio) > 1 else abs(math.expm1(log_ratio))


def trm_max(divergence: Values, *, threshold: float) -> bool:
    """max_t D(c_t) <= threshold: trm_max with D_KL, trm_tv with D_TV (TRM 4.3)."""
    return maximum(divergence) <= threshold


def trm_avg(token_kl: Values, *, threshold: float) -> bool:
    """(1/T) sum_t D_KL(c_t) <= threshold (TRM 4.3, combined criterion)."""
    return mean(token_kl) <= threshold


def trm_sample(log_ratio: Values, *, max_k2: float | None, mean_k3: float | None) -> bool:
    """max_t k2 <= delta and (1/T) sum k3 <= delta_avg, each only where it is asked for (TRM appendix E)."""
    small = max_k2 is None or maximum([k2(x) for x in log_ratio]) <= max_k2
    return small and (mean_k3 is None or mean([k3(x) for x in log_ratio]) <= mean_k3)


def horizon_weights(length: int, *, max_token_kl: float, max_token_tv: float) -> list[float]:
    """w_t = min(1, (T-t) eps, sqrt((T-t) delta / 2)) for t = 1..T (TRM F.2)."""
    return [
        min(1.0, (length - t) * max_token_tv, math.sqrt((length - t) * max_token_kl / 2)) for t in range(1, length + 1)
    ]


def ln_trm(log_ratio: Values, *, threshold: float, max_token_kl: float, max_token_tv: float) -> bool:
    """(1/Z) sum_t abs(rho_t - 1) w_t <= delta_W (TRM F.2). For one token Z = sum_t w_t = 0 and W = 0 <= delta_W Z."""
    weights = horizon_weights(len(log_ratio), max_token_kl=max_token_kl, max_token_tv=max_token_tv)
    total = sum(deviation(x) * w for x, w in zip(log_ratio, weights, strict=True))
    return total <= threshold * sum(weights)


def ser(log_ratio: Values, *, threshold: float) -> bool:
    """(1/T) sum_t abs(rho_t - 1) <= delta_SER (TRM F.3)."""
    return mean([deviation(x) for x in log_ratio]) <= threshold


def geometric(log_ratio: Values, *, low: float, high: float) -> bool:
    """low <= K^(1/T) <= high, on the ratio itself (section 6, geo_mis)."""
    return low <= exp(mean(log_ratio)) <= high


def token_outlier(log_ratio: float, *, max_abs_log_ratio: float) -> bool:
    """abs(log rho_t) <= tau for one token: a baseline, not a trust region (section 4)."""
    return abs(log_ratio) <= max_abs_log_ratio
