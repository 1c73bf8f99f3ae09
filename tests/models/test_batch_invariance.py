"""The batch-invariant arithmetic: the same token has the same bits in every program that computes it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.models import ComputeConfig, head_log_probs, head_token_logps, init_cache

ROWS, LENGTH, PROMPT = 5, 11, 4


def bits(array) -> bytes:
    return np.asarray(array).tobytes()


def programs(model, compute):
    """Name to a function of ``tokens [5, 11]`` that returns hidden states ``[5, 11, D]``, each a program of its own."""
    graphdef, params = nnx.split(model, nnx.Param)

    @jax.jit
    def forward(params, tokens):
        return nnx.merge(graphdef, params)(tokens, compute=compute).hidden

    def in_gradient(remat):
        @jax.jit
        def run(params, tokens):
            def loss(p):
                hidden = nnx.merge(graphdef, p)(tokens, compute=compute, remat=remat).hidden
                return jnp.sum(jnp.square(hidden.astype(jnp.float32))), hidden

            (_, hidden), grads = jax.value_and_grad(loss, has_aux=True)(params)
            return hidden, grads

        return lambda tokens: run(params, tokens)[0]

    def with_neighbours(tokens):
        others = np.random.default_rng(9).integers(0, 13, (64 - ROWS, LENGTH))
        return forward(params, np.concatenate([others[:30], tokens, others[30:]]))[30 : 30 + ROWS]

    @jax.jit
    def cached(params, tokens, positions, cache):
        out = nnx.merge(graphdef, params)(tokens, positions=positions, cache=cache, compute=compute)
        return out.hidden, out.cache

    def prefill_and_decode(tokens):
        start = np.broadcast_to(np.arange(PROMPT), (ROWS, PROMPT))
        first, cache = cached(params, tokens[:, :PROMPT], start, init_cache(model.config, ROWS, LENGTH, compute))
        found = [first]
        for at in range(PROMPT, LENGTH):
            hidden, cache = cached(params, tokens[:, at : at + 1], np.full((ROWS, 1), at), cache)
            found.append(hidden)
        return jnp.concatenate(found, axis=1)

    return {
        "batch of 5": lambda tokens: forward(params, tokens),
        "batches of 1": lambda tokens: jnp.concatenate([forward(params, row[None]) for row in tokens]),
        "among 64": with_neighbours,
        "prefill, then decode": prefill_and_decode,
        "inside value_and_grad": in_gradient(False),
        "inside value_and_grad with remat": in_gradient(True),
    }


# At width 16 the plain arithmetic happens to agree with itself too; at 32 it does not (last test of this file).
WIDE = {"d_model": 32, "d_ff": 48, "head_dim": 16}
CASES = [
    *(("gqa", dtype) for dtype in ("float32", "bfloat16")),
    ("moe", "bfloat16"),
    ("shared", "bfloat16"),
    *(("latent", dtype) for dtype in ("float32", "bfloat16")),
    ("biased", "float32"),
]


@pytest.mark.slow  # the default suite holds it end to end: train/test_architectures and rescore/test_zero_mismatch
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_every_program_gives_the_same_bits(build, kind, dtype):
    model = build(kind, **WIDE)
    compute = ComputeConfig(dtype=dtype, batch_invariant=True)
    tokens = np.random.default_rng(1).integers(0, 13, (ROWS, LENGTH)).astype(np.int32)
    found = {name: np.asarray(run(tokens)) for name, run in programs(model, compute).items()}
    expected = found["batch of 5"]
    assert np.asarray(expected, np.float32).std() > 0.1
    differing = {name: int((x != expected).sum()) for name, x in found.items() if bits(x) != bits(expected)}
    assert not differing, f"elements that differ from the forward pass on 5 rows, of {expected.size}: {differing}"


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_rows_do_not_depend_on_the_tile_they_share(build, dtype):
    """17 rows need two tiles of 16: the last tile is one row and fifteen of padding."""
    compute = ComputeConfig(dtype=dtype, batch_invariant=True)
    rng = np.random.default_rng(0)
    hidden, head = rng.standard_normal((17, 16)), rng.standard_normal((13, 16))
    hidden, head = jnp.asarray(hidden, compute.jnp_dtype), jnp.asarray(head, jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 13, 17), jnp.int32)

    whole = jax.jit(lambda h: head_log_probs(h, head, temperature=0.7, compute=compute))
    expected = np.asarray(whole(hidden))
    for rows in ([16], [3, 9, 16], list(range(16, -1, -1))):
        assert bits(whole(hidden[np.array(rows)])) == bits(expected[rows])

    def loss(h, w):
        logps, entropy = head_token_logps(h, w, tokens, temperature=0.7, compute=compute)
        return jnp.sum(logps) + jnp.sum(entropy), logps

    (_, logps), _ = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(hidden, head)
    assert bits(logps) == bits(expected[np.arange(17), np.asarray(tokens)])


def test_the_plain_arithmetic_does_depend_on_the_batch(build):
    """What the tests above guard against exists at this width; were it gone, they would show nothing."""
    model = build("gqa", **WIDE)
    tokens = np.random.default_rng(1).integers(0, 13, (ROWS, LENGTH)).astype(np.int32)
    runs = programs(model, ComputeConfig())
    assert bits(runs["batch of 5"](tokens)) != bits(runs["among 64"](tokens))
