"""Relative error of float32 KL and TV against float64 on the same logits, for policies of every shape and distance.

    python tools/bench/divergence_accuracy.py --out experiments/divergence_accuracy/results.json

``vocab_divergence`` reads the logits themselves. For the fused operators the rows of the hidden states are unit
vectors, so that the heads' columns are the logits to the last bit, and what is measured is the reduction over the
vocabulary alone.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shlex
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.progress import track

from trm_jax import divergences, ops
from trm_jax.types import VocabDivergence

Float64 = np.ndarray[Any, np.dtype[np.float64]]
Float32 = np.ndarray[Any, np.dtype[np.float32]]


def _peaked(rng: np.random.Generator, rows: int, vocabulary: int) -> Float64:
    """Like a language model's: entropy about 1.7 nats."""
    rank = rng.permuted(np.broadcast_to(np.arange(1, vocabulary + 1), (rows, vocabulary)), axis=1)
    out: Float64 = -2.2 * np.log(rank) + 12 + 0.5 * rng.normal(size=(rows, vocabulary))
    return out


def _flat(rng: np.random.Generator, rows: int, vocabulary: int) -> Float64:
    """An untrained model's: entropy about 11.4 nats of at most 11.9."""
    out: Float64 = rng.normal(size=(rows, vocabulary))
    return out


def _near_deterministic(rng: np.random.Generator, rows: int, vocabulary: int) -> Float64:
    """One token has all but about 1e-3 of the probability."""
    z: Float64 = rng.normal(size=(rows, vocabulary))
    z[np.arange(rows), rng.integers(0, vocabulary, rows)] = 19.5
    return z


Implementation = Literal["vocab_divergence", "reference", "chunked", "pallas_tpu"]

SHAPES: dict[str, Callable[[np.random.Generator, int, int], Float64]] = {
    "peaked": _peaked,
    "flat": _flat,
    "near_deterministic": _near_deterministic,
    "constant_offset": _peaked,
    "large_offset": _peaked,
    "huge_offset": _flat,
    "moved_top": _flat,
    "unrelated": _peaked,
}
TARGETS = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)


def _log_softmax(logits: Float32 | Float64) -> Float64:
    z = logits.astype(np.float64)
    z = z - z.max(-1, keepdims=True)
    out: Float64 = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return out


def exact(policy: Float32, rollout: Float32) -> tuple[Float64, Float64]:
    """KL(rollout ‖ policy) and TV by their definitions, in float64."""
    log_p, log_q = _log_softmax(policy), _log_softmax(rollout)
    return (np.exp(log_q) * (log_q - log_p)).sum(-1), 0.5 * np.abs(np.exp(log_p) - np.exp(log_q)).sum(-1)


@functools.lru_cache(maxsize=1)  # one case serves every implementation
def case(
    shape: str, target: float, rows: int, vocabulary: int
) -> tuple[Float32, Float32, np.ndarray[Any, Any], Float64, Float64]:
    """Logits of two policies whose mean KL is about the target, tokens sampled from the second, the exact KL and TV."""
    rng = np.random.default_rng(zlib.crc32(f"{shape} {target}".encode()))
    rollout = SHAPES[shape](rng, rows, vocabulary)
    policy: Float64
    if shape == "unrelated":
        policy = SHAPES[shape](rng, rows, vocabulary)
    else:
        policy = rollout + _step(rng, rollout, target, moves_top=shape == "near_deterministic")
    if shape == "constant_offset":
        policy = policy + 0.37
    if shape == "large_offset":
        policy = policy + 5.0 * rng.normal(size=(rows, 1))
    if shape == "huge_offset":
        policy = policy + 1000.0
    if shape == "moved_top":  # all others stand off it by much more than they stand apart
        policy[np.arange(rows), rollout.argmax(-1)] += 0.15
    rollout32 = rollout.astype(np.float32)
    policy32, tokens = policy.astype(np.float32), (rollout32 + rng.gumbel(size=rollout.shape)).argmax(-1)
    return policy32, rollout32, tokens, *exact(policy32, rollout32)


