from __future__ import annotations

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trm_jax.report import METRICS, Arm, RunResult, SeedRun, collect, render_overview, render_panel
from trm_jax.report.curves import series
from trm_jax.report.figures import PANELS, drawable_panels
from trm_jax.report.styles import arm_styles

Job = Callable[..., Path]


def _run(seed: int, values: dict[int, float], name: str = "optim/grad_norm", start: float = math.nan) -> SeedRun:
    rows = tuple({"step": step, "stage": "rl", name: value} for step, value in values.items())
    return SeedRun(seed=seed, rows=rows, result=RunResult(status="complete", accuracy_start=start), config={})


def test_a_curve_is_the_mean_over_seeds_with_its_extremes():
    arm = Arm(name="a", slug="a", runs=(_run(0, {1: 1.0, 2: 2.0}), _run(1, {1: 3.0, 2: math.nan, 3: 7.0})))
    curve = series(arm, "optim/grad_norm")
    assert curve.seeds == 2
    np.testing.assert_array_equal(curve.steps, [1, 2, 3])
    np.testing.assert_array_equal(curve.mean, [2, 2, 7])
    np.testing.assert_array_equal(curve.low, [1, 2, 7])
    np.testing.assert_array_equal(curve.high, [3, 2, 7])


def test_infinities_are_gaps_and_a_missing_metric_is_an_empty_curve():
    arm = Arm(name="a", slug="a", runs=(_run(0, {1: math.inf, 2: 2.0}),))
    np.testing.assert_array_equal(series(arm, "optim/grad_norm").mean, [math.nan, 2.0])
    assert series(arm, "optim/loss").steps.size == 0
    assert series(Arm(name="a", slug="a"), "optim/loss").seeds == 0


def test_accuracy_begins_one_step_before_the_first_update():
    arm = Arm(name="a", slug="a", runs=(_run(0, {11: 0.5, 12: 0.6}, "accuracy/heldout", start=0.25),))
    curve = series(arm, "accuracy/heldout")
    np.testing.assert_array_equal(curve.steps, [10, 11, 12])
    np.testing.assert_array_equal(curve.mean, [0.25, 0.5, 0.6])


def test_an_evaluation_at_step_0_is_the_beginning():
    run = _run(0, {0: 0.2, 1: 0.3}, "accuracy/heldout", start=0.25)
    curve = series(Arm(name="a", slug="a", runs=(run,)), "accuracy/heldout")
    np.testing.assert_array_equal(curve.steps, [0, 1])
    np.testing.assert_array_equal(curve.mean, [0.2, 0.3])


@pytest.mark.parametrize(("name", "expected"), [("mismatch/token_kl_max", 100.0), ("optim/grad_norm", 34.0)])
def test_long_curves_are_binned_and_a_maximum_keeps_its_peak(name: str, expected: float):
    # 1,000 steps in bins of 3: steps 499 to 501 hold 1, 100, 1, of mean 102/3 = 34.
    values = {step: 100.0 if step == 500 else 1.0 for step in range(1, 1001)}
    curve = series(Arm(name="a", slug="a", runs=(_run(0, values, name),)), name)
    assert curve.steps.size == math.ceil(1000 / 3)
    assert curve.steps[-1] == 1000
    assert curve.mean.max() == pytest.approx(expected)
    assert curve.high.max() == 100.0


def test_arms_look_different_and_roles_keep_their_colour():
    arms = [Arm(name=f"{i}", slug=f"{i}", role="reference" if i == 3 else None) for i in range(8)]
    styles = arm_styles(arms)
    assert styles["3"].colour == "#000000"
    assert len(set(styles.values())) == 8
    assert styles["0"].svg_dash(2.0) == ""
    assert styles["1"].svg_dash(2.0) == "16 4"


def test_two_arms_of_one_role_look_different_and_any_number_of_arms_is_drawn():
    twins = arm_styles([Arm(name=name, slug=name, role="numerics_only") for name in ("int4", "fp8")])
    assert twins["int4"] != twins["fp8"]
    assert len(arm_styles([Arm(name=f"{i}", slug=f"{i}") for i in range(30)])) == 30


