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


def test_what_is_said_of_the_quickstarts_seeds_is_the_committed_result() -> None:
    arms = results("quickstart")["arms"]
    ends = {slug: accuracies(arm, -1) for slug, arm in arms.items()}
    starts = accuracies(arms["uncorrected"], 0)
    for corrected in ("trm", "cis"):
        for end, lost, whole in zip(ends[corrected], ends["uncorrected"], ends["zero_mismatch"], strict=True):
            assert end - lost > (whole - lost) / 2
    assert sum(end > start for end, start in zip(ends["uncorrected"], starts, strict=True)) == len(starts) - 1 == 2
    uncorrected = min(statistics.stdev(ends[slug]) for slug in ("uncorrected", "lag_only"))
    assert uncorrected > max(statistics.stdev(ends[slug]) for slug in ("zero_mismatch", "numerics_only", "trm", "cis"))
    assert max(starts) - min(starts) < 0.05  # changelog


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


def readme(name: str) -> str:
    return " ".join((ROOT / "experiments" / name / "README.md").read_text(encoding="utf-8").split())


def record(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "experiments" / path).read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", ["float32", "float32_again"])
def test_what_is_said_of_the_operators_on_a_cpu_is_the_committed_result(name: str) -> None:
    said, found = readme("ops_cpu"), record(f"ops_cpu/{name}.json")
    lines = {(line["operator"], line["form"]): line for line in found["lines"]}
    assert (found["platform"], found["absent"]) == ("cpu", {"pallas_tpu": "needs a TPU"})
    assert not found["dirty"]
    rows = {
        "log-probs": "linear_logps",
        "log-probs and their gradients": "linear_logps_gradient",
        "divergences with TV": "linear_vocab_divergence",
    }
    for title, operator in rows.items():
        bounds = re.search(rf"\| {title} \| at most ([\d.]+) \| at most 1/(\d+) \|", said)
        assert bounds, title
        line = lines[operator, "chunked"]
        assert line["time_over_naive"] <= float(bounds[1]), line
        assert line["temporaries_over_naive"] <= 1 / float(bounds[2]), line

    def over_ours(form: str, operator: str, name: str) -> float:
        ratio: float = lines[operator, form][name] / lines[operator, "chunked"][name]
        return ratio

    gradient = "linear_logps_gradient"
    assert found["command"].replace(name, "float32") in said
    assert "Gradients take 0.96 of naive's time in one run and 1.07 in the other" in said
    of_naive = {"float32": 0.96, "float32_again": 1.07}[name]
    assert lines[gradient, "chunked"]["time_over_naive"] == pytest.approx(of_naive, abs=0.005)
    assert "gradients take 1.1 to 1.3, log-probs 1.1 to 1.4 and divergences with TV 2.0 to 2.2" in said
    shares = {gradient: (1.1, 1.3), "linear_logps": (1.1, 1.4), "linear_vocab_divergence": (2.0, 2.2)}
    for operator, (least, most) in shares.items():
        assert least <= round(lines[operator, "chunked"]["time_over_matmuls"], 2) <= most, operator
    assert "tokamax's gradient takes 0.95 to 1.15 of our time on a CPU" in said
    assert 0.95 <= over_ours("tokamax", gradient, "seconds_median") <= 1.15
    assert lines[gradient, "tokamax"]["temporaries_over_naive"] == pytest.approx(1, abs=0.01)  # it holds the logits
    assert "Tunix's forward pass is as fast as ours, within 25%, and holds half of our temporaries" in said
    assert 0.75 <= over_ours("tunix", "linear_logps", "seconds_median") <= 1.25
    assert over_ours("tunix", "linear_logps", "temporary_bytes") == pytest.approx(0.5, abs=0.1)
    assert "its gradient is up to 1.45 times slower, in 4 to 4.5 times our temporaries" in said
    assert 1.0 <= over_ours("tunix", gradient, "seconds_median") <= 1.45
    assert 4.0 <= over_ours("tunix", gradient, "temporary_bytes") <= 4.5


def test_no_error_of_small_divergences_is_above_what_is_said() -> None:
    said = readme("divergence_accuracy")
    for name, rows in (("results", 8), ("kernels", 2)):
        found = record(f"divergence_accuracy/{name}.json")
        row = re.search(rf"\| `{name}.json` \((\d+) rows a line\) \| [^|]+ \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", said)
        assert row, name
        assert int(row[1]) == found["rows"] == rows
        assert found["vocabulary"] == 151_936
        for column, (kind, floor, asked) in enumerate((("kl", 1e-7, 1e-2), ("kl", 1e-5, 1e-3), ("tv", 1e-6, 1e-3)), 2):
            errors = [
                line[f"{kind}_error"]
                for line in found["lines"]
                if f"{kind}_error" in line and line[f"{kind}_min"] >= floor
            ]
            assert len(errors) >= 20, (name, kind)
            assert max(errors) <= float(row[column]) <= asked, (name, kind, floor)


def test_what_is_said_of_programs_compiled_for_tpus_is_in_the_records() -> None:
    said, found = readme("tpu_aot"), record("tpu_aot/results.json")["results"]
    assert f"{len(found)} cases" in said
    kernels = [line for line in found if "kernel" in line]
    many, one = ([line for line in kernels if (line["tokens"] == 1) is single] for single in (False, True))
    assert "more than 5 MB beside arguments and outputs, none of N = 4,096 more than 1.5 MB" in said
    assert max(line["temp_bytes"] for line in kernels) <= 5e6
    assert max(line["temp_bytes"] for line in kernels if line["tokens"] == 4096) <= 1.5e6
    assert "of N > 1 none more than 0.2% of one `[N, V]` array" in said
    assert max(line["temp_share_of_logits"] for line in many) <= 2e-3
    assert "up to 0.3 MB of statistics and operands, 0.6 to 1.5 times one `[1, V]` array" in said
    assert max(line["temp_bytes"] for line in one) <= 3e5
    assert all(0.6 <= line["temp_share_of_logits"] <= 1.5 for line in one)


def test_what_is_said_of_a_long_sequence_is_the_committed_result() -> None:
    line = record("long_horizon/results.json")
    assert (line["tokens"], line["width"], line["vocabulary"]) == (32_768, 1024, 151_936)
    assert "Below 4 GiB" in readme("long_horizon")
    assert line["peak_bytes"] < 4 * 2**30
    assert line["seconds"] < 600
    assert "1e-3 of KL and TV" in readme("long_horizon")
    assert max(line["kl_error"], line["tv_error"]) <= 1e-3
    assert line["finite"]
    assert line["pinsker"]


def test_what_is_said_of_schedules_for_narrower_heads_is_in_the_records() -> None:
    said = readme("tpu_schedule")
    assert "70% at D = 2,048, and at 576 69% on v5e and v5p but only 30% on v6e and TPU7x" in said
    for line in record("tpu_schedule/results.json")["results"]:
        if line["kernel"].startswith("divergence") and line["width"] < 4096:
            least = 0.7 if line["width"] == 2048 else 0.3 if line["chip"] in ("v6e", "tpu7x") else 0.69
            assert line["occupancy"] >= least, line
