"""What is no ordinary distribution, the same in all forms: rows and biases with NaN, policies that lack tokens."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from trm_jax import ops
from trm_jax.divergences import vocab_divergence

FORMS = [
    {"implementation": "reference"},
    {"implementation": "chunked"},
    {"implementation": "pallas_tpu", "interpret": True},
]
RNG = np.random.default_rng(0)
HIDDEN, HEAD = RNG.normal(size=(3, 4)).astype(np.float32), RNG.normal(size=(9, 4)).astype(np.float32)
TOKENS, ZEROS = np.arange(3), np.zeros(9, np.float32)


@pytest.mark.parametrize(
    "form",
    [*FORMS[:2], pytest.param(FORMS[2], marks=pytest.mark.slow)],
    ids=lambda form: form["implementation"],
)
def test_nan_in_a_bias_reaches_every_row(form: dict[str, Any]) -> None:
    bias = np.where(np.arange(9) == 5, np.nan, 0.0).astype(np.float32)
    one = ops.linear_logps(HIDDEN, HEAD, TOKENS, bias=bias, **form)
    both = ops.linear_vocab_divergence(HIDDEN, HEAD, HIDDEN, HEAD, TOKENS, policy_bias=bias, rollout_bias=ZEROS, **form)
    for got in (*one, both.token_kl, both.token_tv, both.policy_logps, both.policy_entropy):
        assert np.isnan(got).all()
    assert np.isfinite(both.rollout_logps).all()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form["implementation"])
def test_a_policy_without_any_token(form: dict[str, Any]) -> None:
    """Of the rollout there is nothing that the policy could miss; what it has itself the other one cannot sample."""
    nothing = np.full(9, -np.inf, np.float32)
    args = (HIDDEN, HEAD, HIDDEN, HEAD, TOKENS)
    without = ops.linear_vocab_divergence(*args, policy_bias=ZEROS, rollout_bias=nothing, **form)
    np.testing.assert_array_equal(without.token_kl, 0.0)
    np.testing.assert_array_equal(without.rollout_logps, -np.inf)
    np.testing.assert_array_equal(without.rollout_entropy, 0.0)
    other = ops.linear_vocab_divergence(*args, policy_bias=nothing, rollout_bias=ZEROS, **form)
    np.testing.assert_array_equal(other.token_kl, np.inf)
    for out in (without, other):
        np.testing.assert_allclose(out.token_tv, 0.5, rtol=1e-6)


@pytest.mark.parametrize(
    ("form", "shards"),
    [
        pytest.param(FORMS[0], 1, id="reference"),
        pytest.param(FORMS[1], 2, id="chunked"),
        pytest.param(FORMS[2], 1, id="pallas_tpu"),
        pytest.param(FORMS[2], 2, id="pallas_tpu-shards", marks=pytest.mark.slow),
    ],
)
def test_a_token_that_only_the_rollout_has_counts_however_unlikely(form: dict[str, Any], shards: int) -> None:
    """KL is infinite also where its probability, e^-100 or less, is no float32; other logits are 0, but one."""
    # In the first block of 128; in the second, and its sublane, one of eight; in the other shard of 150.
    lacking, later, elsewhere = 7, 143, 200
    z = np.zeros((7, 300), np.float32)
    z[0, lacking] = z[1, lacking] = -100.0  # beside the top, or as the sampled token
    z[2, later] = z[3, later] = 200.0  # the top comes later, or is the sampled token
    z[4, lacking + 1] = 200.0  # in another sublane of the same tile
    z[5, elsewhere] = 200.0
    support = np.ones((7, 304), bool)
    support[6, lacking] = False  # of both
    mesh = jax.make_mesh((shards,), ("tensor",), axis_types=(AxisType.Auto,)) if shards > 1 else None
    unit = np.eye(7, dtype=np.float32)
    out = ops.linear_vocab_divergence(
        *(unit, np.zeros((300, 7), np.float32), unit, z.T.copy(), np.array([5, lacking, 5, later, 5, 5, 5])),
        policy_bias=np.where(np.arange(300) == lacking, -np.inf, 0.0).astype(np.float32),
        support=np.packbits(support, axis=1, bitorder="little"),
        mesh=mesh,
        vocab_axis=None if mesh is None else "tensor",
        **form,
    )
    np.testing.assert_array_equal(out.token_kl, [np.inf] * 6 + [0.0])
    # The policy is flat over 299 tokens: so is the rollout, or it has all its mass on one of them.
    np.testing.assert_allclose(out.token_tv, [0.0, 0.0, *[1 - 1 / 299] * 4, 0.0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", [*FORMS, None], ids=lambda form: form["implementation"] if form else "logits")
def test_an_infinite_logit_is_in_no_softmax(form: dict[str, Any] | None) -> None:
    logits = np.array([[np.inf, 1.0, 2.0], [0.0, 1.0, 2.0]], np.float32)
    finite, tokens = np.ones_like(logits), np.array([1, 1])
    if form is None:
        out = vocab_divergence(logits, finite, tokens)
    else:
        unit = np.eye(2, dtype=np.float32)
        bias = np.array([np.inf, 0.0, 0.0], np.float32)
        out = ops.linear_vocab_divergence(unit, finite.T, unit, finite.T, tokens, policy_bias=bias, **form)
    bad = slice(0, 1) if form is None else slice(None)
    for got in (out.token_kl, out.token_tv, out.policy_logps, out.policy_entropy):
        assert np.isnan(np.asarray(got)[bad]).all()
    assert np.isfinite(out.rollout_logps).all()


@pytest.mark.parametrize("cap", [pytest.param(None, marks=pytest.mark.slow), 3.0])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form["implementation"])
def test_what_a_row_without_cotangent_holds_reaches_no_gradient(form: dict[str, Any], cap: float | None) -> None:
    """NaN or infinity, in a whole block of 128 tokens or in one cut short; under a cap infinity has finite logits."""
    hidden = np.random.default_rng(1).normal(size=(130, 4)).astype(np.float32)
    rows = np.arange(130)
    counts = ~np.isin(rows, (5, 6, 7, 129))
    dirty = hidden.copy()
    dirty[5], dirty[6], dirty[7, 0], dirty[129, 0] = np.nan, np.inf, -np.inf, np.inf

    def total(hidden: jax.Array, head: jax.Array) -> jax.Array:
        out = ops.linear_logps(hidden, head, rows % 9, logit_soft_cap=cap, **form)
        return sum(jnp.sum(jnp.where(counts, x, 0.0)) for x in out)

    gradient = jax.jit(jax.grad(total, (0, 1)))
    for got, want in zip(gradient(dirty, HEAD), gradient(hidden, HEAD), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("temperature", [1e-6, pytest.param(5e-5, marks=pytest.mark.slow)])
def test_the_gradient_of_an_entropy_at_the_lowest_temperatures(temperature: float) -> None:
    """What stands for the logit of a masked token, as of those beyond a head of 130, is infinite if divided by them."""
    rng = np.random.default_rng(0)
    hidden = (5 * temperature * rng.normal(size=(4, 8))).astype(np.float32)
    head = rng.normal(size=(130, 8)).astype(np.float32)

    def total(hidden: jax.Array, form: dict[str, Any]) -> jax.Array:
        return ops.linear_logps(hidden, head, np.arange(4), temperature=temperature, **form).entropy.sum()

    got, want = (jax.jit(jax.grad(functools.partial(total, form=form)))(hidden) for form in (FORMS[2], FORMS[1]))
    # 2e-5: the kernel's logits of up to 20 carry 1e-6 from their float32 product, and so do those of the chunked form.
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * np.abs(want).max())
