"""Whole runs that sample ahead, on the toy and in one process: which bits they end with, and what they leave out."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time

import numpy as np
import pytest

from trm_jax.train import Checkpointer
from trm_jax.train.ahead import Ahead
from trm_jax.train.sampling import Sampler

BASE = {"eval.prompts": 0, "rollout.lag": 0, "loss.minibatches": 1}


@pytest.mark.slow
def test_at_staleness_0_sampling_in_a_thread_changes_no_bit(learns, make_config, go, bits):
    in_turn, apart = learns("turn", {}), learns("apart", {})
    config = make_config(BASE)
    assert config.ahead == 0
    sampler = Sampler(apart._experiment, config)
    apart._source = Ahead(sampler, config, apart.params, context=contextlib.nullcontext)
    assert go(in_turn) == go(apart)
    assert bits(in_turn.params) == bits(apart.params)
    assert in_turn.step == 5
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts-ahead"]


@pytest.mark.slow
@pytest.mark.parametrize(("minibatches", "staleness"), [(1, 2), (2, 4)])
def test_what_runs_ahead_ends_with_the_bits_of_what_is_held_back(learns, monkeypatch, minibatches, staleness, go, bits):
    """Two steps ahead in a thread, and two steps' updates held back in turn; whichever side is the slow one."""
    held_back = learns("back", {"rollout.lag": staleness, "loss.minibatches": minibatches})
    expected = go(held_back)
    assert [row["version"] for row in expected] == [minibatches * (step + 1) for step in range(5)]
    assert [row["rollout/staleness_mean"] for row in expected] == [minibatches * min(2, step) for step in range(5)]
    sample = Sampler.sample

    def sluggish(self, step):
        time.sleep(0.05 * (step % 3))
        return sample(self, step)

    for name, slow in (("ahead", False), ("slow", True)):
        if slow:
            monkeypatch.setattr(Sampler, "sample", sluggish)
        ahead = learns(name, {"rollout.max_staleness": staleness, "loss.minibatches": minibatches})
        assert go(ahead) == expected
        assert bits(ahead.params) == bits(held_back.params)


@pytest.mark.slow
def test_a_run_that_was_stopped_while_batches_waited_ends_with_the_same_bits(learns, same_run, tmp_path, go, bits):
    changes = {"rollout.max_staleness": 3, "checkpoint.every": 1}
    whole = learns("whole", changes)
    expected = go(whole)
    first = learns("parts", changes)
    records = go(first, should_stop=lambda: first.step >= 2)
    assert len(records) == 2
    again = learns("parts", changes)
    assert again.resume()
    assert records + go(again) == expected
    assert bits(again.params) == bits(whole.params)
    _, _, state = Checkpointer(tmp_path / "parts" / "checkpoints").restore_latest(
        lambda saved: {"state": whole._state, "held": [whole.params] * len(saved["held_versions"])}
    )
    assert state["held_versions"] == [2, 3, 4, 5]
    assert state["stream"]["next_index"] == 5


def aged(run, step: int, rows: list[int], versions: int) -> None:
    """Has the first token of some rows of one step's samples be of an older version than it is."""
    take, steps = run._source.take, iter(range(100))

    def taken():
        sampled = take()
        if next(steps) != step:
            return sampled
        older = np.array(sampled.rollout.versions)
        older[rows, 0] -= versions
        return dataclasses.replace(sampled, rollout=dataclasses.replace(sampled.rollout, versions=older))

    run._source.take = taken


@pytest.mark.slow
def test_a_group_with_a_sample_that_is_too_old_is_left_out_and_counted(learns, go):
    changes = {"steps": 3, "rollout.max_staleness": 1}
    plain, run = learns("plain", changes), learns("aged", changes)
    programs, seen = run._programs, []

    def update(state, batch):
        seen.append(np.asarray(batch.rollout.response_mask).any(axis=1).tolist())
        return programs.update(state, batch)

    run._programs = dataclasses.replace(programs, update=update)
    aged(run, 2, [6], 1)  # of group 1; its weights are one update old, which may be, and now two, which may not
    expected, records = go(plain), go(run)
    assert records[:2] == expected[:2]
    assert [row["rollout/dropped_groups"] for row in records] == [0.0, 0.0, 1.0]
    assert [row["rollout/staleness_max"] for row in records] == [0.0, 1.0, 2.0]
    assert seen == [[True] * 8, [True] * 8, [True] * 4 + [False] * 4]
    # The four samples that are left are learnt from, and the reward is that of all that were sampled.
    assert records[2]["version"] == 3
    assert records[2]["reward/mean"] == expected[2]["reward/mean"]
    assert records[2]["optim/grad_norm"] != expected[2]["optim/grad_norm"]
    assert run._sampled_tokens == plain._sampled_tokens


@pytest.mark.slow
def test_in_turn_no_sample_is_older_than_it_was_told_to_be(learns, go):
    """What the bound is when nothing runs ahead: the lag. An engine that lies about its weights is found out."""
    run = learns("lied", {"steps": 3, "rollout.lag": 1})
    aged(run, 1, [0], 1)
    assert [row["rollout/dropped_groups"] for row in go(run)] == [0.0, 1.0, 0.0]


def test_a_step_whose_samples_are_all_too_old_leaves_the_policy_alone_and_says_so(learns, go, bits):
    run = learns("none", {"steps": 2, "rollout.max_staleness": 1})
    aged(run, 1, [0, 4], 1)
    after_first: list = []
    keep = run._source.after_step
    run._source.after_step = lambda version, params: (after_first.append(bits(params)), keep(version, params))
    records = go(run)
    assert [row["rollout/dropped_groups"] for row in records] == [0.0, 2.0]
    assert [(row["version"], row["optim/skipped"]) for row in records] == [(1, 0.0), (1, 1.0)]
    assert "step 2: update skipped" in run.notes[0]
    assert "every sample was older than rollout.max_staleness allows" in run.notes[0]
    assert bits(run.params) == after_first[0] == after_first[1]
    assert (records[1]["optim/grad_norm"], records[1]["reward/mean"] > 0) == (0.0, True)
