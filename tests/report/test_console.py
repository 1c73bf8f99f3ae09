from __future__ import annotations

import io

import pytest
from rich.console import Console

from trm_jax.report import ConsoleProgress, PlannedRun


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _plain(**options: object) -> tuple[ConsoleProgress, io.StringIO, _Clock]:
    stream, clock = io.StringIO(), _Clock()
    console = Console(file=stream, force_terminal=False, width=200)
    plan = [PlannedRun(arm=arm, seed=seed, steps=20) for arm in ("lag only", "TRM") for seed in (0, 1)]
    return ConsoleProgress(runs=plan, console=console, clock=clock, **options), stream, clock


def test_a_log_gets_a_line_every_few_steps_the_first_the_last_and_evaluations():
    progress, stream, _ = _plain(every=8)
    progress.start_run("TRM", 1)
    for step in range(1, 21):
        progress.update(step, {"stage": "rl", **({"accuracy/heldout": 0.5} if step == 10 else {})})
    progress.finish_run("complete")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line.split("rl ")[1].split("/")[0] for line in lines[:-1]] == ["1", "8", "10", "16", "20"]
    assert lines[-1] == "TRM (arm 2/2), seed 1: complete"
    assert "held-out 50.0%" in lines[2]
    assert "\x1b" not in stream.getvalue()


def test_a_line_says_where_it_is_how_it_goes_and_how_long_it_takes():
    progress, stream, clock = _plain(every=10)
    progress.start_run("lag only", 0)
    clock.now = 100.0  # compilation: must not count
    for step in range(1, 11):
        metrics = {
            "stage": "rl",
            "reward/mean": 0.25,
            "correction/sequence_keep_fraction": 0.9,
            "time/tokens_per_s": 5210.0,
        }
        progress.update(step, metrics)
        clock.now += 2.0
    # 10 steps at 2 s are left in this run, and 3 more runs of 20 steps: 20 s, and 20 + 120 = 140 s = 2:20.
    expected = "lag only (arm 1/2), seed 0: rl 10/20, reward 0.250, kept 90%, 5,210 tok/s; left: arm 0:20; all 2:20"
    assert stream.getvalue().splitlines()[-1] == expected


def test_a_resumed_run_does_not_count_the_steps_of_its_predecessor_as_time():
    progress, stream, clock = _plain(every=1)
    progress.start_run("lag only", 0, first_step=15)
    progress.update(16, {})
    clock.now = 3.0
    progress.update(17, {})
    assert "left: arm 0:09;" in stream.getvalue().splitlines()[-1]  # 3 steps at 3 s


def test_a_stage_without_a_measured_step_leaves_the_total_unsaid():
    stream, clock = io.StringIO(), _Clock()
    plan = [PlannedRun(arm="warm start", seed=0, steps=4, stage="warmstart"), PlannedRun(arm="TRM", seed=0, steps=4)]
    progress = ConsoleProgress(runs=plan, every=1, console=Console(file=stream, width=200), clock=clock)
    progress.start_run("warm start", 0)
    for step in (1, 2):
        progress.update(step, {})
        clock.now += 1.0
    last = stream.getvalue().splitlines()[-1]
    assert last == "warm start (arm 1/2), seed 0: warmstart 2/4; left: arm 0:02"


def test_runs_that_ended_early_are_no_longer_waited_for():
    progress, stream, clock = _plain(every=1)
    progress.start_run("lag only", 0)
    progress.update(1, {})
    progress.finish_run("failed", "loss is NaN at step 1")
    progress.start_run("lag only", 1)
    for step in (1, 2):
        progress.update(step, {})
        clock.now += 1.0
    lines = stream.getvalue().splitlines()
    assert "lag only (arm 1/2), seed 0: failed: loss is NaN at step 1" in lines
    assert lines[-1].endswith("left: arm 0:18; all 0:58")  # 18 + 20 + 20


def test_a_warm_start_that_is_skipped_is_not_waited_for():
    stream, clock = io.StringIO(), _Clock()
    plan = [PlannedRun(arm="warm start", seed=seed, steps=4, stage="warmstart") for seed in (0, 1)]
    plan += [PlannedRun(arm="TRM", seed=seed, steps=4) for seed in (0, 1)]
    progress = ConsoleProgress(runs=plan, every=1, console=Console(file=stream, width=200), clock=clock)
    for seed in (0, 1):
        progress.start_run("TRM", seed)
        for step in (1, 2):
            progress.update(step, {})
            clock.now += 1.0
    lines = stream.getvalue().splitlines()
    assert lines[1].endswith("left: arm 0:02")  # seed 1's warm start may still come
    assert lines[-1].endswith("left: arm 0:02; all 0:02")


def test_names_with_brackets_are_printed_as_they_are():
    stream = io.StringIO()
    plan = [PlannedRun(arm="[red]arm[/red]", seed=0, steps=1)]
    progress = ConsoleProgress(runs=plan, console=Console(file=stream, width=200))
    progress.start_run("[red]arm[/red]", 0)
    progress.update(1, {})
    assert stream.getvalue().startswith("[red]arm[/red] (arm 1/1)")


def test_a_terminal_gets_bars_for_the_run_and_for_everything():
    stream, clock = io.StringIO(), _Clock()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    plan = [PlannedRun(arm="lag only", seed=0, steps=4), PlannedRun(arm="[x]", seed=0, steps=4)]
    with ConsoleProgress(runs=plan, console=console, clock=clock) as progress:
        progress.start_run("lag only", 0)
        for step in range(1, 5):
            progress.update(step, {"stage": "rl", "reward/mean": 0.5})
            clock.now += 1.0
        progress.finish_run("complete")
        progress.start_run("[x]", 0)
        progress.update(1, {"stage": "rl", "reward/mean": 0.75})
        progress.note("a note")
    output = stream.getvalue()
    final = output[output.rindex("[x] (arm 2/2), seed 0") :]
    assert "1/4" in final
    assert "rl, reward 0.750" in final
    assert "all arms" in final
    assert "5/8" in final
    assert "a note" in output


def test_misuse_is_named():
    with pytest.raises(ValueError, match="runs is empty"):
        ConsoleProgress(runs=[])
    with pytest.raises(ValueError, match="every must be >= 1, got 0"):
        ConsoleProgress(runs=[PlannedRun(arm="a", seed=0, steps=1)], every=0)
    with pytest.raises(ValueError, match="twice"):
        ConsoleProgress(runs=[PlannedRun(arm="a", seed=0, steps=1)] * 2)
    with pytest.raises(ValueError, match="steps must be >= 1, got 0"):
        PlannedRun(arm="a", seed=0, steps=0)
    progress, _, _ = _plain()
    with pytest.raises(ValueError, match="'CIS' with seed 0 is not in the plan"):
        progress.start_run("CIS", 0)
    with pytest.raises(ValueError, match="before start_run"):
        progress.update(1, {})
    with pytest.raises(ValueError, match="before start_run"):
        progress.finish_run("complete")
