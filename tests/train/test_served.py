"""Runs whose samples come from a server process: the same bits as in one process, whatever is killed in between."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("grpc")
pytest.importorskip("jetstream")

pytestmark = pytest.mark.slow

# Fixed tiles in the engine: it then samples the same bits whatever decodes beside, here as in the server.
ENGINE = "rollout.numerics={batch_invariant=true}"
COMMON = (ENGINE, "warmstart.steps=0", "eval.prompts=0")
IN_TURN = ("rollout.lag=2",)
AHEAD = ("rollout.lag=0", "rollout.max_staleness=4")  # two updates a step: two steps ahead
MODES = pytest.mark.parametrize("mode", [IN_TURN, AHEAD], ids=["in_turn", "ahead"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def program(start_program, folder: Path):
    return start_program(folder)


@pytest.fixture(scope="module")
def in_process(program, folder: Path):
    """The run of one mode with its rollouts in the trainer's own process; made once."""

    def run(mode: tuple[str, ...]) -> Path:
        root = folder / f"in_process_{len(mode)}"
        if not root.exists():
            code, out, err = program.run("train", "tiny.toml", *COMMON, *mode, f"directory={root.name}")
            assert code == 0, (out, err)
            # Weights move and versions count, or a test that all stays the same would show nothing.
            assert rows_of(root)[-1]["version"] >= 6
        return root

    return run


@pytest.fixture
def name(request) -> str:
    return "".join(c if c.isalnum() else "_" for c in request.node.name)


def seed_folder(root: Path) -> Path:
    return root / "arms" / "run" / "seed0"


def rows_of(root: Path) -> list[dict]:
    return [json.loads(line) for line in (seed_folder(root) / "metrics.jsonl").read_text().splitlines()]


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def serve(program, name: str, port: int, *options: str) -> subprocess.Popen[str]:
    """A server that listens."""
    process = program.start("serve", "tiny.toml", ENGINE, "--port", str(port), "--weights", f"{name}_weights", *options)
    line = process.stdout.readline()
    assert line == f"serving on 127.0.0.1:{port}\n", (line, process.communicate())
    return process


