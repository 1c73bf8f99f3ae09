"""Numbers in the README and in the heads of configurations are those of the committed results."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = {
    "zero_mismatch": "zero mismatch",
    "numerics_only": "numerics only",
    "lag_only": "lag only",
    "uncorrected": "int4 and lag, uncorrected",
    "trm": "int4 and lag, TRM",
    "cis": "int4 and lag, CIS",
}


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "experiments" / name / "results.json").read_text(encoding="utf-8"))
    return found


def readme_rows(heading: str) -> dict[str, list[str]]:
    """The first table after a heading: first cell → the others, without emphasis."""
    table = README.split(f"{heading}\n", 1)[1].split("\n| ", 1)[1].split("\n\n", 1)[0]
    cells = [[cell.strip().strip("*") for cell in line.strip("| ").split("|")] for line in table.split("\n")]
    return {first: rest for first, *rest in cells}


def accuracies(arm: dict[str, Any], place: int) -> list[float]:
    return [seed["accuracy"][place][1] for seed in arm["seeds"]]


def stated(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


@pytest.mark.parametrize("slug", ROWS)
def test_the_quickstart_table_is_the_committed_result(slug: str) -> None:
    arm = results("quickstart")["arms"][slug]
    rows = readme_rows("## What the quickstart shows")
    (row,) = [cells for first, cells in rows.items() if first.startswith(ROWS[slug])]
    finals = accuracies(arm, -1)
    assert len(finals) >= 3
    assert row[0] == stated(finals)
    kl = statistics.mean(seed["token_kl_mean"] for seed in arm["seeds"])
    assert row[1].split()[0] == (f"{kl:.3f}" if kl else "0")
    assert rows["before RL"][0] == stated(accuracies(arm, 0))
    # The results' own summary is that of their seeds.
    assert arm["final_mean"] == pytest.approx(statistics.mean(finals), abs=5e-5)
    assert arm["final_sd"] == pytest.approx(statistics.stdev(finals), abs=5e-5)


def test_the_time_of_the_quickstart_is_the_committed_one() -> None:
    seconds = results("quickstart")["time"]["seconds"]
    minutes, rest = divmod(math.ceil(seconds), 60)
    assert f"{minutes} min {rest} s" in README


def test_what_is_said_of_the_pretrained_run_is_the_committed_result() -> None:
    run = results("smollm2_gsm8k")
    said = " ".join(README.split())
    rewards = [step["reward/mean"] for step in run["steps"]]
    assert f"(mean {', '.join(f'{reward:.2f}' for reward in rewards)})" in said
    assert all(step["optim/skipped"] == 0.0 and step["optim/grad_norm"] > 0 for step in run["steps"])
    seconds = [step["time/rollout_s"] + step["time/rescore_s"] + step["time/update_s"] for step in run["steps"]]
    assert f"took {min(seconds):.0f} to {max(seconds):.0f} s" in said
    assert f"peaked at {run['peak_rss_gib']:.2f} GiB" in said


def test_the_head_of_the_quickstart_states_the_committed_means() -> None:
    head = " ".join((ROOT / "configs" / "quickstart.toml").read_text(encoding="utf-8").split("title =")[0].split())
    arms = results("quickstart")["arms"]
    for slug, words in {
        "zero_mismatch": "with zero # mismatch",
        "uncorrected": "mismatched and uncorrected",
        "trm": "with TRM",
        "cis": "with CIS",
        "numerics_only": "with int4 alone",
        "lag_only": "with lag alone",
    }.items():
        found = re.search(rf"(0\.\d\d) {re.escape(words)}", head)
        assert found, (words, head)
        assert found[1] == f"{statistics.mean(accuracies(arms[slug], -1)):.2f}", words


def test_the_table_of_the_real_evaluation_is_the_committed_result() -> None:
    found = results("eval_smollm2")
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    table = text.split("## Measured\n", 1)[1].split("\n| ", 1)[1].split("\n\n", 1)[0].split("\n")[2:]
    said = {cells[0]: cells[1:] for line in table if (cells := [cell.strip() for cell in line.strip("| ").split("|")])}
    assert said.keys() == found["tasks"].keys() == {"svamp", "gsm8k", "math500"}
    for name, row in found["tasks"].items():
        assert said[name] == [
            str(row["problems"]),
            f"`{row['prompt_format']}`",
            f"{row['accuracy']:.1%}",
            f"{100 * row['low']:.1f}–{100 * row['high']:.1f}%",
            f"{row['truncated']:.0%}",
            f"{row['tokens']:.0f}",
        ]
        assert row["unjudged"] == 0
        assert len(row["right"]) == round(row["accuracy"] * row["problems"])
        read = found["read_by_eye"][name]
        assert read["read"] == row["problems"]
        assert read["right_but_judged_wrong"] == []
        assert set(read["judged_right_without_a_final_answer"]) <= set(row["right"])
