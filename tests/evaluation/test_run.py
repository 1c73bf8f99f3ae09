"""Evaluations on disk: what is asked, what is written, and what a killed process leaves to the next."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trm_jax.data import Problem
from trm_jax.evaluation import EvaluationSettings, EvaluationTask, run_evaluation

GREEDY = EvaluationSettings(max_new_tokens=4, slots=2, batch=4)
SAMPLED = EvaluationSettings(max_new_tokens=4, slots=2, batch=4, samples=3, temperature=1.0, top_p=0.95)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_problem_is_asked_and_judged_once(engine, policy, task, tmp_path):
    seen = []
    results = run_evaluation(
        policy,
        [task(10)],
        GREEDY,
        tmp_path / "e",
        progress=lambda name, done, total, *batch: seen.append((name, len(done), total, *batch)),
    )
    written = rows(tmp_path / "e" / "sums.jsonl")
    assert [(row["index"], row["sample"]) for row in written] == [(2 * i, 0) for i in range(10)]
    assert [row["reward"] for row in written] == [float(i % 3 != 2) for i in range(10)]
    assert written[3] | {"seconds": 0} == {
        "index": 6, "sample": 0, "reward": 1.0, "verdict": "scored", "finished": True, "tokens": 3, "seconds": 0,
        "reference": "13", "response": "13",
    }  # fmt: skip
    steps = [(0, 0, 0), (0, 1, 5), (4, 0, 0), (4, 1, 5), (8, 0, 0), (8, 1, 5), (10, 0, 0)]
    assert seen == [("sums", done, 10, ended, tokens) for done, ended, tokens in steps]
    assert [len(call.seeds) for call in engine.calls] == [4, 4, 2]
    assert results == json.loads((tmp_path / "e" / "results.json").read_text())
    found = results["tasks"]["sums"]
    assert (found["problems"], found["samples"], found["accuracy"], found["truncated"]) == (10, 1, 0.7, 0.0)
    assert found["low"] < 0.7 < found["high"]


def test_an_answer_at_the_length_limit_is_not_finished(engine, policy, task, tmp_path):
    results = run_evaluation(policy, [task(3)], EvaluationSettings(max_new_tokens=2), tmp_path)
    found = results["tasks"]["sums"]
    # "10", "11", "12" fit into two tokens, the end of the answer does not; the third reference is another number.
    assert (found["truncated"], found["right_truncated"], found["accuracy"]) == (1.0, 2, 0.666667)
    assert [row["finished"] for row in rows(tmp_path / "sums.jsonl")] == [False] * 3


def test_samples_have_seeds_of_their_own_that_nothing_else_changes(engine, policy, task, tmp_path):
    run_evaluation(policy, [task(6)], SAMPLED, tmp_path / "a")
    seeds = np.concatenate([call.seeds for call in engine.calls])
    assert len(set(seeds.tolist())) == 18
    engine.calls.clear()
    other = EvaluationSettings(max_new_tokens=4, slots=2, batch=7, samples=5, temperature=1.0, top_p=0.95, limit=4)
    run_evaluation(policy, [task(6)], other, tmp_path / "b")
    a, b = ({(r["index"], r["sample"]): r["response"] for r in rows(tmp_path / x / "sums.jsonl")} for x in "ab")
    both = a.keys() & b.keys()
    assert len(both) == 12
    assert all(a[key] == b[key] for key in both)
    assert {key[0] for key in b} == {0, 2, 4, 6}
    assert len(set(a.values())) > 6  # seeds do matter here
    engine.calls.clear()
    run_evaluation(policy, [task(6, "other")], SAMPLED, tmp_path / "c")
    assert not set(seeds.tolist()) & set(np.concatenate([call.seeds for call in engine.calls]).tolist())


def test_avg_at_k_is_the_mean_over_problems_of_the_mean_over_samples(engine, policy, task, tmp_path):
    found = run_evaluation(policy, [task(6)], SAMPLED, tmp_path)["tasks"]["sums"]
    by_problem: dict[int, list[float]] = {}
    for row in rows(tmp_path / "sums.jsonl"):
        by_problem.setdefault(row["index"], []).append(row["reward"])
    assert found["samples"] == 3
    assert found["accuracy"] == pytest.approx(sum(sum(r) / 3 for r in by_problem.values()) / 6, abs=1e-6)


def test_resuming_asks_only_what_is_missing(engine, policy, task, tmp_path):
    run_evaluation(policy, [task(10)], SAMPLED, tmp_path / "whole")
    whole = rows(tmp_path / "whole" / "sums.jsonl")
    run_evaluation(policy, [task(10)], SAMPLED, tmp_path / "part")
    file = tmp_path / "part" / "sums.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:8]) + lines[8][:11])  # a write that was cut off
    engine.calls.clear()
    results = run_evaluation(policy, [task(10)], SAMPLED, tmp_path / "part", resume=True)
    assert sum(len(call.seeds) for call in engine.calls) == 22
    part = rows(file)
    key = lambda row: (row["index"], row["sample"])  # noqa: E731
    assert sorted(map(key, part)) == sorted(map(key, whole))
    assert {key(r): (r["response"], r["reward"]) for r in part} == {key(r): (r["response"], r["reward"]) for r in whole}
    engine.calls.clear()
    again = run_evaluation(policy, [task(10)], SAMPLED, tmp_path / "part", resume=True)
    assert engine.calls == []
    assert again == results


def test_more_problems_samples_and_tasks_join_what_is_there(engine, policy, task, tmp_path):
    few = EvaluationSettings(max_new_tokens=4, limit=2, temperature=1.0, top_p=0.95)
    run_evaluation(policy, [task(10)], few, tmp_path)
    results = run_evaluation(policy, [task(10), task(3, "more")], SAMPLED, tmp_path, resume=True)
    assert [results["tasks"][name]["problems"] for name in ("sums", "more")] == [10, 3]
    assert len(rows(tmp_path / "sums.jsonl")) == 30
    # Fewer again: the table is of what was asked for, and the file keeps the rest.
    assert run_evaluation(policy, [task(10)], few, tmp_path, resume=True)["tasks"]["sums"]["problems"] == 2
    assert len(rows(tmp_path / "sums.jsonl")) == 30
    assert set(json.loads((tmp_path / "settings.json").read_text())["files"]) == {"sums", "more"}


def test_answers_under_other_settings_are_never_mixed(engine, policy, task, tmp_path):
    run_evaluation(policy, [task(2)], GREEDY, tmp_path)
    with pytest.raises(ValueError, match="already holds an evaluation; continue it with --resume"):
        run_evaluation(policy, [task(2)], GREEDY, tmp_path)
    for name, changed in {
        "sampling": (policy, task(2), dataclasses.replace(GREEDY, max_new_tokens=5)),
        "policy": (dataclasses.replace(policy, identity={"weights": "v"}), task(2), GREEDY),
        "sums": (policy, task(2, digest="e"), GREEDY),
    }.items():
        who, what, how = changed
        with pytest.raises(ValueError, match=rf"other settings \({name} differ"):
            run_evaluation(who, [what], how, tmp_path, resume=True)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"holds answers, but not the settings .*settings\.json"):
        run_evaluation(policy, [task(2)], GREEDY, tmp_path, resume=True)
    (tmp_path / "settings.json").write_text("[]")
    with pytest.raises(ValueError, match="is not the record of an evaluation"):
        run_evaluation(policy, [task(2)], GREEDY, tmp_path, resume=True)


def test_mistakes_are_found_before_anything_is_written(engine, policy, task, tmp_path):
    with pytest.raises(ValueError, match="every name once"):
        run_evaluation(policy, [task(2), task(3)], GREEDY, tmp_path / "e")
    with pytest.raises(ValueError, match=r"task sums, made\[0\]: character 'x'.* is not in the alphabet"):
        run_evaluation(policy, [task(2, prompt_format="x{question}")], GREEDY, tmp_path / "e")
    empty = [Problem(prompt=" ", reference="1", source="made", index=0)]
    silent = dataclasses.replace(policy, encode=lambda message: [])
    with pytest.raises(ValueError, match="its prompt has no tokens"):
        run_evaluation(silent, [dataclasses.replace(task(1), problems=empty)], GREEDY, tmp_path / "e")
    assert not (tmp_path / "e").exists()


def test_answers_stay_within_the_context_that_the_policy_was_made_for(engine, policy, task, tmp_path):
    short = dataclasses.replace(policy, context=10)  # "9+10=?" takes 6
    run_evaluation(short, [task(10)], GREEDY, tmp_path / "e")
    with pytest.raises(ValueError, match=r"max_new_tokens=5 after .* of sums, 6 tokens, .* 10 tokens; give at most 4"):
        run_evaluation(short, [task(10)], dataclasses.replace(GREEDY, max_new_tokens=5), tmp_path / "f")
    assert not (tmp_path / "f").exists()


def test_a_prompt_that_is_whole_is_not_put_into_a_chat(engine, policy, task, tmp_path):
    chatty = dataclasses.replace(policy, encode=lambda message: policy.tokenizer.encode("1+1=?"))
    run_evaluation(chatty, [task(1)], GREEDY, tmp_path / "chat")
    run_evaluation(chatty, [task(1, rendered=True)], GREEDY, tmp_path / "whole")
    assert [rows(tmp_path / x / "sums.jsonl")[0]["response"] for x in ("chat", "whole")] == ["2", "10"]


def test_a_reward_function_of_ones_own(engine, policy, task, tmp_path):
    mine = task(4, reward=lambda problem, response: 0.25 * (response == str(problem.index // 2 + 10)))
    assert run_evaluation(policy, [mine], GREEDY, tmp_path)["tasks"]["sums"]["accuracy"] == 0.25


def test_the_engine_knows_the_stop_strings(engine, policy, task, tmp_path):
    run_evaluation(policy, [task(2)], dataclasses.replace(SAMPLED, stop=("0",)), tmp_path)
    assert engine.stop == ("0",)


def test_tasks_of_about_one_length_share_an_engine(engine, policy, task, tmp_path):
    long = [Problem(prompt="0" * 30 + "1+10=?", reference="11", source="made", index=0)]
    tasks = [task(3), task(3, "more"), dataclasses.replace(task(1, "long"), problems=long)]
    run_evaluation(policy, tasks, GREEDY, tmp_path)
    assert [made.max_prompt_length for made in engine.made] == [32, 64]


PROGRAM = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {here!r})
    import conftest
    from trm_jax.evaluation import EvaluationSettings, Policy, _run, run_evaluation
    _run.InProcessEngine = conftest.RuleEngine
    conftest.RuleEngine.before_answer = staticmethod(lambda: time.sleep(0.05))
    policy = Policy(name="rule", model=conftest.tiny_model(18), tokenizer=conftest.TOKENIZER,
                    encode=conftest.TOKENIZER.encode, identity={{}})
    settings = EvaluationSettings(max_new_tokens=4, batch=3, samples=2, temperature=1.0)
    run_evaluation(policy, [conftest.sums(60)], settings, {out!r}, resume=True)
"""


