"""Presets, compositions and the validation of the configuration."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from typing import Any

import pytest

from trm_jax import correction

WEIGHTS = ["none", "exact", "tis", "icepop", "kpop", "seq_tis", "seq_mis", "geo_mis", "cis", "cis_two_sided"]
MASKS = ["trm_max", "trm_avg", "trm_combined", "trm_tv", "trm_sample", "ln_trm", "ser", "token_mask"]


@pytest.mark.parametrize("name", WEIGHTS + MASKS)
def test_every_named_preset_is_a_mask_or_a_weight(name: str) -> None:
    config = correction.presets[name]
    assert correction.preset(name) == config
    assert (config.masks == ()) != (config.weight == "none") or name == "none"


def test_published_defaults() -> None:
    config = correction.CorrectionConfig()
    assert (config.tis_cap, config.seq_cap, config.kpop_threshold) == (2.0, 2.0, 2.0)
    assert (config.icepop_low, config.icepop_high) == (0.5, 5.0)
    assert (config.exact_low, config.exact_high) == (1e-6, 1e6)
    assert (config.cis_lambda, config.cis_kappa) == (2.3, 5e-3)


def test_compositions() -> None:
    config = correction.preset("trm_combined + cis")
    assert config.masks == ("trm_max", "trm_avg")
    assert config.weight == "cis"
    assert correction.preset("cis+trm_max+trm_avg").masks == config.masks
    assert correction.preset("trm_max + trm_combined").masks == ("trm_max", "trm_avg")
    assert correction.preset("trm_max + none").weight == "none"
    assert correction.preset("ser + token_mask + tis").masks == ("ser", "token_outlier")


def test_overrides() -> None:
    assert correction.preset("trm_max", max_token_kl=0.2).max_token_kl == 0.2
    with pytest.raises(TypeError, match=r"no such field .*: max_kl"):
        correction.preset("trm_max", max_kl=0.2)
    with pytest.raises(ValueError, match="max_token_kl must lie in"):
        correction.preset("trm_max", max_token_kl=-0.2)


def test_unknown_names_are_listed_with_a_hint() -> None:
    with pytest.raises(ValueError, match=r"unknown preset 'trm_maxx' \(did you mean 'trm_max'\?\).*seq_tis"):
        correction.preset("trm_maxx + cis")


def test_two_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="one weight, given cis and tis"):
        correction.preset("cis + tis")


def test_presets_cannot_be_changed_and_are_hashable() -> None:
    with pytest.raises(TypeError):
        correction.presets["none"] = correction.presets["cis"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        correction.presets["cis"].weight = "tis"
    assert len({hash(config) for config in correction.presets.values()}) == len(set(correction.presets.values()))


def test_a_threshold_is_a_number() -> None:
    for name, value in (("tis_cap", None), ("exact_high", None), ("mean_token_kl", "0.1"), ("seq_cap", b"2")):
        config = copy.copy(correction.preset("tis"))
        object.__setattr__(config, name, value)  # past the run-time types of the tests
        with pytest.raises(TypeError, match=f"{name} must be a number, given {value!r}"):
            config.__post_init__()
    assert correction.CorrectionConfig(max_k2=None, sentinel=None).max_k2 is None


def test_masks_are_names_and_not_one_name() -> None:
    for value in ("trm_max", 5, None):
        config = copy.copy(correction.preset("tis"))
        object.__setattr__(config, "masks", value)
        with pytest.raises(TypeError, match="masks must be a tuple of names"):
            config.__post_init__()


def test_masks_may_come_as_a_list() -> None:
    assert hash(correction.CorrectionConfig(masks=tuple(["ser"]))) == hash(correction.preset("ser"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"masks": ("trm_max", "trm_max")}, "must not repeat"),
        ({"icepop_low": 5.0, "icepop_high": 0.5}, "icepop_low must be below icepop_high"),
        ({"geometric_low": 1.0, "geometric_high": 1.0}, "geometric_low must be below geometric_high"),
        ({"geo_mis_high": math.inf}, "geo_mis_high must lie in"),
        ({"exact_high": math.inf}, "exact_high must lie in"),
        ({"tis_cap": math.inf}, "tis_cap must lie in"),
        ({"tis_cap": 0.0}, "tis_cap must lie in"),
        ({"seq_cap": math.nan}, "seq_cap must lie in"),
        ({"max_token_tv": 1.5}, "max_token_tv must lie in [0, 1], given 1.5"),
        ({"horizon_token_kl": 0.0}, "horizon_token_kl must lie in"),
        ({"cis_kappa": 1.5}, "cis_kappa must lie in"),
        ({"cis_lambda": -0.5}, "cis_lambda must lie in"),
        ({"sentinel": math.nan}, "sentinel must lie in"),
        ({"masks": ("trm_sample",), "max_k2": None, "mean_k3": None}, "trm_sample needs max_k2, mean_k3 or both"),
    ],
)
def test_refused_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        correction.CorrectionConfig(**fields)


@pytest.mark.usefixtures("without_run_time_types")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"masks": ("trm_mx",)}, "unknown masks entry 'trm_mx' (did you mean 'trm_max'?): choose one of"),
        ({"weight": "ciss"}, "unknown weight 'ciss' (did you mean 'cis'?): choose one of"),
        ({"numerator": "old"}, "unknown numerator 'old': choose one of proximal, policy"),
        ({"non_finite": "ignore"}, "unknown non_finite 'ignore': choose one of drop, raise"),
    ],
)
def test_refused_names(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        correction.CorrectionConfig(**fields)


def test_built_from_plain_tables() -> None:
    cattrs = pytest.importorskip("cattrs")
    table = {"masks": ["trm_max", "ser"], "weight": "cis", "max_token_kl": 0.1, "sentinel": -9999.0}
    config = cattrs.structure(table, correction.CorrectionConfig)
    assert config == correction.preset("trm_max + ser + cis", max_token_kl=0.1, sentinel=-9999.0)
