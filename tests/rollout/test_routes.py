"""The experts that an engine records: those that ran, at every position of the training row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.rollout import EngineConfig, InProcessEngine, RolloutNumerics, SamplingConfig


@pytest.fixture(scope="module")
def prompts(tools):
    return tools.prompts(9, samples=2)


@pytest.fixture(scope="module")
def rollout(tools, prompts):
    """Nine requests in four slots, pairs of them with one prompt."""
    return tools.engine(n_experts=4, record_routes=True).generate(prompts)


def rows_of(rollout) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and response joined, zeros behind; and how many positions the engine ran: all but the last token."""
    tokens, masks = np.asarray(rollout.response_tokens), np.asarray(rollout.response_mask)
    prompt, prompt_mask = np.asarray(rollout.prompt_tokens), np.asarray(rollout.prompt_mask)
    rows = np.zeros((len(tokens), prompt.shape[1] + tokens.shape[1]), np.int32)
    for b in range(len(rows)):
        joined = np.concatenate([prompt[b][prompt_mask[b]], tokens[b][masks[b]]])
        rows[b, : len(joined)] = joined
    return rows, prompt_mask.sum(1) + masks.sum(1) - 1


def test_they_are_those_of_a_full_forward_pass(tools, rollout):
    rows, ran = rows_of(rollout)
    model = tools.model(n_experts=4)
    out = jax.jit(lambda p, t: nnx.merge(nnx.graphdef(model), p)(t))(nnx.state(model, nnx.Param), rows)
    expected = np.moveaxis(np.asarray(out.routed_experts), 0, 2)
    found = np.asarray(rollout.routed_experts)
    assert found.shape == (9, 11, 2, 2)  # rows, P + T positions, blocks, experts a token
    assert found.dtype == np.int16
    was_run = np.arange(11)[None, :] < ran[:, None]
    assert float(np.moveaxis(np.asarray(out.router_margins), 0, 2)[was_run].min()) > 1e-4  # rounding flips nothing
    np.testing.assert_array_equal(found[was_run], expected[was_run])
    assert len(np.unique(found[was_run])) == 4
    assert (found[~was_run] == -1).all()  # the last token was never run, and behind it is padding
    assert (~was_run).any(axis=1).all()


@pytest.mark.slow
def test_recording_changes_nothing_else(tools, prompts, rollout):
    plain = tools.engine(n_experts=4).generate(prompts)
    assert plain.routed_experts is None
    np.testing.assert_array_equal(plain.response_tokens, rollout.response_tokens)
    np.testing.assert_array_equal(plain.rollout_logps, rollout.rollout_logps)


def test_a_dense_model_has_none_to_record(tools):
    config = EngineConfig(max_prompt_length=5, max_response_length=6)
    with pytest.raises(ValueError, match=r"record_routes=True needs a mixture of experts"):
        InProcessEngine(
            tools.model(), config, numerics=RolloutNumerics(), sampling=SamplingConfig(), eos_ids=(), record_routes=True
        )


def test_an_empty_batch_has_empty_routes(tools, prompts):
    engine = tools.engine(n_experts=4, record_routes=True)
    assert engine.generate(jax.tree.map(lambda x: jnp.asarray(x)[:0], prompts)).routed_experts.shape == (0, 11, 2, 2)
