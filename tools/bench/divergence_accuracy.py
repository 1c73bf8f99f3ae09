"""Relative error of float32 KL and TV against float64 on the same logits, for policies of every shape and distance.

    python tools/bench/divergence_accuracy.py --out experiments/divergence_accuracy/results.json

Rows of the hidden states are unit vectors, so that the heads' columns are the logits to the last bit, and what is
measured is the operator's reduction over the vocabulary alone.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.progress import track

from trm_jax import ops

Float64 = np.ndarray[Any, np.dtype[np.float64]]
Float32 = np.ndarray[Any, np.dtype[np.float32]]


def _peaked(rng: np.random.Generator, rows: int, vocabulary: int) -> Float64:
    """Like a language model's: entropy about 1.7 nats."""
    rank = rng.permuted(np.broadcast_to(np.arange(1, vocabulary + 1), (rows, vocabulary)), axis=1)
    return -2.2 * np.log(rank) + 12 + 0.5 * rng.normal(size=(rows, vocabulary))


def _flat(rng: np.random.Generator, rows: int, vocabulary: int) -> Float64:
    """An untrained model's: entropy about 11.4 nats of at most 11.9."""
    return rng.normal(size=(rows, vocabulary))


def _near_deterministic(rng: np.random.Generator, rows: int, vocabulary: int) -> Float64:
    """One token has all but about 1e-3 of the probability."""
    z = rng.normal(size=(rows, vocabulary))
    z[np.arange(rows), rng.integers(0, vocabulary, rows)] = 19.5
    return z


SHAPES: dict[str, Callable[[np.random.Generator, int, int], Float64]] = {
    "peaked": _peaked,
    "flat": _flat,
    "near_deterministic": _near_deterministic,
    "constant_offset": _peaked,
    "far_apart": _peaked,
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


def _pair(shape: str, target: float, rows: int, vocabulary: int) -> tuple[Float32, Float32, np.ndarray[Any, Any]]:
    """Logits of two policies whose mean KL is about the target, and tokens sampled from the second."""
    rng = np.random.default_rng(zlib.crc32(f"{shape} {target}".encode()))
    rollout = SHAPES[shape](rng, rows, vocabulary)
    noise = rng.normal(size=rollout.shape)
    if shape == "near_deterministic":  # the top token must move, or the distance never reaches a nat
        noise[np.arange(rows), rollout.argmax(-1)] = -3.0
    offset = {"constant_offset": 0.37, "far_apart": 5.0 * rng.normal(size=(rows, 1))}.get(shape, 0.0)
    low, high = 0.0, 40.0
    for _ in range(40):  # KL grows with the size of the noise
        middle = 0.5 * (low + high) if low else high / 4
        if exact((rollout + middle * noise).astype(np.float32), rollout.astype(np.float32))[0].mean() < target:
            low = middle
        else:
            high = middle
        if high - low < 0.02 * high:
            break
    policy = (rollout + high * noise + offset).astype(np.float32)
    rollout32 = rollout.astype(np.float32)
    gumbel = rng.gumbel(size=rollout.shape)
    return policy, rollout32, (rollout32 + gumbel).argmax(-1)


def measure(
    shape: str,
    target: float,
    *,
    implementation: Literal["reference", "chunked", "pallas_tpu"],
    with_tv: bool,
    rows: int,
    vocabulary: int,
    interpret: bool = False,
) -> dict[str, Any]:
    """One line of the table."""
    policy, rollout, tokens = _pair(shape, target, rows, vocabulary)
    kl, tv = exact(policy, rollout)
    unit = jnp.eye(rows)
    out = ops.linear_vocab_divergence(
        unit, policy.T, unit, rollout.T, tokens, implementation=implementation, with_tv=with_tv, interpret=interpret
    )
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
      implementations: of the operator.
      interpret: run kernels in the interpreter.
    """

    out: Path
    rows: int = 8
    vocabulary: int = 151_936
    implementations: Sequence[Literal["reference", "chunked", "pallas_tpu"]] = ("chunked",)
    interpret: bool = False


def table(options: Options) -> Iterator[dict[str, Any]]:
    """Every line."""
    cases = [(s, t, i, w) for i in options.implementations for s in SHAPES for t in TARGETS for w in (True, False)]
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
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    lines = list(table(options))
    device = jax.devices()[0]
    record = {
        "commit": commit,
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
