"""Token log-probs of a linear head: values and gradients against float64 numpy, chunking, supports, dtypes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import ops
from trm_jax.ops import _dispatch
from trm_jax.types import VocabDivergence

N, D, V = 37, 12, 101  # neither divides any chunk below


def operands(seed: int = 0, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    hidden = scale * rng.normal(size=(N, D)).astype(np.float32)
    head = rng.normal(size=(V, D)).astype(np.float32)
    return hidden.astype(np.float32), head, rng.integers(0, V, N)


def random_support(tokens: np.ndarray, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    support = rng.random((N, V)) < 0.5
    support[np.arange(N), tokens] = True
    return support


def pack(support: np.ndarray) -> np.ndarray:
    return np.packbits(support, axis=1, bitorder="little")


def oracle(
    hidden: np.ndarray, head: np.ndarray, tokens: np.ndarray, temperature: float, support: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Float64 values and the analytic gradient of sum(a·logps + b·logsumexp + c·entropy)."""
    h, w = hidden.astype(float), head.astype(float)
    z = h @ w.T / temperature
    if support is not None:
        z = np.where(support, z, -np.inf)
    top = z.max(-1, keepdims=True)
    lse = (top + np.log(np.exp(z - top).sum(-1, keepdims=True)))[:, 0]
    p = np.exp(z - lse[:, None])
    logp = np.where(p > 0, z - lse[:, None], 0.0)
    entropy = -(p * logp).sum(-1)
    return {
        "logps": z[np.arange(len(tokens)), tokens] - lse,
        "logsumexp": lse,
        "entropy": entropy,
        "p": p,
        "logp": logp,
    }