@contextlib.contextmanager
def serving(program, name: str, port: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    process = serve(program, name, port, *options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def at(name: str, port: int) -> tuple[str, ...]:
    return (f"rollout.address=127.0.0.1:{port}", f"rollout.weights={name}_weights", f"directory={name}")


@MODES
def test_a_server_gives_the_bits_of_one_process_and_outlives_a_killed_trainer(
    program, in_process, same_run, folder, name, mode
):
    port = free_port()
    with serving(program, name, port) as server:
        code, _, err = program.run("train", "tiny.toml", *COMMON, *mode, *at(name, port), "--signal=SIGKILL@arms@3")
        assert code == -signal.SIGKILL, err
        code, out, err = program.run("train", "tiny.toml", *COMMON, *mode, *at(name, port), "--resume")
        assert code == 0, (out, err)
        assert server.poll() is None
    same_run(seed_folder(folder / name), seed_folder(in_process(mode)))
    # The directory holds no more than the versions that the last trainer still needed.
    assert len(list((folder / f"{name}_weights").glob("version_*"))) <= 2


@MODES
def test_a_server_killed_in_a_batch_loses_no_sample_and_doubles_none(program, in_process, same_run, folder, name, mode):
    """A step asks for 2 x 4 samples; the server dies before the 12th reply, is started again, and again dies."""
    port = free_port()
    server = serve(program, name, port, "--kill-before-reply=12")
    trainer = program.start("train", "tiny.toml", *COMMON, *mode, *at(name, port))
    try:
        assert server.wait(timeout=300) == -signal.SIGKILL
        server.communicate()
        assert trainer.poll() is None
        server = serve(program, name, port, "--kill-before-reply=7")
        assert server.wait(timeout=300) == -signal.SIGKILL
        server.communicate()
        server = serve(program, name, port)
        out, err = trainer.communicate(timeout=300)
        assert trainer.returncode == 0, (out, err)
    finally:
        for process in (trainer, server):
            process.kill()
            process.communicate()
    same_run(seed_folder(folder / name), seed_folder(in_process(mode)))


def test_the_experts_of_a_served_engine_are_replayed(program, in_process, same_run, folder, name):
    mixture, port = ("model.n_experts=4", "model.replay_routes=true"), free_port()
    mode = (*IN_TURN, *mixture)
    with serving(program, name, port, *mixture):
        code, out, err = program.run("train", "tiny.toml", *COMMON, *mode, *at(name, port))
        assert code == 0, (out, err)
        same_run(seed_folder(folder / name), seed_folder(in_process(mode)))
    with serving(program, f"{name}_silent", port, mixture[0]):
        code, _, err = program.run("train", "tiny.toml", *COMMON, *mode, *at(f"{name}_silent", port))
        assert code == 2
        assert "model.replay_routes" in err


def test_a_slow_server_changes_no_bit(program, in_process, same_run, folder, name):
    port = free_port()
    with serving(program, name, port, "--delay-replies=0.1"):
        code, out, err = program.run("train", "tiny.toml", *COMMON, *AHEAD, *at(name, port))
    assert code == 0, (out, err)
    same_run(seed_folder(folder / name), seed_folder(in_process(AHEAD)))


def test_a_server_that_stays_away_ends_the_run_after_its_last_step_was_saved(
    program, in_process, same_run, folder, name
):
    port = free_port()
    options = (*COMMON, *AHEAD, "rollout.patience=3", *at(name, port))
    server = serve(program, name, port, "--kill-before-reply=28")  # in the fourth batch
    code, out, err = program.run("train", "tiny.toml", *options)
    server.communicate()
    assert code == 2, (out, err)
    assert "trm-jax: error: rollout.address='127.0.0.1" in err
    assert "Traceback" not in err
    result = json.loads((seed_folder(folder / name) / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["steps"] >= 1
    saved = sorted(path.name for path in (seed_folder(folder / name) / "checkpoints").iterdir())
    assert saved[-1] == f"step_{result['steps']:08d}"
    other = free_port()  # and is resumed at another address
    with serving(program, name, other):
        code, out, err = program.run("train", "tiny.toml", *options, *at(name, other), "--resume")
    assert code == 0, (out, err)
    same_run(seed_folder(folder / name), seed_folder(in_process(AHEAD)))


@pytest.mark.parametrize("finish_first", ["false", "true"])
def test_weights_may_change_in_flight_and_the_tokens_versions_tell(program, folder, name, finish_first):
    port = free_port()
    options = (
        "steps=12",
        "rollout.record_hidden=false",
        "rollout.schedule=newest",
        f"rollout.finish_first={finish_first}",
    )
    serving_too = ("rollout.record_hidden=false", "rollout.decode_chunk=1", "rollout.slots=2", "--delay-replies=0.02")
    with serving(program, name, port, *serving_too):
        code, out, err = program.run("train", "tiny.toml", *COMMON, *AHEAD, *options, *at(name, port))
    assert code == 0, (out, err)
    rows = rows_of(folder / name)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all(row["rollout/staleness_max"] <= 4 for row in rows)
    assert all(row["rollout/dropped_groups"] == 0 for row in rows)
    assert rows[-1]["version"] >= 12
    assert any(row["rollout/staleness_max"] > 0 for row in rows)


def test_what_does_not_fit_is_refused_by_name_before_anything_runs(program, folder, name):
    port = free_port()
    with serving(program, name, port):
        options = ("warmstart.steps=0", "eval.prompts=0", *at(name, port))
        code, _, err = program.run("train", "tiny.toml", *options, "rollout.numerics={weight_format='int8'}")
        assert code == 2
        assert "the server has numerics=" in err
        assert err.count("\n") == 1
        other = f"{name}_first"
        first = program.start("train", "tiny.toml", "steps=2000", ENGINE, *options, f"directory={other}")
        try:
            program.wait_for_step(first, seed_folder(folder / other) / "metrics.jsonl", 1)
            code, _, err = program.run("train", "tiny.toml", ENGINE, *options, f"directory={name}_second")
        finally:
            first.kill()
            first.communicate()
        assert code == 2
        assert "another trainer writes its weights to" in err
        assert err.count("\n") == 1
        assert not (folder / f"{name}_second").exists()


def test_another_runs_version_of_the_same_number_is_refused(program, folder, name):
    """The server follows a directory in which an earlier run left its version 0, and the trainer writes elsewhere."""
    port = free_port()
    with serving(program, name, port):
        code, out, err = program.run("train", "tiny.toml", *COMMON, *IN_TURN, "steps=1", *at(name, port))
        assert code == 0, (out, err)
    assert [path.name for path in (folder / f"{name}_weights").glob("version_*")] == ["version_00000000"]
    elsewhere = (*at(name, port), f"directory={name}_second", f"rollout.weights={name}_elsewhere")
    with serving(program, name, port) as server:
        code, _, err = program.run("train", "tiny.toml", *COMMON, *IN_TURN, "seed=1", *elsewhere)
        assert code == 2
        assert "policy version 0 in the weight directory is" in err
        assert "another run wrote it" in err
        assert server.poll() is None
    result = json.loads((folder / f"{name}_second" / "arms" / "run" / "seed1" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("failed", 0)


def test_a_training_without_an_address_needs_no_grpc():
    program = (
        "import sys; sys.modules['grpc'] = None; import trm_jax.cli, trm_jax.train; "
        "from trm_jax.train import build, check_experiment; "
        "assert 'trm_jax.serve' not in sys.modules; "
        "config = build({'rollout': {'address': 'localhost:1', 'weights': 'w', 'lag': 0}, 'warmstart': {'steps': 0}});"
        "check_experiment(config.arms[0].train)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert "ImportError: rollout.address='localhost:1' needs 'grpc': pip install 'trm-jax[serve]'" in done.stderr
