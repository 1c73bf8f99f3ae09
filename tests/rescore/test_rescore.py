"""Rescored log-probs and divergences against float64 sums over full logits, and what must not change them."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from trm_jax.models import ComputeConfig, make_mesh, param_shardings
from trm_jax.rescore import policy_logps, rescore, response_states

PLAIN, TILED = ComputeConfig(), ComputeConfig(batch_invariant=True)
# Float32 through two layers of width 32: some hundred roundings of 6e-8 on values of order one, over the temperature.
ATOL = 3e-5


def score(tools, case, *, compute=PLAIN, microbatches=1, **changes):
    rollout = dataclasses.replace(case.rollout, **changes)
    graphdef, params = nnx.split(tools.model(), nnx.Param)
    head = None if rollout.hidden is None else case.rollout_head
    return tools.rescore(graphdef, params, rollout, head, compute, microbatches)


@pytest.mark.parametrize(
    ("temperature", "truncated", "compute"),
    [(1.0, False, PLAIN), (0.7, True, PLAIN), (0.7, True, TILED)],
)
def test_scores_are_those_of_full_logits_in_float64(tools, temperature, truncated, compute):
    case = tools.case(temperature=temperature, truncated=truncated)
    scored, checks = score(tools, case, compute=compute)
    mask, p, q = case.mask, np.exp(case.policy), np.exp(case.sampler)
    inside = np.ones_like(p, bool) if case.kept is None else case.kept
    difference = np.where(inside, np.where(inside, case.sampler, 0) - np.where(inside, case.policy, 0), 0)
    expected = {
        "token_kl": (q * difference).sum(-1),
        "token_tv": 0.5 * np.abs(p - q).sum(-1),
        "policy_entropy": -(p * np.where(inside, case.policy, 0)).sum(-1),
        "rollout_entropy": -(q * np.where(inside, case.sampler, 0)).sum(-1),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(np.asarray(getattr(scored, name))[mask], values[mask], atol=ATOL, err_msg=name)
    assert expected["token_kl"][mask].max() > 0.02  # the two policies do differ
    np.testing.assert_allclose(np.asarray(scored.proximal_logps)[mask], case.at_tokens(case.policy), atol=ATOL)
    np.testing.assert_array_equal(scored.rollout_logps, case.rollout.rollout_logps)
    np.testing.assert_array_equal(scored.response_mask, mask)
    error, count = checks["max/recorded_logp_error"]
    assert (float(count), float(error) < ATOL) == (1.0, True)


def test_a_sampled_padding_id_is_scored_like_any_token(tools):
    case = tools.case()
    scored, _ = score(tools, case, hidden=None)
    zeros = (np.asarray(case.rollout.response_tokens) == 0) & case.mask
    assert zeros.sum() >= 3
    found = np.asarray(scored.proximal_logps)[zeros]
    np.testing.assert_allclose(found, case.policy[..., 0][zeros], atol=ATOL)
    assert np.all(found < 0)


def test_without_states_there_is_no_divergence_and_no_check(tools):
    scored, checks = score(tools, tools.case(), hidden=None)
    assert scored.token_kl is None
    assert scored.token_tv is None
    assert scored.rollout_entropy is None
    assert scored.policy_entropy.shape == scored.proximal_logps.shape
    assert checks == {}


def test_a_tampered_record_shows(tools):
    case = tools.case()
    honest = case.rollout.rollout_logps
    valid, masked = (np.argwhere(case.mask)[-1], np.argwhere(~case.mask)[0])

    def error(at, value):
        _, checks = score(tools, case, rollout_logps=honest.at[at[0], at[1]].set(value))
        return float(checks["max/recorded_logp_error"][0])

    assert error(valid, honest[valid[0], valid[1]] - 0.25) == pytest.approx(0.25, abs=ATOL)
    assert np.isnan(error(valid, np.nan))  # never less than any threshold
    assert error(masked, 99.0) < ATOL


def test_a_head_that_the_engine_did_not_use_shows(tools):
    case = tools.case()
    _, checks = score(tools, dataclasses.replace(case, rollout_head=tools.model().head()))
    assert float(checks["max/recorded_logp_error"][0]) > 0.05


@pytest.mark.parametrize("compute", [PLAIN, pytest.param(TILED, marks=pytest.mark.slow)])
def test_microbatches_change_nothing(tools, compute):
    case = tools.case(truncated=True)
    whole, whole_checks = score(tools, case, compute=compute)
    parts, part_checks = score(tools, case, compute=compute, microbatches=2)
    mask = case.mask
    for field in dataclasses.fields(whole):
        x, y = getattr(whole, field.name), getattr(parts, field.name)
        if x is not None:
            np.testing.assert_allclose(np.asarray(y)[mask], np.asarray(x)[mask], atol=2e-6, err_msg=field.name)
    if compute is TILED:
        assert np.asarray(parts.proximal_logps)[mask].tobytes() == np.asarray(whole.proximal_logps)[mask].tobytes()
    np.testing.assert_allclose(*(c["max/recorded_logp_error"][0] for c in (whole_checks, part_checks)), atol=1e-6)


def garbage(case):
    """The same rollout with nonsense at every masked slot."""
    rollout, mask = case.rollout, case.rollout.response_mask
    return {
        "prompt_tokens": jnp.where(rollout.prompt_mask, rollout.prompt_tokens, 10**6),
        "response_tokens": jnp.where(mask, rollout.response_tokens, -3),
        "rollout_logps": jnp.where(mask, rollout.rollout_logps, jnp.nan),
        "hidden": jnp.where(mask[..., None], rollout.hidden, jnp.nan),
        "support": jnp.where(mask[..., None], rollout.support, jnp.uint8(0b100)),
    }


@pytest.mark.parametrize("compute", [PLAIN, TILED])
def test_masked_slots_may_hold_anything(tools, compute):
    case = tools.case(truncated=True)
    clean, clean_checks = score(tools, case, compute=compute)
    dirty, dirty_checks = score(tools, case, compute=compute, **garbage(case))
    for name in ("proximal_logps", "token_kl", "token_tv", "policy_entropy", "rollout_entropy"):
        np.testing.assert_array_equal(
            np.asarray(getattr(dirty, name))[case.mask], np.asarray(getattr(clean, name))[case.mask], err_msg=name
        )
    assert np.isfinite(dirty.proximal_logps).all()
    np.testing.assert_array_equal(*(c["max/recorded_logp_error"][0] for c in (clean_checks, dirty_checks)))


def test_gradients_ignore_masked_slots_and_agree_between_arithmetics(tools):
    case = tools.case(truncated=True, temperature=0.7)
    graphdef, params = nnx.split(tools.model(), nnx.Param)

    def loss(params, rollout, compute):
        logps, entropy = policy_logps(nnx.merge(graphdef, params), rollout, compute=compute)
        return jnp.sum(jnp.where(rollout.response_mask, logps + 0.1 * entropy, 0.0))

    gradient = tools.jit(jax.grad(loss), static_argnames="compute")
    expected = gradient(params, case.rollout, compute=PLAIN)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected)) > 1
    for compute in (PLAIN, TILED):
        dirty = gradient(params, dataclasses.replace(case.rollout, **garbage(case)), compute=compute)
        # Gradients of order ten, summed over 20 positions in another order.
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), dirty, expected)


def test_response_states_can_be_given(tools):
    case, model = tools.case(), tools.model()

    @tools.jit
    def run(rollout, move):
        states = response_states(model, rollout, compute=PLAIN)
        given = policy_logps(model, rollout, compute=PLAIN, hidden=states + move)
        return states, given, policy_logps(model, rollout, compute=PLAIN)

    states, given, taken = run(case.rollout, 0.0)
    assert states.shape == (4, 5, 32)
    for x, y in zip(given, taken, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
    _, moved, _ = run(case.rollout, 1.0)
    assert not np.allclose(moved[0], taken[0], atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("context", [False, True])
def test_sharded_over_eight_devices(tools, context):
    """Rows over 4, heads, feed-forward and vocabulary over 2; left to the compiler, or in the mesh as a run is."""
    case = tools.case(rows=8, temperature=0.7, truncated=True)
    graphdef, params = nnx.split(tools.model(), nnx.Param)
    mesh = make_mesh(data=4, tensor=2)
    expected, checks = tools.rescore(graphdef, params, case.rollout, case.rollout_head, PLAIN, 2)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    with jax.set_mesh(mesh) if context else contextlib.nullcontext():
        found, sharded_checks = tools.rescore(
            graphdef,
            jax.device_put(params, param_shardings(params, mesh)),
            jax.device_put(case.rollout, rows),
            jax.device_put(case.rollout_head, NamedSharding(mesh, PartitionSpec("tensor", None))),
            PLAIN,
            2,
        )
    # Sums over heads, feed-forward columns and vocabulary are taken in two parts: a few float32 roundings more.
    for name in ("proximal_logps", "token_kl", "token_tv", "policy_entropy", "rollout_entropy"):
        np.testing.assert_allclose(
            np.asarray(getattr(found, name))[case.mask],
            np.asarray(getattr(expected, name))[case.mask],
            atol=ATOL,
            err_msg=name,
        )
    assert len(found.proximal_logps.sharding.device_set) == 8
    np.testing.assert_allclose(*(c["max/recorded_logp_error"][0] for c in (checks, sharded_checks)), atol=ATOL)


def test_errors_say_what_is_missing(tools):
    case = tools.case(truncated=True)
    graphdef, params = nnx.split(tools.model(), nnx.Param)
    with pytest.raises(ValueError, match="pass rollout_head"):
        rescore(graphdef, params, case.rollout, None, compute=PLAIN)
    for count in (3, 0):
        with pytest.raises(ValueError, match=rf"microbatches={count} must be at least 1 and divide the 4 rows"):
            rescore(graphdef, params, case.rollout, case.rollout_head, compute=PLAIN, microbatches=count)
    cut = dataclasses.replace(case.rollout, support=None)
    with pytest.raises(ValueError, match=r"top_p=0\.9 but holds no support"):
        policy_logps(tools.model(), cut, compute=PLAIN)


@pytest.mark.parametrize("how", [{"temperature": 0.5}, {"top_p": 0.9}])
def test_raw_log_probs_of_a_rollout_that_was_sampled_otherwise_are_refused(tools, how):
    """Logits (2, 0) at temperature .5: the token has .982, the raw record .8808, a ratio of 1.115 without mismatch."""
    case = tools.case()
    graphdef, params = nnx.split(tools.model(), nnx.Param)
    raw = dataclasses.replace(case.rollout, processed_logps=False, **({"temperature": 1.0, "top_p": 1.0} | how))
    with pytest.raises(ValueError, match=r"raw model's.*sampled at.*after temperature and truncation"):
        rescore(graphdef, params, raw, case.rollout_head, compute=PLAIN)
    same = dataclasses.replace(raw, temperature=1.0, top_p=1.0)
    rescore(graphdef, params, same, case.rollout_head, compute=PLAIN)
