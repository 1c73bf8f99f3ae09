"""Experiments of several arms and seeds: the records on disk, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from trm_jax.models import load_pretrained, make_mesh
from trm_jax.report import JsonlWriter, collect
from trm_jax.train import (
    ArmsFailed,
    CheckpointError,
    Interrupted,
    NonFiniteError,
    arms,
    build,
    check_arms,
    check_experiment,
    open_experiment,
    run_experiment,
)
from trm_jax.train.evaluate import Evaluator
from trm_jax.train.load import load_config
from trm_jax.train.loop import RunOutcome
from trm_jax.train.records import RunRecords, lock_root
from trm_jax.train.warmstart import warm_start, warmstart_directory


@pytest.fixture
def on_the_toy(driver, monkeypatch):
    monkeypatch.setattr(arms, "open_experiment", driver._open_toy)
    monkeypatch.setattr(arms, "check_experiment", lambda config: None)
    monkeypatch.setattr(arms, "write_report", lambda root: root / "report.html")


@pytest.fixture
def without_training(on_the_toy, monkeypatch):
    """Runs that only count: what is tested is what stands around them."""

    class Counted:
        def __init__(self, experiment, config, params, directory, mesh, *, note):
            self.config, self.step, self.params = config, 0, params

        def resume(self):
            return False

        def close(self):
            pass

        def run(self, *, on_step, should_stop):
            while self.step < self.config.steps:
                self.train_step()
                self.step += 1
                on_step(self.step, {"step": self.step, "version": self.step, "stage": "rl", "reward/mean": 0.5})
            return self.outcome("complete")

        def train_step(self):
            pass

        def outcome(self, status):
            return RunOutcome(
                status=status,
                step=self.step,
                accuracy_start=math.nan,
                accuracy_final=math.nan,
                evaluation_items=0,
                sampled_tokens=0,
            )

    monkeypatch.setattr(arms, "TrainRun", Counted)
    return Counted


@pytest.fixture
def config_of(driver, tmp_path):
    """A configuration without evaluation and warm start, with changes at the top."""

    def make(**changes):
        tree = driver.tiny(str(tmp_path / "run")) | {"steps": 2, "eval": {"prompts": 0}, "warmstart": {"steps": 0}}
        return build(tree | changes)

    return make


def result(root: Path, arm: str = "run", seed: int = 0) -> dict:
    return json.loads((root / "arms" / arm / f"seed{seed}" / "result.json").read_text())


def tokens_in(root: Path, arm: str) -> int:
    """Response tokens by the run's own metrics: mean length times the eight rows of a step."""
    lines = (root / "arms" / arm / "seed0" / "metrics.jsonl").read_text().splitlines()
    return round(sum(8 * json.loads(line)["rollout/response_length_mean"] for line in lines))


def test_where_samples_come_from_is_no_part_of_a_run_and_how_old_they_may_be_is(make_config, config_of, tmp_path):
    arm = config_of().arms[0]
    RunRecords(tmp_path, arm, make_config({"rollout.lag": 0})).begin()
    server = {
        "rollout.lag": 0,
        "rollout.address": "elsewhere:80",
        "rollout.weights": "w",
        "rollout.certificate": "c",
        "rollout.token_file": "t",
        "rollout.patience": 5.0,
    }
    RunRecords(tmp_path, arm, make_config(server)).check()
    for key, value in (("max_staleness", 4), ("lag", 1), ("record_hidden", False)):
        with pytest.raises(ValueError, match=rf"another configuration \(rollout\.{key} differ\)"):
            RunRecords(tmp_path, arm, make_config(server | {f"rollout.{key}": value})).check()


