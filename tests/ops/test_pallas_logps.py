"""Log-prob kernels in the interpreter: values and gradients against float64 numpy, options, idle and dirty rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from trm_jax.ops._operands import lies_turned
from trm_jax.ops._tiles import Units
from trm_jax.ops.linear_logps._pallas_tpu import logps_statistics
from trm_jax.ops.linear_logps._pallas_tpu_gradients import logps_gradients

Operands = dict[str, Any]


def random_operands(n: int, d: int, v: int, seed: int = 0) -> Operands:
    rng = np.random.default_rng(seed)
    hidden, head = (rng.normal(size=(k, d)).astype(np.float32) for k in (n, v))
    hidden *= np.float32(min(1.0, 10 / d**0.5))  # logits whose float32 rounding stays below the tolerances
    return dict(hidden=hidden, head=head, tokens=rng.integers(0, v, n), cotangents=rng.normal(size=(3, n)))


def oracle(operands: Operands, temperature: float, cap: float | None) -> dict[str, np.ndarray]:
    """Values, slopes and gradients of ``sum(a·logps + b·logsumexp + c·entropy)`` by hand, float64."""
    h, w = (np.asarray(operands[name], np.float64) for name in ("hidden", "head"))
    rows, tokens = np.arange(len(h)), operands["tokens"]
    s = h @ w.T
    if operands.get("scale") is not None:
        s = s * operands["scale"]
    bias = operands.get("bias")
    s = s if bias is None else s + bias
    capped = s if cap is None else cap * np.tanh(s / cap)
    z = capped / temperature
    if bias is not None:
        z = np.where(np.isneginf(bias), -np.inf, z)
    if operands.get("support") is not None:
        z = np.where(operands["support"], z, -np.inf)
    lse = np.logaddexp.reduce(z, -1)
    p = np.exp(z - lse[:, None])
    logp = np.where(p > 0, z - lse[:, None], 0.0)
    entropy = -(p * logp).sum(-1)
    a, b, c = operands["cotangents"]
    one_hot = np.eye(w.shape[0])[tokens]
    dz = a[:, None] * (one_hot - p) + b[:, None] * p - c[:, None] * p * (logp + entropy[:, None])
    ds = dz / temperature * (1.0 if cap is None else 1 - (capped / cap) ** 2)
    return {
        "token_logit": z[rows, tokens],
        "logps": (z - lse[:, None])[rows, tokens],
        "logsumexp": lse,
        "entropy": entropy,
        "hidden": ds @ w,
        "head": ds.T @ h,
        "bias": ds.sum(0),
        "slopes": np.stack([a, b - a - np.where(c == 0, 0.0, c * entropy), -c]),
    }


@functools.partial(jax.jit, static_argnames=("gradients", "static"))
def kernels(operands: Operands, rows: Operands, *, gradients: bool, static: tuple[tuple[str, Any], ...]) -> Any:
    given = {"bias": None, "support": None, **operands}
    if not gradients:
        options = dict(static)
        unit = Units(options["temperature"], options["logit_soft_cap"]).unit
        told = None if lies_turned(given["head"]) else rows["token_logit"] / unit  # as the operator has it
        part, logit = logps_statistics(**given, token_logit=told, **options)
        logps = unit * (logit - part.top) - part.log_total
        return {"logps": logps, "logsumexp": part.logsumexp(unit), "entropy": part.entropy}
    del rows["token_logit"]
    dhidden, dhead, dbias = logps_gradients(**given, **rows, hidden_grad_dtype=given["hidden"].dtype, **dict(static))
    return {"hidden": dhidden, "head": dhead} | ({} if dbias is None else {"bias": dbias})


def run(
    operands: Operands,
    *,
    gradients: bool,
    temperature: float = 1.0,
    cap: float | None = None,
    blocks: tuple[int, int] = (128, 128),
    interpret: Any = True,
) -> tuple[dict[str, jax.Array], dict[str, np.ndarray]]:
    want = oracle(operands, temperature, cap)
    given = {name: x for name, x in operands.items() if name != "cotangents" and x is not None}
    given["tokens"] = np.asarray(given["tokens"], np.int32)
    if "support" in given:
        given["support"] = np.packbits(given["support"], axis=1, bitorder="little")
    rows = {name: jnp.asarray(want[name], jnp.float32) for name in ("token_logit", "logsumexp")}
    rows |= dict(zip(("token_slope", "slope", "entropy_slope"), jnp.asarray(want["slopes"], jnp.float32), strict=True))
    if not gradients:
        rows = {"token_logit": rows["token_logit"]}
    static = dict(temperature=temperature, logit_soft_cap=cap, blocks=blocks, interpret=interpret)
    arrays = {name: jnp.asarray(x) for name, x in given.items()}
    got = kernels(arrays, rows, gradients=gradients, static=tuple(static.items()))
    return got, {name: want[name] for name in got}


def check(operands: Operands, **options: Any) -> None:
    got, want = run(operands, gradients=False, **options)
    for name in want:
        # 2e-5: logits of size 20 carry 1e-6 from their float32 product.
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=2e-5, err_msg=name)
    got, want = run(operands, gradients=True, **options)
    for name in want:
        scale = np.abs(want[name]).max()
        np.testing.assert_allclose(np.asarray(got[name]) / scale, want[name] / scale, atol=2e-5, err_msg=name)


def test_values_and_gradients_of_ragged_blocks() -> None:
    check(random_operands(37, 20, 300), temperature=0.7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((1, 5, 7), (128, 128)),
        ((300, 130, 257), (128, 256)),
        ((520, 20, 1100), (512, 512)),
        ((256, 8, 256), (256, 128)),
        ((9, 1024, 140), (128, 128)),  # in two pieces of 512
        ((128, 200, 512), (128, 128)),  # both matrices lie turned
    ],
)
def test_shapes(shape: tuple[int, int, int], blocks: tuple[int, int]) -> None:
    check(random_operands(*shape), blocks=blocks)


@pytest.mark.parametrize("n", [pytest.param(140, marks=pytest.mark.slow), 128])
def test_soft_cap_bias_and_support_together(n: int) -> None:
    """The 138 bytes of a row's support lie upright of 140 tokens, turned of 128."""
    assert lies_turned(jnp.zeros((n, 138), jnp.uint8)) is (n == 128)
    operands = random_operands(n, 8, 1100)
    rng = np.random.default_rng(1)
    bias = rng.normal(size=1100).astype(np.float32)
    bias[1000:] = -np.inf  # padding rows
    tokens = operands["tokens"] % 1000
    support = rng.random((n, 1100)) < 0.4
    support[np.arange(n), tokens] = True
    check(operands | dict(bias=bias, tokens=tokens, support=support), temperature=1.3, cap=3.0, blocks=(128, 256))


