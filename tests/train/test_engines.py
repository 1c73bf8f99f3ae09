"""What a run samples with: how it is chosen, what it says of it, and that JetStream's driver here changes no bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from trm_jax.rollout import SlotEngine
from trm_jax.train import Checkpointer, build, engines
from trm_jax.train.config import RolloutConfig
from trm_jax.train.engines import SamplingError, check_engine, describe_engine, engine_of
from trm_jax.train.loop import RunOutcome
from trm_jax.train.records import RunRecords

BASE = {"eval.prompts": 0, "rollout.lag": 0, "rollout.numerics": {"batch_invariant": True}}


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("lacks", ["", "JetStream's driver needs google-jetstream 0.2.2"])
def test_auto_is_jetstream_on_a_tpu_that_has_it(monkeypatch, backend, lacks):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(engines, "_jetstream_lacks", lambda: lacks)
    config = RolloutConfig()
    assert config.engine == "auto"
    chosen = backend == "tpu" and not lacks
    assert engine_of(config) == ("jetstream" if chosen else "loop")
    words = describe_engine(config)
    assert words.startswith("JetStream's driver in this process" if chosen else "a loop in this process")
    assert ("needs google-jetstream" in words) == (backend == "tpu" and bool(lacks))
    for name in ("loop", "jetstream"):
        assert engine_of(RolloutConfig(engine=name)) == name
        assert "needs" not in describe_engine(RolloutConfig(engine=name))
    at = RolloutConfig(address="h:1", weights="w")
    assert (engine_of(at), describe_engine(at)) == ("address", "the server at h:1")


def test_weights_change_in_flight_only_where_that_was_asked_for():
    """And never by what "auto" finds on a machine: it would change what a run means."""
    newest = {"max_staleness": 1, "schedule": "newest", "record_hidden": False}
    assert RolloutConfig(**newest, engine="jetstream", finish_first=True).in_flight
    assert RolloutConfig(**newest, address="h:1", weights="w").in_flight
    for engine in ("auto", "loop"):
        assert not RolloutConfig(**newest, engine=engine).in_flight
    assert not RolloutConfig(max_staleness=1, engine="jetstream").in_flight


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["grpc", "jetstream"])
def test_what_is_missing_is_said_before_anything_runs_and_the_loop_needs_none_of_it(missing):
    hide = (
        f"sys.modules[{missing!r}] = None"
        if missing == "grpc"
        else (
            "import importlib.util as u; find = u.find_spec;"
            "u.find_spec = lambda name, *rest: None if name == 'jetstream' else find(name, *rest)"
        )
    )
    program = (
        f"import sys; {hide}\n"
        "from trm_jax.train import build, check_experiment\n"
        "from trm_jax.train.engines import engine_of\n"
        "def config(engine):\n"
        "    tree = {'rollout': {'engine': engine}, 'warmstart': {'steps': 0}, 'eval': {'prompts': 2}}\n"
        "    return build(tree).arms[0].train\n"
        "for engine in ('auto', 'loop'):\n"
        "    check_experiment(config(engine))\n"
        "assert not {'trm_jax.serve', 'grpc', 'jetstream'} & {m for m in sys.modules if sys.modules[m]}\n"
        "try:\n"
        "    check_experiment(config('jetstream'))\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rollout.engine='jetstream'")
    assert "pip install 'trm-jax[jetstream]'" in done.stdout


def test_a_check_sees_that_the_asked_for_engine_is_there(make_config):
    pytest.importorskip("jetstream")
    config = make_config({"rollout.engine": "jetstream"})
    check_engine(config.rollout, config.model.scratch(14), (12,), record_routes=False)


def test_the_record_says_what_sampled_and_a_run_goes_on_with_another(tmp_path):
    def records(engine: str) -> RunRecords:
        train = build({"rollout": {"engine": engine}}).arms[0].train
        return RunRecords(tmp_path, build({}).arms[0], train)

    outcome = RunOutcome(
        status="stopped", step=1, accuracy_start=0.0, accuracy_final=0.0, evaluation_items=1, sampled_tokens=1
    )
    for engine, sampled in (("loop", "loop"), ("jetstream", "jetstream"), ("auto", "loop")):
        record = records(engine)
        record.begin()
        record.end(outcome, "", 0.0)
        assert json.loads((record.directory / "result.json").read_text())["engine"] == sampled


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"rollout.lag": 2}, {"rollout.max_staleness": 4}, {"rollout.top_p": 0.7, "correction.preset": "tis"}],
    ids=["in_turn", "ahead", "cut"],
)
def test_a_run_by_jetstreams_driver_has_the_bits_of_the_loops(learns, changes, go, bits):
    """Ahead, the driver of one thread samples while the policy learns in another."""
    pytest.importorskip("jetstream")
    loop, ours = (learns(engine, changes | {"rollout.engine": engine}) for engine in ("loop", "jetstream"))
    expected = go(loop)
    assert go(ours) == expected
    assert bits(ours.params) == bits(loop.params)
    assert expected[-1]["version"] >= 6  # weights move, or a test that all stays the same would show nothing


@pytest.mark.slow
def test_a_run_is_resumed_with_the_other_engine_to_the_same_bits(learns, go, bits):
    pytest.importorskip("jetstream")
    changes = {"rollout.max_staleness": 4, "checkpoint.every": 1}
    whole = learns("whole", changes | {"rollout.engine": "loop"})
    expected = go(whole)
    first = learns("parts", changes | {"rollout.engine": "jetstream"})
    records = go(first, should_stop=lambda: first.step >= 2)
    again = learns("parts", changes | {"rollout.engine": "loop"})
    assert again.resume()
    assert records + go(again) == expected
    assert bits(again.params) == bits(whole.params)


@pytest.mark.slow
@pytest.mark.parametrize("finish_first", [False, True])
def test_weights_change_in_flight_in_one_process_and_the_tokens_versions_tell(learns, monkeypatch, finish_first, go):
    pytest.importorskip("jetstream")
    generate = SlotEngine.generate

    def slowly(*args, **kwargs):  # so that a batch takes longer than a step, whatever the machine
        time.sleep(0.02)
        return generate(*args, **kwargs)

    monkeypatch.setattr(SlotEngine, "generate", slowly)
    run = learns(
        "newest",
        {
            "steps": 12,
            "rollout.engine": "jetstream",
            "rollout.record_hidden": False,
            "rollout.max_staleness": 4,
            "rollout.schedule": "newest",
            "rollout.finish_first": finish_first,
            "rollout.decode_chunk": 1,
            "rollout.slots": 2,
        },
    )
    take, seen = run._source.take, []

    def taken():
        seen.append(take())
        return seen[-1]

    run._source.take = taken
    rows = go(run)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all(row["rollout/staleness_max"] <= 4 for row in rows)
    assert all(row["rollout/dropped_groups"] == 0 for row in rows)
    versions = [np.asarray(sampled.rollout.versions) for sampled in seen]
    batches = [np.unique(batch[batch >= 0]).size for batch in versions]
    assert max(batches) > 1  # a batch saw weights change
    rows_of_several = sum(np.unique(row[row >= 0]).size > 1 for batch in versions for row in batch)
    assert (rows_of_several == 0) or not finish_first


@pytest.mark.slow
def test_a_driver_that_fails_ends_the_run_after_its_last_step_was_saved(learns, monkeypatch, tmp_path, go):
    pytest.importorskip("jetstream")
    run = learns("fails", {"rollout.engine": "jetstream", "checkpoint.every": 10})
    generate = SlotEngine.generate

    def fail(self, *args, **kwargs):
        if run.step == 2:
            raise MemoryError("no room")
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(SlotEngine, "generate", fail)
    with pytest.raises(SamplingError, match=r"rollout.engine='jetstream': sampling failed: decoding.*no room"):
        go(run)
    assert Checkpointer(tmp_path / "fails" / "checkpoints").steps() == [2]


@pytest.mark.slow
def test_the_program_says_what_samples_and_outlives_being_killed(start_program, same_run, tmp_path: Path):
    pytest.importorskip("jetstream")
    program = start_program(tmp_path)
    common = ("rollout.numerics={batch_invariant=true}", "warmstart.steps=0", "eval.prompts=0")
    code, out, err = program.run("train", "tiny.toml", *common, "directory=loop")
    assert code == 0, (out, err)
    assert "samples come from a loop in this process" in out
    ours = ("rollout.engine=jetstream", "directory=ours")
    code, out, err = program.run("train", "tiny.toml", *common, *ours, "--signal=SIGKILL@arms@3")
    assert code == -signal.SIGKILL, (out, err)
    code, out, err = program.run("train", "tiny.toml", *common, *ours, "--resume")
    assert code == 0, (out, err)
    assert "samples come from JetStream's driver in this process" in out
    seeds = [tmp_path / name / "arms" / "run" / "seed0" for name in ("loop", "ours")]
    same_run(*seeds)
    found = [json.loads((seed / "result.json").read_text())["engine"] for seed in seeds]
    assert found == ["loop", "jetstream"]
