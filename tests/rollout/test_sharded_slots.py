"""Slots beside sharded weights: where they lie, that they stay there, and that nothing else changes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from trm_jax.models import Transformer, TransformerConfig, make_mesh, param_shardings
from trm_jax.rollout import Columns, EngineConfig, RolloutNumerics, SamplingConfig, SlotEngine

SIZES = EngineConfig(slots=4, prefill_rows=2, decode_chunk=3, max_prompt_length=5, max_response_length=6)


def sampled(engine: SlotEngine, params) -> tuple[np.ndarray, list]:
    policy, state = engine.load(1, params), engine.empty_state()
    kept = []
    for first in (0, 2):
        prefix = engine.prefill(policy, [[1, 2, 4], [5]])
        starts = [(first + i, i, 7 + first + i, 6, SamplingConfig()) for i in range(2)]
        state = engine.insert(prefix, state, starts)
        state, chunk = engine.generate(policy, state)
        kept.append(np.asarray(chunk.data))
    return np.stack(kept), [x.sharding for x in jax.tree.leaves(state)]


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", [None, "int8"])
def test_tokens_are_those_of_one_device_and_every_program_compiles_once(kv_cache_dtype):
    shape = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "d_ff": 32}
    model = Transformer(TransformerConfig(vocab_size=16, **shape), rngs=nnx.Rngs(0))
    params, numerics = nnx.state(model, nnx.Param), RolloutNumerics(kv_cache_dtype=kv_cache_dtype)
    alone, _ = sampled(SlotEngine(model, SIZES, numerics=numerics, eos_ids=()), params)
    mesh = make_mesh(data=2, tensor=2)
    engine = SlotEngine(model, SIZES, numerics=numerics, eos_ids=())
    spread, shardings = sampled(engine, jax.device_put(params, param_shardings(params, mesh)))
    for one, other in zip(alone, spread, strict=True):
        one, other = Columns.of(one), Columns.of(other)
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logps, other.logps, atol=3e-5)
    assert engine.compilations() == 3
    first = jax.tree.leaves(jax.tree.map(lambda x: x.sharding, engine.empty_state()))
    assert shardings == first
    assert (first[0].spec[1], first[0].spec[3]) == ("data", "tensor")