@pytest.mark.slow
def test_arms_share_a_warm_start_and_each_leaves_its_records(on_the_toy, config_of, tmp_path, capsys):
    warm = {"steps": 3, "batch_size": 4, "warmup_steps": 1}
    two = {"plain": {}, "lagged": {"name": "one behind", "role": "lag_only", "rollout": {"lag": 1}}}
    start = config_of(arms=two, warmstart=warm)
    report = run_experiment(start, command=["trm-jax", "train", "a b.toml"])
    root = tmp_path / "run"
    assert report == root / "report.html"
    assert len(list((root / "warmstart").iterdir())) == 1
    head = json.loads((root / "run.json").read_text())
    assert head["command"] == "trm-jax train 'a b.toml'"
    assert [(arm["slug"], arm["name"], arm["role"]) for arm in head["arms"]] == [
        ("plain", "plain", ""),
        ("lagged", "one behind", "lag_only"),
    ]
    out = capsys.readouterr().out
    assert out.count("warmstart 3/3") == 1
    for slug in two:
        assert result(root, slug) | {"seconds": 0} == {
            "engine": "loop",
            "status": "complete", "reason": "", "accuracy_start": None, "accuracy_final": None,
            "evaluation_items": 0, "seconds": 0, "steps": 2, "seed": 0, "sampled_tokens": tokens_in(root, slug),
        }  # fmt: skip
        assert result(root, slug)["seconds"] > 0
    data = collect(root)
    assert [(arm.name, len(arm.complete)) for arm in data.arms] == [("plain", 1), ("one behind", 1)]

    # A directory that holds a run is left alone unless one asks for it.
    before = (root / "arms" / "plain" / "seed0" / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"already holds a run\. Continue it with --resume"):
        run_experiment(start)
    run_experiment(start, resume=True)
    assert "done before" in capsys.readouterr().out
    assert (root / "arms" / "plain" / "seed0" / "metrics.jsonl").read_bytes() == before
    assert json.loads((root / "run.json").read_text())["command"] == "trm-jax train 'a b.toml'"

    # Nor is one continued under another configuration; every key that differs is named.
    changed = {"optimizer": {"learning_rate": 3e-3}, "loss": {"minibatches": 2, "clip_low": 0.3}}
    with pytest.raises(ValueError, match=r"another configuration \(loss\.clip_low, optimizer\.learning_rate differ\)"):
        run_experiment(config_of(arms=two, warmstart=warm, title="other", **changed), resume=True)
    assert json.loads((root / "run.json").read_text())["title"] == "run"  # refused before anything was written

    # A run that ended without an export may have one; nothing else of it changes.
    run_experiment(config_of(arms=two, warmstart=warm, checkpoint={"every": 2, "export": "float32"}), resume=True)
    assert "the policy after step 2: " in capsys.readouterr().out
    assert (root / "arms" / "plain" / "seed0" / "metrics.jsonl").read_bytes() == before
    for slug in two:
        policy = load_pretrained(root / "arms" / slug / "seed0" / "model")
        assert policy.config == start.arms[0].train.model.scratch(14)
        # One of another step is not taken for the policy of this run.
        record = root / "arms" / slug / "seed0" / "model" / "trm_jax.json"
        record.write_text(record.read_text().replace('"step": 2', '"step": 1'))
        assert result(root, slug)["status"] == "complete"
    run_experiment(config_of(arms=two, warmstart=warm, checkpoint={"every": 2, "export": "float32"}), resume=True)
    assert capsys.readouterr().out.count("the policy after step 2: ") == len(two)


def test_one_arm_and_seed_more_may_join_and_what_was_there_stays_listed(without_training, config_of, tmp_path):
    run_experiment(config_of(arms={"plain": {}, "lagged": {"rollout": {"lag": 1}}}))
    run_experiment(config_of(arms={"third": {}}, seeds=[1]), resume=True)
    head = json.loads((tmp_path / "run" / "run.json").read_text())
    assert {arm["slug"] for arm in head["arms"]} == {"plain", "lagged", "third"}
    assert head["seeds"] == [0, 1]
    assert result(tmp_path / "run", "third", seed=1)["status"] == "complete"


def test_a_place_that_cannot_be_written_is_named(on_the_toy, config_of, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"cannot write to the run directory .*file.*directory=PATH"):
            run_experiment(config_of(directory=str(directory)))


def test_a_second_process_is_kept_out(without_training, config_of, tmp_path):
    root = tmp_path / "run"
    with lock_root(root):
        with pytest.raises(ValueError, match=r"another process is running in .*run"):
            run_experiment(config_of())
        assert not (root / "run.json").exists()
    run_experiment(config_of())


def test_metrics_that_cannot_be_written_end_the_run_in_words(without_training, config_of, tmp_path, monkeypatch):
    def full(self, step, metrics):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JsonlWriter, "write", full)
    with pytest.raises(CheckpointError, match=r"metrics of step 1 under .*seed0: No space left .*--resume"):
        run_experiment(config_of())
    assert result(tmp_path / "run")["status"] == "failed"


