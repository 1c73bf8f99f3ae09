from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from trm_jax.report import ReportData, collect, results_table, summarise

Job = Callable[..., Path]


def _change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _table(data: ReportData) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200).print(results_table(data))
    return stream.getvalue()


def test_a_whole_job_is_read_without_complaint(job: Job):
    data = collect(job(seeds=2))
    assert data.problems == ()
    assert (data.title, data.command, data.created) == (
        "Which mismatch hurts?",
        "trm-jax train quickstart.toml",
        "2026-11-29",
    )
    assert [arm.slug for arm in data.arms] == ["zero", "lag", "numerics", "none", "trm", "cis"]
    assert [run.seed for run in data.arms[0].runs] == [0, 1]
    assert data.arms[0].role == "reference"
    assert data.arms[1].runs[0].config["rollout"]["lag"] == 4
    assert len(data.arms[0].runs[0].rows) == 10


def test_the_summary_of_an_arm_by_hand(job: Job):
    summary = summarise(collect(job(seeds=2)).arms[4])
    # Seeds end at .775 and .785; the KL is .05 at nine steps and .1 at the last: mean (9·.05 + .1)/10 = .055.
    assert summary.final.value == pytest.approx(0.78)
    assert summary.final.spread == pytest.approx(0.01 / math.sqrt(2))
    assert summary.token_kl_mean == pytest.approx(0.055)
    assert summary.token_kl_max == pytest.approx(2.0)  # 20 · .1, at step 7
    assert summary.ppl_gap == pytest.approx(-0.1)
    assert summary.sequences_kept == pytest.approx(0.9)
    assert (summary.weight_mean, summary.weight_max) == (1.0, 1.0)
    assert summary.staleness == 4.0
    assert summary.tokens == 8000
    assert summary.steps == 20
    assert summary.seconds == 62.0
    assert summary.state == "complete"
    assert math.isnan(summary.tokens_kept)


def test_an_idle_correction_is_told_from_one_that_acted(job: Job):
    acted = {arm.slug: summarise(arm).acted for arm in collect(job()).arms}
    assert acted == {"zero": False, "lag": False, "numerics": False, "none": False, "trm": True, "cis": True}