def _step(rng: np.random.Generator, rollout: Float64, target: float, *, moves_top: bool) -> Float64:
    """Noise of the size that gives the target; KL grows with it."""
    noise = np.asarray(rng.normal(size=rollout.shape))
    if moves_top:  # of a nearly deterministic policy, or the distance never reaches a nat
        noise[np.arange(len(noise)), rollout.argmax(-1)] = -3.0
    low, high = 0.0, 40.0
    while high - low > 0.02 * high:
        middle = 0.5 * (low + high) if low else high / 4
        if exact((rollout + middle * noise).astype(np.float32), rollout.astype(np.float32))[0].mean() < target:
            low = middle
        else:
            high = middle
    step: Float64 = high * noise
    return step


def _computed(
    policy: Float32,
    rollout: Float32,
    tokens: np.ndarray[Any, Any],
    implementation: Implementation,
    with_tv: bool,
    interpret: bool,
) -> VocabDivergence:
    if implementation == "vocab_divergence":
        return divergences.vocab_divergence(policy, rollout, tokens)
    unit = jnp.eye(len(tokens))
    return ops.linear_vocab_divergence(
        unit, policy.T, unit, rollout.T, tokens, implementation=implementation, with_tv=with_tv, interpret=interpret
    )


def measure(
    shape: str,
    target: float,
    *,
    implementation: Implementation,
    with_tv: bool,
    rows: int,
    vocabulary: int,
    interpret: bool = False,
) -> dict[str, Any]:
    """One line of the table; ``vocab_divergence`` always computes TV."""
    policy, rollout, tokens, kl, tv = case(shape, target, rows, vocabulary)
    out = _computed(policy, rollout, tokens, implementation, with_tv, interpret)
    line = {
        "shape": shape,
        "implementation": implementation,
        "with_tv": with_tv,
        "kl": float(kl.mean()),
        "kl_min": float(kl.min()),
        "kl_max": float(kl.max()),
        "kl_error": float(np.max(np.abs(np.asarray(out.token_kl, np.float64) - kl) / kl)),
        "tv": float(tv.mean()),
        "tv_min": float(tv.min()),
    }
    if out.token_tv is not None:
        line["tv_error"] = float(np.max(np.abs(np.asarray(out.token_tv, np.float64) - tv) / tv))
    return line


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      out: JSON file to write.
      rows: tokens of each line; the error is their largest.
      vocabulary: tokens of the vocabulary.
      implementations: ``vocab_divergence``, and those of the fused operator.
      interpret: run kernels in the interpreter.
    """

    out: Path
    rows: int = 8
    vocabulary: int = 151_936
    implementations: Sequence[Implementation] = ("vocab_divergence", "chunked")
    interpret: bool = False


def table(options: Options) -> Iterator[dict[str, Any]]:
    """Every line."""
    cases = [
        (shape, target, implementation, with_tv)
        for shape in SHAPES
        for target in (TARGETS if shape != "unrelated" else TARGETS[-1:])
        for implementation in options.implementations
        for with_tv in ((True,) if implementation == "vocab_divergence" else (True, False))
    ]
    for shape, target, implementation, with_tv in track(cases, description="divergence accuracy"):
        yield measure(
            shape,
            target,
            implementation=implementation,
            with_tv=with_tv,
            rows=options.rows,
            vocabulary=options.vocabulary,
            interpret=options.interpret,
        )


def main(options: Options) -> None:
    """Measures and writes."""
    here = ["git", "-C", str(Path(__file__).resolve().parent)]
    commit, changes = (
        subprocess.run([*here, *args], capture_output=True, text=True, check=False).stdout.strip()
        for args in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    )
    lines = list(table(options))
    device = jax.devices()[0]
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit,
        "dirty": bool(changes),
        "jax": jax.__version__,
        "device": device.device_kind,
        "dtype": "float32 against float64",
        "vocabulary": options.vocabulary,
        "rows": options.rows,
        "lines": lines,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    worst = {
        name: max(line[f"{name}_error"] for line in lines if f"{name}_error" in line and line[f"{name}_min"] >= floor)
        for name, floor in (("kl", 1e-7), ("tv", 1e-6))
    }
    print(f"{options.out}: largest error of KL from 1e-7 {worst['kl']:.1e}, of TV from 1e-6 {worst['tv']:.1e}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
