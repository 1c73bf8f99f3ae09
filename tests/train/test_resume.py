"""A run that is killed or interrupted ends, after ``--resume``, with the bits of one that was not."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the programs of this file run; it holds the configuration and the run that nobody disturbs."""
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def program(start_program, folder: Path):
    return start_program(folder)


@pytest.fixture(scope="module")
def uninterrupted(program, folder: Path) -> Path:
    code, out, err = program.run("train", "tiny.toml", "directory=whole")
    assert code == 0, (out, err)
    return folder / "whole"


@pytest.fixture
def name(request) -> str:
    """A directory of the test's own, inside the folder."""
    return "".join(c if c.isalnum() else "_" for c in request.node.name)


def seed_folder(root: Path) -> Path:
    return root / "arms" / "run" / "seed0"


def warm_folder(root: Path) -> Path:
    (folder,) = (root / "warmstart").iterdir()
    return folder


def test_sigkill_in_the_middle_of_a_checkpoint_loses_nothing(program, uninterrupted, same_run, folder, name):
    root = folder / name
    code, _, _ = program.run("train", "tiny.toml", f"directory={name}", "--kill-in-save=4")
    assert code == -signal.SIGKILL
    left = sorted(path.name for path in (seed_folder(root) / "checkpoints").iterdir())
    assert left == ["step_00000002", "step_00000004.partial"]
    assert '"step": 4,' in (seed_folder(root) / "metrics.jsonl").read_text()  # written before the checkpoint

    code, out, err = program.run("train", "tiny.toml", f"directory={name}", "--resume")
    assert code == 0, (out, err)
    same_run(seed_folder(root), seed_folder(uninterrupted))
    # The toy does learn from what it samples: a test on frozen weights would hold for any resume.
    rows = [json.loads(line) for line in (seed_folder(root) / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert rows[-1]["version"] >= 4
    assert any(row.get("rollout/staleness_mean", 0) == 2 for row in rows)


@pytest.mark.slow
def test_sigint_ends_after_the_step_and_resume_completes(program, uninterrupted, same_run, folder, name):
    root = folder / name
    code, out, err = program.run("train", "tiny.toml", f"directory={name}", "--signal=SIGINT@arms@3")
    assert code == 130, (out, err)
    assert "stopped after step 3; continue with --resume" in err
    assert "Traceback" not in err
    result = json.loads((seed_folder(root) / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("stopped", 3)
    assert (seed_folder(root) / "checkpoints" / "step_00000003").is_dir()

    code, out, err = program.run("train", "tiny.toml", f"directory={name}", "--resume")
    assert code == 0, (out, err)
    same_run(seed_folder(root), seed_folder(uninterrupted))
    assert json.loads((seed_folder(root) / "result.json").read_text())["status"] == "complete"


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 2, 5])
def test_sigkill_from_outside_at_any_step(program, uninterrupted, same_run, folder, name, step):
    root = folder / name
    process = program.start("train", "tiny.toml", f"directory={name}")
    program.wait_for_step(process, seed_folder(root) / "metrics.jsonl", step)
    process.kill()
    process.communicate()
    code, out, err = program.run("train", "tiny.toml", f"directory={name}", "--resume")
    assert code == 0, (out, err)
    same_run(seed_folder(root), seed_folder(uninterrupted))


@pytest.mark.slow
def test_killed_again_and_again(program, uninterrupted, same_run, folder, name):
    root = folder / name
    for step, resume in ((1, ()), (3, ("--resume",)), (4, ("--resume",)), (5, ("--resume",))):
        code, _, _ = program.run("train", "tiny.toml", f"directory={name}", f"--signal=SIGKILL@arms@{step}", *resume)
        assert code == -signal.SIGKILL
    code, out, err = program.run("train", "tiny.toml", f"directory={name}", "--resume")
    assert code == 0, (out, err)
    same_run(seed_folder(root), seed_folder(uninterrupted))


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGKILL", "SIGINT"])
def test_signals_in_the_warm_start(program, same_run, folder, name, number):
    options = ("warmstart.steps=8", "checkpoint.every=1", "steps=1")  # a warm start saves every fifth step
    code, out, err = program.run("train", "tiny.toml", f"directory={name}_whole", *options)
    assert code == 0, (out, err)
    for step, resume in ((3, ()), (7, ("--resume",)), (8, ("--resume",))):
        stop = f"--signal={number}@warmstart@{step}"
        code, out, err = program.run("train", "tiny.toml", f"directory={name}", stop, *resume, *options)
        assert code == (-signal.SIGKILL if number == "SIGKILL" else 130), (out, err)
        metrics = seed_folder(folder / name) / "metrics.jsonl"
        assert not metrics.exists() or metrics.read_text() == ""
    code, out, err = program.run("train", "tiny.toml", f"directory={name}", "--resume", *options)
    assert code == 0, (out, err)
    same_run(warm_folder(folder / name), warm_folder(folder / f"{name}_whole"))
    same_run(seed_folder(folder / name), seed_folder(folder / f"{name}_whole"))


@pytest.mark.slow
def test_sigterm_ends_after_the_step(program, uninterrupted, same_run, folder, name):
    code, out, err = program.run("train", "tiny.toml", f"directory={name}", "--signal=SIGTERM@arms@2")
    assert code == 130, (out, err)
    code, out, err = program.run("train", "tiny.toml", f"directory={name}", "--resume")
    assert code == 0, (out, err)
    same_run(seed_folder(folder / name), seed_folder(uninterrupted))


@pytest.mark.slow
def test_a_signal_at_the_end_of_an_arm_starts_no_other_one(program, folder, name):
    code, out, err = program.run(
        "train", "tiny.toml", f"directory={name}", "seeds=[0,1]", "warmstart.steps=0", "--signal=SIGTERM@arms@5"
    )
    assert code == 130, (out, err)
    assert not (folder / name / "arms" / "run" / "seed1").exists()
    options = ("seeds=[0,1]", "warmstart.steps=0", "--resume")
    code, out, err = program.run("train", "tiny.toml", f"directory={name}", *options)
    assert code == 0, (out, err)
    for seed in (0, 1):
        result = json.loads((folder / name / f"arms/run/seed{seed}/result.json").read_text())
        assert (result["status"], result["steps"]) == ("complete", 5)


@pytest.mark.slow
def test_a_second_sigint_ends_at_once_and_the_run_resumes(program, uninterrupted, same_run, folder, name):
    twice = ("--signal=SIGINT@arms@2", "--signal=SIGINT@arms@2")
    code, out, err = program.run("train", "tiny.toml", f"directory={name}", *twice)
    assert code == 130, (out, err)
    assert err.splitlines()[-1] == "trm-jax: interrupted"
    code, out, err = program.run("train", "tiny.toml", f"directory={name}", "--resume")
    assert code == 0, (out, err)
    same_run(seed_folder(folder / name), seed_folder(uninterrupted))


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_aloud(program, uninterrupted, same_run, folder, name):
    code, _, _ = program.run("train", "tiny.toml", f"directory={name}", "--signal=SIGKILL@arms@5")
    assert code == -signal.SIGKILL
    newest = seed_folder(folder / name) / "checkpoints" / "step_00000004"
    victim = max((path for path in (newest / "arrays").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    code, out, err = program.run("train", "tiny.toml", f"directory={name}", "--resume")
    assert code == 0, (out, err)
    assert "step_00000004 is damaged" in out
    same_run(seed_folder(folder / name), seed_folder(uninterrupted))
