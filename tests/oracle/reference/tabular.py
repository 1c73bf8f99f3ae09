"""Exact enumeration of a tabular autoregressive pair (FORMULAS section 9): one dictionary lookup a token."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .divergences import excess, exp, kl_term

Context = tuple[int, ...]


class Pair:
    """`rollout[t]` and `policy[t]` are `[V^(t), V]` conditional probabilities, contexts in lexicographic order;
    `rewards` one value a sequence in the same order."""

    def __init__(self, rollout: Sequence[Any], policy: Sequence[Any], rewards: Any) -> None:
        self.length, self.vocabulary = len(rollout), int(rollout[0].shape[1])
        self.q = self.table(rollout)
        self.p = self.table(policy)
        self.sequences = list(itertools.product(range(self.vocabulary), repeat=self.length))
        self.rewards = dict(zip(self.sequences, [float(r) for r in rewards], strict=True))

    def table(self, levels: Sequence[Any]) -> dict[Context, list[float]]:
        found = {}
        for t, level in enumerate(levels):
            for row, context in zip(level, itertools.product(range(self.vocabulary), repeat=t), strict=True):
                found[context] = [float(x) for x in row]
        return found

    def probability(self, table: dict[Context, list[float]], y: Context) -> float:
        """prod_s pi(y_s | c_s)."""
        return math.prod(table[y[:s]][y[s]] for s in range(len(y)))

    def ratios(self, y: Context) -> list[float]:
        """rho_t of a sequence that the rollout policy can sample."""
        return [self.p[y[:t]][y[t]] / self.q[y[:t]][y[t]] for t in range(self.length)]

    def token_kl(self, context: Context) -> float:
        """D_KL(c) = KL(rollout || policy), summed as q (e^d - 1 - d) >= 0 with d = log p/q: sum q (e^d - 1) is 0."""
        pairs = zip(self.q[context], self.p[context], strict=True)
        return math.fsum((q * excess(math.log(p / q)) if p > 0 else math.inf) if q > 0 else p for q, p in pairs)

    def token_tv(self, context: Context) -> float:
        """D_TV(c)."""
        return 0.5 * math.fsum(abs(q - p) for q, p in zip(self.q[context], self.p[context], strict=True))

    def rollout_mean(self, value: Callable[[Context], float]) -> float:
        """E_roll[value(y)] over the sequences of positive probability."""
        weighted = [(self.probability(self.q, y), y) for y in self.sequences]
        return math.fsum(w * value(y) for w, y in weighted if w > 0)

    def expected(self, t: int, value: Callable[[Context], float]) -> float:
        """E_{c_t ~ roll}[value(c_t)] of position t = 0..T-1."""
        contexts = itertools.product(range(self.vocabulary), repeat=t)
        weighted = [(self.probability(self.q, c), c) for c in contexts]
        return math.fsum(w * value(c) for w, c in weighted if w > 0)

    def total_variation(self, t: int) -> float:
        """TV between the distributions of the first t tokens; of whole sequences for t = T."""
        contexts = itertools.product(range(self.vocabulary), repeat=t)
        return 0.5 * math.fsum(abs(self.probability(self.p, c) - self.probability(self.q, c)) for c in contexts)

    @property
    def improvement(self) -> float:
        """J(theta) - J(roll)."""
        return math.fsum(
            (self.probability(self.p, y) - self.probability(self.q, y)) * r for y, r in self.rewards.items()
        )

    @property
    def surrogate(self) -> float:
        """L' = E_roll[R sum_t (rho_t - 1)]."""
        return self.rollout_mean(lambda y: self.rewards[y] * math.fsum(r - 1 for r in self.ratios(y)))

    @property
    def error(self) -> float:
        """J(theta) - J(roll) - L'."""
        return self.improvement - self.surrogate

    def reachable(self) -> list[Context]:
        """Contexts that either policy can reach."""
        return [c for c in self.q if self.probability(self.q, c) > 0 or self.probability(self.p, c) > 0]

    @property
    def max_token_kl(self) -> float:
        return max(self.token_kl(c) for c in self.reachable())

    @property
    def max_token_tv(self) -> float:
        return max(self.token_tv(c) for c in self.reachable())

    @property
    def mean_tv(self) -> list[float]:
        return [self.expected(t, self.token_tv) for t in range(self.length)]

    @property
    def mean_kl(self) -> list[float]:
        return [self.expected(t, self.token_kl) for t in range(self.length)]

    @property
    def sequence_kl(self) -> float:
        return math.fsum(self.mean_kl)

    @property
    def sequence_tv(self) -> float:
        return self.total_variation(self.length)

    def prefix_kl(self, t: int) -> float:
        """KL between the distributions of the first t tokens, by enumeration (for the chain rule)."""
        contexts = itertools.product(range(self.vocabulary), repeat=t)
        return math.fsum(kl_term(self.probability(self.q, c), self.probability(self.p, c)) for c in contexts)

    def value(self, context: Context) -> float:
        """V(c): the expected reward when the rollout policy goes on from c."""
        if len(context) == self.length:
            return self.rewards[context]
        return math.fsum(q * self.value((*context, v)) for v, q in enumerate(self.q[context]) if q > 0)

    def advantage(self, context: Context) -> float:
        """g_t(c) = sum_v (pi_theta - pi_roll) A(c, v) (Lemma 3.1)."""
        here = self.value(context)
        pairs = zip(self.p[context], self.q[context], strict=True)
        return math.fsum((p - q) * (self.value((*context, v)) - here) for v, (p, q) in enumerate(pairs))


def deviation(ratios: Sequence[float]) -> float:
    """U = sum_t abs(rho_t - 1) (section 8)."""
    return math.fsum(abs(r - 1) for r in ratios)


def accepted_error(ratios: Sequence[float]) -> float:
    """e^U - 1 - U, no less than abs(prod rho - 1 - sum (rho - 1)) (section 8)."""
    u = deviation(ratios)
    return exp(u) - 1 - u if u > 1e-3 else u * u / 2 + u**3 / 6 + u**4 / 24


def random_tables(
    seed: int, vocabulary: int, length: int, mismatch: float, zeros: float = 0.0
) -> tuple[list[Any], list[Any], Any]:
    """Random conditionals of both policies; a share of the probabilities is exactly zero on either side."""
    rng = np.random.default_rng([seed, vocabulary, length, round(mismatch * 1e6)])
    rollout: list[Any] = []
    policy: list[Any] = []
    for t in range(length):
        logits = rng.normal(size=(vocabulary**t, vocabulary))
        pair = [np.exp(logits), np.exp(logits + mismatch * rng.normal(size=logits.shape))]
        for table, levels in zip(pair, (rollout, policy), strict=True):
            table[:, 1:][rng.random(table[:, 1:].shape) < zeros] = 0.0
            levels.append(table / table.sum(-1, keepdims=True))
    return rollout, policy, rng.random(vocabulary**length)


def sample(pair: Pair, size: int, rng: np.random.Generator) -> list[Context]:
    """Sequences of the rollout policy."""
    probabilities = [pair.probability(pair.q, y) for y in pair.sequences]
    chosen = rng.choice(len(probabilities), size, p=np.array(probabilities) / math.fsum(probabilities))
    return [pair.sequences[i] for i in chosen]