def test_broken_records_are_named(on_the_toy, config_of, tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    (root / "run.json").write_text('{"title": "x", "ar')
    with pytest.raises(ValueError, match=r"run\.json is not readable JSON"):
        run_experiment(config_of(), resume=True)
    for text, words in (("[]", "holds a list"), ('{"arms": 5}', "created=None; a str"), ("{}", "created=None")):
        (root / "run.json").write_text(text)
        with pytest.raises(ValueError, match=rf"run\.json .*{words}"):
            run_experiment(config_of(), resume=True)
    (root / "run.json").unlink()
    place = root / "arms" / "run" / "seed0"
    place.mkdir(parents=True)
    with pytest.raises(ValueError, match="already holds a run"):  # its arms are there, whatever became of run.json
        run_experiment(config_of())
    (place / "result.json").write_text("{}")
    with pytest.raises(ValueError, match=r"result\.json has status=None; a str is required"):
        run_experiment(config_of(), resume=True)


def test_a_run_that_goes_non_finite_is_recorded_and_the_others_go_on(
    without_training, config_of, tmp_path, monkeypatch, capsys
):
    def fail(self):
        if self.step == 1 and self.config.rollout.lag == 1:
            raise NonFiniteError("step 2: the loss is not finite. The batch is in broken.npz.")

    monkeypatch.setattr(without_training, "train_step", fail)
    three = {"before": {}, "broken": {"rollout": {"lag": 1}}, "after": {}}
    with pytest.raises(ArmsFailed, match=r"1 of 3 runs failed: arm broken, seed 0: step 2: .*broken\.npz") as caught:
        run_experiment(config_of(arms=three))
    root = tmp_path / "run"
    assert caught.value.report == root / "report.html"
    held = result(root, "broken")
    assert (held["status"], held["steps"]) == ("failed", 1)
    assert held["reason"] == "step 2: the loss is not finite. The batch is in broken.npz."
    assert "failed: step 2" in capsys.readouterr().out
    assert [result(root, arm)["status"] for arm in ("before", "after")] == ["complete", "complete"]
    # The report's readers see the failure and where it came.
    data = collect(root)
    assert [len(arm.complete) for arm in data.arms] == [1, 0, 1]
    assert data.arms[1].runs[0].result.reason == held["reason"]


def test_a_warm_start_that_diverges_fails_the_arms_that_share_it_and_no_other(
    without_training, config_of, tmp_path, monkeypatch
):
    def diverge(experiment, train, *rest, **named):
        if train.warmstart.corruption == 0:
            tried.append(train.seed)
            raise NonFiniteError("warm start, step 1: loss nan")
        return nnx.state(experiment.model)

    tried: list[int] = []
    monkeypatch.setattr(arms, "warm_start", diverge)
    warm = {"steps": 1, "batch_size": 4, "warmup_steps": 1, "corruption": 0.0}
    three = {"one": {}, "two": {}, "other": {"warmstart": {"corruption": 0.5}}}
    with pytest.raises(ArmsFailed, match=r"2 of 3 runs failed: arm one, seed 0: warm start, .*; arm two, seed 0: warm"):
        run_experiment(config_of(arms=three, warmstart=warm))
    assert tried == [0]  # the second arm would diverge at the same place
    assert [result(tmp_path / "run", arm)["status"] for arm in three] == ["failed", "failed", "complete"]


def test_what_is_refused_before_an_arm_begins_leaves_the_directory_free(on_the_toy, config_of, tmp_path, monkeypatch):
    def refuse(config):
        raise ValueError("no held-out problem")

    monkeypatch.setattr(arms, "open_experiment", refuse)
    with pytest.raises(ValueError, match="no held-out problem"):
        run_experiment(config_of())
    assert not (tmp_path / "run" / "run.json").exists()


def test_who_is_refused_the_weight_directory_leaves_everything_as_it_is(
    without_training, driver, config_of, tmp_path, monkeypatch
):
    """By its owner at the start; and by one that came later, when the engine is opened."""
    serve = pytest.importorskip("trm_jax.serve", reason="clients of a server need trm-jax[serve]", exc_type=ImportError)

    def served(address):
        rollout = driver.tiny("")["rollout"] | {"address": address, "weights": str(tmp_path / "weights")}
        return config_of(rollout=rollout)

    with (
        serve.WeightDirectory(tmp_path / "weights").owned(),
        pytest.raises(ValueError, match="another trainer writes its weights to"),
    ):
        run_experiment(served("127.0.0.1:1"))
    assert not (tmp_path / "run").exists()

    def refuse(*args, **kwargs):
        raise ValueError("another trainer came while this one was warming up")

    with monkeypatch.context() as patch:
        patch.setattr(arms, "TrainRun", refuse)
        with pytest.raises(ValueError, match="another trainer came"):
            run_experiment(served("127.0.0.1:1"))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock"}

    run_experiment(served("127.0.0.1:1"))
    settings = tmp_path / "run" / "arms" / "run" / "seed0" / "config.json"
    before = settings.read_bytes()
    (settings.parent / "result.json").unlink()
    monkeypatch.setattr(arms, "TrainRun", refuse)
    with pytest.raises(ValueError, match="another trainer came"):
        run_experiment(served("127.0.0.1:2"), resume=True)
    assert settings.read_bytes() == before
    assert b"127.0.0.1:1" in before


def test_a_stop_before_an_arm_opens_nothing(on_the_toy, config_of, tmp_path):
    with pytest.raises(Interrupted, match=r"stopped before arm 'run', seed 0"):
        run_experiment(config_of(), should_stop=lambda: True)
    assert not (tmp_path / "run" / "arms").exists()


def test_what_cannot_work_is_found_before_a_directory_is_made(config_of, tmp_path):
    """Also in the last arm, and nothing is left behind that would make the next attempt ask for --resume."""
    lengths = {"prompts_per_step": 2, "max_prompt_length": 64, "max_response_length": 64}
    with pytest.raises(ValueError, match=r"arm wide: mesh data=4 x tensor=4 needs 16 devices"):
        run_experiment(config_of(rollout=lengths, arms={"fine": {}, "wide": {"mesh": {"data": 4, "tensor": 4}}}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task.name=chain_summ", ["chain_summ", "chain_sum"]),
        ("task.params={terms=3}", ["terms", "min_terms"]),
        ("rollout.max_prompt_length=7", ["max_prompt_length", "7"]),
        ("rollout.max_response_length=3", ["max_response_length", "3"]),
        ("mesh.data=16", ["data=16", "devices"]),
        ("mesh.tensor=3", ["mesh.tensor=3", "16 token ids"]),
        ("task.params={min_terms=2.0}", ["task", "min_terms", "int", "2.0"]),
        ("task.params={min_terms=true}", ["task", "min_terms", "int", "True"]),
        ("task.name=composite", ["task", "mixes others"]),
        ("task.test_permille=0", ["eval.prompts=1024", "held-out", "test_permille"]),
    ],
)
def test_tasks_and_lengths_that_do_not_fit(override, words):
    path = Path(__file__).parents[2] / "configs" / "quickstart.toml"
    config = load_config(path, [f"arms.lag_only.{override}"])
    (train,) = (arm.train for arm in config.arms if arm.slug == "lag_only")
    with pytest.raises(ValueError, match=r"\w") as caught:
        check_experiment(train)
    for word in words:
        assert word in str(caught.value), caught.value


WORDS = {"task.kind": "gsm8k", "model": {"path": "smollm2"}}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (None, ["task.path", "no file", "problems.jsonl"]),
        ([], ["task.path", "no records"]),
        (["{}"], ["line 1", "no column"]),
        (['{"question": "1+1?", "answer": "#### 2"}', '{"question": '], ["problems.jsonl", "line 2", "not JSON"]),
        (['{"question": "1+1?", "answer": "two"}'], ["line 1", "####"]),
        (['{"question": "1+1?", "answer": "#### 2"}'], ["no held-out problem", "task.test_path"]),
    ],
)
def test_word_problems_that_cannot_be_read_are_named_by_file_and_line(make_config, tmp_path, lines, words):
    path = tmp_path / "problems.jsonl"
    if lines is not None:
        path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"\w") as caught:
        check_experiment(make_config(WORDS | {"task.path": str(path), "task.test_permille": 0}))
    for word in words:
        assert word in str(caught.value), caught.value


