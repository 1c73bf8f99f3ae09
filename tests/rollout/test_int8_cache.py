"""An int8 key/value cache as a source of mismatch: it is recorded as it was sampled from, and lies a little off."""

from __future__ import annotations

import numpy as np
import pytest

from trm_jax.rollout import RolloutNumerics


@pytest.mark.slow
def test_its_policy_is_near_the_trainers_and_recorded_as_its_own(tools):
    prompts = tools.prompts(11, samples=2)
    model, kl = tools.model(), {}
    for dtype in ("int8", "bfloat16"):
        found = tools.engine(RolloutNumerics(kv_cache_dtype=dtype)).generate(prompts)
        mask = np.asarray(found.response_mask)
        own = tools.log_softmax64(found.hidden, model.head())
        # The record is the engine's own policy, to the rounding of a float32 softmax ...
        recorded = np.where(mask, found.rollout_logps, 0)
        np.testing.assert_allclose(recorded, tools.at_tokens(own, found), atol=3e-5)
        trainer = tools.log_softmax64(tools.teacher_forced(model, found), model.head())
        kl[dtype] = (np.exp(own) * (own - trainer)).sum(-1)[mask]
    # ... which is the trainer's but for the rounding of keys and values: at most 1/254 of a head's largest value in
    # int8, 1/512 of each value in bfloat16. KL is quadratic in it: 0.4 % of logits of order 1 give 1e-5.
    for values in kl.values():
        assert 1e-8 < values.mean() < 3e-4
        assert values.min() > -1e-12