@pytest.mark.slow
def test_killed_again_and_again_nothing_is_lost_and_nothing_twice(tmp_path):
    def start(out: Path) -> subprocess.Popen[bytes]:
        program = textwrap.dedent(PROGRAM.format(here=str(Path(__file__).parent), out=str(out)))
        return subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)

    def size(out: Path) -> int:
        return len((out / "sums.jsonl").read_bytes().splitlines()) if (out / "sums.jsonl").exists() else 0

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with start(whole) as done:
        assert done.communicate(timeout=300)[1] == b""
    kept = 0
    for _ in range(3):
        with start(cut) as running:
            while size(cut) < kept + 9:
                assert running.poll() is None, running.stderr
            os.kill(running.pid, signal.SIGKILL)
        assert size(cut) >= kept + 9
        kept = size(cut)
    assert kept < 120
    with start(cut) as last:
        assert last.communicate(timeout=300)[1] == b""
    assert last.returncode == 0
    one, other = (
        sorted((r["index"], r["sample"], r["response"], r["reward"]) for r in rows(x / "sums.jsonl"))
        for x in (whole, cut)
    )
    assert one == other
    assert len(one) == len({row[:2] for row in one}) == 120


def test_an_answer_that_could_not_be_judged_is_counted(engine, policy, tmp_path):
    pytest.importorskip("math_verify")
    problems = [
        Problem(prompt=f"{i}+1=?", reference=gold, source="made", index=i) for i, gold in enumerate(("1", "", "4"))
    ]
    task = EvaluationTask(name="t", problems=problems, reward="math", prompt_format="question", digest="")
    found = run_evaluation(policy, [task], GREEDY, tmp_path)["tasks"]["t"]
    assert found["unjudged"] == 1
    assert [(r["reward"], r["verdict"]) for r in rows(tmp_path / "t.jsonl")] == [
        (1.0, "scored"),
        (0.0, "error"),
        (0.0, "scored"),
    ]
