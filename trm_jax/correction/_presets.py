"""Named corrections and their compositions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast, get_args

from trm_jax.checks import known_name
from trm_jax.correction._config import CorrectionConfig, MaskName, WeightName

__all__ = ["preset", "presets"]

_WEIGHTS: tuple[WeightName, ...] = get_args(WeightName)
_MASKS: dict[str, tuple[MaskName, ...]] = {
    "trm_max": ("trm_max",),
    "trm_avg": ("trm_avg",),
    "trm_combined": ("trm_max", "trm_avg"),
    "trm_tv": ("trm_tv",),
    "trm_sample": ("trm_sample",),
    "ln_trm": ("ln_trm",),
    "ser": ("ser",),
    "geometric": ("geometric",),
    "token_mask": ("token_outlier",),
}

presets: Mapping[str, CorrectionConfig] = MappingProxyType(
    {name: CorrectionConfig(weight=name) for name in _WEIGHTS}
    | {name: CorrectionConfig(masks=masks) for name, masks in _MASKS.items()}
)
"""Name → ``CorrectionConfig`` with default thresholds; ``preset`` also composes them."""


def preset(name: str, **overrides: Any) -> CorrectionConfig:
    """The correction of that name, or of a composition such as ``"trm_combined + cis"``.

    A composition joins the masks of its parts, in order, and takes the one weight among them.

    Args:
      name: preset names joined by ``+``; blanks do not matter.
      **overrides: fields of ``CorrectionConfig`` that replace the defaults.

    Returns:
      A validated ``CorrectionConfig``.

    Raises:
      ValueError: on an unknown name (the message lists all and the nearest), on two different weights, or on a field
        out of range.
      TypeError: on a name that is no text, or an override that is no field.

    >>> config = preset("trm_combined + cis", max_token_kl=0.1)
    >>> config.masks, config.weight, config.max_token_kl
    (('trm_max', 'trm_avg'), 'cis', 0.1)
    """
    if not isinstance(name, str):
        raise TypeError(f"a preset is a name such as 'trm_max + cis', given {name!r}")
    parts = [part.strip() for part in name.split("+")]
    for part in parts:
        known_name("preset", part, presets)
    masks = tuple(dict.fromkeys(mask for part in parts for mask in presets[part].masks))
    weights = list(dict.fromkeys(presets[part].weight for part in parts if presets[part].weight != "none"))
    if len(weights) > 1:
        raise ValueError(f"a composition takes one weight, given {' and '.join(weights)} in {name!r}: keep one of them")
    unknown = set(overrides) - {field.name for field in dataclasses.fields(CorrectionConfig)}
    if unknown:
        raise TypeError(f"no such field of CorrectionConfig: {', '.join(sorted(unknown))}")
    fields: dict[str, Any] = {"masks": masks, "weight": weights[0] if weights else "none"}
    return CorrectionConfig(**cast(dict[str, Any], fields | overrides))