def oracle_gradient(
    hidden: np.ndarray,
    head: np.ndarray,
    tokens: np.ndarray,
    temperature: float,
    cotangents: np.ndarray,
    support: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    o = oracle(hidden, head, tokens, temperature, support)
    a, b, c = (x[:, None] for x in cotangents)
    onehot = np.eye(V)[tokens]
    dz = a * (onehot - o["p"]) + b * o["p"] - c * o["p"] * (o["logp"] + o["entropy"][:, None])
    dz /= temperature
    return dz @ head.astype(float), dz.T @ hidden.astype(float)


@pytest.mark.parametrize(("implementation", "devices"), [("reference", 8), ("chunked", 8), ("chunked", 1)])
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.0, marks=pytest.mark.slow)])
def test_values_and_gradients(
    implementation: str, devices: int, restricted: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, a device goes through the head in contiguous chunks."""
    monkeypatch.setattr(_dispatch.jax, "device_count", lambda: devices)
    hidden, head, tokens = operands()
    support = random_support(tokens) if restricted else None
    bits = None if support is None else pack(support)
    cotangents = np.random.default_rng(2).normal(size=(3, N)).astype(np.float32)

    def weighted(h: jax.Array, w: jax.Array) -> tuple[jax.Array, ops.LinearLogps]:
        out = ops.linear_logps(
            h, w, tokens, temperature=temperature, support=bits, implementation=implementation, chunk_size=8
        )
        return sum(jnp.sum(x * c) for x, c in zip(out, cotangents, strict=True)), out

    (_, out), gradients = jax.jit(jax.value_and_grad(weighted, (0, 1), has_aux=True))(hidden, head)
    expected = oracle(hidden, head, tokens, temperature, support)
    for name in ("logps", "logsumexp", "entropy"):
        # 2e-5: logits of size 20 carry 1e-6 from their float32 product.
        np.testing.assert_allclose(getattr(out, name), expected[name], rtol=1e-5, atol=2e-5, err_msg=name)
    for got, want in zip(
        gradients, oracle_gradient(hidden, head, tokens, temperature, cotangents, support), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=5e-5)


def test_gradients_are_central_differences() -> None:
    """Of the float64 values, in a dozen entries of each operand."""
    hidden, head, tokens = operands(4)
    cotangents = np.random.default_rng(5).normal(size=(3, N)).astype(np.float32)

    def weighted(h: jax.Array, w: jax.Array) -> jax.Array:
        out = ops.linear_logps(h, w, tokens, temperature=0.7, implementation="chunked", chunk_size=8)
        return sum(jnp.sum(x * c) for x, c in zip(out, cotangents, strict=True))

    def exact(h: np.ndarray, w: np.ndarray) -> float:
        found = oracle(h, w, tokens, 0.7)
        return sum(found[name] @ c for name, c in zip(("logps", "logsumexp", "entropy"), cotangents, strict=True))

    gradients = jax.grad(weighted, (0, 1))(hidden, head)
    entries = np.random.default_rng(6)
    for place, gradient in enumerate(gradients):
        for _ in range(12):
            at = tuple(entries.integers(0, size) for size in gradient.shape)
            ends = []
            for step in (1e-5, -1e-5):
                moved = [hidden.astype(float), head.astype(float)]
                moved[place][at] += step
                ends.append(exact(*moved))
            # Differences of a float64 function are good to 1e-9; the float32 gradient as above.
            np.testing.assert_allclose(gradient[at], (ends[0] - ends[1]) / 2e-5, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize(
    "chunk_size", [pytest.param(1, marks=pytest.mark.slow), 5, pytest.param(37, marks=pytest.mark.slow), 1000]
)
def test_chunking_does_not_matter(chunk_size: int) -> None:
    hidden, head, tokens = operands()
    bits = pack(random_support(tokens))

    @functools.partial(jax.jit, static_argnums=2)
    def run(h: jax.Array, w: jax.Array, size: int) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        def total(h: jax.Array, w: jax.Array) -> jax.Array:
            out = ops.linear_logps(h, w, tokens, support=bits, chunk_size=size)
            return jnp.sum(out.logps + 0.1 * out.entropy)

        return ops.linear_logps(h, w, tokens, support=bits, chunk_size=size), jax.grad(total, (0, 1))(h, w)

    got, want = run(hidden, head, chunk_size), run(hidden, head, 9)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


def test_token_outside_the_support() -> None:
    hidden, head, tokens = operands()
    support = random_support(tokens)
    support[3, tokens[3]] = False
    support[4] = False  # nothing left at all, as at a masked slot
    bits = pack(support)
    for implementation in ("reference", "chunked"):

        def total(h: jax.Array, w: jax.Array, implementation: str = implementation) -> jax.Array:
            out = ops.linear_logps(h, w, tokens, support=bits, implementation=implementation)
            return jnp.sum(jnp.where(jnp.isfinite(out.logps), out.logps, 0.0))

        out = ops.linear_logps(hidden, head, tokens, support=bits, implementation=implementation)
        np.testing.assert_array_equal(np.isneginf(out.logps), np.isin(np.arange(N), [3, 4]))
        assert out.logsumexp[4] == -np.inf
        assert out.entropy[4] == 0
        grad_hidden, grad_head = jax.jit(jax.grad(total, (0, 1)))(hidden, head)
        np.testing.assert_array_equal(grad_hidden[3:5], 0.0)
        assert np.all(np.isfinite(grad_head))


def test_unguarded_gradient_of_an_impossible_token_is_zero() -> None:
    hidden, head, tokens = operands()
    support = random_support(tokens)
    support[3, tokens[3]] = False
    grads = jax.grad(lambda h: jnp.sum(ops.linear_logps(h, head, tokens, support=pack(support)).logps))(hidden)
    np.testing.assert_array_equal(grads[3], 0.0)
    assert np.all(np.isfinite(grads))


@pytest.mark.parametrize("implementation", ["reference", "chunked", "pallas_tpu"])
def test_an_empty_support_has_no_gradient_of_any_output(implementation: str) -> None:
    """Its normaliser is -inf and its entropy 0, whatever the logits; the other rows' gradients are theirs."""
    hidden, head, tokens = operands()
    support = random_support(tokens)
    support[4] = False

    def total(h: jax.Array, w: jax.Array) -> jax.Array:
        out = ops.linear_logps(h, w, tokens, support=pack(support), implementation=implementation, interpret=True)
        return jnp.sum(2.0 * out.logsumexp + out.entropy)

    grad_hidden, grad_head = jax.grad(total, (0, 1))(hidden, head)
    np.testing.assert_array_equal(grad_hidden[4], 0.0)
    cotangents = np.stack([np.zeros(N), np.full(N, 2.0), np.ones(N)])
    rest = np.arange(N) != 4
    wants = oracle_gradient(hidden[rest], head, tokens[rest], 1.0, cotangents[:, rest], support[rest])
    for got, want in zip((grad_hidden[rest], grad_head), wants, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_nan_row_without_cotangent_stays_out_of_the_head_gradient(implementation: str) -> None:
    hidden, head, tokens = operands()
    mask = np.ones(N, bool)
    mask[5] = False
    dirty = hidden.copy()
    dirty[5] = np.nan

    def total(h: jax.Array, w: jax.Array) -> jax.Array:
        logps = ops.linear_logps(h, w, tokens, chunk_size=8, implementation=implementation).logps
        return jnp.sum(jnp.where(mask, logps, 0.0))

    gradient = jax.jit(jax.grad(total, (0, 1)))
    got, want = gradient(dirty, head), gradient(hidden, head)
    np.testing.assert_array_equal(got[0][5], 0.0)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6, atol=1e-6)
    assert jnp.isnan(ops.linear_logps(dirty, head, tokens, implementation=implementation).logps[5])


def test_bfloat16_operands_accumulate_in_float32() -> None:
    hidden, head, tokens = operands(scale=3.0)
    h, w = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    out = ops.linear_logps(h, w, tokens, chunk_size=8)
    # The same bfloat16 operands in float64: what is left is accumulation, far below bfloat16's 4e-3.
    expected = oracle(np.asarray(h, np.float32), np.asarray(w, np.float32), tokens, 1.0)
    np.testing.assert_allclose(out.logps, expected["logps"], rtol=1e-5, atol=2e-5)
    assert out.logps.dtype == jnp.float32
    grads = jax.grad(lambda h, w: jnp.sum(ops.linear_logps(h, w, tokens, chunk_size=8).logps), (0, 1))(h, w)
    ones = np.stack([np.ones(N), np.zeros(N), np.zeros(N)])
    wants = oracle_gradient(np.asarray(h, np.float32), np.asarray(w, np.float32), tokens, 1.0, ones)
    for got, want in zip(grads, wants, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=8e-3, atol=1e-4)  # one rounding to bfloat16


def test_head_gradient_of_many_tokens_is_summed_in_float32() -> None:
    # 4,096 equal tokens against a bfloat16 head: a bfloat16 running sum would stop growing at 256 times a term.
    hidden = jnp.ones((4096, 1), jnp.bfloat16)
    head = jnp.zeros((2, 1), jnp.bfloat16)
    tokens = jnp.zeros(4096, jnp.int32)
    grad = jax.grad(lambda w: jnp.sum(ops.linear_logps(hidden, w, tokens, chunk_size=64).logps))(head)
    np.testing.assert_array_equal(np.asarray(grad, np.float32), [[2048.0], [-2048.0]])  # 4096 · (1 - ½), 4096 · (-½)


@pytest.mark.parametrize("implementation", ["chunked", "pallas_tpu"])
def test_hidden_gradient_of_shards_is_summed_before_it_is_rounded(implementation: str) -> None:
    """Rows 1, 1/256 on one device and -1, 0 on another, each of probability ¼: gradient (1 + 1/256 - 1) / 4.

    The first device's addend has nine significant bits, one more than bfloat16: rounded alone, the sum would be 0.
    """
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    hidden, head = jnp.zeros((1, 1), jnp.bfloat16), jnp.array([[1.0], [1 / 256], [-1.0], [0.0]], jnp.bfloat16)

    def total(h: jax.Array) -> jax.Array:
        options = {"implementation": implementation, "interpret": True, "mesh": mesh, "vocab_axis": "tensor"}
        return jnp.sum(ops.linear_logps(h, head, jnp.array([0]), **options).logsumexp)

    grad = jax.grad(total)(hidden)
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(grad, np.float32), [[1 / 1024]], rtol=2**-8)


