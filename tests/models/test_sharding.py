"""Logical axes of every parameter, the shardings that follow, and the errors that name what does not fit."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from trm_jax.models import RULES, make_mesh, param_shardings


def variables(params):
    flat, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return {jax.tree_util.keystr(path): variable for path, variable in flat}


@pytest.mark.parametrize(
    ("kind", "count"),
    # Embedding, head, final norm; two norms, four projections, three of the feed-forward layer. Then what is added:
    # router; three biases, two norms; router, three biases, shared layer and its gate; fourteen of a latent
    # block with experts and ten of a dense one.
    [("dense", 12), ("gqa", 12), ("tied", 11), ("moe", 13), ("biased", 17), ("shared", 20), ("latent", 27)],
)
def test_every_parameter_has_one_known_logical_axis_for_each_dimension(build, kind, count):
    found = variables(nnx.state(build(kind), nnx.Param))
    assert len(found) == count
    for name, variable in found.items():
        axes = variable.get_metadata("logical_axes")
        assert len(axes) == variable.get_value().ndim, name
        assert set(axes) <= set(RULES), name


def test_biases_go_with_their_heads(build):
    mesh = make_mesh(data=4, tensor=2)
    blocks = param_shardings(nnx.state(build("biased", vocab_size=12), nnx.Param), mesh)["blocks"]
    assert blocks["query_bias"].get_value().spec == PartitionSpec(None, "tensor")
    assert blocks["query_norm"].get_value().spec == PartitionSpec(None, None)


def test_shardings_split_what_the_rules_say(build):
    params = nnx.state(build("moe"), nnx.Param)
    mesh = make_mesh(data=4, tensor=2)
    shardings = param_shardings(nnx.state(build("moe", vocab_size=12), nnx.Param), mesh)
    blocks = shardings["blocks"]
    expected = {
        "query": PartitionSpec(None, None, "tensor"),
        "output": PartitionSpec(None, "tensor", None),
        "gate": PartitionSpec(None, None, None, "tensor"),
        "down": PartitionSpec(None, None, "tensor", None),
        "router": PartitionSpec(None, None, None),
        "mlp_norm": PartitionSpec(None, None),
    }
    for name, spec in expected.items():
        assert blocks[name].get_value() == NamedSharding(mesh, spec), name
    assert shardings["lm_head"].get_value() == NamedSharding(mesh, PartitionSpec("tensor", None))
    assert jax.tree.structure(shardings) == jax.tree.structure(params)


def test_parameters_land_where_they_are_sent_and_the_forward_agrees(build):
    model = build("gqa", vocab_size=12)
    graphdef, params = nnx.split(model, nnx.Param)
    mesh = make_mesh(data=4, tensor=2)
    placed = jax.device_put(params, param_shardings(params, mesh))
    shard = placed["blocks"]["gate"].get_value().addressable_shards[0].data
    assert shard.shape == (2, 16, 12)
    tokens = np.random.default_rng(0).integers(0, 12, (8, 6)).astype(np.int32)
    rows = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))
    run = jax.jit(lambda p, t: nnx.merge(graphdef, p)(t).hidden)
    # Sums over heads and feed-forward columns are split in two and added: a few float32 roundings.
    np.testing.assert_allclose(run(placed, rows), run(params, tokens), atol=2e-5)


def test_an_axis_that_does_not_divide_is_named(build):
    params = nnx.state(build("dense"), nnx.Param)  # a vocabulary of 13
    with pytest.raises(
        ValueError, match=r"embedding.*axis 'vocab' of size 13 does not divide by mesh axis 'tensor' of size 2"
    ):
        param_shardings(params, make_mesh(tensor=2))


def test_rules_can_be_replaced_and_must_be_complete(build):
    params = nnx.state(build("dense"), nnx.Param)
    mesh = make_mesh(data=4, tensor=2)
    only_embed = {**dict.fromkeys(RULES), "embed": "data"}
    shardings = param_shardings(params, mesh, only_embed)
    assert shardings["embedding"].get_value().spec == PartitionSpec(None, "data")
    with pytest.raises(ValueError, match=r"axis 'vocab' of size 13 has no rule"):
        param_shardings(params, mesh, {k: v for k, v in RULES.items() if k != "vocab"})
    with pytest.raises(ValueError, match=r"mesh axis 'model', but the mesh has \['data', 'tensor'\]"):
        param_shardings(params, mesh, {**RULES, "vocab": "model"})


def test_a_mesh_has_the_asked_shape_over_the_first_devices():
    mesh = make_mesh(data=2, tensor=3)
    assert dict(mesh.shape) == {"data": 2, "tensor": 3}
    assert [d.id for d in mesh.devices.reshape(-1)] == [d.id for d in jax.devices()[:6]]


def test_a_mesh_that_cannot_be_made_is_refused():
    with pytest.raises(ValueError, match=r"data=3 x tensor=4 needs 12 devices, but JAX sees 8.*XLA_FLAGS"):
        make_mesh(data=3, tensor=4)
    with pytest.raises(ValueError, match="data=0, tensor=2: both must be at least 1"):
        make_mesh(data=0, tensor=2)
