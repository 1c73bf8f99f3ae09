"""Divergence kernels in the interpreter against float64 numpy: options, ragged blocks, accuracy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from trm_jax.ops._operands import lies_turned
from trm_jax.ops._partials import DivergencePartial, divergence_of_sums
from trm_jax.ops._tiles import Units
from trm_jax.ops.linear_vocab_divergence._pallas_tpu import divergence_statistics, divergence_tv

Operands = dict[str, Any]


def logits(operands: Operands, temperature: float, cap: float | None) -> list[np.ndarray]:
    """Float64 logits of both policies, ``-inf`` outside the softmax."""
    out = []
    for side in ("policy", "rollout"):
        z = np.asarray(operands[f"{side}_hidden"], np.float64) @ np.asarray(operands[f"{side}_head"], np.float64).T
        if operands.get(f"{side}_scale") is not None:
            z = z * np.asarray(operands[f"{side}_scale"], np.float64)
        if (bias := operands.get(f"{side}_bias")) is not None:
            z = z + np.asarray(bias, np.float64)
        if cap is not None:
            z = np.where(np.isneginf(z), z, cap * np.tanh(z / cap))
        if (support := operands.get("support")) is not None:
            z = np.where(support, z, -np.inf)
        out.append(z / temperature)
    return out


def oracle(policy: np.ndarray, rollout: np.ndarray, tokens: np.ndarray) -> dict[str, np.ndarray]:
    logp, logq = (z - np.logaddexp.reduce(z, -1, keepdims=True) for z in (policy, rollout))
    p, q = np.exp(logp), np.exp(logq)
    with np.errstate(invalid="ignore", over="ignore"):
        d = logp - logq
        # Non-negative terms; the series where expm1(d) - d would cancel in float64 too.
        near = np.abs(d) < 1e-3
        terms = np.where(near, q * (d**2 / 2 + d**3 / 6 + d**4 / 24), p - q - q * d)
        terms = np.where(q == 0, p, np.where(p == 0, np.inf, terms))
        gap = np.where(near, q * np.abs(np.expm1(d)), np.abs(p - q))
        entropies = [-np.where(x > 0, x * lx, 0.0).sum(-1) for x, lx in ((p, logp), (q, logq))]
    rows = np.arange(len(tokens))
    return {
        "policy_logps": logp[rows, tokens],
        "rollout_logps": logq[rows, tokens],
        "token_kl": terms.sum(-1),
        "token_tv": 0.5 * gap.sum(-1),
        "policy_entropy": entropies[0],
        "rollout_entropy": entropies[1],
    }


@functools.partial(jax.jit, static_argnames=("shared", "temperature", "cap", "blocks", "interpret"))
def kernels(
    operands: Operands,
    tokens: jax.Array,
    token_logits: tuple[jax.Array, jax.Array],
    *,
    shared: bool,
    temperature: float,
    cap: float | None,
    blocks: tuple[int, int],
    interpret: Any,
) -> tuple[DivergencePartial, dict[str, jax.Array]]:
    heads = [operands[name] for name in ("policy_head", "rollout_head") if name in operands]
    picks = any(map(lies_turned, heads))  # as the operator has it
    given = dict(operands)
    if shared:
        given["rollout_head"] = given["policy_head"]
    given = {"policy_bias": None, "rollout_scale": None, "rollout_bias": None, "support": None, **given}
    unit = Units(temperature, cap).unit
    given["tokens"], told = tokens, tuple(z / unit for z in token_logits)
    static = dict(temperature=temperature, logit_soft_cap=cap, blocks=blocks, interpret=interpret)
    part, picked = divergence_statistics(**given, token_logits=None if picks else told, **static)
    policy_logit, rollout_logit = (unit * z for z in picked)
    normaliser, kl = divergence_of_sums(part)
    tv = divergence_tv(
        **given,
        token_logits=picked,
        policy_top=part.policy.top,
        policy_log_total=part.policy.log_total,
        rollout_top=part.rollout.top,
        rollout_log_total=part.rollout.log_total,
        normaliser=part.shift + normaliser,
        **static,
    )
    return part, {
        "policy_logps": policy_logit - unit * part.policy.top - part.policy.log_total,
        "rollout_logps": rollout_logit - unit * part.rollout.top - part.rollout.log_total,
        "token_kl": kl,
        "token_tv": tv,
        "policy_entropy": part.policy.entropy,
        "rollout_entropy": part.rollout.entropy,
    }


def run(
    operands: Operands,
    tokens: np.ndarray,
    *,
    temperature: float = 1.0,
    cap: float | None = None,
    blocks: tuple[int, int] = (128, 128),
    interpret: Any = True,
) -> tuple[dict[str, jax.Array], dict[str, np.ndarray]]:
    """``(kernels, oracle)``; one head object for both policies is passed as one."""
    policy, rollout = logits(operands, temperature, cap)
    rows = np.arange(len(tokens))
    at_token = tuple(jnp.asarray(z[rows, tokens], jnp.float32) for z in (policy, rollout))
    given = dict(operands)
    shared = given["policy_head"] is given["rollout_head"]
    if shared:
        del given["rollout_head"]
    if given.get("support") is not None:
        given["support"] = np.packbits(given["support"], axis=1, bitorder="little")
    arrays = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    static = dict(shared=shared, temperature=temperature, cap=cap, blocks=blocks, interpret=interpret)
    _, got = kernels(arrays, jnp.asarray(tokens, jnp.int32), at_token, **static)
    return got, oracle(policy, rollout, tokens)


def random_operands(n: int, d: int, v: int, shift: float, seed: int = 0) -> tuple[Operands, np.ndarray]:
    rng = np.random.default_rng(seed)
    hidden = (min(1.0, 10 / d**0.5) * rng.normal(size=(n, d))).astype(np.float32)  # no coarse logits
    head = rng.normal(size=(v, d)).astype(np.float32)
    other = (hidden + shift * rng.normal(size=hidden.shape)).astype(np.float32)
    operands = dict(policy_hidden=other, policy_head=head, rollout_hidden=hidden, rollout_head=head)
    return operands, rng.integers(0, v, n)


def check(got: dict[str, jax.Array], want: dict[str, np.ndarray]) -> None:
    for name, expected in want.items():
        # 2e-4: float32 products move logits by 1e-6, which a KL of 1e-3 sees to first order in its square root.
        np.testing.assert_allclose(got[name], expected, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("shape", "temperature", "blocks"),
    [
        ((37, 20, 300), 0.7, (128, 128)),
        pytest.param((1, 5, 7), 1.0, (128, 128), marks=pytest.mark.slow),
        pytest.param((140, 130, 257), 1.0, (128, 256), marks=pytest.mark.slow),
        pytest.param((9, 1024, 140), 1.0, (128, 128), marks=pytest.mark.slow),  # in two pieces of 512
        pytest.param((300, 40, 300), 1.0, (256, 128), marks=pytest.mark.slow),  # of two groups one waits
        pytest.param((520, 20, 1100), 1.0, (512, 512), marks=pytest.mark.slow),
    ],
)
def test_ragged_shapes(shape: tuple[int, int, int], temperature: float, blocks: tuple[int, int]) -> None:
    operands, tokens = random_operands(*shape, 0.05)
    check(*run(operands, tokens, temperature=temperature, blocks=blocks))


@pytest.mark.slow
def test_soft_cap() -> None:
    operands, tokens = random_operands(20, 8, 140, 0.2)
    check(*run(operands, tokens, temperature=0.7, cap=3.0))


@pytest.mark.slow
def test_bfloat16() -> None:
    operands, tokens = random_operands(20, 8, 140, 0.1)
    head = jnp.asarray(operands["policy_head"], jnp.bfloat16)
    hidden = {name: jnp.asarray(operands[name], jnp.bfloat16) for name in ("policy_hidden", "rollout_hidden")}
    check(*run(operands | hidden | dict(policy_head=head, rollout_head=head), tokens))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_int8_rollout_head_of_another_width(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    operands, tokens = random_operands(20, 8, 300, 0.05)
    scale = np.abs(operands["rollout_head"]).max(1) / 127
    quantised = np.round(operands["rollout_head"] / scale[:, None]).astype(np.int8)
    wide = np.concatenate([quantised, rng.integers(-9, 9, (300, 3), dtype=np.int8)], axis=1)
    hidden = np.concatenate([operands["rollout_hidden"], np.zeros((20, 3), np.float32)], axis=1)
    operands |= dict(rollout_head=wide, rollout_scale=scale, rollout_hidden=jnp.asarray(hidden, dtype))
    check(*run(operands, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("n", [20, 128])
def test_support_of_several_blocks(n: int) -> None:
    """The bits of 1024 tokens make a block; those of 128 rows lie turned."""
    assert lies_turned(jnp.zeros((n, 138), jnp.uint8)) is (n == 128)
    operands, tokens = random_operands(n, 6, 1100, 0.1)
    support = np.random.default_rng(1).random((n, 1100)) < 0.3
    support[np.arange(n), tokens] = True
    check(*run(operands | dict(support=support), tokens, blocks=(128, 256)))


@pytest.mark.slow
def test_biases_and_tokens_that_one_policy_lacks() -> None:
    operands, tokens = random_operands(20, 8, 200, 0.1)
    rng = np.random.default_rng(1)
    bias = rng.normal(size=200).astype(np.float32)
    bias[190:] = -np.inf  # padding rows: outside both
    tokens = tokens % 180
    check(*run(operands | dict(policy_bias=bias, rollout_bias=bias), tokens))
    fewer = bias.copy()
    fewer[185] = -np.inf
    check(*run(operands | dict(policy_bias=bias, rollout_bias=fewer), tokens))
    got, want = run(operands | dict(policy_bias=fewer, rollout_bias=bias), tokens)
    np.testing.assert_array_equal(got["token_kl"], np.inf)
    np.testing.assert_allclose(got["token_tv"], want["token_tv"], rtol=1e-4)
    got, want = run(operands | dict(policy_bias=None, rollout_bias=bias), tokens)
    np.testing.assert_allclose(got["token_kl"], want["token_kl"], rtol=1e-3)


@pytest.mark.slow  # one such case, on a mesh, is in the default suite: test_sharded.py
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("temperature", "cap"), [(0.7, None), (1.3, 2.0)])
def test_on_policy_is_exactly_zero(dtype: Any, temperature: float, cap: float | None) -> None:
    operands, tokens = random_operands(5, 6, 140, 0.0)
    hidden, head = (jnp.asarray(operands[name], dtype) for name in ("rollout_hidden", "rollout_head"))
    same = dict(policy_hidden=hidden, rollout_hidden=hidden, policy_head=head, rollout_head=head)
    got, _ = run(same, tokens, temperature=temperature, cap=cap)
    np.testing.assert_array_equal(got["token_kl"], 0.0)
    np.testing.assert_array_equal(got["token_tv"], 0.0)
    np.testing.assert_array_equal(got["policy_logps"], got["rollout_logps"])
    two_heads = same | dict(rollout_head=head + 0)
    np.testing.assert_array_equal(run(two_heads, tokens, temperature=temperature, cap=cap)[0]["token_kl"], 0.0)


def test_nan_stays_in_its_row_and_an_empty_support_is_no_divergence() -> None:
    operands, tokens = random_operands(9, 6, 140, 0.1)
    support = np.ones((9, 140), bool)
    support[2] = False
    operands["policy_hidden"][4] = np.nan
    with np.errstate(invalid="ignore"):
        got, want = run(operands | dict(support=support), tokens)
    clean = ~np.isin(np.arange(9), (2, 4))
    for name in ("token_kl", "token_tv", "policy_entropy"):
        assert np.isnan(got[name][4]), name
        assert got[name][2] == 0, name
        np.testing.assert_allclose(got[name][clean], want[name][clean], rtol=1e-4, err_msg=name)


@pytest.mark.slow
def test_shards_add_up() -> None:
    """Two shards' records, each told about tokens of the other, against the whole vocabulary."""
    operands, tokens = random_operands(11, 6, 140, 0.1)
    policy, rollout = logits(operands, 1.0, None)
    at_token = tuple(jnp.asarray(z[np.arange(11), tokens], jnp.float32) for z in (policy, rollout))
    static = dict(shared=True, temperature=1.0, cap=None, blocks=(128, 128), interpret=True)

    def part(rows: slice) -> DivergencePartial:
        arrays = {name: jnp.asarray(operands[name]) for name in ("policy_hidden", "rollout_hidden")}
        arrays["policy_head"] = jnp.asarray(operands["policy_head"][rows])
        return kernels(arrays, jnp.asarray(tokens - rows.start, jnp.int32), at_token, **static)[0]

    parts = [part(slice(0, 60)), part(slice(60, 140))]
    for side, z in (("policy", policy), ("rollout", rollout)):
        whole = np.logaddexp(*(np.asarray(getattr(p, side).logsumexp(1.0)) for p in parts))
        np.testing.assert_allclose(whole, np.logaddexp.reduce(z, -1), rtol=1e-6)
    # Σ π_roll exp(x) is what a shard adds to the ratio of the normalisers, about its own shift.
    weights = [np.exp(np.asarray(p.rollout.logsumexp(1.0)) - np.logaddexp.reduce(rollout, -1)) for p in parts]
    ratio = sum(
        w * np.exp(p.policy.top - p.rollout.top + p.shift) * (1 + np.asarray(p.growth))
        for w, p in zip(weights, parts, strict=True)
    )
    want = np.logaddexp.reduce(policy, -1) - np.logaddexp.reduce(rollout, -1)
    np.testing.assert_allclose(np.log(ratio), want, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_tpu_interpreter() -> None:
    """The other interpreter models TPU memory: blocks that were never written hold NaN."""
    operands, tokens = random_operands(3, 6, 140, 0.1)
    check(*run(operands, tokens, interpret=pltpu.InterpretParams()))


VOCABULARY = 151_936
GRID = 2.0**-20  # logits below 16 on this grid add without rounding, so that the oracle sees the same numbers


def accuracy_logits(kind: str, scale: float, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(rollout, policy - rollout, offset)`` on the grid, ``[V, rows]``, ``[V, rows]``, ``[rows]``."""
    rng = np.random.default_rng(3)
    base = {
        "flat": lambda: 0.3 * rng.normal(size=(VOCABULARY, rows)),
        "offset": lambda: rng.normal(size=(VOCABULARY, rows)),
        "peaked": lambda: np.minimum(2.0 * rng.normal(size=(VOCABULARY, rows)), 6.0),
        "deterministic": lambda: np.clip(rng.normal(size=(VOCABULARY, rows)) - 5.0, -14.0, 0.0),
    }[kind]()
    if kind == "peaked":
        base[rng.integers(0, VOCABULARY, 8), :] = 11.0 + rng.random((8, rows))
    if kind == "deterministic":
        base[17] = 14.5
    noise = scale * rng.normal(size=base.shape)
    snap = [np.round(x / GRID) * GRID for x in (base, noise)]
    return snap[0], snap[1], np.full(rows, 0.375 if kind == "offset" else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "offset", "peaked", "deterministic"])
@pytest.mark.parametrize("scale", [2e-5, 4.5e-4, 5e-3, 0.5])
def test_accuracy_over_a_real_vocabulary(kind: str, scale: float) -> None:
    """KL within 0.1 % from 1e-5 up and 1 % at 1e-7, TV within 0.1 % at 1e-6 and above: float32 against float64.

    Row i of the tokens selects column i of the head for the rollout; the policy adds a column of differences.
    """
    rows = 4
    rollout, noise, offset = accuracy_logits(kind, scale, rows)
    head = np.concatenate([rollout, noise, np.ones((VOCABULARY, 1))], axis=1).astype(np.float32)
    eye, zeros = np.eye(rows, dtype=np.float32), np.zeros((rows, rows), np.float32)
    hidden = np.concatenate([eye, zeros, np.zeros((rows, 1), np.float32)], axis=1)
    other = np.concatenate([eye, eye, offset[:, None].astype(np.float32)], axis=1)
    operands = dict(policy_hidden=other, policy_head=head, rollout_hidden=hidden, rollout_head=head)
    rng = np.random.default_rng(4)
    q = np.exp(rollout - np.logaddexp.reduce(rollout, 0))
    tokens = np.array([rng.choice(VOCABULARY, p=q[:, i] / q[:, i].sum()) for i in range(rows)])
    got, want = run(operands, tokens, blocks=(128, 512))
    kl, tv = (np.abs(np.asarray(got[name]) / want[name] - 1) for name in ("token_kl", "token_tv"))
    measured = f"KL {want['token_kl']} off by {kl}, TV {want['token_tv']} off by {tv}"
    limit = np.where(want["token_kl"] > 0.9e-5, 1e-3, 1e-2)
    assert np.all((kl < limit) | (want["token_kl"] < 5e-8)), measured
    assert np.all((tv < 1e-3) | (want["token_tv"] < 0.9e-6)), measured
    np.testing.assert_allclose(got["rollout_logps"], want["rollout_logps"], rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(got["rollout_entropy"], want["rollout_entropy"], rtol=1e-5)


@pytest.mark.slow
def test_far_apart_policies() -> None:
    operands, tokens = random_operands(16, 40, 300, 1.0)
    got, want = run(operands, tokens)
    assert want["token_kl"].max() > 10
    np.testing.assert_allclose(got["token_kl"], want["token_kl"], rtol=1e-3, atol=2e-5)
    np.testing.assert_allclose(got["token_tv"], want["token_tv"], rtol=1e-3, atol=2e-6)


@pytest.mark.slow
def test_what_the_kernel_picks_out_is_what_it_is_given() -> None:
    """Tokens of several tiles, outside the support, banned by one bias, in another shard; a rollout head of int8."""
    rng = np.random.default_rng(5)
    hidden, other = (jnp.asarray(rng.normal(size=(12, 9)), jnp.float32) for _ in range(2))
    head = jnp.asarray(rng.normal(size=(300, 9)), jnp.float32)
    int8, scale = jnp.asarray(rng.integers(-127, 128, (300, 9)), jnp.int8), jnp.asarray(rng.uniform(0.01, 0.02, 300))
    bias = jnp.zeros(300).at[jnp.array([3, 131])].set(-jnp.inf)
    tokens = jnp.array([0, 3, 7, 127, 128, 131, 256, 299, 40, 41, -1, 300], jnp.int32)
    support = np.ones((12, 304), np.uint8)
    support[8, 40] = 0
    operands = (hidden, head, bias, other, int8, scale.astype(jnp.float32), None)
    operands += (jnp.packbits(support, axis=1, bitorder="little"), tokens)
    z = np.asarray(hidden @ head.T + bias), np.asarray((other @ int8.astype(jnp.float32).T) * scale)
    local, rows = slice(0, 10), np.arange(10)
    want = [np.where(support[:10, tokens[local]][rows, rows], x[rows, tokens[local]], -np.inf) for x in z]
    static = dict(temperature=0.5, interpret=True, blocks=(128, 128))
    part, picked = divergence_statistics(*operands, None, **static)
    for side, expected in zip(picked, want, strict=True):
        np.testing.assert_allclose(side[local], expected, rtol=1e-5, atol=1e-5)
    given = [jnp.pad(jnp.asarray(x, jnp.float32), (0, 2)) for x in want]
    other_part, back = divergence_statistics(*operands, tuple(given), **static)
    assert all(a is b for a, b in zip(back, given, strict=True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), part, other_part)
