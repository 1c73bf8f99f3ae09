"""Grouped matrix products: against NumPy, group by group; their gradients; and what they cost."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax.models import ComputeConfig
from trm_jax.models._grouped_matmul import group_rows, grouped_matmul, tile_rows

PLAIN = ComputeConfig()
# Sums of 12 products of order one in float32.
TIGHT = {"rtol": 1e-5, "atol": 1e-5}


def test_grouping_by_hand():
    # Groups 1, 0, 1, 1 of 3, tiles of 2: group 0 takes places 0-1 (one of padding), group 1 2-5, group 2 what is over.
    found = group_rows(jnp.array([1, 0, 1, 1]), 3, align=2, total=8)
    assert found.source.tolist() == [1, 4, 0, 2, 3, 4, 4, 4]
    assert found.place.tolist() == [2, 0, 3, 4]
    assert found.sizes.tolist() == [2, 4, 2]


@pytest.mark.parametrize("implementation", ["blocked", "ragged_dot", "megablox"])
@pytest.mark.parametrize(
    "rows", [1, pytest.param(7, marks=pytest.mark.slow), pytest.param(96, marks=pytest.mark.slow), 1000]
)
@pytest.mark.parametrize("case", ["even", "one", "skewed"])
def test_every_assignment_has_a_place_in_its_group(implementation, rows, case):
    rng, groups = np.random.default_rng(rows), 5
    group = {
        "even": rng.integers(0, groups, rows),
        "one": np.full(rows, 3),
        "skewed": np.minimum(rng.geometric(0.6, rows) - 1, groups - 1),
    }[case].astype(np.int32)
    align, total = tile_rows(rows, groups, implementation)
    found = jax.jit(functools.partial(group_rows, groups=groups, align=align, total=total))(group)
    source, place, sizes = (np.asarray(x) for x in (found.source, found.place, found.sizes))
    assert source.shape == (total,)
    assert sizes.sum() == total
    assert not (sizes % align).any()
    owner = np.repeat(np.arange(groups), sizes)
    np.testing.assert_array_equal(owner[place], group)
    np.testing.assert_array_equal(source[place], np.arange(rows))
    assert np.sum(source < rows) == rows


def _case(sizes, dtype=np.float32):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((sum(sizes), 12)).astype(dtype)
    weight = rng.standard_normal((len(sizes), 12, 10)).astype(dtype)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    readout = rng.standard_normal((sum(sizes), 10)).astype(dtype)
    return rows, weight, owner, readout


SIZES = {"even": [8, 8, 8, 8], "empty ones": [0, 16, 0, 16], "one": [0, 0, 32, 0], "last": [0, 0, 0, 32]}


@pytest.mark.parametrize("implementation", ["blocked", "ragged_dot"])
@pytest.mark.parametrize("case", SIZES)
def test_products_and_gradients_group_by_group(implementation, case, quick_jit):
    rows, weight, owner, readout = _case(SIZES[case])
    sizes = jnp.array(SIZES[case], jnp.int32)

    def value(x, w):
        out = grouped_matmul(x, w, sizes, align=8, implementation=implementation, compute=PLAIN)
        return jnp.sum(out * readout), out

    (_, out), (by_rows, by_weight) = quick_jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))(rows, weight)
    wide, wide_weight, wide_readout = (x.astype(np.float64) for x in (rows, weight, readout))
    for r, group in enumerate(owner):
        np.testing.assert_allclose(out[r], wide[r] @ wide_weight[group], **TIGHT)
        np.testing.assert_allclose(by_rows[r], wide_weight[group] @ wide_readout[r], **TIGHT)
    for group in range(4):
        mine = owner == group
        expected = wide[mine].T @ wide_readout[mine]  # zeros for a group without rows
        np.testing.assert_allclose(by_weight[group], expected, **TIGHT)


def test_bfloat16_rows_accumulate_in_float32():
    """1 + 256 summands of 2^-9: in bfloat16, whose step at 1 is 2^-7, each of them would be lost."""
    rows = jnp.concatenate([jnp.ones((8, 1)), jnp.full((8, 256), 2.0**-9)], axis=1).astype(jnp.bfloat16)
    weight = jnp.ones((1, 257, 1), jnp.bfloat16)
    compute = ComputeConfig(dtype="bfloat16")
    out = grouped_matmul(rows, weight, jnp.array([8]), align=8, implementation="blocked", compute=compute)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.5)


@pytest.mark.slow
def test_the_tpu_kernel_computes_the_same_in_the_interpreter():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((256, 128)).astype(np.float32)
    weight = rng.standard_normal((3, 128, 128)).astype(np.float32)
    sizes = np.array([100, 0, 156], np.int32)

    def value(x, w, implementation):
        out = grouped_matmul(
            x, w, jnp.asarray(sizes), align=1, implementation=implementation, compute=PLAIN, interpret=True
        )
        return jnp.sum(jnp.sin(out)), out

    found = {
        name: jax.value_and_grad(functools.partial(value, implementation=name), argnums=(0, 1), has_aux=True)(
            rows, weight
        )
        for name in ("megablox", "ragged_dot")
    }
    # The gradient of the sine is of order one and its argument of order ten: float32 roundings of sums of 128 products.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-3), found["megablox"], found["ragged_dot"]
    )


COMPILE = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from trm_jax.models import ComputeConfig
from trm_jax.models._grouped_matmul import grouped_matmul, tile_rows
chip = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[:1]
place = NamedSharding(Mesh(np.array(chip), ("x",)), PartitionSpec())
compute = ComputeConfig(dtype="bfloat16")
align, total = tile_rows(4096, 60, "megablox")
def loss(rows, weight, sizes):
    out = grouped_matmul(rows, weight, sizes, align=align, implementation="megablox", compute=compute)
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))
shapes = [((total, 512), jnp.bfloat16), ((60, 512, 256), jnp.bfloat16), ((60,), jnp.int32)]
args = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in shapes]
for function in (loss, jax.grad(loss, argnums=(0, 1))):
    print(jax.jit(function).lower(*args).compile().cost_analysis()["flops"] / (2 * total * 512 * 256))
"""


@pytest.mark.slow
def test_the_tpu_kernel_compiles_for_a_tpu_and_costs_what_it_multiplies():
    pytest.importorskip("libtpu")
    environ = {**os.environ, "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    forward, gradient = map(float, done.stdout.split())
    assert 1 <= forward < 1.05  # the sine costs a little
    assert 3 <= gradient < 3.1  # the product, and one product for each operand: sixty times that with ragged_dot


def test_an_unknown_form_is_refused():
    with pytest.raises(NotImplementedError, match="'dense'"):
        grouped_matmul(
            jnp.ones((8, 2)), jnp.ones((1, 2, 2)), jnp.array([8]), align=8, implementation="dense", compute=PLAIN
        )


@pytest.mark.parametrize(("rows", "groups"), [(8192 * 4, 60), (4096 * 8, 128), (2048 * 2, 8), (512 * 2, 4)])
def test_padding_to_whole_tiles_adds_little_on_average_and_a_known_most(rows, groups):
    align, total = tile_rows(rows, groups, "blocked")
    assert align % 8 == 0
    assert total <= rows + align * groups  # the most: every group but for one row in its last tile
    assert total <= 1.13 * rows
