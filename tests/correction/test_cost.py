"""A correction reads its inputs about once: bytes that the compiled program moves, against one read and one write."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import pytest

from trm_jax import correction
from trm_jax.types import ScoredBatch

SHAPE = (512, 8192)
FULL = jax.ShapeDtypeStruct(SHAPE, jnp.float32)


def size(tree: object) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def moved(name: str) -> float:
    config = correction.preset(name)
    needed = {"trm_max": "token_kl", "trm_avg": "token_kl", "trm_tv": "token_tv"}
    scored = ScoredBatch(
        proximal_logps=FULL,
        rollout_logps=FULL,
        response_mask=jax.ShapeDtypeStruct(SHAPE, jnp.bool_),
        **{needed[mask]: FULL for mask in config.masks if mask in needed},
    )
    compiled = jax.jit(correction.correct, static_argnums=1).lower(scored, config).compile()
    outputs = jax.eval_shape(functools.partial(correction.correct, config=config), scored)
    return float(compiled.cost_analysis()["bytes accessed"]) / size((scored, outputs))


@pytest.mark.parametrize("name", ["cis", "token_mask + seq_tis", "trm_combined + tis"])
def test_twice_the_minimum_at_most(name: str) -> None:
    assert moved(name) <= 2.0


@pytest.mark.slow
@pytest.mark.parametrize("name", [*correction.presets, "trm_combined + trm_sample + ser + geometric + cis"])
def test_every_preset(name: str) -> None:
    assert moved(name) <= 2.0
