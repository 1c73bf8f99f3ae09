"""RL on each architecture: finite losses, weights that move, and what is left of the mismatch when nothing differs."""

from __future__ import annotations

import jax
import numpy as np
import pytest

NO_EVALUATION = {"eval.prompts": 0}
# Three blocks, so that a group of blocks holds more than one also where the first is dense.
SMALL = {"model.n_layers": 3, "model.d_model": 16, "model.n_heads": 2, "model.d_ff": 16}
MIXTURE = {"model.n_experts": 4, "model.experts_per_token": 2}
KINDS = {
    "llama": {"model.shape": {"tie_embeddings": True}},
    "qwen2": {"model.shape": {"n_kv_heads": 1}},
    "qwen3": {"model.shape": {"n_kv_heads": 1}},
    "qwen2_moe": MIXTURE,
    "qwen3_moe": MIXTURE | {"model.shape": {"n_kv_heads": 1}},
    "deepseek_v2": MIXTURE,
}
ON_POLICY = {
    "steps": 3,
    "rollout.lag": 0,
    "loss.minibatches": 1,
    "rollout.slots": 5,  # not all sequences decode together, and not always the same ones
}


def go(run, **options) -> list[dict]:
    records: list[dict] = []
    run.run(on_step=lambda step, record: records.append(record), **options)
    return records


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_batch_invariant_arithmetic_without_lag_has_no_mismatch_at_all(make_config, make_run, kind):
    """To the bit, over updates, in every part: biases, norms of queries and keys, latents, experts, shared experts."""
    changes = {
        "model.architecture": kind,
        "model.batch_invariant": True,
        "rollout.numerics": {"batch_invariant": True},
        "rollout.top_p": 0.8,
        "model.replay_routes": kind == "qwen3_moe",  # to replay what one would choose oneself changes no bit
    }
    run = make_run(make_config(NO_EVALUATION | SMALL | KINDS[kind] | ON_POLICY | changes))
    records = go(run)
    assert records[-1]["version"] >= 2  # the weights did move in between
    for record in records:
        assert np.isfinite(record["optim/loss"])
        assert record["mismatch/bitwise_equal_fraction"] == 1.0
        for name in ("log_ratio_max_abs", "log_ratio_sd", "ppl_gap"):
            assert record[f"mismatch/{name}"] == 0.0, name
        for name in ("token_kl_mean", "token_kl_max", "token_tv_mean", "token_tv_max"):
            assert record[f"mismatch/{name}"] == 0.0, name
        assert record["rollout/staleness_mean"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "deepseek_v2"])
def test_plain_arithmetic_differs_by_rounding_alone(make_config, make_run, kind):
    run = make_run(make_config(NO_EVALUATION | SMALL | KINDS[kind] | ON_POLICY | {"model.architecture": kind}))
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(run.params)]
    records = go(run)
    assert records[-1]["version"] >= 2
    for record in records:
        assert np.isfinite(record["optim/loss"])
        assert np.isfinite(record["optim/grad_norm"])
        # Decode and full pass sum in different orders: three blocks of width 16 in float32.
        assert record["mismatch/log_ratio_max_abs"] < 1e-4
        assert record["mismatch/token_kl_max"] < 1e-8
    for a, b in zip(before, jax.tree.leaves(run.params), strict=True):
        assert np.isfinite(np.asarray(b)).all()
        assert (a != np.asarray(b)).any()


@pytest.mark.slow
def test_replay_leaves_no_mismatch_of_router_noise_but_in_the_experts_weights(make_config, make_run, tmp_path):
    changes = NO_EVALUATION | SMALL | KINDS["qwen3_moe"] | ON_POLICY
    changes |= {"steps": 1, "model.architecture": "qwen3_moe", "rollout.numerics": {"routing_jitter": 0.005}}
    changes |= {"rollout.prompts_per_step": 16, "rollout.samples_per_prompt": 8}
    (free,) = go(make_run(make_config(changes), directory=tmp_path / "free"))
    (replayed,) = go(make_run(make_config(changes | {"model.replay_routes": True}), directory=tmp_path / "replayed"))
    assert replayed["reward/mean"] == free["reward/mean"]  # the same samples
    assert free["mismatch/token_kl_max"] > 100 * replayed["mismatch/token_kl_max"]


@pytest.mark.slow
def test_a_mixture_resumes_to_the_same_bits(make_config, make_run, tmp_path):
    """With parameters of bfloat16, whose updates are rounded at random."""
    changes = (
        NO_EVALUATION
        | SMALL
        | KINDS["qwen2_moe"]
        | {
            "model.architecture": "qwen2_moe",
            "model.param_dtype": "bfloat16",
            "model.replay_routes": True,
            "model.remat": "dots",
            "rollout.lag": 1,
            "steps": 4,
            "checkpoint.every": 1,
        }
    )
    whole = make_run(make_config(changes), directory=tmp_path / "whole")
    records = go(whole)
    first = make_run(make_config(changes), directory=tmp_path / "parts")
    outcome = first.run(on_step=lambda *_: None, should_stop=lambda: first.step == 2)
    assert (outcome.status, outcome.step) == ("stopped", 2)
    second = make_run(make_config(changes), directory=tmp_path / "parts")
    assert second.resume()
    again = go(second)
    leaves = [[np.asarray(x).tobytes() for x in jax.tree.leaves(run._state)] for run in (whole, second)]
    assert leaves[0] == leaves[1]
    assert {x.dtype.name for x in jax.tree.leaves(second.params)} == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(second._state.opt_state)} <= {"float32", "int32"}
    assert [row["optim/loss"] for row in again] == [row["optim/loss"] for row in records[2:]]
    assert records[-1]["version"] >= 4
