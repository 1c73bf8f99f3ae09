"""Seconds a training step when sampling and training take turns, and when the one runs ahead of the other.

    python tools/bench/async_training.py --out experiments/async_training/results.json

The server (``trm-jax serve``) is a process on one core, the trainer another on the other core, both pinned, so that
each has as much as it would have alone; weights go through a directory, every step. "in turn" is
``rollout.max_staleness=0``, "ahead" is 1: the batch of the next step is sampled while this one is learnt from. Both do
the same work on the same prompts. A run is ``--steps`` steps, of which the first ``--skip`` (compilation, an empty
queue) are not counted; the two take turns, ``--repeats`` times. The reward is a number made of the response's
characters, so that every step makes its update and publishes its weights.

``ideal`` is what overlap could give at most: (sampling + training) / max(sampling, training), from the runs in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODES = {"in turn": ("rollout.max_staleness=0",), "ahead": ("rollout.max_staleness=1",)}
CONFIG = """
[task]
params = { min_terms = 4, max_terms = 4, min_digits = 1, max_digits = 1 }
train_size = 5000
[model]
d_model = 128
d_ff = 512
[warmstart]
steps = 0
[correction]
preset = "cis"
[rollout]
prompts_per_step = 8
samples_per_prompt = 8
max_prompt_length = 8
max_response_length = 96
slots = 32
decode_chunk = 12
[eval]
prompts = 0
[checkpoint]
every = 100000
"""


def train(file: Path, overrides: list[str]) -> None:
    """One run; prints what each step took as JSON."""
    from flax import nnx

    from trm_jax.models import make_mesh
    from trm_jax.train import TrainRun, load_config, open_experiment

    config = load_config(file, overrides).arms[0].train

    def reward(problem: Any, response: str) -> float:
        return (sum((i + 2) * ord(c) for i, c in enumerate(response)) % 101) / 101

    rows: list[dict[str, float]] = []
    last = time.perf_counter()

    def on_step(step: int, record: dict[str, float | str]) -> None:
        nonlocal last
        now = time.perf_counter()
        times = {name: float(value) for name, value in record.items() if name.startswith(("time/", "rollout/stale"))}
        rows.append({"seconds": now - last, "version": float(record["version"]), **times})
        last = now

    with open_experiment(config) as experiment, tempfile.TemporaryDirectory() as place:
        opened = dataclasses.replace(experiment, reward=reward)
        run = TrainRun(opened, config, nnx.state(opened.model), Path(place), make_mesh(1, 1), note=lambda _: None)
        run.run(on_step=on_step)
        run.close()
    print(json.dumps({"steps": rows, "cpu_seconds": time.process_time()}))


def pinned(core: int, *command: str, cache: Path) -> subprocess.Popen[str]:
    """A process that sees one core; its XLA then has one thread."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-c", _PIN, str(core), *command], env=environment, text=True, stdout=subprocess.PIPE
    )


_PIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def measure(args: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Every run of both modes."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    file, weights = folder / "bench.toml", folder / "weights"
    file.write_text(CONFIG, encoding="utf-8")
    serve = ("-m", "trm_jax", "serve", str(file), "--weights", str(weights))
    server = pinned(cores[0], *serve, cache=folder / "cache")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in MODES}
    try:
        assert server.stdout is not None
        target = server.stdout.readline().split()[-1]
        for _ in range(args.repeats):
            for name, overrides in MODES.items():
                own = (f"steps={args.steps}", f"rollout.address={target}", f"rollout.weights={weights}")
                child = (__file__, "--train", str(file), *overrides, *own)
                load = os.getloadavg()[0]
                out, _ = pinned(cores[1], *child, cache=folder / "cache").communicate()
                run = json.loads(out.splitlines()[-1])
                found[name].append({**run, "load_before": load})
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 24), ("skip", 4), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--train", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(Path(args.train[0]), args.train[1:])
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))

    def counted(name: str, what: str) -> list[float]:
        return [row[what] for run in found[name] for row in run["steps"][args.skip :]]

    seconds = {name: counted(name, "seconds") for name in MODES}
    median = {name: statistics.median(values) for name, values in seconds.items()}
    quartiles = {name: statistics.quantiles(values, n=4) for name, values in seconds.items()}
    waited = statistics.median(counted("in turn", "time/wait_s"))
    trained = median["in turn"] - waited
    report = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": __import__("jax").__version__,
        "options": {key: value for key, value in vars(args).items() if key not in ("out", "train")},
        "config": CONFIG,
        "median_seconds_a_step": median,
        "quartiles_seconds_a_step": quartiles,
        "median_seconds_waited": {name: statistics.median(counted(name, "time/wait_s")) for name in MODES},
        "staleness_max": {name: max(counted(name, "rollout/staleness_max")) for name in MODES},
        "speed_up": median["in turn"] / median["ahead"],
        "ideal": median["in turn"] / max(waited, trained),
        "runs": found,
    }
    for name in MODES:
        print(f"{name:>8}: {median[name]:.3f} s a step (quartiles {quartiles[name][0]:.3f}, {quartiles[name][2]:.3f})")
    print(f"speed-up {report['speed_up']:.2f}; ideal {report['ideal']:.2f}")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
