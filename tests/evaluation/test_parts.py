"""The parts of an evaluation: rows on disk, intervals, settings, tasks by name, tables and progress."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from trm_jax.evaluation import (
    EvaluationSettings,
    EvaluationTask,
    Ledger,
    bootstrap_interval,
    evaluation_table,
    parse_task,
    summarize,
)
from trm_jax.evaluation.progress import EvaluationProgress


def row(index: int, sample: int = 0, **values: Any) -> dict[str, Any]:
    return {"index": index, "sample": sample, **values}


def test_rows_are_kept_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with Ledger(path) as ledger:
        ledger.append([row(0, text="é\n"), row(0, 1)])
        ledger.append([])
        ledger.append([row(7)])
    with Ledger(path) as ledger:
        assert ledger.rows == {(0, 0): row(0, text="é\n"), (0, 1): row(0, 1), (7, 0): row(7)}
        for twice in ([row(7)], [row(8), row(8)]):
            with pytest.raises(ValueError, match="would stand twice"):
                ledger.append(twice)
        assert len(ledger.rows) == 3


def test_a_line_that_was_cut_off_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    whole = json.dumps(row(0)).encode() + b"\n"
    for cut in range(1, len(whole)):
        path.write_bytes(whole + whole.replace(b"0", b"1", 1)[:cut])
        with Ledger(path) as ledger:
            assert list(ledger.rows) == [(0, 0)]
            ledger.append([row(5)])
        assert [json.loads(line)["index"] for line in path.read_bytes().splitlines()] == [0, 5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"index": 0, "sample": 0}\nnonsense\n', "line 2 is no judged answer .JSONDecodeError"),
        ('{"index": 0}\n', "line 1 is no judged answer .KeyError: 'sample'"),
        ("[1]\n", "line 1 is no judged answer .TypeError: a list"),
        ('{"index": 0, "sample": 0}\n' * 2, "line 2 is a second answer for {'index': 0, 'sample': 0}"),
    ],
)
def test_a_damaged_file_is_named_by_line_and_left_as_it_is(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"rows\.jsonl: {message}"):
        Ledger(path)
    assert path.read_text() == content


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with Ledger(tmp_path / "rows.jsonl"), pytest.raises(ValueError, match=r"another process is writing .*rows\.jsonl"):
        Ledger(tmp_path / "rows.jsonl")
    Ledger(tmp_path / "rows.jsonl").__exit__(None, None, None)


def test_intervals_by_hand() -> None:
    # One of four: resampled successes are Binomial(4, 1/4): P(0) = .316 > .025, P(<= 2) = .949, P(<= 3) = .996.
    assert bootstrap_interval(np.array([1.0, 0, 0, 0])) == (0.0, 0.75)
    # All alike, but neither 0 nor 1: nothing varies.
    assert bootstrap_interval(np.full(9, 0.25)) == (0.25, 0.25)
    # 0 of 50: 1 - .025^(1/50) = .0711; 1 of 1: .025.
    assert bootstrap_interval(np.zeros(50)) == pytest.approx((0.0, 0.0711), abs=5e-5)
    assert bootstrap_interval(np.ones(1)) == pytest.approx((0.025, 1.0))


def test_an_interval_is_about_two_standard_errors_each_way() -> None:
    values = np.random.default_rng(3).integers(0, 5, 400) / 4.0
    low, high = bootstrap_interval(values)
    error = values.std() / 20
    # 10,000 resamples place a quantile to about 0.03 standard errors; skewness moves it by less than that here.
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.1 * error)
    assert bootstrap_interval(values) == (low, high)
    assert bootstrap_interval(values, seed=1) != (low, high)
    narrow = bootstrap_interval(values, confidence=0.5)
    assert low < narrow[0] < narrow[1] < high


@pytest.mark.parametrize("values", [[], [[0.5]], [1.5], [float("nan")]])
def test_values_that_are_no_rewards_are_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="values"):
        bootstrap_interval(np.array(values))
    with pytest.raises(ValueError, match="confidence=1"):
        bootstrap_interval(np.array([0.5]), confidence=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "samples=0: must be at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0: must be a finite number"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, r"top_p=0.0: must lie in \(0, 1\]"),
        ({"samples": 4}, "at temperature 0 all samples"),
        ({"top_p": 0.5}, "has no effect at temperature 0"),
        ({"stop": ("",)}, "an empty text"),
        ({"dtype": "int8"}, "choose float32 or bfloat16"),
        ({"limit": -1}, "limit=-1: must be at least 0"),
    ],
)
def test_settings_that_cannot_be_meant(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvaluationSettings(**changes)


def test_tasks_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m=1.jsonl"
    path.write_text('{"problem": "p", "answer": "1"}\n')
    task = parse_task(f"math500={path}")
    assert (task.name, task.reward, task.prompt_format, len(task.problems)) == ("math500", "math", "boxed", 1)
    assert parse_task(f"math500={path}", prompt_format="question").prompt_format == "question"
    before = task.digest
    path.write_text('{"problem": "p", "answer": "2"}\n')
    assert parse_task(f"math500={path}").digest != before
    assert parse_task("gsm8k_sample").name == "gsm8k_sample"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gsm8k", "gsm8k: give its file, gsm8k=PATH; it is published as openai/grade-school-math"),
        ("gsm8k=", "give its file"),
        ("gsm=x", "did you mean 'gsm8k'.; shipped with the package: gsm8k_sample, one_step"),
        ("one_step=x", "no benchmark 'one_step'"),
        ("", "there is no benchmark ''"),
    ],
)
def test_tasks_that_cannot_be_found(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_task(text)


def test_a_question_about_options_shows_them(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"question": "which?", "choices": ["u", "v"], "answer": 1, "subject": "astronomy"}\n')
    assert parse_task(f"mmlu_stem={path}", prompt_format="{question} {choices}").prompt_format == "{question} {choices}"
    for hiding in ("boxed", "{question}"):
        with pytest.raises(ValueError, match=r"mmlu_stem asks for the letter .*: leave it at 'options', or give"):
            parse_task(f"mmlu_stem={path}", prompt_format=hiding)


def test_a_task_has_a_name_for_a_file_and_every_index_once() -> None:
    from trm_jax.data import Problem

    problems = [Problem(prompt="p", reference="1", source="s", index=i) for i in (0, 0)]
    values: dict[str, Any] = {"reward": "number", "prompt_format": "question", "digest": ""}
    with pytest.raises(ValueError, match="every index once"):
        EvaluationTask(name="a", problems=problems, **values)
    with pytest.raises(ValueError, match="at least one problem"):
        EvaluationTask(name="a", problems=[], **values)
    with pytest.raises(ValueError, match="for it names a file"):
        EvaluationTask(name="../a", problems=problems[:1], **values)


def test_the_summary_and_its_table() -> None:
    rewards = {0: [1.0, 0.0], 1: [1.0, 1.0], 2: [0.0, 0.0], 3: [1.0, 0.0]}
    rows = [
        row(i, s, reward=r, verdict="error" if i == 2 else "scored", finished=s == 0, tokens=10 + i, seconds=0.5)
        for i, values in rewards.items()
        for s, r in enumerate(values)
    ]
    found = summarize({"t": rows})["t"]
    # Means .5, 1, 0, .5; tokens 2 (10 + 11 + 12 + 13) = 92 over 8 answers and 4 seconds.
    assert {key: found[key] for key in ("problems", "samples", "accuracy", "truncated", "tokens")} == {
        "problems": 4, "samples": 2, "accuracy": 0.5, "truncated": 0.5, "tokens": 11.5,
    }  # fmt: skip
    assert (found["tokens_per_second"], found["unjudged"]) == (23.0, 2)
    assert found["right_truncated"] == 1  # the second sample of problem 1
    console = Console(file=(out := io.StringIO()), width=80)
    console.print(evaluation_table({"checkpoint": "[m]", "tasks": {"olympiadbench": found}}))
    text = " ".join(out.getvalue().split())
    assert "[m]" in text
    for word in ("olympiadbench", "problems", "accuracy", "95% interval", "unjudged", "tok/s"):
        assert word in text  # nothing is cut off on eighty columns
    assert "right although cut off, by their last expression: olympiadbench 1" in text
    for cell in ("50.0%", f"{100 * found['low']:.1f}–{100 * found['high']:.1f}%", "23"):
        assert cell in text


def test_progress_on_a_terminal() -> None:
    console = Console(file=(out := io.StringIO()), force_terminal=True, width=100)
    with EvaluationProgress(console) as progress:
        progress("gsm8k", [], 4)
        progress("gsm8k", [row(0, reward=1.0, tokens=3), row(1, reward=0.0, tokens=3)], 4)
        progress("gsm8k", [row(0, reward=1.0, tokens=3), row(1, reward=0.0, tokens=3)], 4, 1, 9)
    assert "accuracy 50.0%" in out.getvalue()
    assert "3/4" in out.getvalue()


def test_progress_in_a_log_is_a_line_a_batch_and_every_half_minute_within() -> None:
    console = Console(file=(out := io.StringIO()), force_terminal=False, width=20)
    now = [0.0]
    with EvaluationProgress(console, lambda: now[0]) as progress:
        progress("t", [], 8)
        for seconds, ended, tokens in ((10, 0, 100), (29, 1, 290), (30, 1, 300), (59, 2, 590), (60, 3, 600)):
            now[0] = seconds
            progress("t", [], 8, ended, tokens)
        now[0] = 80.0
        progress("t", [row(i, reward=float(i == 0), tokens=200) for i in range(4)], 8)
    # Left: 7 answers at one in 30 seconds; 5 at three in 60; 4 at four in 80.
    assert out.getvalue().splitlines() == [
        "t: 0/8 answers",
        "t: 1/8 answers (1 not judged yet), 10 tok/s, left 0:03:30",
        "t: 3/8 answers (3 not judged yet), 10 tok/s, left 0:01:40",
        "t: 4/8 answers, accuracy 25.0%, 10 tok/s, left 0:01:20",
    ]