def test_a_folder_that_is_no_job_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"neither run\.json nor arms/"):
        collect(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither"):
        collect(tmp_path / "absent")


def test_without_run_json_the_folders_are_the_arms(job: Job):
    root = job()
    (root / "run.json").unlink()
    data = collect(root)
    assert data.title == "job"
    assert sorted(arm.name for arm in data.arms) == ["cis", "lag", "none", "numerics", "trm", "zero"]
    assert all(arm.role is None for arm in data.arms)
    assert data.problems[0] == "run.json is missing."


def test_broken_pieces_are_each_named_and_nothing_else_is_lost(job: Job):
    root = job()
    arms = root / "arms"
    (arms / "zero" / "seed0" / "metrics.jsonl").unlink()
    (arms / "lag" / "seed0" / "metrics.jsonl").write_text('{"step": 1}\nrubbish\n')
    (arms / "numerics" / "seed0" / "result.json").unlink()
    (arms / "none" / "seed0" / "result.json").write_text("{")
    _change(arms / "trm" / "seed0" / "result.json", status="exploded")
    (arms / "cis" / "seed0" / "config.json").write_text("[]")
    with (arms / "cis" / "seed0" / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 11, "rew')
    data = collect(root)
    text = "\n".join(data.problems)
    assert "zero mismatch, seed 0: metrics.jsonl is missing" in text
    assert "lag only, seed 0: arms/lag/seed0/metrics.jsonl: line 2 is malformed" in text
    assert "numerics only, seed 0: result.json is missing; the run is still going or was killed." in text
    assert "arms/none/seed0/result.json is not readable JSON" in text
    assert "mismatched, TRM, seed 0: result.json has status 'exploded'" in text
    assert "arms/cis/seed0/config.json is not a JSON object." in text
    assert "mismatched, CIS, seed 0: arms/cis/seed0/metrics.jsonl: line 11 was cut off" in text
    assert len(data.problems) == 7
    assert str(root) not in text
    states = {arm.slug: summarise(arm).state for arm in data.arms}
    assert states == {
        "zero": "complete",
        "lag": "complete",
        "numerics": "seed 0 unfinished at step 10",
        "none": "seed 0 unfinished at step 10",
        "trm": "seed 0 unfinished at step 10",
        "cis": "complete",
    }
    assert summarise(data.arms[2]).final.value == pytest.approx(0.83)  # from the last evaluation of the curve
    assert not summarise(data.arms[2]).comparable


def test_arms_that_were_not_run_or_not_listed_are_said(job: Job):
    root = job()
    shutil.rmtree(root / "arms" / "cis")
    shutil.copytree(root / "arms" / "trm", root / "arms" / "extra")
    data = collect(root)
    assert "mismatched, CIS: not run (no seed folder in arms/cis)." in data.problems
    assert "arms/extra is not listed in run.json; it is shown under its folder's name." in data.problems
    assert [arm.name for arm in data.arms][-2:] == ["mismatched, CIS", "extra"]
    assert summarise(data.arms[5]).state == "not run"


def test_odd_entries_of_run_json_are_survived(job: Job):
    root = job()
    arms = [{"name": "evil", "slug": "../.."}, "words", {"slug": "zero", "role": "boss"}]
    _change(root / "run.json", arms=arms, command=["trm-jax", "train", "x.toml"])
    data = collect(root)
    assert data.command == "trm-jax train x.toml"
    assert sum("no usable slug" in problem for problem in data.problems) == 2
    assert any("unknown role 'boss'" in problem for problem in data.problems)
    assert data.arms[0].name == "zero"


def test_only_complete_runs_enter_the_accuracy(job: Job):
    root = job(seeds=2)
    path = root / "arms" / "none" / "seed1" / "result.json"
    _change(path, status="stopped", reason="time limit", accuracy_final=0.9, steps=6)
    summary = summarise(collect(root).arms[3])
    assert summary.final.value == pytest.approx(0.255)  # seed 0 alone
    assert summary.final.spread is None
    assert summary.state == "seed 1 stopped at step 10 (time limit)"
    assert summary.comparable


def test_a_result_with_holes_is_said_and_filled_from_the_curve(job: Job):
    root = job()
    _change(root / "arms" / "zero" / "seed0" / "result.json", accuracy_final="nan", seconds=None, sampled_tokens=None)
    data = collect(root)
    assert data.problems == ("zero mismatch, seed 0: result.json lacks accuracy_final, seconds.",)
    assert summarise(data.arms[0]).final.value == pytest.approx(0.84)
    assert summarise(data.arms[0]).tokens is None


def test_the_warm_start_is_kept_out_of_the_mismatch_and_split_records_are_joined(job: Job):
    root = job()
    path = root / "arms" / "zero" / "seed0" / "metrics.jsonl"
    warm = {"step": 1, "stage": "warmstart", "mismatch/token_kl_max": 99.0}
    late = {"step": 10, "stage": "rl", "accuracy/heldout": 0.5}
    path.write_text(json.dumps(warm) + "\n" + path.read_text() + json.dumps(late) + "\n")
    arm = collect(root).arms[0]
    assert summarise(arm).token_kl_max == 0
    assert len(arm.runs[0].rows) == 11
    assert arm.runs[0].rows[-1]["accuracy/heldout"] == 0.5
    assert arm.runs[0].rows[-1]["policy/entropy"] == pytest.approx(0.8)


def test_non_finite_measurements_infinity_shows_and_nan_is_left_out(job: Job):
    root = job()
    path = root / "arms" / "none" / "seed0" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["mismatch/token_kl_max"] = "inf"
    rows[1]["mismatch/token_kl_mean"] = "nan"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = collect(root)
    assert summarise(data.arms[3]).token_kl_max == math.inf
    assert summarise(data.arms[3]).token_kl_mean == pytest.approx((8 * 0.06 + 0.12) / 9)
    assert "∞" in _table(data)


def test_the_terminal_table_shows_every_arm_and_what_is_lacking(job: Job):
    root = job(seeds=2)
    _change(root / "arms" / "none" / "seed1" / "result.json", status="failed", reason="loss is NaN")
    output = _table(collect(root))
    assert "zero mismatch" in output
    assert "84.0% ± 0.7" in output
    assert "2/2" in output
    assert "1/2" in output
    assert "* mismatched, uncorrected: seed 1 failed at step 10 (loss is NaN)" in output
    assert "does not cover the variation between seeds" in output


def test_a_job_that_has_only_begun_is_a_table_of_dashes(tmp_path: Path):
    (tmp_path / "run.json").write_text(json.dumps({"arms": [{"slug": "zero", "name": "zero mismatch"}]}))
    data = collect(tmp_path)
    assert data.arms[0].runs == ()
    assert "* zero mismatch: not run" in _table(data)


def test_an_arm_without_a_role_is_no_problem(job: Job):
    root = job()
    _change(root / "run.json", arms=[{"name": "plain", "slug": "zero", "role": ""}])
    data = collect(root)
    assert data.arms[0].role is None
    assert not [problem for problem in data.problems if "role" in problem]
