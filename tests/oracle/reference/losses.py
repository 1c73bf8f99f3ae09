"""Surrogates, advantages and aggregations of FORMULAS section 5 in float64, token by token.

A loss is a list of token terms (to be minimised) and how they are added: `aggregate` is the only place that knows of
masks and denominators. Gradients are central differences of these totals, or the closed forms given here where a
stop-gradient makes the gradient differ from the derivative of the value.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .divergences import excess, exp
from .rows import Floats, Slots, float64, sequences


class Total(NamedTuple):
    total: float
    denominator: float

    @property
    def value(self) -> float:
        """An empty denominator gives 0."""
        return self.total / self.denominator if self.denominator else 0.0


class Keep(NamedTuple):
    """What `sequence_keep` (`[B]` or `[B, T]`) and `token_keep` leave of a batch, and how to divide."""

    response_mask: Any
    sequence_keep: Any = None
    token_keep: Any = None
    segment_ids: Any = None
    aggregation: str = "token_mean"
    denominator: str = "original"
    constant_length: float | None = None

    def of(self, slots: Slots) -> Slots:
        """The response slots of a sequence that are trained on."""
        kept = []
        for b, t in slots:
            sequence: Any = True if self.sequence_keep is None else np.asarray(self.sequence_keep)[b]
            sequence = sequence if np.ndim(sequence) == 0 else sequence[t]
            if sequence and (self.token_keep is None or np.asarray(self.token_keep)[b, t]):
                kept.append((b, t))
        return kept


def aggregate(term: Callable[[int, int], float], keep: Keep) -> Total:
    """Sum of the kept token terms over what `keep` divides by (section 5, aggregations; the expectation of the masked
    surrogate divides by ALL sampled sequences unless the denominator is "kept")."""
    total, tokens, count = 0.0, 0, 0
    for slots in sequences(keep.response_mask, keep.segment_ids):
        kept = keep.of(slots)
        counted = kept if keep.denominator == "kept" else slots
        if not counted:
            continue
        tokens, count = tokens + len(counted), count + 1
        summed = math.fsum(term(b, t) for b, t in kept)
        if keep.aggregation == "sequence_mean":
            total += summed / len(counted)
        elif keep.aggregation == "constant_length":
            length = keep.constant_length or np.shape(keep.response_mask)[1]
            total += summed / length
        else:
            total += summed
    return Total(total, float(tokens if keep.aggregation == "token_mean" else count))


def clip(ratio: float, low: float, high: float) -> float:
    return min(max(ratio, 1 - low), 1 + high)


def clipped_term(ratio: float, advantage: float, *, low: float, high: float, dual_clip: float | None = None) -> float:
    """max(-A r, -A clip(r)), and for A < 0 no more than -c A (dual clip)."""
    loss = max(-advantage * ratio, -advantage * clip(ratio, low, high))
    return min(loss, -dual_clip * advantage) if dual_clip is not None and advantage < 0 else loss


class Inputs(NamedTuple):
    """Arrays `[B, T]`; `weights` and `advantages` are constants."""

    policy: Floats
    old: Floats
    advantages: Floats
    weights: Floats

    @classmethod
    def of(cls, policy: Any, old: Any, advantages: Any, weights: Any = None) -> "Inputs":
        policy = float64(policy)
        a = float64(advantages)
        spread = np.broadcast_to(a[:, None] if a.ndim == 1 else a, policy.shape)
        return cls(policy, float64(old), spread, np.ones(policy.shape) if weights is None else float64(weights))

    def log_ratio(self, b: int, t: int) -> float:
        return float(self.policy[b, t] - self.old[b, t])


def masked_surrogate(x: Inputs, keep: Keep) -> Total:
    """-E_roll[M A sum_t rho_t], `old` being the rollout log-probs (TRM 4.2)."""
    return aggregate(lambda b, t: -x.weights[b, t] * x.advantages[b, t] * exp(x.log_ratio(b, t)), keep)


def clipped_surrogate(
    x: Inputs,
    keep: Keep,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    reference: Any = None,
    reference_coef: float = 0.0,
) -> Total:
    """Mean of w_t max(-A r_t, -A clip(r_t)) (decoupled, or bypass with the rollout log-probs as `old`), plus the
    GRPO penalty coef * k3(log pi_ref - log pi_theta) of each trained token."""
    penalty = np.zeros(x.policy.shape) if reference is None else float64(reference) - x.policy

    def term(b: int, t: int) -> float:
        ratio = exp(x.log_ratio(b, t))
        loss = clipped_term(ratio, x.advantages[b, t], low=clip_low, high=clip_high, dual_clip=dual_clip)
        return float(x.weights[b, t] * loss + reference_coef * excess(penalty[b, t]))

    return aggregate(term, keep)


def sequence_log_ratio(x: Inputs, keep: Keep) -> Floats:
    """(1/T) sum log r_t of the own sequence at every response slot."""
    out = np.zeros(x.policy.shape)
    for slots in sequences(keep.response_mask, keep.segment_ids):
        for slot in slots:
            out[slot] = math.fsum(x.log_ratio(*s) for s in slots) / len(slots)
    return out


def gspo(
    x: Inputs, keep: Keep, *, clip_low: float = 3e-4, clip_high: float = 4e-4, dual_clip: float | None = None
) -> Total:
    """One ratio a sequence, s = exp((1/T) sum log r_t), clipped, on each of its tokens."""
    logs = sequence_log_ratio(x, keep)

    def term(b: int, t: int) -> float:
        loss = clipped_term(exp(logs[b, t]), x.advantages[b, t], low=clip_low, high=clip_high, dual_clip=dual_clip)
        return float(x.weights[b, t] * loss)

    return aggregate(term, keep)


def cispo_coefficient(x: Inputs, b: int, t: int, *, clip_low: float, clip_high: float) -> float:
    """stop_grad(clip(r_t)) A of the token: the loss is minus this times policy_logps, so is its gradient."""
    return float(x.weights[b, t] * clip(exp(x.log_ratio(b, t)), clip_low, clip_high) * x.advantages[b, t])


def cispo(x: Inputs, keep: Keep, *, clip_low: float = 1.0, clip_high: float = 0.28) -> Total:
    """-stop_grad(clip(r_t)) A policy_logps."""

    def term(b: int, t: int) -> float:
        return -cispo_coefficient(x, b, t, clip_low=clip_low, clip_high=clip_high) * float(x.policy[b, t])

    return aggregate(term, keep)


def dppo_trains(ratio: float, advantage: float, divergence: float, threshold: float) -> bool:
    """False where the divergence is above the threshold and the update would move further away from ratio 1."""
    away = (advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1)
    return not (divergence > threshold and away)


def dppo_term(x: Inputs, b: int, t: int, *, threshold: float, token_divergence: Any = None) -> float:
    """-A r_t of a trained token, else 0; the divergence is binary TV unless another is given."""
    ratio = exp(x.log_ratio(b, t))
    if token_divergence is None:
        divergence = abs(exp(float(x.policy[b, t])) - exp(float(x.old[b, t])))
    else:
        divergence = float(float64(token_divergence)[b, t])
    trains = dppo_trains(ratio, float(x.advantages[b, t]), divergence, threshold)
    return float(-x.weights[b, t] * x.advantages[b, t] * ratio) if trains else 0.0


def dppo(x: Inputs, keep: Keep, *, threshold: float = 0.15, token_divergence: Any = None) -> Total:
    """Token mask by a directly estimated divergence (section 5, DPPO)."""
    return aggregate(lambda b, t: dppo_term(x, b, t, threshold=threshold, token_divergence=token_divergence), keep)


def indicator(slot: tuple[int, int], b: int, t: int) -> float:
    return float((b, t) == slot)


def closed_form_gradient(slope: Callable[[int, int], float], keep: Keep) -> Floats:
    """d value / d policy_logps when each token's term has the given slope in its own log-prob: the weight of every
    token in the value times its slope."""
    out = np.zeros(np.shape(keep.response_mask))
    for slots in sequences(keep.response_mask, keep.segment_ids):
        for slot in slots:
            share = aggregate(partial(indicator, slot), keep).value
            out[slot] = share * slope(*slot) if share else 0.0
    return out


def central_difference(loss: Callable[[Floats], Total], policy: Any, response_mask: Any, step: float = 1e-6) -> Floats:
    """d value / d policy_logps at the response slots; the error is about step^2 + 1e-16/step."""
    base, out = float64(policy), np.zeros(np.shape(policy))
    for b, t in zip(*np.nonzero(response_mask), strict=True):
        up, down = base.copy(), base.copy()
        up[b, t] += step
        down[b, t] -= step
        out[b, t] = (loss(up).value - loss(down).value) / (2 * step)
    return out


def group_advantages(
    rewards: Sequence[float],
    group_ids: Sequence[int],
    *,
    normalize: str = "std",
    scope: str = "all",
    sequence_keep: Sequence[bool] | None = None,
) -> list[float]:
    """(R - mean of the group) / std (ddof 1) of the group, or undivided, or against the mean of the others.

    "kept" takes mean and std over kept rows; rejected rows then have no advantage (0). A group of one, or of equal
    rewards, gives 0."""
    out = []
    for i, group in enumerate(group_ids):
        members = [j for j, g in enumerate(group_ids) if g == group]
        if scope == "kept" and sequence_keep is not None:
            members = [j for j in members if sequence_keep[j]]
        values = [float(rewards[j]) for j in members]
        if i not in members or len(values) < 2 or min(values) == max(values):
            out.append(0.0)
            continue
        mean = math.fsum(values) / len(values)
        if normalize == "loo":
            others = [float(rewards[j]) for j in members if j != i]
            out.append(float(rewards[i]) - math.fsum(others) / len(others))
        elif normalize == "none":
            out.append(float(rewards[i]) - mean)
        else:
            std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
            out.append((float(rewards[i]) - mean) / std)
    return out
