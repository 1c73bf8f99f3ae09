"""Rotary frequencies, with YaRN, and the scale of attention scores."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax.models import LatentConfig, TransformerConfig, YarnConfig
from trm_jax.models._rope import apply_rope, rope_frequencies, score_scale

LITE = YarnConfig(factor=40.0, original_length=4096, mscale=0.707, mscale_all_dim=0.707)


def config(**changes):
    return TransformerConfig(**{"vocab_size": 16, "n_heads": 1, "n_kv_heads": 1, **changes})


def test_a_quarter_turn_by_hand():
    # theta^0 = 1 radian a position for the only pair; at position pi/2 ... positions are integers, so turn by 1 radian.
    turned = apply_rope(jnp.array([[[1.0, 0.0]], [[0.0, 2.0]]]), jnp.array([1, 3]), config(head_dim=2))
    np.testing.assert_allclose(turned[0, 0], [math.cos(1), math.sin(1)], rtol=1e-6)
    np.testing.assert_allclose(turned[1, 0], [-2 * math.sin(3), 2 * math.cos(3)], rtol=1e-6)


def test_yarn_keeps_fast_pairs_divides_slow_ones_and_mixes_between():
    """DeepSeek-V2-Lite, 64 rotary coordinates. Pair i turns 4096 / (2 pi 10000^(i/32)) times in 4096 positions.

    32 turns: i = 32 ln(4096 / (32 · 2 pi)) / ln(10000) = 10.47, so 10 after rounding down; 1 turn: 22.51, so 23 up.
    """
    shape = config(head_dim=192, latent=LatentConfig(kv_rank=512, rope_dim=64, value_dim=128), yarn=LITE)
    plain = 10_000.0 ** (-np.arange(32) / 32)
    found = rope_frequencies(shape)
    np.testing.assert_allclose(found[:11], plain[:11], rtol=1e-6)
    np.testing.assert_allclose(found[23:], plain[23:] / 40, rtol=1e-6)
    # Pair 12 is 2/13 along the ramp.
    np.testing.assert_allclose(found[12], plain[12] * (11 / 13 + 2 / 13 / 40), rtol=1e-6)


def test_scales_by_hand():
    assert score_scale(config(head_dim=16)) == 0.25
    # 1 + 0.1 · 0.707 · ln 40 = 1.260804; its square is 1.589626.
    lite = config(head_dim=192, latent=LatentConfig(kv_rank=8, rope_dim=64, value_dim=4), yarn=LITE)
    assert score_scale(lite) == pytest.approx(1.589626 / math.sqrt(192), rel=1e-6)
    turned = apply_rope(jnp.ones((1, 1, 64)), jnp.zeros((1,), jnp.int32), lite)
    np.testing.assert_allclose(turned, 1.0, rtol=1e-6)  # both of its magnitudes are equal, and cancel
    # The paper's own: no factor on the scores, 1 + 0.1 ln 4 = 1.138629 on each rotated vector.
    plain = config(head_dim=16, yarn=YarnConfig(factor=4.0, original_length=32))
    assert score_scale(plain) == 0.25
    np.testing.assert_allclose(apply_rope(jnp.ones((1, 1, 16)), jnp.zeros((1,), jnp.int32), plain), 1.138629, rtol=1e-6)


def test_a_factor_of_one_is_plain():
    plain, same = config(head_dim=16), config(head_dim=16, yarn=YarnConfig(factor=1.0, original_length=32))
    np.testing.assert_array_equal(rope_frequencies(plain), rope_frequencies(same))


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(0)
    shape = config(head_dim=16, yarn=YarnConfig(factor=4.0, original_length=32))
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 16)), jnp.float32) for _ in range(2))

    def score(i, j):
        return float(jnp.sum(apply_rope(q, jnp.array([i]), shape) * apply_rope(k, jnp.array([j]), shape)))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-3)  # angles of 100 radians are rounded to 4e-6
    assert abs(score(7, 3) - score(7, 4)) > 1e-2