@pytest.mark.slow
def test_bfloat16_gradients_are_summed_in_float32() -> None:
    operands = random_operands(300, 12, 140)
    operands |= {name: jnp.asarray(operands[name], jnp.bfloat16) for name in ("hidden", "head")}
    got, want = run(operands, gradients=True)
    for name in want:
        assert got[name].dtype == jnp.bfloat16
        # The logit gradient and the sum are rounded to bfloat16 once each: 2^-8 of the largest terms.
        scale = np.abs(want[name]).max()
        np.testing.assert_allclose(np.asarray(got[name], np.float32) / scale, want[name] / scale, atol=1e-2)
    # A bfloat16 running sum of 4,096 equal terms would stop growing at 256 times a term.
    ones, zeros = jnp.ones(4096), jnp.zeros(4096)
    _, dhead, _ = logps_gradients(
        jnp.ones((4096, 1), jnp.bfloat16),
        jnp.zeros((2, 1), jnp.bfloat16),
        None,
        jnp.zeros(4096, jnp.int32),
        None,
        jnp.full(4096, np.log(2.0), jnp.float32),
        ones,
        -ones,
        zeros,
        temperature=1.0,
        blocks=(128, 128),
        interpret=True,
    )
    np.testing.assert_allclose(np.asarray(dhead, np.float32), [[2048.0], [-2048.0]], rtol=4e-3)  # 4096 · (1 - ½)


def test_rows_without_slopes_take_no_part() -> None:
    """NaN in a row without slopes reaches nothing; a block of such rows is passed over; NaN with slopes is seen."""
    operands = random_operands(300, 6, 140)
    operands["cotangents"][:, 7] = 0.0
    operands["cotangents"][:, 128:256] = 0.0
    clean, _ = run(operands, gradients=True)
    dirty = operands | dict(hidden=operands["hidden"].copy())
    dirty["hidden"][[7, 140]] = np.nan
    with np.errstate(invalid="ignore"):
        got, _ = run(dirty, gradients=True)
    np.testing.assert_array_equal(got["hidden"][np.r_[7, 128:256]], 0.0)
    np.testing.assert_array_equal(got["hidden"], clean["hidden"])
    np.testing.assert_array_equal(got["head"], clean["head"])
    dirty["hidden"][9] = np.nan
    with np.errstate(invalid="ignore"):
        got, _ = run(dirty, gradients=True)
    np.testing.assert_array_equal(np.isnan(got["hidden"]).all(-1), np.arange(300) == 9)
    assert np.isnan(got["head"]).all()


def test_nearly_deterministic_token_keeps_its_digits() -> None:
    """z = [30, 0, …, 0] over 101 tokens: logp = -100 e^-30 = -9.4e-12, H = 31 · 100 e^-30 = 2.9e-10."""
    head = np.zeros((101, 1), np.float32)
    head[3] = 30.0
    got, _ = logps_statistics(
        jnp.ones((1, 1)),
        jnp.asarray(head),
        None,
        None,
        jnp.array([3]),
        jnp.array([30.0]),
        temperature=1.0,
        blocks=(128, 128),
        interpret=True,
    )
    np.testing.assert_allclose(30.0 - got.top - got.log_total, [-9.357623e-12], rtol=1e-5)
    np.testing.assert_allclose(got.entropy, [2.9008631e-10], rtol=1e-5)


@pytest.mark.slow
def test_tpu_interpreter() -> None:
    """The other interpreter models TPU memory: blocks that were never written hold NaN."""
    check(random_operands(3, 6, 140), interpret=pltpu.InterpretParams())


def test_what_the_kernel_picks_out_is_what_it_is_given() -> None:
    """Tokens of several tiles, without a place in the softmax, and in another shard."""
    rng = np.random.default_rng(5)
    hidden, head = (jnp.asarray(rng.normal(size=(k, 9)), jnp.float32) for k in (8, 300))
    bias = jnp.zeros(300).at[131].set(-jnp.inf)
    tokens = jnp.array([0, 127, 128, 131, 256, 299, -1, 300], jnp.int32)
    static = dict(temperature=0.5, logit_soft_cap=5.0, interpret=True, blocks=(128, 128))
    want = np.tanh((hidden @ head.T)[np.arange(6), tokens[:6]] / 5.0) + np.where(tokens[:6] == 131, -np.inf, 0.0)
    part, picked = logps_statistics(hidden, head, bias, None, tokens, None, **static)
    np.testing.assert_allclose(picked[:6], want, rtol=1e-5, atol=1e-6)
    given = jnp.pad(jnp.asarray(want, jnp.float32), (0, 2))
    other, back = logps_statistics(hidden, head, bias, None, tokens, given, **static)
    assert back is given
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), part, other)
