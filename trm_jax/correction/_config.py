"""One flat configuration of the correction: which masks, which weight, every threshold by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

from trm_jax.checks import in_range, known_name, number, ordered

__all__ = ["CorrectionConfig", "MaskName", "WeightName"]

MaskName: TypeAlias = Literal[
    "trm_max", "trm_avg", "trm_tv", "trm_sample", "ln_trm", "ser", "geometric", "token_outlier"
]
WeightName: TypeAlias = Literal[
    "none", "exact", "tis", "icepop", "kpop", "seq_tis", "seq_mis", "geo_mis", "cis", "cis_two_sided"
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Masks and weight of ``correct``. Plain values only, hashable, so that it can be static under ``jax.jit``.

    A threshold matters only when its mask or weight is chosen. Defaults of the weights are those of CIS Table 8; δ
    and ε of the horizon weight are those of TRM Table 1. Neither paper fixes a rejection threshold: the defaults here
    keep a bfloat16 engine of the same weights (log-ratio sd near 0.06) and reject visible outliers; tune them on the
    reported ``rejected/*`` fractions.

    Attributes:
      masks: sequence and token masks, combined by "and" after each has seen the original response mask.
      weight: the importance weight on the token loss.
      numerator: whose log-probs are compared with the rollout's: ``"proximal"`` (recomputed before the update) or
        ``"policy"`` (current weights, given to ``correct`` as ``policy_logps``).
      non_finite: what NaN, a sentinel or an illegal log-prob does: ``"drop"`` rejects its sequence and counts it,
        ``"raise"`` raises (outside ``jax.jit`` only).
      sentinel: a value by which the engine says "no log-prob" (such as -9999.0), or None.
      max_token_kl: δ of trm_max, nats.
      mean_token_kl: δ_avg of trm_avg, nats.
      max_token_tv: ε of trm_tv, in [0, 1].
      max_k2: δ of trm_sample on ``max_t k2``, nats (0.5 is ``|log ρ| <= 1``); None leaves it out.
      mean_k3: δ_avg of trm_sample on the mean k3, nats; None leaves it out.
      ln_trm_threshold: δ_W of ln_trm.
      horizon_token_kl: δ of the horizon weight of ln_trm, nats.
      horizon_token_tv: ε of the horizon weight of ln_trm.
      ser_threshold: δ_SER of ser.
      geometric_low: lower end of the geometric mask's band of ``(Π ρ)^(1/T)``.
      geometric_high: its upper end.
      max_abs_log_ratio: τ of token_outlier, nats.
      exact_low: smallest weight of exact.
      exact_high: largest weight of exact.
      tis_cap: C of tis.
      icepop_low: lower end of icepop's band of the ratio.
      icepop_high: its upper end.
      kpop_threshold: φ of kpop, nats.
      seq_cap: C of seq_tis and seq_mis.
      geo_mis_low: lower end of geo_mis's band of ``(Π k)^(1/T)``.
      geo_mis_high: its upper end.
      geo_mis_token_weight: ``"unit"`` or ``"ratio"``, what a kept token weighs under geo_mis.
      cis_lambda: λ of cis and cis_two_sided.
      cis_kappa: κ of cis and cis_two_sided.

    Raises:
      ValueError: naming the field, its value and the rule.

    >>> CorrectionConfig(masks=("trm_max",), weight="cis", max_token_kl=0.1).masks
    ('trm_max',)
    """

    masks: tuple[MaskName, ...] = ()
    weight: WeightName = "none"
    numerator: Literal["proximal", "policy"] = "proximal"
    non_finite: Literal["drop", "raise"] = "drop"
    sentinel: float | None = None
    max_token_kl: float = 0.05
    mean_token_kl: float = 0.01
    max_token_tv: float = 0.15
    max_k2: float | None = 0.5
    mean_k3: float | None = 0.01
    ln_trm_threshold: float = 0.1
    horizon_token_kl: float = 1e-4
    horizon_token_tv: float = 5e-3
    ser_threshold: float = 0.1
    geometric_low: float = 0.99
    geometric_high: float = 1.01
    max_abs_log_ratio: float = 1.0
    exact_low: float = 1e-6
    exact_high: float = 1e6
    tis_cap: float = 2.0
    icepop_low: float = 0.5
    icepop_high: float = 5.0
    kpop_threshold: float = 2.0
    seq_cap: float = 2.0
    geo_mis_low: float = 0.99
    geo_mis_high: float = 1.01
    geo_mis_token_weight: Literal["unit", "ratio"] = "unit"
    cis_lambda: float = 2.3
    cis_kappa: float = 5e-3

    def __post_init__(self) -> None:
        """Validates every field, used or not: a typo in an unused threshold would wait for the day it is used."""
        if isinstance(self.masks, str) or not isinstance(self.masks, Iterable):
            raise TypeError(f"masks must be a tuple of names such as ('trm_max',), given {self.masks!r}")
        object.__setattr__(self, "masks", tuple(self.masks))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(field.default, float) or (value is None and "None" in str(field.type)):
                continue
            # An int, a NumPy or a JAX scalar: the configuration must stay hashable and equal to its like.
            object.__setattr__(self, field.name, number(field.name, value))
        for mask in self.masks:
            known_name("masks entry", mask, get_args(MaskName))
        if len(set(self.masks)) != len(self.masks):
            raise ValueError(f"masks must not repeat a name, given {self.masks!r}")
        known_name("weight", self.weight, get_args(WeightName))
        known_name("numerator", self.numerator, ("proximal", "policy"))
        known_name("non_finite", self.non_finite, ("drop", "raise"))
        known_name("geo_mis_token_weight", self.geo_mis_token_weight, ("unit", "ratio"))
        in_range("sentinel", self.sentinel)
        for name in ("max_token_kl", "mean_token_kl", "max_k2", "mean_k3", "ln_trm_threshold", "ser_threshold"):
            in_range(name, getattr(self, name), low=0.0)
        in_range("max_token_tv", self.max_token_tv, low=0.0, high=1.0)
        in_range("max_abs_log_ratio", self.max_abs_log_ratio, low=0.0)
        for name in ("horizon_token_kl", "horizon_token_tv"):
            in_range(name, getattr(self, name), low=0.0, low_open=True)
        # An infinite cap is no cap: a token that the engine calls impossible (q = 0) would weigh infinitely.
        for name in ("tis_cap", "seq_cap", "kpop_threshold"):
            in_range(name, getattr(self, name), low=0.0, low_open=True, high_open=True)
        for name in ("exact", "icepop", "geo_mis", "geometric"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            in_range(f"{name}_low", low, low=0.0)
            in_range(f"{name}_high", high, high_open=name != "geometric")
            ordered(f"{name}_low", low, f"{name}_high", high)
        in_range("cis_lambda", self.cis_lambda, low=0.0, high_open=True)
        in_range("cis_kappa", self.cis_kappa, low=0.0, high=1.0)
        if "trm_sample" in self.masks and self.max_k2 is None and self.mean_k3 is None:
            raise ValueError("the mask trm_sample needs max_k2, mean_k3 or both, given neither")
