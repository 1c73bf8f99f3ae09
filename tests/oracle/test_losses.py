"""Every loss against loops: values and gradients, aggregations, denominators, masks, garbage, packed rows."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import losses

from .batches import SCALES, batch, close, spoil
from .reference import losses as oracle

AGGREGATIONS = ["token_mean", "sequence_mean", "constant_length"]
DENOMINATORS = ["original", "kept"]
OPTIONS = {
    "clipped_surrogate": {"clip_low": 0.1, "clip_high": 0.15},
    "clipped_dual": {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.3},
    "gspo": {"clip_low": 0.2, "clip_high": 0.2},
    "gspo_dual": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.05},
    "cispo": {"clip_low": 0.3, "clip_high": 0.2},
    "dppo": {"threshold": 0.05},
    "masked_surrogate": {},
}
FUNCTIONS = {
    "clipped_surrogate": losses.clipped_surrogate,
    "clipped_dual": losses.clipped_surrogate,
    "gspo": losses.gspo,
    "gspo_dual": losses.gspo,
    "cispo": losses.cispo,
    "dppo": losses.dppo,
    "masked_surrogate": losses.masked_surrogate,
}
ORACLES = {
    "clipped_surrogate": oracle.clipped_surrogate,
    "clipped_dual": oracle.clipped_surrogate,
    "gspo": oracle.gspo,
    "gspo_dual": oracle.gspo,
    "cispo": oracle.cispo,
    "dppo": oracle.dppo,
    "masked_surrogate": oracle.masked_surrogate,
}


def kept(data, name=""):
    """Two rejected rows and a third of the tokens dropped; none for GSPO, whose ratio is one of whole sequences."""
    rng = np.random.default_rng(12)
    sequence_keep = np.array([True, False, True, True, True, False])
    return sequence_keep, (rng.random(data.response_mask.shape) < 0.7) | name.startswith("gspo")


def run(name, data, policy, **changes):
    """Loss of the package; `old` are the rollout log-probs for the masked surrogate, else the proximal ones."""
    old = data.rollout if name == "masked_surrogate" else data.proximal
    arguments = {"old": old, "advantages": data.advantages, "response_mask": data.response_mask} | changes
    positional = [policy, *[arguments.pop(k) for k in ("old", "advantages", "response_mask")]]
    return FUNCTIONS[name](*positional, **OPTIONS[name], **arguments)


def reference(name, data, policy, keep, *, weights=None, advantages=None):
    old = data.rollout if name == "masked_surrogate" else data.proximal
    x = oracle.Inputs.of(policy, old, data.advantages if advantages is None else advantages, weights)
    return ORACLES[name](x, keep, **OPTIONS[name])


def reference_gradient(name, data, keep, *, weights=None):
    """Closed forms where a stop-gradient or a jump stands in the way of differences, differences elsewhere."""
    x = oracle.Inputs.of(data.policy, data.proximal, data.advantages, weights)
    if name == "cispo":
        return oracle.closed_form_gradient(lambda b, t: -oracle.cispo_coefficient(x, b, t, **OPTIONS[name]), keep)
    if name == "dppo":
        return oracle.closed_form_gradient(functools.partial(oracle.dppo_term, x, **OPTIONS[name]), keep)
    value = functools.partial(reference, name, data, keep=keep, weights=weights)
    return oracle.central_difference(value, data.policy, data.response_mask)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_value_against_loops(name, dtype):
    """Weights, both masks, every aggregation and denominator; 1e-5 of float32 exponentials summed over 30 tokens.
    Log ratios stay below 20: beyond that the losses may bound the exponent."""
    for index, (scale, aggregation, denominator) in enumerate(
        itertools.product(SCALES[:4], AGGREGATIONS, DENOMINATORS)
    ):
        data = batch(index, scale, dtype)
        sequence_keep, token_keep = kept(data, name)
        weights = data.rng.uniform(0, 2, data.policy.shape).astype(np.float32)
        options = {"aggregation": aggregation, "denominator": denominator, "constant_length": 5}
        got = run(
            name,
            data,
            data.policy,
            sequence_keep=sequence_keep,
            token_keep=token_keep,
            importance_weights=weights,
            **options,
        )
        keep = oracle.Keep(data.response_mask, sequence_keep, token_keep, **options)
        want = reference(name, data, data.policy, keep, weights=weights)
        close(got.value, want.value, relative=2e-5, absolute=2e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("aggregation", "denominator"), [*itertools.product(AGGREGATIONS, DENOMINATORS)])
def test_gradient_against_the_oracle(name, aggregation, denominator):
    """1e-4: float32 against differences of a float64 function whose own error is 1e-9."""
    data = batch(3, 0.3)
    sequence_keep, token_keep = kept(data, name)
    weights = data.rng.uniform(0.5, 2, data.policy.shape).astype(np.float32)
    options = {"aggregation": aggregation, "denominator": denominator, "constant_length": 5}

    def value(policy, weights):
        arrays = {"sequence_keep": sequence_keep, "token_keep": token_keep, "importance_weights": weights}
        return run(name, data, policy, **arrays, **options).value

    gradient, of_weights = jax.grad(value, argnums=(0, 1))(data.policy, weights)
    keep = oracle.Keep(data.response_mask, sequence_keep, token_keep, **options)
    want = reference_gradient(name, data, keep, weights=weights)
    assert np.abs(want).max() > 1e-3
    close(gradient, want, relative=1e-4, absolute=1e-6)
    assert not np.asarray(of_weights).any(), "an importance weight is a constant"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_only_the_policy_gets_a_gradient(name):
    data = batch(4, 0.3)
    keep = np.ones(6, bool)

    def value(old, advantages):
        return run(name, data, data.policy, old=old, advantages=advantages, sequence_keep=keep).value

    for gradient in jax.grad(value, argnums=(0, 1))(data.proximal, data.advantages):
        assert not np.asarray(gradient).any()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_masked_slots_reach_neither_value_nor_gradient(name):
    data = batch(5, 0.3)
    mask = data.response_mask
    sequence_keep, token_keep = kept(data)
    dirty = data._replace(
        **{k: spoil(getattr(data, k), mask) for k in ("proximal", "rollout", "policy")},
    )
    weights = spoil(np.ones(mask.shape, np.float32), mask)
    advantages = spoil(np.broadcast_to(data.advantages[:, None], mask.shape), mask)
    arrays = {"sequence_keep": sequence_keep, "token_keep": token_keep}

    def value(policy):
        return run(name, dirty, policy, advantages=advantages, importance_weights=weights, **arrays).value

    got, gradient = jax.value_and_grad(value)(dirty.policy)
    clean, clean_gradient = jax.value_and_grad(lambda p: run(name, data, p, **arrays).value)(data.policy)
    close(got, clean, relative=1e-6)
    close(gradient, clean_gradient, relative=1e-6)
    assert not np.asarray(gradient)[~mask].any()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rejected_slots_reach_neither_value_nor_gradient(name):
    """What stands in a rejected sequence or at a dropped token is as good as masked: it was rejected for being bad."""
    data = batch(6, 0.3)
    sequence_keep, token_keep = kept(data)
    trained = sequence_keep[:, None] & token_keep & data.response_mask
    arrays = {"sequence_keep": sequence_keep, "token_keep": token_keep}
    dirty = data._replace(**{k: spoil(getattr(data, k), trained) for k in ("proximal", "rollout", "policy")})
    got, gradient = jax.value_and_grad(lambda p: run(name, dirty, p, **arrays).value)(dirty.policy)
    clean, clean_gradient = jax.value_and_grad(lambda p: run(name, data, p, **arrays).value)(data.policy)
    close(got, clean, relative=1e-6)
    close(gradient, clean_gradient, relative=1e-6, absolute=1e-9)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_packed_rows(name, aggregation):
    """A packed row is its segments in rows of their own: per-segment ratios, lengths and counts."""
    data = batch(7, 0.3)
    rng = np.random.default_rng(3)
    by_segment = rng.random((6, 3)) < 0.6
    sequence_keep = np.take_along_axis(by_segment, data.segment_ids.astype(int), 1)
    options = {"aggregation": aggregation, "constant_length": 5, "segment_ids": data.segment_ids}
    got = run(name, data, data.policy, sequence_keep=sequence_keep, **options)
    want = reference(name, data, data.policy, oracle.Keep(data.response_mask, sequence_keep, **options))
    close(got.value, want.value, relative=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_token_advantages(name):
    data = batch(8, 0.3)
    advantages = data.rng.normal(size=data.policy.shape).astype(np.float32)
    sequence_keep = np.ones(6, bool)
    got = run(name, data, data.policy, advantages=advantages, sequence_keep=sequence_keep, aggregation="token_mean")
    keep = oracle.Keep(data.response_mask, sequence_keep)
    want = reference(name, data, data.policy, keep, advantages=advantages)
    close(got.value, want.value, relative=1e-5, absolute=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("empty", "aggregation", "denominator"),
    [
        ("response_mask", "constant_length", "original"),
        ("sequence_keep", "token_mean", "kept"),
        ("token_keep", "sequence_mean", "kept"),
    ],
)
def test_nothing_to_train_on_is_zero(name, empty, aggregation, denominator):
    data = batch(9, 3.0)
    arrays = {
        "response_mask": data.response_mask,
        "sequence_keep": np.ones(6, bool),
        "token_keep": np.ones(data.response_mask.shape, bool),
    }
    arrays[empty] = np.zeros_like(arrays[empty])
    options = {"aggregation": aggregation, "denominator": denominator, "constant_length": 5}
    value, gradient = jax.value_and_grad(lambda p: run(name, data, p, **arrays, **options).value)(data.policy)
    assert float(value) == 0.0
    assert not np.asarray(gradient).any()


def test_masked_surrogate_divides_by_all_sampled_sequences():
    """Ratios (2, 1), A = 1 and -1, the second rejected: L = (1*(2 + 1))/2 = 1.5, the loss -1.5; "kept" gives -3."""
    mask = np.zeros((6, 7), bool)
    mask[:2, :2] = True
    rollout = np.full((6, 7), -2.0, np.float32)
    policy = rollout.copy()
    policy[:2, 0] += np.log(np.float32(2))
    inputs = (policy, rollout, np.float32([1, -1, 0, 0, 0, 0]), mask, np.arange(6) != 1)
    close(losses.masked_surrogate(*inputs).value, -1.5, relative=1e-6)
    close(losses.masked_surrogate(*inputs, denominator="kept").value, -3.0, relative=1e-6)


@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_bypass_and_decoupled_are_the_same_without_lag(scale):
    """Weights k_t = pi_train/pi_roll on r_t = pi_theta/pi_train without clipping: the masked surrogate's -A rho_t."""
    data = batch(10, scale)
    keep = np.ones(6, bool)
    k = np.exp(data.proximal.astype(float) - data.rollout).astype(np.float32)
    decoupled = losses.clipped_surrogate(
        data.policy,
        data.proximal,
        data.advantages,
        data.response_mask,
        importance_weights=k,
        clip_low=1.0,
        clip_high=1e6,
        aggregation="constant_length",
        constant_length=1,
    )
    surrogate = losses.masked_surrogate(data.policy, data.rollout, data.advantages, data.response_mask, keep)
    close(decoupled.value, surrogate.value, relative=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_penalty_against_a_reference_policy(aggregation):
    """coef * k3(log pi_ref - log pi_theta) on every trained token, in value and in gradient."""
    data = batch(11, 0.3)
    sequence_keep, token_keep = kept(data)
    reference_logps = (data.policy + data.rng.normal(size=data.policy.shape) * 0.5).astype(np.float32)
    options = {"aggregation": aggregation, "constant_length": 5}
    keep = oracle.Keep(data.response_mask, sequence_keep, token_keep, **options)

    def want(policy):
        x = oracle.Inputs.of(policy, data.proximal, data.advantages)
        return oracle.clipped_surrogate(x, keep, reference=reference_logps, reference_coef=0.3)

    def got(policy):
        return losses.clipped_surrogate(
            policy,
            data.proximal,
            data.advantages,
            data.response_mask,
            sequence_keep=sequence_keep,
            token_keep=token_keep,
            reference_logps=spoil(reference_logps, data.response_mask, np.nan),
            reference_coef=0.3,
            **options,
        ).value

    value, gradient = jax.value_and_grad(got)(data.policy)
    close(value, want(data.policy).value, relative=1e-5)
    close(gradient, oracle.central_difference(want, data.policy, data.response_mask), relative=1e-4, absolute=1e-6)


def test_dppo_takes_any_token_divergence():
    data = batch(12, 0.3)
    given = data.token_tv
    got = losses.dppo(
        data.policy, data.proximal, data.advantages, data.response_mask, threshold=0.1, token_divergence=given
    )
    x = oracle.Inputs.of(data.policy, data.proximal, data.advantages)
    keep = oracle.Keep(data.response_mask)
    want = oracle.dppo(x, keep, threshold=0.1, token_divergence=given)
    assert want != oracle.dppo(x, keep, threshold=10.0)
    close(got.value, want.value, relative=1e-5)
    undecided = np.where(np.arange(given.shape[1]) == 1, np.nan, given).astype(np.float32)
    gradient = jax.grad(
        lambda p: (
            losses.dppo(
                p, data.proximal, data.advantages, data.response_mask, threshold=0.1, token_divergence=undecided
            ).value
        )
    )(data.policy)
    away = (data.policy - data.proximal)[:, 1] * data.advantages > 0
    assert away.any()
    assert not np.asarray(gradient)[away, 1].any(), "an unknown divergence does not train a token further away"


def test_a_constant_length_is_the_padded_length_unless_given():
    data = batch(13, 0.3)
    got = losses.clipped_surrogate(
        data.policy, data.proximal, data.advantages, data.response_mask, aggregation="constant_length"
    )
    x = oracle.Inputs.of(data.policy, data.proximal, data.advantages)
    keep = oracle.Keep(data.response_mask, aggregation="constant_length", constant_length=7)
    close(got.value, oracle.clipped_surrogate(x, keep).value, relative=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_totals_of_microbatches_add_up(name):
    data = batch(14, 0.3)
    sequence_keep, _ = kept(data)
    whole = run(name, data, data.policy, sequence_keep=sequence_keep)
    parts = []
    for rows in (np.arange(6) < 2, np.arange(6) >= 2):
        mask = data.response_mask & rows[:, None]
        parts.append(run(name, data, data.policy, sequence_keep=sequence_keep, response_mask=mask))
    close(sum(p.total for p in parts), whole.total, relative=1e-5)
    close(sum(p.denominator for p in parts), whole.denominator, relative=0)
