"""Exact KL and TV of one long response on the device at hand: time, peak memory, and some tokens against float64.

    python tools/bench/long_horizon.py --width 1024 --out experiments/long_horizon/results.json

Two policies of one head, whose hidden states stand 1e-4 to 1e-2 apart, from token to token; logits of a standard
deviation of 5.7, as if of a trained model. Full logits of both would take 8 N V bytes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console

from trm_jax import ops

Float64 = np.ndarray[Any, np.dtype[np.float64]]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      tokens: of the response.
      width: of the hidden states.
      vocabulary: rows of the head.
      out: JSON file to write; the record is printed in any case.
    """

    tokens: int = 32_768
    width: int = 1024
    vocabulary: int = 151_936
    out: Path | None = None


def exact(policy: Float64, rollout: Float64) -> tuple[Float64, Float64]:
    """KL(rollout ‖ policy) and TV by their definitions."""
    log_p, log_q = (z - z.max(-1, keepdims=True) for z in (policy, rollout))
    log_p, log_q = (z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in (log_p, log_q))
    return (np.exp(log_q) * (log_q - log_p)).sum(-1), 0.5 * np.abs(np.exp(log_p) - np.exp(log_q)).sum(-1)


def peak_resident_bytes() -> int:
    """Of this process on Linux (``ru_maxrss`` begins with what its parent held), or as the system counts it."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(options: Options) -> dict[str, Any]:
    """The record."""
    n, d, v = options.tokens, options.width, options.vocabulary
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(n, d)).astype(np.float32)
    head = (rng.normal(size=(v, d)) * np.sqrt(32 / d)).astype(np.float32)
    apart = rng.uniform(1e-4, 1e-2, (n, 1)).astype(np.float32)
    rollout = hidden + apart * rng.normal(size=(n, d)).astype(np.float32)
    tokens = rng.integers(0, v, n)
    start = time.perf_counter()
    out = ops.linear_vocab_divergence(hidden, head, rollout, head, tokens)
    kl, tv = np.asarray(out.token_kl, float), np.asarray(out.token_tv, float)
    seconds = time.perf_counter() - start
    peak = peak_resident_bytes()
    some = np.linspace(0, n - 1, 5).astype(int)
    exact_kl, exact_tv = exact(*(x[some].astype(float) @ head.T.astype(float) for x in (hidden, rollout)))
    return {
        "tokens": n,
        "width": d,
        "vocabulary": v,
        "dtype": "float32",
        "seconds": round(seconds, 1),
        "peak_bytes": peak,
        "full_logits_bytes": 8 * n * v,
        "finite": bool(np.isfinite(kl).all() and np.isfinite(tv).all()),
        "pinsker": bool((tv <= np.sqrt(kl / 2) * (1 + 1e-4)).all()),
        "kl_range": [float(kl.min()), float(kl.max())],
        "kl_error": float(np.max(np.abs(kl[some] / exact_kl - 1))),
        "tv_error": float(np.max(np.abs(tv[some] / exact_tv - 1))),
    }


def main(options: Options) -> None:
    """Measures, prints and writes."""
    with Console(stderr=True).status(f"KL and TV of {options.tokens:,} tokens over {options.vocabulary:,}"):
        record = measure(options)
    here = ["git", "-C", str(Path(__file__).resolve().parent)]
    commit, changes = (
        subprocess.run([*here, *args], capture_output=True, text=True, check=False).stdout.strip()
        for args in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    )
    device = jax.devices()[0].device_kind
    record |= {"device": device, "cores": os.cpu_count(), "load": os.getloadavg(), "jax": jax.__version__}
    record |= {"command": shlex.join(["python", *sys.argv]), "commit": commit, "dirty": bool(changes)}
    print(json.dumps(record))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
