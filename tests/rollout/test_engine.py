"""The engine's records against a recomputation, and their independence of how the engine schedules."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.models import ComputeConfig, head_token_logps
from trm_jax.rollout import EngineConfig, InProcessEngine, RolloutNumerics, SamplingConfig

# Two layers of width 32 in float32, decode against a full forward pass: both round some hundred times by 6e-8.
ATOL = 3e-5


@pytest.fixture(scope="module")
def prompts(tools):
    return tools.prompts(11, samples=2)


@pytest.fixture(scope="module")
def rollout(tools, prompts):
    return tools.engine().generate(prompts)


def tokens_of(rollout):
    return np.where(rollout.response_mask, rollout.response_tokens, -1)


def test_every_request_is_answered_once_and_by_its_rules(tools, prompts, rollout):
    tokens, mask = np.asarray(rollout.response_tokens), np.asarray(rollout.response_mask)
    assert tokens.shape == mask.shape == (11, 6)
    ends = np.isin(tokens, tools.eos)
    for row in range(11):
        length = int(mask[row].sum())
        assert length >= 1
        assert mask[row, :length].all()  # left-aligned
        assert not ends[row, : length - 1].any()  # nothing is sampled after an end token
        assert bool(rollout.finished[row]) == bool(ends[row, length - 1])  # the end token is part of the response
        assert rollout.finished[row] or length == 6
    assert 0 < int(rollout.finished.sum()) < 11  # both ways of ending occur
    np.testing.assert_array_equal(rollout.prompt_tokens, np.where(prompts.mask, prompts.tokens, 0))
    np.testing.assert_array_equal(rollout.prompt_mask, prompts.mask)
    np.testing.assert_array_equal(rollout.group_ids, prompts.group_ids)
    assert (rollout.temperature, rollout.top_p, rollout.support) == (1.0, 1.0, None)


def test_recorded_log_probs_and_states_are_those_of_a_full_forward_pass(tools, rollout):
    model = tools.model()
    hidden = tools.teacher_forced(model, rollout)
    mask = np.asarray(rollout.response_mask)
    np.testing.assert_allclose(np.asarray(rollout.hidden)[mask], hidden[mask], atol=ATOL)
    expected = tools.at_tokens(tools.log_softmax64(hidden, model.head()), rollout)
    np.testing.assert_allclose(np.where(mask, rollout.rollout_logps, 0), expected, atol=ATOL)
    assert rollout.rollout_logps.dtype == jnp.float32
    assert np.std(expected[mask]) > 0.3


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"slots": 1, "prefill_rows": 1, "decode_chunk": 1}, marks=pytest.mark.slow),
        {"slots": 16, "prefill_rows": 3, "decode_chunk": 9},
    ],
)
def test_scheduling_changes_no_token(tools, prompts, rollout, sizes):
    other = tools.engine(**sizes).generate(prompts)
    np.testing.assert_array_equal(tokens_of(other), tokens_of(rollout))
    np.testing.assert_array_equal(other.finished, rollout.finished)
    mask = np.asarray(rollout.response_mask)
    np.testing.assert_allclose(
        np.asarray(other.rollout_logps)[mask], np.asarray(rollout.rollout_logps)[mask], atol=ATOL
    )


def test_progress_is_told_while_it_goes_and_changes_nothing(tools, prompts, rollout):
    seen: list[tuple[int, int]] = []
    found = tools.engine().generate(prompts, on_progress=lambda ended, tokens: seen.append((ended, tokens)))
    np.testing.assert_array_equal(tokens_of(found), tokens_of(rollout))
    ended, tokens = zip(*seen, strict=True)
    assert list(ended) == sorted(ended)
    assert list(tokens) == sorted(tokens)
    assert seen[-1] == (11, int(np.sum(rollout.response_mask)))
    assert any(0 < now < 11 for now in ended)
    assert all(ends <= total for ends, total in seen)  # an answer has a token at least


def test_a_response_follows_from_prompt_and_seed_alone(tools, prompts, rollout):
    order = np.array([7, 0, 10, 3, 3, 9])
    some = jax.tree.map(lambda x: x[order], prompts)
    again = tools.engine().generate(some)
    np.testing.assert_array_equal(tokens_of(again), tokens_of(rollout)[order])
    other_seeds = dataclasses.replace(prompts, seeds=prompts.seeds + jnp.uint32(1000))
    assert np.mean(np.any(tokens_of(tools.engine().generate(other_seeds)) != tokens_of(rollout), axis=1)) > 0.7


def test_group_ids_are_passed_on_and_decide_nothing(tools, prompts, rollout):
    """Samples share a prefill when their prompts are equal, not when somebody says so."""
    one_group = dataclasses.replace(prompts, group_ids=jnp.zeros_like(prompts.group_ids))
    found = tools.engine().generate(one_group)
    np.testing.assert_array_equal(tokens_of(found), tokens_of(rollout))
    np.testing.assert_array_equal(found.group_ids, np.zeros(11))


def test_prompt_arrays_may_be_wider_or_narrower_than_the_engine(tools, prompts, rollout):
    wide = dataclasses.replace(
        prompts,
        tokens=jnp.pad(prompts.tokens, [(0, 0), (0, 4)], constant_values=99),
        mask=jnp.pad(prompts.mask, [(0, 0), (0, 4)]),
    )
    found = tools.engine().generate(wide)
    np.testing.assert_array_equal(tokens_of(found), tokens_of(rollout))
    assert found.prompt_tokens.shape == (11, 5)
    narrow = jax.tree.map(lambda x: x[:, :2] if x.ndim == 2 else x, prompts)
    short = np.asarray(prompts.mask).sum(1) <= 2
    assert short.any()
    np.testing.assert_array_equal(tokens_of(tools.engine().generate(narrow))[short], tokens_of(rollout)[short])


def test_no_prompts_give_an_empty_rollout(tools, prompts):
    empty = tools.engine().generate(jax.tree.map(lambda x: x[:0], prompts))
    assert empty.response_tokens.shape == (0, 6)
    assert empty.hidden.shape == (0, 6, 32)


def test_greedy_takes_the_most_likely_token_with_certainty(tools, prompts):
    found = tools.engine().generate(prompts, SamplingConfig(greedy=True))
    logps = tools.log_softmax64(tools.teacher_forced(tools.model(), found), tools.model().head())
    mask = np.asarray(found.response_mask)
    np.testing.assert_array_equal(np.asarray(found.response_tokens)[mask], logps.argmax(-1)[mask])
    assert np.all(np.asarray(found.rollout_logps) == 0)  # the log-prob of a point mass


def test_temperature_and_nucleus_are_in_the_record(tools, prompts):
    sampling = SamplingConfig(temperature=0.6, top_p=0.7)
    found = tools.engine().generate(prompts, sampling)
    assert (found.temperature, found.top_p) == (0.6, 0.7)
    mask = np.asarray(found.response_mask)
    full = np.exp(tools.log_softmax64(tools.teacher_forced(tools.model(), found), tools.model().head(), 0.6))[mask]
    kept = np.unpackbits(np.asarray(found.support), axis=-1, bitorder="little")[mask].astype(bool)
    assert not kept[:, 13:].any()  # bits beyond the vocabulary
    kept = kept[:, :13]
    tokens = np.asarray(found.response_tokens)[mask]
    for p, support, token, logp in zip(full, kept, tokens, np.asarray(found.rollout_logps)[mask], strict=True):
        assert support[token]
        assert p[support].min() > p[~support].max()  # the most likely ones
        mass = p[support].sum()
        assert mass >= 0.7 - 1e-5  # enough of them
        assert mass - p[support].min() < 0.7 + 1e-5  # and not one more than needed
        assert logp == pytest.approx(np.log(p[token] / mass), abs=ATOL / 0.6)
    assert 1 < kept.sum(1).mean() < 12


def test_versions_are_those_of_the_weights_that_sampled(tools, prompts, rollout):
    mask = np.asarray(rollout.response_mask)
    np.testing.assert_array_equal(rollout.versions, np.where(mask, 1, -1))
    engine, newer = tools.engine(slots=5), tools.model(seed=1)
    before = engine.generate(prompts)
    assert engine.version == 1
    engine.update_weights(9, nnx.state(newer, nnx.Param))
    after = engine.generate(prompts)
    assert engine.version == 9
    np.testing.assert_array_equal(tokens_of(before), tokens_of(rollout))
    np.testing.assert_array_equal(after.versions, np.where(after.response_mask, 9, -1))
    expected = tools.at_tokens(tools.log_softmax64(tools.teacher_forced(newer, after), newer.head()), after)
    np.testing.assert_allclose(np.where(after.response_mask, after.rollout_logps, 0), expected, atol=ATOL)
    np.testing.assert_array_equal(engine.head_matrix(), newer.head())


@pytest.mark.slow  # rescore/test_zero_mismatch holds the same of its own programs
@pytest.mark.parametrize(
    ("n_experts", "dtype", "sampling"),
    [
        (0, "float32", SamplingConfig(temperature=0.8)),
        (4, "bfloat16", SamplingConfig(top_p=0.8)),
    ],
)
def test_batch_invariant_records_equal_a_full_forward_pass_to_the_bit(tools, prompts, n_experts, dtype, sampling):
    numerics = RolloutNumerics(dtype=dtype, batch_invariant=True)
    found = tools.engine(numerics, sampling, n_experts).generate(prompts)
    model, compute = tools.model(n_experts=n_experts), ComputeConfig(dtype=dtype, batch_invariant=True)
    hidden = tools.teacher_forced(model, found, compute)
    mask = np.asarray(found.response_mask)
    assert np.asarray(found.hidden)[mask].tobytes() == hidden[mask].tobytes()

    @jax.jit
    def recomputed(states, head, tokens, support):
        return head_token_logps(
            states, head, tokens, temperature=sampling.temperature, compute=compute, support=support
        )[0]

    support = None if found.support is None else np.asarray(found.support)[mask]
    logps = recomputed(hidden[mask], model.head(), np.asarray(found.response_tokens)[mask], support)
    assert np.asarray(found.rollout_logps)[mask].tobytes() == np.asarray(logps).tobytes()


@pytest.mark.slow
def test_router_noise_follows_from_prompt_and_seed_alone(tools, prompts):
    noisy = RolloutNumerics(routing_jitter=1.0)
    engine = tools.engine(noisy, n_experts=4)
    found = engine.generate(prompts)
    order = np.array([10, 4, 5, 0])
    some = jax.tree.map(lambda x: x[order], prompts)
    again = engine.generate(dataclasses.replace(some, group_ids=jnp.array([5, 6, 7, 8])))
    np.testing.assert_array_equal(tokens_of(again), tokens_of(found)[order])
    # The noise does something: log-probs are not those of the quiet model.
    model = tools.model(n_experts=4)
    quiet = tools.at_tokens(tools.log_softmax64(tools.teacher_forced(model, found), model.head()), found)
    assert np.abs(np.where(found.response_mask, found.rollout_logps, 0) - quiet).max() > 0.1


def test_hidden_states_are_left_out_when_not_asked_for(tools, prompts, rollout):
    model = tools.model()
    config = EngineConfig(slots=4, max_prompt_length=5, max_response_length=6, prefill_rows=2, decode_chunk=3)
    engine = InProcessEngine(
        model, config, numerics=RolloutNumerics(), sampling=SamplingConfig(), eos_ids=tools.eos, record_hidden=False
    )
    engine.update_weights(1, nnx.state(model, nnx.Param))
    found = engine.generate(prompts)
    assert found.hidden is None
    np.testing.assert_array_equal(tokens_of(found), tokens_of(rollout))


def test_without_end_tokens_every_response_has_full_length(tools, prompts):
    model = tools.model()
    config = EngineConfig(slots=3, max_prompt_length=5, max_response_length=2, prefill_rows=2, decode_chunk=5)
    engine = InProcessEngine(model, config, numerics=RolloutNumerics(), sampling=SamplingConfig(), eos_ids=())
    engine.update_weights(1, nnx.state(model, nnx.Param))
    found = engine.generate(prompts)
    assert np.asarray(found.response_mask).all()
    assert not np.asarray(found.finished).any()