def test_empty_and_idle_panels_are_left_out_and_said(job: Job):
    data = collect(job())
    panels, left_out = drawable_panels(data)
    assert panels["Learning"] == ("accuracy/heldout", "reward/mean")
    assert "correction/token_keep_fraction" not in panels["Correction"]
    assert left_out == ("tokens kept: not recorded", "prompts dropped: 0 in every arm at every step")
    idle = [arm for arm in data.arms if arm.role != "corrected"]
    panels, left_out = drawable_panels(type(data)(title="", command="", created="", arms=tuple(idle), problems=()))
    assert "Correction" not in panels
    assert "sequences kept: 1 in every arm at every step" in left_out


@pytest.mark.parametrize("name", [name for names in PANELS.values() for name in names])
def test_every_panel_is_drawn_as_svg_the_same_each_time(job: Job, name: str):
    data = collect(job(seeds=2))
    svg = render_panel(data, name)
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert render_panel(data, name) == svg
    recorded = any(name in row for arm in data.arms for run in arm.runs for row in run.rows)
    colours = {style.colour.lower() for style in arm_styles(data.arms).values()}
    assert {colour for colour in colours if colour in svg.decode().lower()} >= (colours if recorded else set())


def test_png_and_the_overview(job: Job):
    data = collect(job())
    assert render_panel(data, "optim/grad_norm", format="png").startswith(b"\x89PNG")
    assert render_overview(data).startswith(b"\x89PNG")
    assert ElementTree.fromstring(render_overview(data, format="svg")).tag.endswith("svg")


@pytest.mark.parametrize("name", ["mismatch/token_kl_max", "mismatch/ppl_gap", "accuracy/heldout", "optim/loss"])
@pytest.mark.parametrize("values", [{}, {1: math.nan}, {1: 0.0, 2: 0.0}, {1: 1e-30, 2: 1.0}, {5: math.inf}, {1: -1.0}])
def test_odd_values_are_drawn_without_complaint(name: str, values: dict[int, float]):
    arm = Arm(name="a", slug="a", runs=(_run(0, values, name), _run(1, {1: 0.0, 2: 3.0}, name)))
    for runs in (arm.runs, arm.runs[:1]):
        data = _data(Arm(name="a", slug="a", runs=runs))
        assert render_panel(data, name, format="png").startswith(b"\x89PNG")


def test_dollars_in_names_are_no_formulas():
    data = _data(Arm(name="$x_1 $y^", slug="a", runs=(_run(0, {1: 1.0}),)))
    assert render_overview(data).startswith(b"\x89PNG")


def test_a_job_without_arms_has_an_overview_that_says_so():
    assert render_overview(_data()).startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_refused(job: Job):
    data = collect(job())
    with pytest.raises(ValueError, match="'stage' is not a numeric metric"):
        render_panel(data, "stage")
    with pytest.raises(ValueError, match="'nonsense' is not"):
        render_panel(data, "nonsense")
    with pytest.raises(ValueError, match="format must be 'svg' or 'png', got 'pdf'"):
        render_panel(data, "optim/loss", format="pdf")


def test_panels_name_metrics_of_the_catalogue():
    assert {name for names in PANELS.values() for name in names} <= set(METRICS)


def test_importing_the_room_loads_nothing_heavy_and_drawing_leaves_pyplot_alone(job: Job):
    code = (
        "import sys, json, pathlib, trm_jax\n"
        "before = set(sys.modules)\n"
        "import trm_jax.report as r\n"
        "early = [m for m in ('matplotlib', 'jinja2', 'rich', 'tensorboardX') if m in set(sys.modules) - before]\n"
        f"r.write_report(pathlib.Path({str(job())!r}))\n"
        "print(json.dumps([early, 'matplotlib.pyplot' in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], False]


def _data(*arms: Arm):
    from trm_jax.report import ReportData

    return ReportData(title="t", command="", created="", arms=arms, problems=())
