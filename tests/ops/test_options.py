"""Cap, bias, int8 rollout head: both operators in every portable form, against float64 numpy; gradients of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import ops

N, D, V = 19, 10, 83
OPTIONS = {
    "cap": {"logit_soft_cap": 4.0},
    "bias": {"bias": True},
    "all": {"logit_soft_cap": 4.0, "bias": True, "temperature": 0.7, "support": True},
}
_STRICT_CHUNKED = {"implementation": "chunked", "chunk_size": 4}
_STRICT_KERNEL = {"implementation": "pallas_tpu", "interpret": True}


def raw_logits(hidden: np.ndarray, head: np.ndarray, bias: np.ndarray | None, cap: float | None) -> np.ndarray:
    z = hidden.astype(float) @ head.astype(float).T
    absent = np.zeros(len(head), bool) if bias is None else np.isneginf(bias)
    z = z if bias is None else z + np.where(absent, 0.0, bias)
    z = z if cap is None else cap * np.tanh(z / cap)
    return np.where(absent, -np.inf, z)


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def restricted(z: np.ndarray, given: dict[str, Any], options: dict[str, Any]) -> np.ndarray:
    if "support" not in options:
        return z
    return np.where(np.unpackbits(given["support"], axis=1, count=V, bitorder="little") > 0, z, -np.inf)


def keywords(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return {k: given[k] if v is True else v for k, v in options.items()}


def oracle(
    given: dict[str, Any], options: dict[str, Any], operands: tuple[np.ndarray, ...], cotangents: np.ndarray
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Float64 log-probs, normalisers and entropies, and their gradients by formula: of hidden states, head and bias."""
    (hidden, head, bias), tokens, cap = operands, given["tokens"], options.get("logit_soft_cap")
    temperature = options.get("temperature", 1.0)
    raw = raw_logits(hidden, head, bias, cap)
    z = restricted(raw / temperature, given, options)
    log_p = log_softmax(z)
    p, finite = np.exp(log_p), np.maximum(log_p, -1e3)
    entropy = -(p * finite).sum(-1)
    a, b, c = (x[:, None] for x in cotangents)
    dz = a * (np.eye(V)[tokens] - p) + b * p - c * p * (finite + entropy[:, None])
    slope = 1.0 if cap is None else 1 - (np.where(np.isinf(raw), 0.0, raw) / cap) ** 2
    dz = dz * slope / temperature
    values = (log_p[np.arange(N), tokens], np.log(np.exp(z).sum(-1)), entropy)
    return values, (dz @ head.astype(float), dz.T @ hidden.astype(float), dz.sum(0))


def arguments(given: dict[str, Any], options: dict[str, Any]) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """Hidden states, head and a bias, which is 0 where none is asked for; and the other options."""
    bias = given["bias"] if "bias" in options else np.zeros(V, np.float32)
    rest = {k: v for k, v in keywords(given, options).items() if k != "bias"}
    return (given["hidden"], given["head"], bias), rest


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
@pytest.mark.parametrize("name", OPTIONS)
def test_logps_and_gradients(name: str, implementation: Any, operands: Callable[..., dict[str, Any]]) -> None:
    given, options = operands(N, D, V), OPTIONS[name]
    args, rest = arguments(given, options)
    cotangents = np.random.default_rng(2).normal(size=(3, N)).astype(np.float32)

    def total(h: jax.Array, w: jax.Array, b: jax.Array) -> tuple[jax.Array, ops.LinearLogps]:
        out = ops.linear_logps(h, w, given["tokens"], bias=b, chunk_size=8, implementation=implementation, **rest)
        return sum(jnp.sum(x * c) for x, c in zip(out, cotangents, strict=True)), out

    (_, out), grads = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*args)
    values, gradients = oracle(given, options, args, cotangents)
    for got, want in zip(out, values, strict=True):
        # 2e-5: logits of size 10 carry 1e-6 from their float32 product.
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)
    for got, want in zip(grads, gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=5e-5)


MESH = {"vocab_axis": "tensor", "token_axis": "data"}