def test_a_mistake_of_all_arms_is_not_blamed_on_one(config_of):
    two = {"one": {}, "two": {}}
    long_enough = {"prompts_per_step": 2, "max_prompt_length": 64, "max_response_length": 64}
    with pytest.raises(ValueError, match=r"^task: reasoning-gym has no task 'nope'"):
        check_arms(config_of(arms=two, task={"name": "nope"}))
    with pytest.raises(ValueError, match=r"^arm two: task: reasoning-gym has no task 'nope'"):
        check_arms(config_of(arms={"one": {}, "two": {"task": {"name": "nope"}}}, rollout=long_enough))


def test_arms_share_a_warm_start_only_when_all_that_makes_it_is_the_same(make_config, tmp_path):
    def place(**changes):
        return warmstart_directory(tmp_path, make_config({name.replace("__", "."): v for name, v in changes.items()}))

    same = [
        {"optimizer__learning_rate": 1.0},
        {"model__batch_invariant": True},
        {"rollout__lag": 3},
        {"eval__prompts": 1},
        {"loss__minibatches": 1},
    ]
    other = [
        {"optimizer__max_grad_norm": 0.5},
        {"optimizer__b2": 0.5},
        {"optimizer__weight_decay": 1.0},
        {"mesh__data": 2},
        {"warmstart__steps": 5},
        {"warmstart__target_accuracy": 0.5},
        {"rollout__max_response_length": 4},
        {"model__d_ff": 32},
        {"seed": 1},
    ]
    assert {place(**changes) for changes in same} == {place()}
    assert len({place(), *(place(**changes) for changes in other)}) == 1 + len(other)
    # Where an accuracy ends it, the prompts that decide belong to it.
    target = {"warmstart__target_accuracy": 0.5}
    assert place(**target) != place(**target, eval__prompts=1)


