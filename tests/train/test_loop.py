"""A whole run in process, on the toy: what it keeps, what it says, and when it stops."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax.train import Checkpointer, CheckpointError, NonFiniteError

NO_EVALUATION = {"eval.prompts": 0}


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def go(run, **options) -> list[dict]:
    records: list[dict] = []
    run.run(on_step=lambda step, record: records.append(record), **options)
    return records


@pytest.mark.slow
def test_held_weights_are_the_last_versions_and_stay_alive(make_config, make_run):
    """The update donates the state: what the engine still needs must be copies."""
    run = make_run(make_config(NO_EVALUATION))
    records = go(run)
    final = int(records[-1]["version"])
    assert final >= 4  # two minibatches a step, some of them without advantage
    held = run._source.held
    assert [version for version, _ in held] == [final - 2, final - 1, final]
    leaves = [jax.tree.leaves(params) for _, params in held]
    assert not any(leaf.is_deleted() for group in leaves for leaf in group)
    assert bits(held[-1][1]) == bits(run.params)
    assert bits(held[0][1]) != bits(held[1][1]) != bits(held[2][1])
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    # The engine is two updates behind as soon as two updates exist.
    for before, record in itertools.pairwise(records):
        assert record["rollout/staleness_mean"] == min(2, before["version"])


@pytest.mark.slow
def test_samples_stand_as_text_beside_the_checkpoint(make_config, make_run, tmp_path):
    (record,) = go(make_run(make_config(NO_EVALUATION | {"steps": 1})))
    (path,) = (tmp_path / "run" / "samples").iterdir()
    assert path.name == "step00000001.json"
    rows = json.loads(path.read_text())
    assert len(rows) == 8  # all of this small step
    assert sum(row["reward"] for row in rows) / 8 == record["reward/mean"]
    for row in rows:
        assert row["prompt"].startswith(row["reference"] + "+")
        assert row["reward"] == float(row["response"][:1] in ("0", "2", "4", "6", "8"))


@pytest.mark.slow
def test_equal_rewards_leave_the_policy_alone_and_say_why(make_config, make_run):
    run = make_run(make_config(NO_EVALUATION | {"steps": 2}), reward=lambda problem, response: 0.5)
    start = bits(run.params)
    records = go(run)
    assert bits(run.params) == start
    assert [(record["version"], record["optim/skipped"]) for record in records] == [(0, 1.0), (0, 1.0)]
    assert [note.partition(":")[0] for note in run.notes] == ["step 1", "step 2"]
    assert "all rewards within every group are equal (mean 0.50)" in run.notes[0]
    assert "the optimizer is untouched" in run.notes[0]


def test_a_reward_that_is_not_a_number_is_named_and_ends_the_run(make_config, make_run, driver, tmp_path):
    calls = []

    def reward(problem, response):
        calls.append(response)
        return math.nan if len(calls) == 2 * 8 + 3 else driver.even_digit(problem, response)  # third step, third row

    run = make_run(make_config(NO_EVALUATION), reward=reward)
    with pytest.raises(ValueError, match=r"the reward of toy\[\d\] \(row 2\) is nan"):
        go(run)
    assert run.step == 2
    assert Checkpointer(tmp_path / "run" / "checkpoints").steps() == [2]


def test_a_gradient_that_is_not_finite_stops_the_run_with_evidence(make_config, make_run, tmp_path):
    run = make_run(make_config(NO_EVALUATION))
    proper = run._programs.advantages

    def advantages(rewards, groups, **options):
        out = proper(rewards, groups, **options)
        return out.at[1].set(jnp.nan) if run.step == 2 else out  # row 1 stands in the second minibatch

    run._programs = dataclasses.replace(run._programs, advantages=advantages)
    words = r"step 3: the loss or its gradient is not finite\. This update was not made; .* checkpoint is step 2\."
    with pytest.raises(NonFiniteError, match=words) as caught:
        go(run)
    assert run.step == 2
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(run.params))
    (path,) = (tmp_path / "run").glob("*.npz")
    assert str(path) in str(caught.value)
    with np.load(path) as evidence:
        assert evidence["rewards"].shape == (8,)
        assert len(json.loads(str(evidence["texts"]))) == 8
        assert np.isnan(evidence["advantages"]).tolist() == [True, False, False, False]
        assert evidence["scored.proximal_logps"].shape == (4, 3)

    # The same configuration resumes from the last good checkpoint.
    again = make_run(make_config(NO_EVALUATION))
    assert again.resume()
    assert again.step == 2
    go(again)
    assert again.step == 5


def kill_weights(run) -> None:
    run._state = dataclasses.replace(run._state, params=jax.tree.map(lambda x: x * jnp.nan, run.params))


def test_a_dead_policy_stops_the_run(make_config, make_run, tmp_path):
    run = make_run(make_config(NO_EVALUATION))
    kill_weights(run)
    with pytest.raises(NonFiniteError, match=r"step 1: a log-prob in every sequence is not finite.*no checkpoint"):
        go(run)
    with np.load(tmp_path / "run" / "nonfinite_step00000001.npz") as evidence:
        mask = evidence["scored.response_mask"]
        assert np.isnan(evidence["scored.proximal_logps"][mask]).all()
        assert evidence["rollout.hidden"].shape == (8, 3, 16)


def test_evidence_that_cannot_be_written_does_not_hide_the_error(make_config, make_run, monkeypatch):
    run = make_run(make_config(NO_EVALUATION))
    kill_weights(run)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(NonFiniteError, match=r"is not finite.*could not be written .*No space left"):
        go(run)


def test_asked_to_stop_before_it_began_it_does_nothing(make_config, make_run, tmp_path):
    run = make_run(make_config(NO_EVALUATION))
    outcome = run.run(on_step=lambda *_: pytest.fail("a step was made"), should_stop=lambda: True)
    assert (outcome.status, outcome.step) == ("stopped", 0)
    assert Checkpointer(tmp_path / "run" / "checkpoints").steps() == []


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_keeps_the_last(make_config, make_run, monkeypatch):
    run = make_run(make_config(NO_EVALUATION))
    save = run._checkpoints.save

    def full(step, arrays, state):
        if step == 4:
            monkeypatch.setattr("trm_jax.checkpoint._flush", _full)
        return save(step, arrays, state)

    def _full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run._checkpoints, "save", full)
    with pytest.raises(CheckpointError, match=r"step_00000004 .*No space left.*Kept: step_00000002"):
        go(run)


def test_another_model_does_not_resume_these_arrays(make_config, make_run):
    run = make_run(make_config(NO_EVALUATION | {"steps": 2, "checkpoint.every": 1}))
    go(run)
    other = make_run(make_config(NO_EVALUATION | {"model.d_ff": 32}))
    with pytest.raises(CheckpointError, match=r"float32\[1, 16, 16\] there and float32\[1, 32, 16\] here"):
        other.resume()


@pytest.mark.slow  # that the state is untouched then is held by test_step
def test_everything_rejected_is_said_aloud(make_config, make_run):
    changes = {
        "steps": 1,
        "rollout.numerics": {"weight_format": "bfloat16"},  # bfloat16 weights: some KL in every sequence
        "correction": {"preset": "trm_max", "max_token_kl": 0.0},
    }
    run = make_run(make_config(NO_EVALUATION | changes))
    start = bits(run.params)
    (record,) = go(run)
    assert bits(run.params) == start
    assert record["mismatch/token_kl_mean"] > 1e-7
    assert record["correction/sequence_keep_fraction"] == 0
    assert (record["version"], record["optim/skipped"], record["optim/grad_norm"]) == (0, 1.0, 0.0)
    assert "the correction rejected every sequence" in run.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_eight_devices_give_the_numbers_of_one(make_config, make_run, driver, tmp_path, kind):
    changes = NO_EVALUATION | {
        "model.architecture": kind,
        "steps": 3,
        "rollout.prompts_per_step": 4,
        "rollout.lag": 1,
        "rollout.numerics": {"weight_format": "bfloat16"},
        "loss.microbatch_rows": 4,
        "optimizer.learning_rate": 1e-3,
        "correction": {"preset": "trm_combined + cis", "max_token_kl": 0.5, "mean_token_kl": 0.1},
    }
    if kind == "qwen3_moe":
        changes |= {"model.n_experts": 4, "model.replay_routes": True}
    meshes = set()

    def reward(problem, response):
        meshes.add(tuple(jax.sharding.get_abstract_mesh().shape.items()))
        return driver.even_digit(problem, response)

    one = make_run(make_config(changes), directory=tmp_path / "one")
    on_eight = changes | {"mesh.data": 4, "mesh.tensor": 2}
    many = make_run(make_config(on_eight), directory=tmp_path / "many", reward=reward)
    embedding = many.params["embedding"].get_value()
    assert len(embedding.sharding.device_set) == 8
    assert embedding.addressable_shards[0].data.shape == (7, 16)  # the vocabulary of 14 in two halves
    plain, sharded = go(one), go(many)
    assert meshes == {(("data", 4), ("tensor", 2))}  # what a mixture needs to sort each device's own tokens
    assert plain[-1]["version"] == sharded[-1]["version"] >= 4
    same = [name for name in plain[0] if not name.startswith(("time/", "memory/"))]
    for a, b in zip(plain, sharded, strict=True):
        for name in same:
            if isinstance(a[name], float) and name != "mismatch/bitwise_equal_fraction":
                # Sums over two devices round otherwise: 1e-6 a sum, grown by three updates of Adam.
                np.testing.assert_allclose(b[name], a[name], rtol=2e-3, atol=2e-4, err_msg=name)
            elif name != "mismatch/bitwise_equal_fraction":
                assert a[name] == b[name], name
    for x, y in zip(jax.tree.leaves(one.params), jax.tree.leaves(many.params), strict=True):
        np.testing.assert_allclose(np.asarray(y), np.asarray(x), atol=2e-4)
    # Its checkpoint goes back to the same devices, to the bit.
    again = make_run(make_config(on_eight), directory=tmp_path / "many")
    assert again.resume()
    assert bits(again.params) == bits(many.params)
    assert again.params["embedding"].get_value().sharding == embedding.sharding