def test_by_hand() -> None:
    # z = [2, 0] / 0.5 = [4, 0]: logp = -log(1 + e^-4) = -0.0181499, H = 0.0900948 (p = .9820138)
    out = ops.linear_logps(jnp.array([[2.0]]), jnp.array([[1.0], [0.0]]), jnp.array([0]), temperature=0.5)
    np.testing.assert_allclose(out.logps, [-0.0181499], rtol=1e-5)
    np.testing.assert_allclose(out.logsumexp, [4.0181499], rtol=1e-6)
    np.testing.assert_allclose(out.entropy, [0.0900948], rtol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "chunked", "pallas_tpu"])
@pytest.mark.parametrize("support", [None, np.zeros((0, -(-V // 8)), np.uint8)], ids=["whole", "support"])
def test_no_tokens(implementation: Any, support: np.ndarray | None) -> None:
    options = {"implementation": implementation, "interpret": implementation == "pallas_tpu", "support": support}
    hidden, head, tokens = jnp.zeros((0, D)), jnp.ones((V, D)), jnp.zeros(0, int)
    out = ops.linear_logps(hidden, head, tokens, **options)
    apart = ops.linear_vocab_divergence(hidden, head, hidden, head, tokens, **options)
    for values in jax.tree.leaves((out, apart)):
        assert values.shape == (0,)
    gradients = jax.grad(lambda h, w: jnp.sum(ops.linear_logps(h, w, tokens, **options).logps), (0, 1))(hidden, head)
    for gradient, operand in zip(gradients, (hidden, head), strict=True):
        np.testing.assert_array_equal(gradient, jnp.zeros_like(operand))


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_ids_that_are_no_tokens_and_infinite_logits_are_nan(implementation: str) -> None:
    hidden, head, tokens = operands()
    padded = np.where(np.arange(N) % 3 == 0, -100, np.where(np.arange(N) % 3 == 1, V, tokens))
    hidden[5] = np.inf  # row 5 keeps its token

    def total(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        logps = ops.linear_logps(h, w, padded, implementation=implementation, chunk_size=8).logps
        counted = (np.arange(N) % 3 == 2) & (np.arange(N) != 5)
        return jnp.sum(jnp.where(counted, logps, 0.0)), logps

    gradients, logps = jax.grad(total, (0, 1), has_aux=True)(hidden, head)
    np.testing.assert_array_equal(np.isnan(logps), (np.arange(N) % 3 != 2) | (np.arange(N) == 5))
    np.testing.assert_array_equal(gradients[0][np.arange(N) % 3 != 2], 0.0)
    assert np.isfinite(gradients[1]).all()


def test_second_call_does_not_recompile() -> None:
    hidden, head, tokens = operands()
    run = jax.jit(lambda h, w, y: ops.linear_logps(h, w, y, chunk_size=8))
    run(hidden, head, tokens)
    run(hidden + 1, head, (tokens + 1) % V)
    assert run._cache_size() == 1


def temporaries(n: int, d: int, v: int, chunk_size: int) -> int:
    """Bytes, of value and gradient."""
    shapes = (jax.ShapeDtypeStruct((n, d), jnp.float32), jax.ShapeDtypeStruct((v, d), jnp.float32))
    tokens = jnp.zeros(n, jnp.int32)

    def total(h: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(ops.linear_logps(h, w, tokens, chunk_size=chunk_size).logps)

    compiled = jax.jit(jax.value_and_grad(total, (0, 1))).lower(*shapes).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def test_full_logits_are_never_held() -> None:
    """In a vocabulary where [N, V] float32 would be 64 MiB."""
    n, v = 2048, 8192
    assert temporaries(n, 8, v, 64) < 4 * n * v / 4


def test_a_vocabulary_without_divisors_costs_no_copy_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of its gradient, 16 MiB each: the last chunk of a prime number of rows shares some with its neighbour."""
    monkeypatch.setattr(_dispatch.jax, "device_count", lambda: 1)
    d, v = 512, 8191
    assert temporaries(64, d, v, 16) < 4 * v * d / 4


@pytest.mark.parametrize("program", ["logps", "gradient", "divergence"])
def test_full_logits_are_not_held_by_default(program: str) -> None:
    """Without ``chunk_size``, of 16,384 tokens: chunks of 256, so a 64th of [N, V] for each array that a chunk has."""
    n, d, v = 16_384, 8, 8192
    spec = jax.ShapeDtypeStruct
    h, w, y = spec((n, d), jnp.float32), spec((v, d), jnp.float32), spec((n,), jnp.int32)

    def logps(h: jax.Array, w: jax.Array, y: jax.Array) -> ops.LinearLogps:
        return ops.linear_logps(h, w, y)

    def gradient(h: jax.Array, w: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        return jax.grad(lambda h, w: jnp.sum(logps(h, w, y).logps), (0, 1))(h, w)

    def divergence(h: jax.Array, w: jax.Array, y: jax.Array) -> VocabDivergence:
        return ops.linear_vocab_divergence(h, w, 2 * h, w, y)

    function = {"logps": logps, "gradient": gradient, "divergence": divergence}[program]
    held = jax.jit(function).lower(h, w, y).compile().memory_analysis().temp_size_in_bytes
    rows = 64 * n * d  # copies of [N, D], and statistics of tokens
    assert held < 4 * (4 * n * v / 64) + rows


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
def test_ids_of_any_integer_type_mean_the_same(dtype: type) -> None:
    """300 entries, a number that no type of one byte holds."""
    hidden, head = np.ones((2, 3), np.float32), np.linspace(0, 1, 900, dtype=np.float32).reshape(300, 3)
    wide = ops.linear_logps(hidden, head, np.array([1, 100]))
    np.testing.assert_array_equal(ops.linear_logps(hidden, head, np.array([1, 100], dtype)).logps, wide.logps)
    both = ops.linear_vocab_divergence(hidden, head, hidden, head, np.array([1, 100], dtype))
    np.testing.assert_allclose(both.policy_logps, wide.logps, rtol=1e-6)
