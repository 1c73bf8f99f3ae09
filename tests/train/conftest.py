"""The toy experiment of ``driver.py``, in this process and in others."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from trm_jax.models import make_mesh
from trm_jax.train import Checkpointer, TrainConfig, TrainRun, build

DRIVER = Path(__file__).with_name("driver.py")


@pytest.fixture(scope="session")
def driver() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trm_jax_train_driver", DRIVER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_keys(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``tree`` with dotted keys set."""
    for key, value in changes.items():
        *tables, last = key.split(".")
        place = tree
        for table in tables:
            place = place.setdefault(table, {})
        place[last] = value
    return tree


@pytest.fixture(scope="session")
def make_config(driver: ModuleType) -> Callable[..., TrainConfig]:
    """``make_config({"rollout.lag": 0})``: the tiny configuration with changes."""

    def make(changes: dict[str, Any] | None = None) -> TrainConfig:
        return build(with_keys(driver.tiny("unused"), changes or {})).arms[0].train

    return make


@pytest.fixture
def make_run(driver: ModuleType, tmp_path: Path) -> Callable[..., TrainRun]:
    """A ``TrainRun`` on the toy, from random weights; what it notes goes to ``run.notes``."""

    def make(config: TrainConfig, *, directory: Path | None = None, **toy: Any) -> TrainRun:
        experiment = driver.toy_experiment(config, **toy)
        mesh = make_mesh(config.mesh.data, config.mesh.tensor)
        notes: list[str] = []
        place = directory or tmp_path / "run"
        place.mkdir(parents=True, exist_ok=True)
        run = TrainRun(experiment, config, nnx.state(experiment.model), place, mesh, note=notes.append)
        run.notes = notes  # type: ignore[attr-defined]
        return run

    return make


class Program:
    """Starts ``driver.py`` as a process of its own."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self._folder = folder
        self._environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(cache / "bytecode"),
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(DRIVER), *arguments],
            cwd=self._folder,
            env=self._environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err

    @staticmethod
    def wait_for_step(process: subprocess.Popen[str], metrics: Path, step: int) -> None:
        """Returns as soon as the metrics file shows that step."""
        for _ in range(30_000):
            if metrics.exists() and f'{{"step": {step},' in metrics.read_text():
                return
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        raise AssertionError(f"step {step} never appeared in {metrics}")


@pytest.fixture(scope="session")
def start_program(driver: ModuleType, cache_directory: Path) -> Callable[[Path], Program]:
    """Of a folder to run in, which gets ``tiny.toml``."""

    def start(folder: Path) -> Program:
        lines = []
        for key, value in driver.tiny("unused").items():
            if isinstance(value, dict):
                lines += [f"{key}.{name} = {json.dumps(entry)}" for name, entry in value.items()]
            else:
                lines.append(f"{key} = {json.dumps(value)}")
        (folder / "tiny.toml").write_text("\n".join(lines))
        return Program(folder, cache_directory)

    return start


def held_arrays(directory: Path) -> tuple[int, dict[str, np.ndarray]]:
    """Step and arrays of the newest checkpoint, by name, as they lie on disk."""
    keeper = Checkpointer(directory)
    newest = directory / f"step_{keeper.steps()[-1]:08d}"
    layout = json.loads((newest / "layout.json").read_text())
    template = {}
    for name, text in layout.items():
        dtype, _, shape = text.partition("[")
        template[name] = np.zeros(json.loads(f"[{shape}"), dtype)
    step, arrays, _ = keeper.restore_latest(lambda _: template)
    return step, arrays


def comparable_rows(path: Path) -> list[dict[str, Any]]:
    """Metrics without what a clock or the operating system decides."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in rows]


@pytest.fixture(scope="session")
def same_run() -> Callable[[Path, Path], None]:
    """Asserts that two run directories hold the same arrays, to the bit, and the same metrics."""

    def check(a: Path, b: Path) -> None:
        steps, arrays = zip(held_arrays(a / "checkpoints"), held_arrays(b / "checkpoints"), strict=True)
        assert steps[0] == steps[1]
        assert arrays[0].keys() == arrays[1].keys()
        for name, array in arrays[0].items():
            np.testing.assert_array_equal(array, arrays[1][name], err_msg=name)
        assert comparable_rows(a / "metrics.jsonl") == comparable_rows(b / "metrics.jsonl")

    return check


@pytest.fixture
def learns(
    make_config: Callable[..., TrainConfig], make_run: Callable[..., TrainRun], tmp_path: Path, request: Any
) -> Iterator[Callable[[str, dict[str, Any]], TrainRun]]:
    """Runs of the module's ``BASE`` whose every step makes its updates, each in a directory of its own."""
    runs = []

    def reward(problem: Any, response: str) -> float:
        """Hardly ever the same for all samples of a prompt, so that no update is skipped."""
        return (sum((i + 2) * ord(c) for i, c in enumerate(response)) % 101) / 101

    def make(name: str, changes: dict[str, Any]) -> TrainRun:
        config = make_config(request.module.BASE | changes)
        runs.append(make_run(config, directory=tmp_path / name, reward=reward))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.fixture(scope="session")
def go() -> Callable[..., list[dict[str, Any]]]:
    """Runs to the end; the records without what a clock decides."""

    def to_the_end(run: TrainRun, **options: Any) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        run.run(on_step=lambda step, record: records.append(record), **options)
        return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in records]

    return to_the_end


@pytest.fixture(scope="session")
def bits() -> Callable[[Any], list[bytes]]:
    """Of every array in a tree."""
    return lambda tree: [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
