from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax.report import METRICS, check_record, reduce_pairs

REQUIRED = [
    "step",
    "version",
    "stage",
    "reward/mean",
    "reward/solved_groups",
    "accuracy/heldout",
    "accuracy/validation",
    "mismatch/ppl_gap",
    "mismatch/token_kl_mean",
    "mismatch/token_kl_max",
    "mismatch/token_tv_mean",
    "mismatch/token_tv_max",
    "mismatch/log_ratio_max_abs",
    "mismatch/log_ratio_sd",
    "mismatch/bitwise_equal_fraction",
    "mismatch/recorded_logp_error",
    "correction/sequence_keep_fraction",
    "correction/token_keep_fraction",
    "correction/weight_zero_fraction",
    "correction/non_finite_fraction",
    "correction/ratio_raw_mean",
    "correction/weight_mean",
    "correction/weight_max",
    "correction/weight_min",
    "correction/weight_capped_fraction",
    "correction/ess_fraction",
    "optim/loss",
    "optim/grad_norm",
    "optim/learning_rate",
    "optim/clip_fraction",
    "optim/skipped",
    "policy/entropy",
    "rollout/entropy",
    "rollout/staleness_mean",
    "rollout/staleness_max",
    "rollout/dropped_groups",
    "rollout/response_length_mean",
    "rollout/truncated_fraction",
    "time/rollout_s",
    "time/wait_s",
    "time/rescore_s",
    "time/update_s",
    "time/tokens_per_s",
    "memory/peak_rss_gib",
]


def test_the_catalogue_has_exactly_the_agreed_names_each_explained():
    assert list(METRICS) == REQUIRED
    assert all(
        metric.meaning.endswith(".") and len(metric.meaning) > 15 and metric.label for metric in METRICS.values()
    )
    assert len({metric.label for metric in METRICS.values()}) == len(REQUIRED)


@pytest.mark.parametrize("name", [name for name in REQUIRED if "max" in name])
def test_every_maximum_is_reduced_by_maximum(name: str):
    assert METRICS[name].reduction == "max"


def test_means_divide_once_so_parts_of_different_size_do_not_count_alike():
    # 3 right of 4, then 0 of 8: 3/12 = 0.25; the mean of the two means would be 0.375.
    parts = [{"reward/mean": (3.0, 4.0)}, {"reward/mean": (0.0, 8.0)}]
    assert reduce_pairs(parts) == {"reward/mean": 0.25}


def test_one_part_equals_any_split_of_it():
    rng = np.random.default_rng(0)
    values = rng.normal(size=24)
    whole = reduce_pairs([{"optim/loss": (values.sum(), 24), "correction/weight_max": (values.max(), 1)}])
    split = reduce_pairs(
        {"optim/loss": (part.sum(), len(part)), "correction/weight_max": (part.max(), 1)}
        for part in np.split(values, [3, 10, 11])
    )
    assert split["optim/loss"] == pytest.approx(values.mean(), rel=1e-12)
    assert split["correction/weight_max"] == whole["correction/weight_max"] == values.max()


def test_maxima_take_the_largest_also_under_the_prefix_of_corrections():
    parts = [{"max/anything": (-3.0, 1.0)}, {"max/anything": (-5.0, 1.0)}]
    assert reduce_pairs(parts) == {"max/anything": -3.0}


def test_minima_take_the_smallest():
    parts = [{"min/weight": (0.5, 1.0)}, {"min/weight": (0.0, 0.0)}, {"min/weight": (0.25, 1.0)}]
    assert reduce_pairs(parts) == {"min/weight": 0.25}
    assert METRICS["correction/weight_min"].reduction == "min"


def test_empty_parts_do_not_count_and_nothing_at_all_is_nan():
    parts = [{"reward/mean": (0.0, 0.0), "mismatch/token_kl_max": (9.0, 0.0)}]
    parts += [{"reward/mean": (1.0, 2.0), "mismatch/token_kl_max": (0.5, 1.0)}]
    assert reduce_pairs(parts) == {"reward/mean": 0.5, "mismatch/token_kl_max": 0.5}
    assert math.isnan(reduce_pairs(parts[:1])["reward/mean"])
    assert math.isnan(reduce_pairs(parts[:1])["mismatch/token_kl_max"])
    assert reduce_pairs([]) == {}


@pytest.mark.parametrize("name", ["reward/mean", "mismatch/token_kl_max"])
def test_nan_in_a_part_that_counts_stays(name: str):
    for order in (1, -1):
        parts = [{name: (math.nan, 1.0)}, {name: (2.0, 1.0)}][::order]
        assert math.isnan(reduce_pairs(parts)[name])


def test_parts_may_be_jax_scalars():
    assert reduce_pairs([{"reward/mean": (jnp.float32(1.0), jnp.int32(4))}]) == {"reward/mean": 0.25}


def test_a_standard_deviation_cannot_be_put_together_from_parts():
    parts = [{"mismatch/log_ratio_sd": (0.1, 1.0)}]
    assert reduce_pairs(parts) == {"mismatch/log_ratio_sd": 0.1}
    with pytest.raises(ValueError, match="log_ratio_sd' came in 2 parts"):
        reduce_pairs(parts * 2)


def test_a_negative_denominator_is_refused():
    with pytest.raises(ValueError, match="denominator -1"):
        reduce_pairs([{"reward/mean": (1.0, -1.0)}])


def test_an_unknown_name_is_an_error_that_offers_the_close_one():
    with pytest.raises(ValueError, match="'mismatch/token_kl_mx'; did you mean 'mismatch/token_kl_max'"):
        check_record({"step": 1, "mismatch/token_kl_mx": 0.1})
    with pytest.raises(ValueError, match=r"unknown metric 'zzz'\. The names"):
        check_record({"zzz": 0.1})


def test_values_must_be_numbers_and_labels_words():
    check_record({"stage": "rl", "optim/loss": math.nan, "optim/skipped": np.int64(1), "optim/grad_norm": jnp.inf})
    with pytest.raises(TypeError, match="'stage' is a label"):
        check_record({"stage": 1.0})
    with pytest.raises(TypeError, match="'optim/loss' must be a number, got 'nan'"):
        check_record({"optim/loss": "nan"})
    with pytest.raises(TypeError, match="'optim/loss' must be a number, got None"):
        check_record({"optim/loss": None})