def test_a_warm_start_ends_at_its_accuracy_and_stays_ended(driver, make_config, tmp_path):
    config = make_config({"warmstart.steps": 9, "warmstart.target_accuracy": 0.5, "warmstart.check_every": 3})
    looks = iter([0.2, 0.6])
    experiment = dataclasses.replace(driver.toy_experiment(config), validation=driver.problems(8, 10))

    def go() -> list[dict]:
        rows: list[dict] = []
        ended.append(
            warm_start(experiment, config, tmp_path, make_mesh(), on_step=lambda step, record: rows.append(record))
        )
        return rows

    ended: list = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "__call__", lambda self, params: next(looks))
        rows = go()
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert [row.get("accuracy/validation") for row in rows] == [None, None, 0.2, None, None, 0.6]
        assert go() == []  # found on disk, ended: no step and no look
    leaves = [jax.tree.leaves(weights) for weights in ended]
    assert all((a == b).all() for a, b in zip(*leaves, strict=True))


@pytest.mark.slow
def test_a_warm_start_that_misses_its_accuracy_says_so(driver, make_config, tmp_path, monkeypatch):
    config = make_config({"warmstart.steps": 2, "warmstart.target_accuracy": 0.5, "warmstart.check_every": 1})
    monkeypatch.setattr(Evaluator, "__call__", lambda self, params: 0.25)
    experiment = dataclasses.replace(driver.toy_experiment(config), validation=driver.problems(8, 10))
    notes: list[str] = []
    warm_start(experiment, config, tmp_path, make_mesh(), on_step=lambda *_: None, note=notes.append)
    assert notes == ["the warm start ends at accuracy 0.250, below warmstart.target_accuracy."]


def test_validation_problems_are_neither_trained_on_nor_tested(make_config):
    params = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    config = make_config(
        {
            "task.params": params,
            "rollout.max_prompt_length": 6,
            "rollout.max_response_length": 8,
            "eval.prompts": 20,
            "warmstart.target_accuracy": 0.5,
            "warmstart.validation_prompts": 30,
        }
    )
    with open_experiment(config) as experiment:
        tested, decided = ({p.prompt for p in part} for part in (experiment.test, experiment.validation))
        trained = {problem.prompt for problem in experiment.train[:500]}
    assert (len(tested), len(decided)) == (20, 30)
    assert not tested & decided
    assert not trained & (tested | decided)


@pytest.mark.slow  # that it fails its arms is held above
def test_a_warm_start_that_diverges_stops_with_its_step(driver, make_config, tmp_path):
    config = make_config({"warmstart.learning_rate": 1e30, "warmstart.warmup_steps": 0, "warmstart.steps": 8})
    rows: list[int] = []
    with pytest.raises(NonFiniteError, match=r"warm start, step \d: loss .*warmstart\.learning_rate"):
        warm_start(
            driver.toy_experiment(config),
            config,
            warmstart_directory(tmp_path, config),
            make_mesh(),
            on_step=lambda step, record: rows.append(step),
        )
    assert len(rows) < 8
    assert not list(tmp_path.rglob("step_*"))
    (path,) = tmp_path.rglob("nonfinite_step*.npz")
    with np.load(path) as batch:
        assert batch["tokens"].shape == batch["loss_mask"].shape == (4, 7)
