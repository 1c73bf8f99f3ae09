"""Shapes and arithmetics that cannot be are refused by name."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from trm_jax.models import ComputeConfig, TransformerConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"d_model": -1}, "d_model=-1"),
        ({"n_layers": 0}, "n_layers=0"),
        ({"n_kv_heads": 3}, "n_kv_heads=3 must divide n_heads=4"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"n_experts": -2}, "n_experts=-2"),
        ({"n_experts": 4, "experts_per_token": 5}, r"experts_per_token=5 must lie in 1\.\.n_experts=4"),
        ({"n_experts": 4, "experts_per_token": 0}, "experts_per_token=0"),
        ({"rope_theta": 0.0}, r"rope_theta=0\.0"),
        ({"norm_eps": 0.0}, r"norm_eps=0\.0"),
    ],
)
def test_impossible_shapes(changes, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{"vocab_size": 16, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, "dtype='float16': choose 'float32' or 'bfloat16'"),
        ({"row_tile": 0}, "row_tile=0"),
        ({"routing_jitter": -0.1}, r"routing_jitter=-0\.1"),
        ({"routing_jitter": float("nan")}, "routing_jitter=nan"),
    ],
)
def test_impossible_arithmetics(changes, message):
    with pytest.raises(ValueError, match=message):
        ComputeConfig(**changes)


def test_a_dense_shape_does_not_judge_the_number_of_experts_a_token():
    assert TransformerConfig(vocab_size=16, n_experts=0, experts_per_token=9).n_experts == 0


def test_configs_are_frozen_and_hashable():
    config = TransformerConfig(vocab_size=16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 3
    assert hash(config) == hash(TransformerConfig(vocab_size=16))
    assert ComputeConfig() != ComputeConfig(batch_invariant=True)


def test_float32_is_multiplied_as_float32_everywhere():
    assert ComputeConfig().precision == jax.lax.Precision.HIGHEST
    assert ComputeConfig(dtype="bfloat16").precision == jax.lax.Precision.DEFAULT
    assert ComputeConfig(dtype="bfloat16").jnp_dtype == jnp.bfloat16
