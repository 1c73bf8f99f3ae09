"""Bounds on abs(Error) of FORMULAS section 3 and Lemmas 3.1, 3.2 of section 2, as sums over positions in floats."""

import math
from collections.abc import Sequence

INF = math.inf


def pinsker(kl: float) -> float:
    """min(1, sqrt(D_KL / 2))."""
    return min(1.0, math.sqrt(kl / 2))


def advantage(*, max_token_kl: float = INF, max_token_tv: float = INF) -> float:
    """Lemma 3.1: 2 min(1, eps, sqrt(delta/2))."""
    return 2 * min(1.0, max_token_tv, math.sqrt(max_token_kl / 2))


def times(count: int, value: float) -> float:
    """count * value with 0 * inf = 0: no step, no shift."""
    return count * value if count else 0.0


def context_shift(
    t: int,
    *,
    max_token_kl: float = INF,
    max_token_tv: float = INF,
    sequence_kl: float = INF,
    sequence_tv: float = INF,
) -> float:
    """Lemma 3.2: min(1, (t-1) eps, sqrt((t-1) delta/2), D_TV^seq, sqrt(D_KL^seq/2)), of what is given."""
    routes = [1.0, sequence_tv, math.sqrt(sequence_kl / 2)]
    if max_token_tv < INF:
        routes.append((t - 1) * max_token_tv)
    if max_token_kl < INF:
        routes.append(math.sqrt((t - 1) * max_token_kl / 2))
    return min(routes)


def classical(length: int, *, max_token_tv: float) -> float:
    """4 eps^2 sum_t (t-1) = 2 T (T-1) eps^2."""
    return 4 * max_token_tv**2 * sum(t - 1 for t in range(1, length + 1))


def coupling(length: int, *, max_token_tv: float) -> float:
    return 4 * min(1, max_token_tv) * math.fsum(min(1.0, (t - 1) * max_token_tv) for t in range(1, length + 1))


def pinsker_marginal_kl(length: int, *, max_token_kl: float) -> float:
    return 4 * pinsker(max_token_kl) * math.fsum(pinsker((t - 1) * max_token_kl) for t in range(1, length + 1))


def pinsker_marginal_tv(length: int, *, max_token_kl: float, max_token_tv: float) -> float:
    return 4 * min(1, max_token_tv) * math.fsum(pinsker((t - 1) * max_token_kl) for t in range(1, length + 1))


def mixed_kl(length: int, *, max_token_kl: float, sequence_kl: float) -> float:
    return 4 * length * pinsker(max_token_kl) * pinsker(sequence_kl)


def mixed_tv(length: int, *, max_token_tv: float, sequence_tv: float) -> float:
    return 4 * length * min(1, max_token_tv) * min(1, sequence_tv)


def adaptive(mean_tv: Sequence[float], *, max_token_kl: float = INF, max_token_tv: float = INF) -> float:
    """4 sum_t D_t min(1, (T-t) eps, sqrt((T-t) delta/2)); one argument alone gives the KL or the TV form."""
    length = len(mean_tv)
    return 4 * math.fsum(
        d * min(1.0, times(length - t, max_token_tv), math.sqrt(times(length - t, max_token_kl) / 2))
        for t, d in enumerate(mean_tv, start=1)
    )
