"""An engine and a trainer with the same batch-invariant arithmetic are one policy, to the bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.models import ComputeConfig
from trm_jax.rescore import policy_logps, rescore
from trm_jax.rollout import EngineConfig, InProcessEngine, RolloutNumerics, SamplingConfig
from trm_jax.types import PromptBatch


def sampled(model, numerics, sampling):
    """12 responses in 5 slots."""
    config = EngineConfig(slots=5, max_prompt_length=4, max_response_length=5, prefill_rows=3, decode_chunk=4)
    engine = InProcessEngine(model, config, numerics=numerics, sampling=sampling, eos_ids=(2, 7))
    engine.update_weights(0, nnx.state(model, nnx.Param))
    rng = np.random.default_rng(0)
    prompts = PromptBatch(
        tokens=jnp.asarray(rng.integers(0, 12, (12, 4)), jnp.int32),
        mask=jnp.asarray(np.arange(4) < rng.integers(1, 5, 12)[:, None]),
        group_ids=jnp.arange(12, dtype=jnp.int32),
        seeds=jnp.arange(12, dtype=jnp.uint32),
    )
    return engine.generate(prompts), engine.head_matrix()


@pytest.mark.parametrize(
    ("n_experts", "dtype", "sampling"),
    [
        (0, "float32", SamplingConfig(temperature=0.8, top_p=0.8)),
        pytest.param(0, "bfloat16", SamplingConfig(), marks=pytest.mark.slow),
        pytest.param(4, "bfloat16", SamplingConfig(temperature=0.8, top_p=0.8), marks=pytest.mark.slow),
        pytest.param(4, "float32", SamplingConfig(temperature=1.3), marks=pytest.mark.slow),
    ],
)
def test_proximal_is_rollout_to_the_bit_and_divergence_is_nil(tools, n_experts, dtype, sampling):
    model = tools.model(n_experts=n_experts)
    rollout, head = sampled(model, RolloutNumerics(dtype=dtype, batch_invariant=True), sampling)
    compute = ComputeConfig(dtype=dtype, batch_invariant=True)
    graphdef, params = nnx.split(model, nnx.Param)
    mask = np.asarray(rollout.response_mask)
    recorded = np.asarray(rollout.rollout_logps)[mask]
    assert len(np.unique(recorded)) > 10

    run = jax.jit(lambda p, r, h: rescore(graphdef, p, r, h, compute=compute, microbatches=3))
    scored, checks = run(params, rollout, head)
    assert np.asarray(scored.proximal_logps)[mask].tobytes() == recorded.tobytes()
    assert np.all(np.asarray(scored.token_kl)[mask] == 0)
    assert np.all(np.asarray(scored.token_tv)[mask] == 0)
    np.testing.assert_array_equal(
        np.asarray(scored.policy_entropy)[mask] > 0, np.asarray(scored.rollout_entropy)[mask] > 0
    )
    assert float(checks["max/recorded_logp_error"][0]) < 2e-5  # another formula for the same number, in float32

    # The loss sees the same bits as the rescore, inside a gradient and with rematerialisation.
    @jax.jit
    def in_loss(params):
        def loss(p):
            logps, _ = policy_logps(nnx.merge(graphdef, p), rollout, compute=compute, remat=True)
            return jnp.sum(jnp.where(rollout.response_mask, logps, 0.0)), logps

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, logps), grads = in_loss(params)
    assert np.asarray(logps)[mask].tobytes() == recorded.tobytes()
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in jax.tree.leaves(grads))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [SamplingConfig(temperature=0.8, top_p=0.8)])
def test_the_plain_arithmetic_on_policy_has_ratio_one_within_rounding(tools, sampling):
    """With top-p the recorded log-probs are renormalised; the support on both sides is what makes the ratio 1."""
    model = tools.model()
    rollout, head = sampled(model, RolloutNumerics(), sampling)
    graphdef, params = nnx.split(model, nnx.Param)
    scored, _ = tools.rescore(graphdef, params, rollout, head, ComputeConfig())
    mask = np.asarray(rollout.response_mask)
    ratio = np.exp(np.asarray(scored.proximal_logps) - np.asarray(scored.rollout_logps))[mask]
    np.testing.assert_allclose(
        ratio, 1.0, atol=1e-4
    )  # decode and full pass round differently, over a temperature of 0.8
    assert np.asarray(scored.token_kl)[mask].max() < 1e-8  # second order in a logit error of 1e-5
    assert np.asarray(scored.token_tv)[mask].max() < 1e-4
