"""Input that a caller may well pass: ids that no vocabulary has, masks that are finite, arguments that are refused."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trm_jax import ops
from trm_jax.checks import token_ids
from trm_jax.ops._head import check_scaling

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench" / "tpu_aot.py"
N, D, V = 3, 4, 20
# Without the run-time types of the tests, which would refuse some of this first.
linear_logps, linear_vocab_divergence = map(inspect.unwrap, (ops.linear_logps, ops.linear_vocab_divergence))
FORMS: list[dict[str, Any]] = [
    {"implementation": "reference"},
    {"implementation": "chunked"},
    {"implementation": "pallas_tpu", "interpret": True},
]
FORM_OF_DIVERGENCES = [*FORMS[:2], pytest.param(FORMS[2], marks=pytest.mark.slow)]


def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, D)).astype(np.float32), rng.normal(size=(V, D)).astype(np.float32), np.arange(N)


def test_an_id_beyond_32_bits_has_no_log_prob() -> None:
    hidden, head, _ = operands()
    far = np.array([2**32 + 3, np.iinfo(np.int64).min, 3])  # cut to 32 bits: the ids 3, 0 and 3
    logps = ops.linear_logps(hidden, head, far).logps
    both = ops.linear_vocab_divergence(hidden, head, hidden, head, far)
    for values in (logps, both.policy_logps, both.rollout_logps):
        np.testing.assert_array_equal(np.isnan(values), [True, True, False])
    with jax.enable_x64(True):  # JAX holds 64 bits
        np.testing.assert_array_equal(np.isnan(ops.linear_logps(hidden, head, jnp.asarray(far)).logps), np.isnan(logps))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_ids_are_ranged_before_they_are_cut(dtype: type) -> None:
    limits = np.iinfo(dtype)
    ids = token_ids(np.array([limits.min, 3, limits.max], dtype))
    fits = (-1 if limits.min < -(2**31) else limits.min), 3, (limits.max if limits.max < 2**31 else -1)
    np.testing.assert_array_equal(ids, np.array(fits, np.int32), strict=True)


def masked() -> tuple[np.ndarray, np.ndarray]:
    """A bias whose last nine values are usual masks, and the same with ``-inf`` for them."""
    masks = np.repeat(np.array([np.finfo(np.float32).min, -5e29, -1e29], np.float32), 3)
    bias = np.concatenate([0.1 * np.arange(V - 9), masks]).astype(np.float32)
    return bias, np.where(bias <= masks[-1], -np.inf, bias).astype(np.float32)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        *((form, {"logit_soft_cap": 5.0, "temperature": 0.7}) for form in FORMS),
        *(pytest.param(form, {}, marks=pytest.mark.slow) for form in FORMS),
    ],
)
def test_a_finite_mask_is_minus_infinity(form: dict[str, Any], options: dict[str, Any]) -> None:
    hidden, head, tokens = operands()

    def total(h: jax.Array, w: jax.Array, b: jax.Array) -> tuple[jax.Array, Any]:
        out = ops.linear_logps(h, w, tokens, bias=b, **form, **options)
        return jnp.sum(out.logps + 0.3 * out.entropy), out

    run = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))
    got, want = (run(hidden, head, bias) for bias in masked())
    jax.tree.map(np.testing.assert_array_equal, got, want)
    (_, out), gradients = got
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(gradients[2][-9:], 0.0)
    assert np.all(gradients[2][:-9] != 0)


@pytest.mark.parametrize("form", FORM_OF_DIVERGENCES)
def test_a_finite_mask_is_minus_infinity_for_divergences(form: dict[str, Any]) -> None:
    hidden, head, tokens = operands()

    @jax.jit
    def run(bias: jax.Array) -> tuple[Any, Any]:
        lost = ops.linear_vocab_divergence(hidden, head, hidden, head, tokens, policy_bias=bias, **form)
        return lost, ops.linear_vocab_divergence(hidden, head, hidden, head, tokens, rollout_bias=bias, **form)

    (lost, gained), want = map(run, masked())
    jax.tree.map(np.testing.assert_array_equal, (lost, gained), want)
    np.testing.assert_array_equal(lost.token_kl, np.inf)
    for values in (lost.token_tv, lost.policy_entropy, gained.token_kl, gained.token_tv):
        assert np.all((values > 0.01) & (values < 10)), values


@pytest.mark.parametrize("form", FORM_OF_DIVERGENCES)
def test_a_bias_above_the_bound_is_added(form: dict[str, Any]) -> None:
    """-9e28 for one of two equal tokens: KL = ½ (log ½ - 0) + ½ (log ½ + 9e28) = 4.5e28, and TV = ½."""
    hidden, head, bias = np.ones((1, 1), np.float32), np.zeros((2, 1), np.float32), np.array([0.0, -9e28], np.float32)
    out = ops.linear_vocab_divergence(hidden, head, hidden, head, np.array([0]), policy_bias=bias, **form)
    np.testing.assert_allclose([out.token_kl[0], out.token_tv[0]], [4.5e28, 0.5], rtol=1e-6)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"temperature": 1e-9}, ValueError, r"temperature must lie in \[1e-06, inf\), given 1e-09"),
    ({"temperature": 1e-40}, ValueError, r"temperature must lie in \[1e-06, inf\), given 1e-40"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        *REFUSED,
        (
            {"head": np.zeros((V, D), np.int8)},
            TypeError,
            r"^head must be .* given int8 .*pass head\.astype\(jnp\.float32\) \* scale\[:, None\]; an int8",
        ),
    ],
)
def test_log_probs_refuse(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linear_logps(**dict(zip(("hidden", "head", "tokens"), operands(), strict=True)) | change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        *REFUSED,
        (
            {"rollout_head_scale": np.ones(V, np.float32)},
            TypeError,
            r"rollout_head must be int8 .* given float32 with a scale: leave rollout_head_scale out and pass "
            r"rollout_head\.astype\(jnp\.float32\) \* rollout_head_scale\[:, None\]",
        ),
        (
            {"rollout_head": np.zeros((V, D), np.uint8), "rollout_head_scale": np.ones(V, np.float32)},
            TypeError,
            r"rollout_head must be int8 .* given uint8 with a scale: leave .* \* rollout_head_scale\[:, None\]",
        ),
        (
            {"rollout_head": np.zeros((V, D), np.int8)},
            TypeError,
            "rollout_head must be .* given int8 without a scale: pass rollout_head_scale, the factor of each row",
        ),
        (
            {"policy_head": np.zeros((V, D), np.int8)},
            TypeError,
            r"policy_head must be .* given int8 .*pass policy_head\.astype\(jnp\.float32\) \* scale\[:, None\]",
        ),
        (
            {"rollout_hidden": np.zeros((N + 1, D), np.float32)},
            ValueError,
            rf"rollout_hidden must have a row for each of the {N} rows of policy_hidden, given \[{N + 1}, {D}\]",
        ),
        ({"tokens": np.zeros(N + 1, int)}, ValueError, rf"tokens must be \[{N}\], one for each row of policy_hidden"),
        ({"with_tv": jnp.array(True)}, TypeError, r"with_tv must be True or False, .* given Array\(True"),
        ({"with_tv": "no"}, TypeError, "with_tv must be True or False, .* given 'no'"),
    ],
)
def test_divergences_refuse(change: dict[str, Any], error: type[Exception], message: str) -> None:
    hidden, head, tokens = operands()
    given = {"policy_hidden": hidden, "policy_head": head, "rollout_hidden": hidden, "rollout_head": head}
    with pytest.raises(error, match=message):
        linear_vocab_divergence(**given | {"tokens": tokens} | change)


def test_a_missing_temperature_is_refused() -> None:
    with pytest.raises(TypeError, match="temperature must be a number, given None"):
        inspect.unwrap(check_scaling)(None, None, None)  # both operators' check


@pytest.mark.parametrize("form", FORM_OF_DIVERGENCES)
def test_the_lowest_temperature(form: dict[str, Any]) -> None:
    """Logits of whole numbers up to 1e3, so 1e9 after the division: the likeliest token has all of the mass."""
    hidden, head = np.eye(3, dtype=np.float32), np.array([[0, 1e3, 5], [1, 2, 4], [2, 3, 3]], np.float32)
    out = ops.linear_logps(hidden, head, np.array([2, 0, 0]), temperature=1e-6, **form)
    jax.tree.map(np.testing.assert_array_equal, (out.logps, out.entropy), (np.zeros(3, np.float32),) * 2)
    both = ops.linear_vocab_divergence(
        hidden, head, hidden, head[[0, 2, 1]], np.zeros(3, int), temperature=1e-6, **form
    )
    np.testing.assert_allclose(both.token_kl, [1e6, 0.0, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(both.token_tv, [1.0, 0.0, 0.0])


MESH = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("abstract", [True, False])
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_shard_map_that_splits_the_tokens_around_a_mesh(check_vma: bool, abstract: bool) -> None:
    rng = np.random.default_rng(1)
    hidden, head = (rng.normal(size=(n, D)).astype(np.float32) for n in (8, V))
    tokens, bias = rng.integers(0, V, 8), rng.normal(size=V).astype(np.float32)

    def everything(h: jax.Array, w: jax.Array, b: jax.Array, y: jax.Array, **axes: Any) -> Any:
        def total(h: jax.Array, w: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = ops.linear_logps(h, w, y, bias=b, **axes)
            return jnp.sum(out.logps + 0.3 * out.entropy), out.logps

        gradients, logps = jax.grad(total, (0, 1, 2), has_aux=True)(h, w, b)
        return gradients, logps, ops.linear_vocab_divergence(h, w, 1.1 * h, w, y, policy_bias=b, **axes).token_kl

    def local(h: jax.Array, *rest: jax.Array) -> Any:
        mesh = jax.sharding.get_abstract_mesh() if abstract else MESH
        (of_hidden, *of_head), *rows = everything(h, *rest, mesh=mesh, vocab_axis="tensor")
        if not check_vma:  # then it is the caller's to sum
            of_head = jax.lax.psum(of_head, "data")
        return (of_hidden, *of_head), *rows

    along, whole = PartitionSpec("data"), PartitionSpec()
    run = jax.shard_map(
        local,
        mesh=MESH,
        in_specs=(along, whole, whole, along),
        out_specs=((along, whole, whole), along, along),
        axis_names={"data"},
        check_vma=check_vma,
    )
    got, want = jax.jit(run)(hidden, head, bias, tokens), everything(hidden, head, bias, tokens)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)  # sums over four shards round otherwise


@pytest.mark.parametrize(
    ("mesh", "vocab_axis", "message"),
    [
        (MESH, "data", "axis 'data' is split already by the shard_map around the call, .* not in its axis_names, or"),
        (
            jax.make_mesh((8,), ("tensor",), axis_types=(AxisType.Auto,)),
            "tensor",
            r"that of the shard_map .* axes {'data': 2, 'tensor': 4}, given {'tensor': 8}: pass jax\.sharding\.get_abs",
        ),
    ],
)
def test_a_mesh_that_a_surrounding_shard_map_has_not_left(mesh: Any, vocab_axis: str, message: str) -> None:
    def local(h: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
        return ops.linear_logps(h, w, y, mesh=mesh, vocab_axis=vocab_axis).logps

    specs = (PartitionSpec("data"), PartitionSpec(), PartitionSpec("data"))
    run = jax.shard_map(local, mesh=MESH, in_specs=specs, out_specs=specs[0], axis_names={"data"})
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run, np.zeros((8, D), np.float32), np.zeros((V, D), np.float32), np.zeros(8, int))


def test_an_abstract_mesh_gets_its_devices_from_the_context_or_an_operand() -> None:
    hidden, head, tokens = operands()
    placed = jax.device_put(head, NamedSharding(MESH, PartitionSpec("tensor")))
    options = {"mesh": MESH.abstract_mesh, "vocab_axis": "tensor"}
    with pytest.raises(ValueError, match=r"mesh is abstract, and no operand lies on 8 devices, .*inside jax\.set_mesh"):
        ops.linear_logps(hidden, head, tokens, **options)
    with pytest.raises(ValueError, match=r"mesh is abstract, .*pass a jax\.sharding\.Mesh"):
        ops.linear_vocab_divergence(hidden, head, hidden, head, tokens, **options)
    of_operand = ops.linear_logps(hidden, placed, tokens, **options).logps
    with jax.set_mesh(MESH):
        of_context = ops.linear_logps(hidden, head, tokens, **options).logps
    np.testing.assert_array_equal(of_operand, of_context)


def kernels_of(jaxpr: Any) -> Iterator[str]:
    """The text of every kernel call in a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield str(equation)
        else:
            inner = jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns"))
            for part in (getattr(x, "jaxpr", x) for x in inner):
                yield from kernels_of(part) if hasattr(part, "eqns") else ()


