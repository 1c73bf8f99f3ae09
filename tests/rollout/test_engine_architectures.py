"""The engine with other parts than the plain block: biases, norms of queries and keys, latent attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.models import (
    ComputeConfig,
    LatentConfig,
    QuantizedArray,
    Transformer,
    TransformerConfig,
    YarnConfig,
    head_token_logps,
)
from trm_jax.rollout import EngineConfig, InProcessEngine, RolloutNumerics, SamplingConfig, convert_weights

SHAPE = {"vocab_size": 13, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "head_dim": 8, "d_ff": 32}
KINDS = {
    "biased": {"n_kv_heads": 2, "qkv_bias": True, "qk_norm": True},
    "latent": {
        "latent": LatentConfig(kv_rank=16, rope_dim=4, value_dim=8),
        "yarn": YarnConfig(factor=4.0, original_length=8, mscale_all_dim=0.7),
        "n_layers": 3,
        "n_experts": 4,
        "normalize_experts": False,
        "d_ff_shared": 16,
        "n_dense_layers": 1,
        "d_ff_dense": 24,
    },
}


def make(kind: str) -> Transformer:
    model: Transformer = nnx.eval_shape(lambda: Transformer(TransformerConfig(**SHAPE | KINDS[kind]), rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model, nnx.Param)
    rng = np.random.default_rng(5)

    def fill(variable):
        shape, axes = variable.get_value().shape, variable.get_metadata("logical_axes")
        noise = rng.standard_normal(shape)
        filled = 1 + 0.1 * noise if "norm" in axes else noise * (0.5 if "bias" in axes else 1.2 * shape[-2] ** -0.5)
        return variable.replace(jnp.asarray(filled, jnp.float32))

    return nnx.merge(graphdef, jax.tree.map(fill, params, is_leaf=lambda x: isinstance(x, nnx.Variable)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_batch_invariant_records_equal_a_full_forward_pass_to_the_bit(tools, kind):
    model, numerics = make(kind), RolloutNumerics(batch_invariant=True)
    config = EngineConfig(slots=4, prefill_rows=2, decode_chunk=3, max_prompt_length=5, max_response_length=6)
    engine = InProcessEngine(model, config, numerics=numerics, sampling=SamplingConfig(), eos_ids=tools.eos)
    engine.update_weights(1, nnx.state(model, nnx.Param))
    found = engine.generate(tools.prompts(8, samples=2))
    compute = ComputeConfig(batch_invariant=True)
    hidden = tools.teacher_forced(model, found, compute)
    mask = np.asarray(found.response_mask)
    assert np.asarray(found.hidden)[mask].tobytes() == hidden[mask].tobytes()
    recompute = jax.jit(lambda h, w, y: head_token_logps(h, w, y, temperature=1.0, compute=compute)[0])
    logps = recompute(hidden[mask], model.head(), np.asarray(found.response_tokens)[mask])
    assert np.asarray(found.rollout_logps)[mask].tobytes() == np.asarray(logps).tobytes()


@pytest.mark.parametrize("kind", ["biased", pytest.param("latent", marks=pytest.mark.slow)])
def test_biases_and_norms_are_not_quantised(kind):
    graphdef, params = nnx.split(make(kind), nnx.Param)
    weights = convert_weights(graphdef, params, RolloutNumerics(weight_format="int8"))
    for name, variable in weights.params["blocks"].items():
        expected = not name.endswith(("_bias", "_norm"))
        assert isinstance(variable.get_value(), QuantizedArray) == expected, name