@pytest.mark.parametrize(
    ("name", "mode", "form"),
    [
        ("all", "reverse", {"implementation": "chunked"}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("all", "reverse", {"implementation": "reference"}),
                ("all", "reverse", {"implementation": "chunked", **MESH}),
                ("bias", "reverse", {"implementation": "chunked", **MESH}),
                ("all", "forward", {"implementation": "chunked"}),
                ("all", "forward", {"implementation": "reference"}),
                ("all", "forward", {"implementation": "chunked", **MESH}),
            )
        ),
    ],
)
def test_second_derivatives(
    name: str, mode: str, form: dict[str, Any], operands: Callable[..., dict[str, Any]]
) -> None:
    """The gradient's derivative along a direction, of either mode, is the central difference of the float64 one.

    One row has no token but its own, and the last quarter of the vocabulary, on a mesh a device's, has none.
    """
    given, options = operands(N, D, V), OPTIONS[name]
    y = given["tokens"] = given["tokens"] % 60
    given["bias"][60:], given["bias"][y] = -np.inf, 0.5
    given["support"][0] = 0
    given["support"][np.arange(N), y // 8] |= (1 << y % 8).astype(np.uint8)
    args, rest = arguments(given, options)
    rng = np.random.default_rng(2)
    cotangents = rng.normal(size=(3, N)).astype(np.float32)
    along = tuple(rng.normal(size=x.shape).astype(np.float32) for x in args)
    if "vocab_axis" in form:
        rest["mesh"] = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def total(h: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        out = ops.linear_logps(h, w, given["tokens"], bias=b, chunk_size=8, **form, **rest)
        return sum(jnp.sum(x * c) for x, c in zip(out, cotangents, strict=True))

    gradient = jax.grad(total, (0, 1, 2))

    def slope(*args: jax.Array) -> jax.Array:
        return sum(jnp.sum(x * d) for x, d in zip(gradient(*args), along, strict=True))

    if mode == "reverse":
        found = jax.jit(jax.grad(slope, (0, 1, 2)))(*args)
    else:
        found = jax.jit(lambda *args: jax.jvp(gradient, args, along)[1])(*args)
    step = 1e-5  # differences of float64 gradients of 10 are then good to 1e-9
    ends = (
        oracle(given, options, tuple(x + s * d.astype(float) for x, d in zip(args, along, strict=True)), cotangents)[1]
        for s in (step, -step)
    )
    for got, high, low in zip(found, *ends, strict=True):
        want = (high - low) / (2 * step)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def test_cap_and_temperature_by_hand() -> None:
    # z = 2 tanh([3, 0] / 2) / ½ = [3.62059, 0]; log p_0 = -log(1 + e^-3.62059) = -0.026415; the other order would
    # give 2 tanh([6, 0] / 2) = [1.99011, 0] and -0.127876.
    out = ops.linear_logps(
        jnp.array([[3.0]]), jnp.array([[1.0], [0.0]]), jnp.array([0]), temperature=0.5, logit_soft_cap=2.0
    )
    np.testing.assert_allclose(out.logps, [-np.log1p(np.exp(-4 * np.tanh(1.5)))], rtol=1e-5)
    np.testing.assert_allclose(out.logps, [-0.026415], atol=1e-6)


def test_padding_rows_by_bias_are_no_tokens(operands: Callable[..., dict[str, Any]]) -> None:
    given = operands(N, D, V)
    head = np.concatenate([given["head"], np.ones((13, D), np.float32)])
    bias = np.where(np.arange(V + 13) < V, 0.0, -np.inf).astype(np.float32)

    def run(head: np.ndarray, bias: np.ndarray | None) -> Any:
        def total(h: jax.Array, w: jax.Array) -> jax.Array:
            out = ops.linear_logps(h, w, given["tokens"], bias=bias, logit_soft_cap=4.0, chunk_size=8)
            return jnp.sum(out.logps + out.entropy)

        return jax.jit(jax.value_and_grad(total, (0, 1)))(given["hidden"], head)

    (value, (grad_hidden, grad_head)), (want, (want_hidden, want_head)) = run(head, bias), run(given["head"], None)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(grad_hidden, want_hidden, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grad_head[:V], want_head, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(grad_head[V:], 0.0)


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
@pytest.mark.parametrize(
    ("name", "int8"),
    [
        *[("all", False), ("all", True), ("cap", False)],
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("cap", True), ("bias", False), ("bias", True)]),
    ],
)
def test_divergence(name: str, int8: bool, implementation: Any, operands: Callable[..., dict[str, Any]]) -> None:
    given, options = operands(N, D, V), dict(OPTIONS[name])
    cap, temperature = options.get("logit_soft_cap"), options.get("temperature", 1.0)
    rollout_head = given["head"]
    call: dict[str, Any] = {"rollout_head": rollout_head}
    if int8:
        rollout_head = given["int8_head"].astype(float) * given["scale"][:, None]
        call = {"rollout_head": given["int8_head"], "rollout_head_scale": given["scale"]}
    if options.pop("bias", False):
        call |= {"policy_bias": given["bias"], "rollout_bias": given["rollout_bias"]}
    out = ops.linear_vocab_divergence(
        policy_hidden=given["hidden"],
        policy_head=given["head"],
        rollout_hidden=given["rollout_hidden"],
        tokens=given["tokens"],
        chunk_size=8,
        implementation=implementation,
        **call,
        **keywords(given, options),
    )
    log_p, log_q = (
        log_softmax(restricted(raw_logits(h, w, call.get(f"{side}_bias"), cap) / temperature, given, options))
        for side, h, w in (
            ("policy", given["hidden"], given["head"]),
            ("rollout", given["rollout_hidden"], rollout_head),
        )
    )
    p, q = np.exp(log_p), np.exp(log_q)
    both = q > 0
    at = np.arange(N), given["tokens"]
    # 2e-4: float32 products move logits by 1e-6, which a KL of 1e-3 sees to first order in its square root.
    np.testing.assert_allclose(
        out.token_kl, (q * (np.where(both, log_q, 0) - np.where(both, log_p, 0))).sum(-1), rtol=2e-4, atol=1e-7
    )
    np.testing.assert_allclose(out.token_tv, 0.5 * np.abs(p - q).sum(-1), rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(out.policy_logps, log_p[at], rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(out.rollout_logps, log_q[at], rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(out.rollout_entropy, -(q * np.maximum(log_q, -1e3)).sum(-1), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_a_token_that_only_one_policy_has(implementation: Any) -> None:
    # Two tokens, equal logits, one of them taken from one side: p = (1, 0) and q = (½, ½), then the reverse.
    hidden, head = jnp.ones((1, 1)), jnp.zeros((2, 1))
    bias = jnp.array([0.0, -jnp.inf])
    options = {"implementation": implementation}
    tokens = jnp.array([0])
    lost = ops.linear_vocab_divergence(hidden, head, hidden, head, tokens, policy_bias=bias, **options)
    assert (lost.token_kl[0], lost.token_tv[0]) == (np.inf, 0.5)
    kept = ops.linear_vocab_divergence(hidden, head, hidden, head, tokens, rollout_bias=bias, **options)
    np.testing.assert_allclose([kept.token_kl[0], kept.token_tv[0]], [np.log(2), 0.5], rtol=1e-6)


def test_an_int8_head_is_widened_by_blocks() -> None:
    """Temporaries stay below a float32 copy of the head, 16 MiB; the last block, which overlaps, is right too."""
    n, d, v = 16, 256, 16_385
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(n, d)).astype(np.float32)
    int8 = rng.integers(-127, 128, (v, d)).astype(np.int8)
    scale = rng.uniform(0.5, 1.5, v).astype(np.float32) / 127 / 16
    tokens = np.append(rng.integers(0, v, n - 1), v - 1)
    dense = int8 * scale[:, None]
    args = (hidden, dense, hidden, int8, tokens, scale)

    def run(h: Any, w: Any, r: Any, q: Any, y: Any, s: Any) -> Any:
        return ops.linear_vocab_divergence(h, w, r, q, y, rollout_head_scale=s, chunk_size=n)

    compiled = jax.jit(run).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * v * d
    out = compiled(*map(jnp.asarray, args))
    log_q = log_softmax(hidden.astype(float) @ (int8 * scale[:, None].astype(float)).T)
    np.testing.assert_allclose(out.rollout_logps, log_q[np.arange(n), tokens], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out.token_kl, 0.0, atol=1e-9)  # the same head but for the rounding of int8 · scale


@pytest.mark.parametrize(
    ("form", "of_hidden", "of_head"),
    [
        pytest.param(_STRICT_CHUNKED, "bfloat16", "float32", id="chunked"),
        pytest.param(_STRICT_CHUNKED, "float32", "bfloat16", id="chunked-bfloat16-head", marks=pytest.mark.slow),
        pytest.param({"implementation": "reference"}, "float32", "bfloat16", id="reference", marks=pytest.mark.slow),
        pytest.param(_STRICT_KERNEL, "bfloat16", "float32", id="pallas_tpu", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_promoted_implicitly(
    form: dict[str, Any], of_hidden: str, of_head: str, operands: Callable[..., dict[str, Any]]
) -> None:
    """Neither types nor ranks: the same with every option where JAX forbids it, bit for bit."""
    given = operands(8, D, V)
    options = {"support": given["support"], "logit_soft_cap": 6.0, "temperature": 0.7, **form}

    def total(hidden: jax.Array, head: jax.Array, bias: jax.Array) -> Any:
        out = ops.linear_logps(hidden, head, given["tokens"], bias=bias, **options)
        return jnp.sum(out.logps + out.entropy), out

    def run() -> Any:
        hidden, head = jnp.asarray(given["hidden"], of_hidden), jnp.asarray(given["head"], of_head)
        whole = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(hidden, head, given["bias"])
        biases = {"policy_bias": given["bias"], "rollout_bias": given["rollout_bias"]}
        return whole, [
            ops.linear_vocab_divergence(hidden, head, given["rollout_hidden"], *rollout, **biases, **options, **scaled)
            for rollout, scaled in (
                ((head, given["tokens"]), {}),
                ((given["int8_head"], given["tokens"]), {"rollout_head_scale": given["scale"]}),
            )
        ]

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = run()
    jax.tree.map(np.testing.assert_array_equal, found, run())
