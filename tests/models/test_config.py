"""Shapes and arithmetics that cannot be are refused by name."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from trm_jax.models import ComputeConfig, LatentConfig, TransformerConfig, YarnConfig

LATENT = LatentConfig(kv_rank=8, rope_dim=4, value_dim=6)


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
        ({"d_ff_shared": 8}, "d_ff_shared=8 needs a mixture of experts"),
        ({"shared_router": True}, "shared_router=True needs a mixture"),
        ({"n_experts": 4, "shared_router": True}, "set its width, d_ff_shared"),
        ({"n_experts": 4, "n_dense_layers": 2, "d_ff_dense": 8}, "n_dense_layers=2 must be below n_layers=2"),
        ({"n_experts": 4, "n_dense_layers": 1}, "n_dense_layers=1 and d_ff_dense=0: set both or neither"),
        ({"latent": LATENT, "qkv_bias": True}, "neither qkv_bias nor qk_norm"),
        ({"latent": LATENT, "n_kv_heads": 2}, "a key for each of n_heads=4"),
        ({"latent": LATENT, "head_dim": 4}, r"latent\.rope_dim=4 must be below head_dim=4"),
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
        ({"experts": "sparse"}, "experts='sparse': choose one of dense, blocked"),
        ({"experts": "blocked", "batch_invariant": True}, "their bits depend on the batch"),
        ({"routing_jitter": -0.1}, r"routing_jitter=-0\.1"),
        ({"routing_jitter": float("nan")}, "routing_jitter=nan"),
    ],
)
def test_impossible_arithmetics(changes, message):
    with pytest.raises(ValueError, match=message):
        ComputeConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_rank": 0}, r"latent\.kv_rank=0"),
        ({"query_rank": 0}, r"latent\.query_rank=0"),
        ({"rope_dim": 3}, r"latent\.rope_dim=3 must be even"),
        ({"norm_eps": 0.0}, r"latent\.norm_eps=0\.0"),
    ],
)
def test_impossible_latents(changes, message):
    with pytest.raises(ValueError, match=message):
        LatentConfig(**{"kv_rank": 8, "rope_dim": 4, "value_dim": 6, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": 0.5}, r"factor=0\.5"),
        ({"factor": float("nan")}, "factor=nan"),
        ({"original_length": 0}, "original_length=0"),
        ({"beta_fast": 1.0}, r"beta_slow=1\.0 < beta_fast=1\.0 is required"),
    ],
)
def test_impossible_yarns(changes, message):
    with pytest.raises(ValueError, match=message):
        YarnConfig(**{"factor": 4.0, "original_length": 32, **changes})


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
