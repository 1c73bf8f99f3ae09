"""``mesh=``: the head's rows over one axis, tokens over another, equal to the unsharded operator, and what travels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trm_jax import ops

CHUNKED = {"implementation": "chunked", "chunk_size": 8}
PALLAS = {"implementation": "pallas_tpu", "interpret": True}
FORMS = [pytest.param(CHUNKED, id="chunked"), pytest.param(PALLAS, id="pallas_tpu")]
WITH_GRADIENTS = [FORMS[0], pytest.param(PALLAS, id="pallas_tpu", marks=pytest.mark.slow)]
OPTIONS = {"temperature": 0.7, "logit_soft_cap": 6.0}


def mesh_of(data: int, tensor: int, axis_type: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=(axis_type,) * 2)


def on(mesh: Mesh) -> dict[str, Any]:
    return {"mesh": mesh, "vocab_axis": "tensor", "token_axis": "data"}


def everything(given: dict[str, Any], full: bool, **options: Any) -> Any:
    """Values and gradients of both operators; ``full`` with every option."""
    n = given["hidden"].shape[0]
    cotangents = np.random.default_rng(9).normal(size=(3, n)).astype(np.float32)
    extras = {"support": given["support"], **OPTIONS} if full else {}

    def total(hidden: jax.Array, head: jax.Array, bias: jax.Array) -> jax.Array:
        out = ops.linear_logps(hidden, head, given["tokens"], bias=bias if full else None, **extras, **options)
        return sum(jnp.sum(x * c) for x, c in zip(out, cotangents, strict=True))

    argnums = (0, 1, 2) if full else (0, 1)
    logps = jax.value_and_grad(total, argnums)(given["hidden"], given["head"], given["bias"])
    rollout = {"rollout_head": given["head"]}
    if full:
        rollout = {"rollout_head": given["int8_head"], "rollout_head_scale": given["scale"]}
        rollout |= {"policy_bias": given["bias"], "rollout_bias": given["rollout_bias"]}
    divergence = ops.linear_vocab_divergence(
        policy_hidden=given["hidden"],
        policy_head=given["head"],
        rollout_hidden=given["rollout_hidden"],
        tokens=given["tokens"],
        **rollout,
        **extras,
        **options,
    )
    return logps, divergence


# Neither 101 nor 37 is a multiple of an axis; a shard has 26 or 13 rows, no multiple of 128.
@pytest.mark.parametrize("form", WITH_GRADIENTS)
@pytest.mark.parametrize(("shape", "full"), [((2, 4), True), pytest.param((1, 8), False, marks=pytest.mark.slow)])
def test_equals_the_unsharded_operator(
    form: dict[str, Any], shape: tuple[int, int], full: bool, operands: Callable[..., dict[str, Any]]
) -> None:
    given = operands(37, 16, 101)
    sharded = jax.jit(functools.partial(everything, full=full, **form, **on(mesh_of(*shape))))(given)
    whole = jax.jit(functools.partial(everything, full=full, implementation="reference"))(given)
    for path, (got, want) in zip(
        jax.tree_util.tree_leaves_with_path(sharded),
        zip(*map(jax.tree.leaves, (sharded, whole)), strict=True),
        strict=True,
    ):
        # float32 sums in another order: 1e-6 of logits of 10, and of sums of 37 tokens.
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=3e-5, err_msg=str(path[0]))


@pytest.mark.parametrize("form", WITH_GRADIENTS)
def test_identical_policies_are_exactly_zero_apart(
    form: dict[str, Any], operands: Callable[..., dict[str, Any]]
) -> None:
    given = operands(16, 16, 101)
    h, w, b, y = (given[name] for name in ("hidden", "head", "bias", "tokens"))
    out = ops.linear_vocab_divergence(
        h, w, h, w, y, policy_bias=b, rollout_bias=b, **OPTIONS, **form, **on(mesh_of(2, 4))
    )
    np.testing.assert_array_equal(out.token_kl, 0.0)
    np.testing.assert_array_equal(out.token_tv, 0.0)


@pytest.mark.parametrize("form", FORMS)
def test_shards_without_any_token(form: dict[str, Any], operands: Callable[..., dict[str, Any]]) -> None:
    # Five rows over eight devices, and a support that lies in one of them.
    given = operands(6, 8, 5)
    support = np.full((6, 1), 0b00010, np.uint8)
    tokens = np.array([1, 1, 1, 0, 4, 1])
    both = [
        ops.linear_logps(given["hidden"], given["head"], tokens, support=support, **options)
        for options in ({"implementation": "reference"}, {**form, "mesh": mesh_of(1, 8), "vocab_axis": "tensor"})
    ]
    np.testing.assert_array_equal(np.isneginf(both[1].logps), [False, False, False, True, True, False])
    for want, got in zip(*both, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", WITH_GRADIENTS)
def test_a_shard_that_only_the_policy_has(form: dict[str, Any], operands: Callable[..., dict[str, Any]]) -> None:
    # A mass of about 1e-3 in the first of eight shards, where the rollout has no token: KL is -log(1 - mass).
    given = operands(6, 8, 64)
    h, w = given["hidden"], given["head"]
    first = np.arange(64) < 8
    policy_bias, rollout_bias = (np.where(first, low, 0.0).astype(np.float32) for low in (-6.0, -np.inf))
    out = ops.linear_vocab_divergence(
        *(h, w, h, w, np.full(6, 40)),
        policy_bias=policy_bias,
        rollout_bias=rollout_bias,
        mesh=mesh_of(1, 8),
        vocab_axis="tensor",
        **form,
    )
    p = np.exp(h.astype(float) @ w.T.astype(float) + policy_bias)
    mass = p[:, first].sum(-1) / p.sum(-1)
    assert mass.max() < 0.05  # beyond it the plain difference of normalisers would do
    np.testing.assert_allclose(out.token_kl, -np.log1p(-mass), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(out.token_tv, mass, rtol=1e-3, atol=1e-6)


def test_nan_stays_in_its_row_and_out_of_the_head_gradient(operands: Callable[..., dict[str, Any]]) -> None:
    given = operands(16, 8, 40)
    clean, head, tokens = given["hidden"], given["head"], given["tokens"]
    dirty = clean.copy()
    dirty[5] = np.nan
    counted = np.arange(16) != 5

    def total(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        logps = ops.linear_logps(h, w, tokens, **on(mesh_of(2, 4))).logps
        return jnp.sum(jnp.where(counted, logps, 0.0)), logps

    run = jax.jit(jax.grad(total, (0, 1), has_aux=True))
    (got, logps), (want, _) = run(dirty, head), run(clean, head)
    np.testing.assert_array_equal(np.isnan(logps), ~counted)
    np.testing.assert_array_equal(got[0][5], 0.0)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6, atol=1e-6)


def test_a_bfloat16_head_is_summed_over_the_tokens_in_float32() -> None:
    # 4,096 equal tokens on eight devices: 4096 · ½ = 2048 has no bfloat16 rounding, a sum of rounded parts might.
    hidden, head = jnp.full((4096, 1), 1.0078125, jnp.bfloat16), jnp.zeros((2, 1), jnp.bfloat16)
    tokens = jnp.zeros(4096, jnp.int32)
    grad = jax.grad(lambda w: jnp.sum(ops.linear_logps(hidden, w, tokens, **on(mesh_of(8, 1))).logps))(head)
    np.testing.assert_array_equal(np.asarray(grad, np.float32), [[2064.0], [-2064.0]])  # 2048 · 1.0078125


EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
ANYWHERE = {
    "numpy": None,
    "sharded": ("data", "tensor", "data"),
    "copied": (None, None, None),
    "elsewhere": (("data", "tensor"), "data", ("tensor", "data")),
}


# 15 tokens and 23 rows of the head are no shards of equal work, and cannot be stored as such.
@pytest.mark.parametrize(
    ("types", "n", "v", "place", "context"),
    [
        ((EXPLICIT, EXPLICIT), 15, 23, "numpy", False),  # jax.make_mesh's own types
        pytest.param((EXPLICIT, EXPLICIT), 16, 24, "sharded", True, marks=pytest.mark.slow),
        pytest.param((EXPLICIT, AUTO), 15, 23, "copied", True, marks=pytest.mark.slow),
        pytest.param((EXPLICIT, EXPLICIT), 16, 24, "elsewhere", True, marks=pytest.mark.slow),
        pytest.param((EXPLICIT, EXPLICIT), 15, 23, "copied", False, marks=pytest.mark.slow),
        pytest.param((EXPLICIT, EXPLICIT), 15, 23, "numpy", True, marks=pytest.mark.slow),
        pytest.param((EXPLICIT, EXPLICIT), 16, 24, "sharded", False, marks=pytest.mark.slow),
        pytest.param((AUTO, EXPLICIT), 16, 24, "sharded", True, marks=pytest.mark.slow),
        pytest.param((AUTO, AUTO), 15, 23, "copied", True, marks=pytest.mark.slow),
    ],
)
def test_axes_of_any_type(
    types: tuple[AxisType, AxisType],
    n: int,
    v: int,
    place: str,
    context: bool,
    operands: Callable[..., dict[str, Any]],
) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=types)
    plain = tuple(operands(n, 8, v)[name] for name in ("hidden", "head", "tokens"))
    weights = np.random.default_rng(1).normal(size=n).astype(np.float32)

    def total(hidden: jax.Array, head: jax.Array, tokens: jax.Array, **options: Any) -> tuple[jax.Array, Any]:
        out = ops.linear_logps(hidden, head, tokens, **options)
        apart = ops.linear_vocab_divergence(hidden, head, hidden * 1.01, head, tokens, **options)
        return jnp.sum(out.logps * weights), (out, apart)

    specs = ANYWHERE[place]
    placed = plain
    if specs is not None:
        shardings = [NamedSharding(mesh, PartitionSpec(spec)) for spec in specs]
        placed = tuple(jax.device_put(x, s) for x, s in zip(plain, shardings, strict=True))
    with jax.set_mesh(mesh) if context else contextlib.nullcontext():
        got = jax.jit(jax.grad(functools.partial(total, **on(mesh)), (0, 1), has_aux=True))(*placed)
    want = jax.jit(jax.grad(total, (0, 1), has_aux=True))(*plain)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        # float32 sums in another order: 1.5e-6 of gradients of 10.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    if specs is not None:
        for gradient, operand in zip(got[0], placed, strict=False):
            assert jax.typeof(gradient).sharding.spec == jax.typeof(operand).sharding.spec


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
@pytest.mark.parametrize("compiled", [True, False])
def test_axes_without_a_mesh_are_the_context_s(
    axis_type: AxisType, compiled: bool, operands: Callable[..., dict[str, Any]]
) -> None:
    given = operands(16, 8, 24)
    args = tuple(given[name] for name in ("hidden", "head", "tokens"))

    def logps(*args: jax.Array, **options: Any) -> jax.Array:
        return ops.linear_logps(*args, **options).logps

    run = functools.partial(logps, vocab_axis="tensor", token_axis="data")
    with jax.set_mesh(mesh_of(2, 4, axis_type)):
        found = (jax.jit(run) if compiled else run)(*args)
        traced = str(jax.make_jaxpr(run)(*args))
    np.testing.assert_allclose(found, logps(*args), rtol=1e-5, atol=1e-5)  # float32 sums in another order
    assert "shard_map" in traced


@pytest.mark.parametrize(
    ("of_tokens", "of_head", "travels"),
    [
        ("data", "tensor", {"all-reduce"}),
        pytest.param("data", None, set(), marks=pytest.mark.slow),
        pytest.param(None, "tensor", {"all-reduce"}, marks=pytest.mark.slow),
        pytest.param("data", "data", {"all-reduce", "all-gather", "all-to-all"}, marks=pytest.mark.slow),
        (("data", "tensor"), "tensor", {"all-reduce", "all-gather"}),
    ],
)
def test_types_say_where_operands_lie(
    of_tokens: str | tuple[str, ...] | None,
    of_head: str | None,
    travels: set[str],
    operands: Callable[..., dict[str, Any]],
    collectives_of: Callable[[str], dict[str, list[int]]],
) -> None:
    mesh = mesh_of(2, 4, EXPLICIT)
    plain = tuple(operands(16, 8, 24)[name] for name in ("hidden", "head", "tokens"))
    specs = (of_tokens, of_head, of_tokens)
    placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(s))) for x, s in zip(plain, specs, strict=True)]

    def logps(*args: jax.Array, **options: Any) -> jax.Array:
        return ops.linear_logps(*args, chunk_size=4, **options).logps

    for implementation in (None, "reference"):  # results lie as the tokens do
        result = jax.eval_shape(functools.partial(logps, implementation=implementation), *placed)
        assert result.sharding.spec == jax.typeof(placed[2]).sharding.spec
    gradient = jax.jit(jax.grad(lambda *args: jnp.sum(logps(*args)), (0, 1)))
    forward = jax.jit(logps).lower(*placed).compile()
    found = collectives_of(forward.as_text())
    assert set(found) <= travels, found
    if travels == {"all-reduce"}:  # statistics, and not once for each of the chunks
        assert sum(found["all-reduce"]) == 20 * (8 if of_tokens else 16), found
    # float32 sums in another order: 1e-6 of log-probs and gradients of 10.
    np.testing.assert_allclose(forward(*placed), logps(*plain), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(logps(*placed, implementation="reference"), logps(*plain), rtol=1e-5, atol=1e-5)
    for a, b in zip(gradient(*placed), gradient(*plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_gradients_in_a_shard_map_of_the_caller(operands: Callable[..., dict[str, Any]]) -> None:
    mesh = mesh_of(8, 1)
    given = operands(16, 8, 40)
    plain = tuple(given[name] for name in ("hidden", "head", "bias", "tokens"))
    rows, same = PartitionSpec("data"), PartitionSpec()

    def total(
        hidden: jax.Array, head: jax.Array, bias: jax.Array, tokens: jax.Array, chunk_size: int | None = 1
    ) -> jax.Array:
        return jnp.sum(ops.linear_logps(hidden, head, tokens, bias=bias, chunk_size=chunk_size).logps)

    gradient = jax.grad(total, (0, 1, 2))
    specs = {"mesh": mesh, "in_specs": (rows, same, same, rows), "out_specs": (rows, same, same)}
    got, want = jax.jit(jax.shard_map(gradient, **specs))(*plain), gradient(*plain)
    for a, b in zip(got, want, strict=True):
        # float32 sums in another order: 5e-7 of gradients of 4.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

    # Summed in float32: seven times 257 (256 in bfloat16) and 260 make 2059, which rounds to 2064 and not to 2048.
    ones = np.ones((8, 520, 1))
    ones[:7, 514:] = 0
    hidden, head = jnp.asarray(ones.reshape(-1, 1), jnp.bfloat16), jnp.zeros((2, 1), jnp.bfloat16)
    args = (hidden, head, jnp.zeros(2), jnp.zeros(4160, jnp.int32))
    _, summed, _ = jax.jit(jax.shard_map(jax.grad(functools.partial(total, chunk_size=None), (0, 1, 2)), **specs))(
        *args
    )
    np.testing.assert_array_equal(np.asarray(summed, np.float32), [[2064.0], [-2064.0]])


@pytest.mark.parametrize("form", WITH_GRADIENTS)
def test_only_statistics_and_gradients_travel(
    form: dict[str, Any],
    operands: Callable[..., dict[str, Any]],
    collectives_of: Callable[[str], dict[str, list[int]]],
) -> None:
    n, d, v, data, tensor = 16, 32, 128, 2, 4
    given = operands(n, d, v)
    mesh = mesh_of(data, tensor)
    rows, head = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec("tensor"))
    placed = {k: jax.device_put(x, head if k in ("head", "scale", "bias") else rows) for k, x in given.items()}
    options = {**form, **on(mesh), "chunk_size": 4}  # a loop of the chunked form
    shares = n // data

    def compiled(function: Callable[..., Any], *args: Any) -> dict[str, list[int]]:
        return collectives_of(jax.jit(function).lower(*args).compile().as_text())

    h, w, r, y = (placed[name] for name in ("hidden", "head", "rollout_hidden", "tokens"))
    forward = compiled(lambda h, w, y: ops.linear_logps(h, w, y, **options), h, w, y)
    assert list(forward) == ["all-reduce"], forward
    assert sum(forward["all-reduce"]) == 20 * shares, forward

    divergence = compiled(lambda h, w, r, y: ops.linear_vocab_divergence(h, w, r, w, y, **options), h, w, r, y)
    assert list(divergence) == ["all-reduce"], divergence
    assert sum(divergence["all-reduce"]) == 60 * shares, divergence

    def total(h: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(ops.linear_logps(h, w, y, **options).logps)

    backward = compiled(jax.grad(total, (0, 1)), h, w, y)
    assert list(backward) == ["all-reduce"], backward
    of_hidden, of_head = 4 * shares * d, 4 * (v // tensor) * d  # the head's: data parallelism itself
    assert sum(backward["all-reduce"]) <= 20 * shares + of_hidden + of_head, backward
