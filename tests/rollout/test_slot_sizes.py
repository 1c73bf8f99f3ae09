"""Few or short prompts take smaller programs than many or long ones; what is sampled must not tell."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.rollout import Columns, EngineConfig, RolloutNumerics, SamplingConfig, SlotEngine, chunk_steps

SIZES = EngineConfig(slots=16, prefill_rows=16, decode_chunk=4, max_prompt_length=24, max_response_length=6)


@pytest.fixture(scope="module")
def engine(tools) -> SlotEngine:
    return SlotEngine(tools.model(), SIZES, numerics=RolloutNumerics(), eos_ids=())


@pytest.mark.slow
def test_a_prompt_samples_the_same_in_every_size_and_two_of_each_are_compiled(tools, engine):
    policy = engine.load(3, nnx.state(tools.model(), nnx.Param))
    rng = np.random.default_rng(0)
    short = [[1, 2, 4], [5]]
    long = [rng.integers(0, 13, 24).tolist() for _ in range(14)]
    found = []
    for prompts in (short, [*long, *short]):
        prefix = engine.prefill(policy, prompts)
        first = len(prompts) - 2
        starts = [(3 * i % 16, i, 40 + i - first, 6, SamplingConfig()) for i in range(len(prompts))]
        # A slot that held something before: what is left of it beyond a short prefix must not be attended to.
        state, _ = engine.generate(policy, engine.insert(prefix, engine.empty_state(), starts))
        state = engine.insert(engine.prefill(policy, short), state, [(7, 0, 40, 6, SamplingConfig())])
        state, chunk = engine.generate(policy, state)
        columns = Columns.of(np.asarray(chunk.data))
        found.append((columns.tokens[7], columns.logps[7], columns.versions[7]))
        _, chunk = engine.generate(policy, engine.insert(prefix, engine.empty_state(), starts))
        columns = Columns.of(np.asarray(chunk.data))
        rows = [slot for slot, row, *_ in starts if row >= first]
        found.append((columns.tokens[rows[0]], columns.logps[rows[0]], columns.versions[rows[0]]))
    for tokens, logps, version in found[1:]:
        np.testing.assert_array_equal(tokens, found[0][0])
        np.testing.assert_allclose(logps, found[0][1], atol=3e-5)  # as in test_engine
        assert version == 3
    assert engine.compilations() == 2 + 2 + 1


def test_a_call_makes_as_many_steps_as_it_is_asked_for(tools, engine):
    policy = engine.load(1, nnx.state(tools.model(), nnx.Param))
    start = (2, 0, 40, 6, SamplingConfig())

    def state():
        return engine.insert(engine.prefill(policy, [[1, 2, 4]]), engine.empty_state(), [start])

    _, whole = engine.generate(policy, state())
    whole = Columns.of(np.asarray(whole.data))
    assert whole.valid[2].tolist() == [1, 1, 1, 1]
    after, first = engine.generate(policy, state(), 2)
    _, second = engine.generate(policy, after, 2)
    first, second = (Columns.of(np.asarray(chunk.data)) for chunk in (first, second))
    assert first.valid[2].tolist() == [1, 1, 0, 0]
    assert (first.length[2], second.length[2]) == (1, 3)
    joined = np.concatenate([first.tokens[2, :2], second.tokens[2, :2]])
    np.testing.assert_array_equal(joined, whole.tokens[2])
    assert len(set(joined.tolist())) > 1


def test_what_broken_weights_left_in_a_slot_reaches_nobody_after_them(tools, engine):
    """A weight of 0 does not remove a NaN: behind a short prompt, nothing of an earlier long one may stand."""
    params = nnx.state(tools.model(), nnx.Param)
    good = engine.load(1, params)
    broken = engine.load(2, jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params))
    start = [(2, 0, 40, 6, SamplingConfig())]
    prefix = engine.prefill(good, [[1, 2, 4]])
    _, expected = engine.generate(good, engine.insert(prefix, engine.empty_state(), start))
    state = engine.insert(engine.prefill(broken, [[1] * 24]), engine.empty_state(), start)
    state, chunk = engine.generate(broken, state)
    assert np.isnan(Columns.of(np.asarray(chunk.data)).logps[2]).all()
    _, found = engine.generate(good, engine.insert(prefix, state, start))
    np.testing.assert_array_equal(np.asarray(found.data)[2], np.asarray(expected.data)[2])


@pytest.mark.parametrize(
    ("left", "free", "expected"),
    [([40, 7], False, 7), ([40, 2], False, 4), ([40, 90], False, 16), ([], False, 16), ([40, 7], True, 4)],
)
def test_steps_by_hand(left, free, expected):
    assert chunk_steps(16, left, free=free) == expected