def test_kernels_have_no_number_of_64_bits() -> None:
    hidden, head, tokens = operands()
    options = {"bias": np.zeros(V, np.float32), "support": np.full((N, 3), 255, np.uint8), "logit_soft_cap": 3.0}

    def everything(h: jax.Array, w: jax.Array) -> Any:
        out, pull = jax.vjp(lambda h, w: ops.linear_logps(h, w, tokens, **options, **FORMS[2]), h, w)
        return pull(out), ops.linear_vocab_divergence(h, w, h, w, tokens, **FORMS[2])

    with jax.enable_x64(True):
        kernels = list(kernels_of(jax.make_jaxpr(everything)(hidden, head).jaxpr))
    assert len(kernels) == 5  # one forward; the gradients of hidden states and head; two of divergences
    for text in kernels:
        assert "f32[" in text
        assert re.findall(r"\b(?:f|i|u|float|int|uint)64\b", text) == []


@pytest.mark.parametrize("form", [FORMS[1], pytest.param(FORMS[0], marks=pytest.mark.slow)])
def test_64_bits_change_nothing(form: dict[str, Any]) -> None:
    hidden, head, tokens = operands()

    def everything() -> Any:
        def total(h: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
            out = ops.linear_logps(h, w, tokens, **form)
            return jnp.sum(out.logps), out

        both = ops.linear_vocab_divergence(hidden, head, 1.1 * hidden, head, tokens, **form)
        return jax.value_and_grad(total, (0, 1), has_aux=True)(jnp.asarray(hidden), jnp.asarray(head)), both

    want = everything()
    with jax.enable_x64(True):
        got = everything()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)  # sums may be made in another order


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install trm-jax[tpu]")
def test_kernels_compile_for_a_tpu_under_64_bits() -> None:
    programs = ("logps", "gradient", "divergence")
    cases = [json.dumps(("v6e:2x2", "pallas_tpu", program, 4, 7, 100, 1000)) for program in programs]
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_ENABLE_X64": "1"}
    command = [sys.executable, str(TOOL), *(text for case in cases for text in ("--sharded", case))]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [record["program"] for record in records] == list(programs), records
    assert all("error" not in record for record in records), records
