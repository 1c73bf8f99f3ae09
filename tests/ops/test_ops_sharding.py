"""Both operators on eight devices: tokens over "data", vocabulary over "tensor", no gathered head or hidden states."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trm_jax import ops

N, D, V, CHUNK = 64, 16, 112, 16


def everything(hidden: jax.Array, head: jax.Array, tokens: jax.Array, bits: jax.Array) -> object:
    def total(h: jax.Array, w: jax.Array) -> jax.Array:
        out = ops.linear_logps(h, w, tokens, support=bits, chunk_size=CHUNK)
        return jnp.sum(out.logps) + jnp.sum(out.entropy)

    divergence = ops.linear_vocab_divergence(hidden, head, hidden * 1.01, head, tokens, support=bits, chunk_size=CHUNK)
    return jax.value_and_grad(total, (0, 1))(hidden, head), divergence


@pytest.fixture(scope="module")
def inputs() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, N)
    support = rng.random((N, V)) < 0.5
    support[np.arange(N), tokens] = True
    return (
        rng.normal(size=(N, D)).astype(np.float32),
        rng.normal(size=(V, D)).astype(np.float32),
        tokens,
        np.packbits(support, axis=1, bitorder="little"),
    )


@pytest.mark.parametrize(
    "shape", [pytest.param((8, 1), marks=pytest.mark.slow), (4, 2), pytest.param((1, 8), marks=pytest.mark.slow)]
)
def test_sharded_equals_unsharded_and_moves_only_reductions(
    shape: tuple[int, int], inputs: tuple[np.ndarray, ...], collectives_of: Callable[[str], dict[str, list[int]]]
) -> None:
    mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))
    specs = (PartitionSpec("data"), PartitionSpec("tensor"), PartitionSpec("data"), PartitionSpec("data"))
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(inputs, specs, strict=True)]
    compiled = jax.jit(everything).lower(*placed).compile()
    got, want = compiled(*placed), jax.jit(everything)(*inputs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # float32 sums in another order, of 64 tokens: 1.4e-5 of gradients of 10.
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=5e-5)
    # A gathered head holds V·D values and gathered hidden states N·D; the arg-maximum gathers a few values a row.
    found = collectives_of(compiled.as_text())
    assert set(found) <= {"all-reduce", "all-gather"}, found
    assert max(found.get("all-gather", [0])) <= 4 * CHUNK * shape[1], found
