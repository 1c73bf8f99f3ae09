"""What engines make of weights: formats, the head they multiply with, and lag."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.models import ComputeConfig, QuantizedArray, dequantize, quantize
from trm_jax.rollout import RolloutNumerics, WeightLag, convert_weights

FLOAT32 = jnp.dtype("float32")
MATMULS = ("query", "key", "value", "output", "gate", "up", "down")
FORMATS = [RolloutNumerics(weight_format="int4", group_size=16, quantize_head=True, dtype="bfloat16")]
MORE_FORMATS = [
    RolloutNumerics(weight_format="int8"),
    RolloutNumerics(weight_format="bfloat16", dtype="bfloat16"),
    RolloutNumerics(weight_format="int8", quantize_head=True),
    RolloutNumerics(weight_format="bfloat16"),
    RolloutNumerics(weight_format="float16"),
    RolloutNumerics(dtype="bfloat16"),
    RolloutNumerics(weight_format="fp8"),
]


def name_of(numerics):
    return f"{numerics.weight_format}-{numerics.dtype}{'-head' if numerics.quantize_head else ''}"


def rounded_model(tools, numerics):
    """The model with every weight replaced by what its format can hold: a plain model that the engine must equal."""
    graphdef, params = nnx.split(tools.model(), nnx.Param)
    group = numerics.group_size if numerics.weight_format == "int4" else None

    def one(path, variable):
        name, value = path[-1].key, variable.get_value()
        if numerics.weight_format in ("bfloat16", "float16"):
            value = value.astype(numerics.weight_format).astype(jnp.float32)
        elif name in MATMULS and numerics.weight_format != "float32":
            value = dequantize(quantize(value, numerics.weight_format, group_size=group), FLOAT32)
        elif name == "lm_head" and numerics.quantize_head:
            value = dequantize(quantize(value.T, numerics.weight_format, group_size=group), FLOAT32).T
        return variable.replace(value)

    return nnx.merge(
        graphdef, jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    )


@pytest.mark.parametrize(
    "numerics", [*FORMATS, *(pytest.param(x, marks=pytest.mark.slow) for x in MORE_FORMATS)], ids=name_of
)
def test_every_format_samples_from_what_it_holds_and_records_it(tools, numerics):
    prompts = tools.prompts(8)
    engine = tools.engine(numerics, slots=8, decode_chunk=6, prefill_rows=8)
    found = engine.generate(prompts)
    mask = np.asarray(found.response_mask)
    recorded = np.where(mask, found.rollout_logps, 0.0)

    # Recorded states through the engine's head give the recorded log-probs: products of 8-bit mantissas are exact in
    # float32, so bfloat16 needs no wider tolerance than float32.
    head = engine.head_matrix()
    assert head.shape == (13, 32)
    assert head.dtype == found.hidden.dtype == jnp.dtype(numerics.dtype)
    np.testing.assert_allclose(tools.at_tokens(tools.log_softmax64(found.hidden, head), found), recorded, atol=2e-5)

    # They are those of a plain model with rounded weights ...
    model = rounded_model(tools, numerics)
    compute = ComputeConfig(dtype=numerics.dtype)
    states = tools.teacher_forced(model, found, compute)
    same = tools.at_tokens(tools.log_softmax64(states, model.head().astype(compute.jnp_dtype)), found)
    # ... within rounding: decode and the full pass may differ by a few steps of bfloat16 (4e-3 of a logit of order 3).
    np.testing.assert_allclose(recorded, same, atol=3e-5 if numerics.dtype == "float32" else 0.1)

    # And not those of the trainer's weights.
    trainer = tools.at_tokens(
        tools.log_softmax64(tools.teacher_forced(tools.model(), found), tools.model().head()), found
    )
    assert np.abs(recorded - trainer)[mask].max() > 1e-3


@pytest.mark.parametrize("fmt", ["int8", "int4", "fp8"])
def test_only_matmul_weights_are_quantised(tools, fmt):
    graphdef, params = nnx.split(tools.model(n_experts=4), nnx.Param)
    weights = convert_weights(graphdef, params, RolloutNumerics(weight_format=fmt, group_size=16))
    blocks = weights.params["blocks"]
    for name in (*MATMULS, "router"):
        stored = blocks[name].get_value()
        assert isinstance(stored, QuantizedArray), name
        expected = quantize(params["blocks"][name].get_value(), fmt, group_size=16 if fmt == "int4" else None)
        np.testing.assert_array_equal(stored.values.astype(jnp.float32), expected.values.astype(jnp.float32))
    for name in ("attention_norm", "mlp_norm"):
        np.testing.assert_array_equal(blocks[name].get_value(), params["blocks"][name].get_value())
    np.testing.assert_array_equal(weights.params["embedding"].get_value(), params["embedding"].get_value())
    np.testing.assert_array_equal(weights.head, params["lm_head"].get_value())


def test_a_quantised_head_is_stored_input_first(tools):
    graphdef, params = nnx.split(tools.model(), nnx.Param)
    weights = convert_weights(graphdef, params, RolloutNumerics(weight_format="int8", quantize_head=True))
    assert weights.head.values.shape == (1, 32, 13)
    head = np.asarray(params["lm_head"].get_value())
    # One scale a token, over the hidden width.
    np.testing.assert_allclose(weights.head.scales.reshape(-1), np.abs(head).max(axis=1) / 127, rtol=1e-6)
    np.testing.assert_allclose(weights.head_matrix(FLOAT32), head, atol=np.abs(head).max() / 127 / 2 * 1.001)


def test_float32_keeps_the_trainers_arrays(tools):
    graphdef, params = nnx.split(tools.model(), nnx.Param)
    weights = convert_weights(graphdef, params, RolloutNumerics())
    assert weights.params is params
    assert weights.head is params["lm_head"].get_value()


def test_a_group_that_does_not_divide_a_weight_is_named(tools):
    graphdef, params = nnx.split(tools.model(), nnx.Param)
    with pytest.raises(ValueError, match=r"parameter \['blocks'\]\['\w+'\]: group_size=24 .* 32"):
        convert_weights(graphdef, params, RolloutNumerics(weight_format="int4", group_size=24))


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_lag_hands_out_the_version_that_many_updates_old(lag):
    held = WeightLag(lag)
    for version in range(6):
        held.push(version, {"w": version})
        assert held.oldest == (max(0, version - lag), {"w": max(0, version - lag)})
        assert [v for v, _ in held.held] == list(range(max(0, version - lag), version + 1))


def test_lag_edges():
    with pytest.raises(ValueError, match="lag=-1"):
        WeightLag(-1)
    with pytest.raises(RuntimeError, match="call push"):
        _ = WeightLag(2).oldest
