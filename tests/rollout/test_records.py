"""What an engine records besides token and log-prob: most likely tokens, and how its cut supports are drawn from."""

from __future__ import annotations

import numpy as np
import pytest

from trm_jax.rollout import EngineConfig, InProcessEngine, RolloutNumerics, SamplingConfig

ATOL = 3e-5  # as in test_engine


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=0.5, top_k=4)])
def test_most_likely_tokens_are_the_models_at_temperature_one(tools, sampling):
    found = tools.engine(record_top_logps=3).generate(tools.prompts(7), sampling)
    model, mask = tools.model(), np.asarray(found.response_mask)
    logps = tools.log_softmax64(tools.teacher_forced(model, found), model.head())[mask]
    order = np.argsort(-logps, axis=-1)[:, :3]
    assert np.diff(np.take_along_axis(-logps, order, -1)).min() > 1e-4  # no ties that rounding could turn
    np.testing.assert_array_equal(np.asarray(found.top_tokens)[mask], order)
    np.testing.assert_allclose(np.asarray(found.top_logps)[mask], np.take_along_axis(logps, order, -1), atol=ATOL)
    assert (np.asarray(found.top_logps)[~mask] == 0).all()


@pytest.mark.parametrize(
    "sampling",
    [SamplingConfig(top_k=3), SamplingConfig(temperature=1.4, min_p=0.2), SamplingConfig(top_k=5, top_p=0.7)],
)
def test_top_k_and_min_p_in_process_cut_and_record_the_support(tools, sampling):
    found = tools.engine().generate(tools.prompts(11, samples=2), sampling)
    mask, tokens = np.asarray(found.response_mask), np.asarray(found.response_tokens)
    model = tools.model()
    full = np.exp(tools.log_softmax64(tools.teacher_forced(model, found), model.head(), sampling.temperature))[mask]
    kept = np.unpackbits(np.asarray(found.support), axis=-1, count=13, bitorder="little")[mask].astype(bool)
    for p, support, token, logp in zip(full, kept, tokens[mask], np.asarray(found.rollout_logps)[mask], strict=True):
        order = np.argsort(-p)
        left = [v for v in order if p[v] >= sampling.min_p * p.max()][: sampling.top_k or None]
        mass = np.cumsum(p[left]) / p[left].sum()
        expected = left[: 1 + int((mass[:-1] < sampling.top_p).sum())]
        assert set(np.flatnonzero(support)) == set(expected)
        assert logp == pytest.approx(np.log(p[token] / p[expected].sum()), abs=ATOL)
    assert kept.sum(1).min() < 13


def test_more_of_them_than_there_are_tokens_is_refused(tools):
    with pytest.raises(ValueError, match="record_top_logps=14: the vocabulary has 13"):
        InProcessEngine(
            tools.model(),
            EngineConfig(max_prompt_length=5, max_response_length=6),
            numerics=RolloutNumerics(),
            sampling=SamplingConfig(),
            eos_ids=(),
            record_top_logps=14,
        )
