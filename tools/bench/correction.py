"""What a correction costs: bytes and time of ``correction.correct``, preset by preset.

Three forms of the same operators (decisions, weights and the main metrics; their results are compared first): this
library under ``jax.jit``, and eager NumPy and PyTorch, where every operation reads and writes whole arrays::

    python tools/bench/correction.py --out experiments/correction_cost/cpu.json
    python tools/bench/correction.py --tpu-topology v5e:2x2 --out experiments/correction_cost/tpu_v5e.json

The second form compiles for a TPU that need not be there (``pip install jax[tpu]``) and measures no time.

Bytes. ``minimum`` is one read of every input and one write of every output. ``compiled`` is XLA's own count, the
"bytes accessed" of its cost analysis. On TPU that also counts moves between levels of on-chip memory, so ``hbm`` adds
up the operands and results that the compiled schedule keeps in main memory. ``eager`` counts operands and results of
every operation of NumPy or PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from trm_jax import correction
from trm_jax.types import ScoredBatch

_FIELDS = {"trm_max": "token_kl", "trm_avg": "token_kl", "trm_tv": "token_tv"}
_ITEM = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Bytes and time of a correction.

    Attributes:
      presets: names of presets or compositions; every preset when empty.
      rows: B.
      length: T.
      repeats: timed calls of each form, after one that is not.
      eager: also NumPy, and PyTorch when it is installed.
      tpu_topology: compile for this TPU (such as v5e:2x2) instead of running here.
      out: JSON file to be written.
    """

    presets: tuple[str, ...] = ()
    rows: int = 512
    length: int = 8192
    repeats: int = 7
    eager: bool = True
    tpu_topology: str | None = None
    out: Path | None = None


def sample(config: correction.CorrectionConfig, rows: int, length: int) -> ScoredBatch:
    """Log-probs near each other, full responses but for a fifth of the slots; only the divergence the masks need."""
    rng = np.random.default_rng(0)
    proximal = -rng.gamma(0.5, 1.0, (rows, length)).astype(np.float32)
    rollout = np.minimum(proximal + 0.06 * rng.standard_normal((rows, length), np.float32), np.float32(0))
    needed = {_FIELDS[mask] for mask in config.masks if mask in _FIELDS}
    arrays: dict[str, Any] = {name: np.square(proximal - rollout).astype(np.float32) for name in needed}
    arrays |= {"proximal_logps": proximal, "rollout_logps": rollout}
    mask: Any = np.arange(length) < rng.integers(length // 2, length + 1, (rows, 1))
    return ScoredBatch(response_mask=mask, **arrays)


# The same operators, eagerly: one function for NumPy and PyTorch, whose names agree.


def eager_correction(xp: Any, batch: dict[str, Any], config: correction.CorrectionConfig) -> dict[str, Any]:
    """Decisions, weights and the main metrics, as one writes them in an eager framework."""
    mask, p, q = batch["response_mask"], batch["proximal_logps"], batch["rollout_logps"]
    illegal = mask & (xp.isnan(p) | xp.isnan(q) | (p > 1.0) | (q > 1.0))
    legal = mask & ~illegal
    p, q = xp.where(legal, xp.clip(p, -math.inf, 0.0), 0.0), xp.where(legal, xp.clip(q, -math.inf, 0.0), 0.0)
    log_ratio = xp.where(legal, p - q, 0.0)
    ratio = xp.exp(xp.clip(log_ratio, -math.inf, 60.0))
    tokens = xp.sum(mask, axis=1)
    count = xp.clip(tokens, 1, None)

    def mean(values: Any) -> Any:
        return xp.sum(xp.where(mask, values, 0.0), axis=1) / count

    def largest(values: Any) -> Any:
        return xp.amax(xp.where(mask, values, -math.inf), axis=1)

    k3 = xp.expm1(log_ratio) - log_ratio
    keep, token_keep = ~xp.any(illegal, axis=1), mask & ~illegal
    for name in config.masks:
        if name == "trm_max":
            keep = keep & (largest(batch["token_kl"]) <= config.max_token_kl)
        elif name == "trm_avg":
            keep = keep & (mean(batch["token_kl"]) <= config.mean_token_kl)
        elif name == "trm_tv":
            keep = keep & (largest(batch["token_tv"]) <= config.max_token_tv)
        elif name == "trm_sample":
            keep = keep & (largest(0.5 * log_ratio**2) <= config.max_k2) & (mean(k3) <= config.mean_k3)
        elif name == "ser":
            keep = keep & (mean(xp.abs(ratio - 1.0)) <= config.ser_threshold)
        elif name == "geometric":
            geometric = mean(log_ratio)
            keep = keep & (geometric >= math.log(config.geometric_low)) & (geometric <= math.log(config.geometric_high))
        elif name == "token_outlier":
            token_keep = token_keep & (xp.abs(log_ratio) <= config.max_abs_log_ratio)
        else:
            later = tokens[:, None] - xp.cumsum(mask, axis=1)
            horizon = xp.sqrt(later * (0.5 * config.horizon_token_kl))
            horizon = xp.where(mask, xp.clip(xp.minimum(horizon, later * config.horizon_token_tv), 0.0, 1.0), 0.0)
            error = xp.sum(xp.abs(ratio - 1.0) * horizon, axis=1)
            keep = keep & (error <= config.ln_trm_threshold * xp.sum(horizon, axis=1))

    product = xp.exp(xp.clip(xp.sum(log_ratio, axis=1), -math.inf, 60.0))[:, None]
    one = xp.ones_like(ratio)
    match config.weight:
        case "none":
            weights, raw = one, one
        case "exact":
            weights, raw = xp.clip(ratio, config.exact_low, config.exact_high), ratio
        case "tis":
            weights, raw = xp.clip(ratio, -math.inf, config.tis_cap), ratio
        case "icepop":
            inside = (ratio >= config.icepop_low) & (ratio <= config.icepop_high)
            weights, raw = xp.where(inside, ratio, 0.0), ratio
        case "kpop":
            rest_p, rest_q = xp.clip(-xp.expm1(p), 2.0**-24, 1.0), xp.clip(-xp.expm1(q), 2.0**-24, 1.0)
            complement = xp.log(rest_q) - xp.log(rest_p)
            forward = xp.exp(p) * log_ratio - rest_p * complement
            backward = rest_q * complement - xp.exp(q) * log_ratio
            weights, raw = xp.where(xp.maximum(forward, backward) <= config.kpop_threshold, ratio, 0.0), ratio
        case "seq_tis":
            weights, raw = xp.clip(product, -math.inf, config.seq_cap) * one, product * one
        case "seq_mis":
            weights, raw = xp.where(product <= config.seq_cap, product, 0.0) * one, product * one
        case "geo_mis":
            geometric = mean(log_ratio)[:, None]
            inside = (geometric >= math.log(config.geo_mis_low)) & (geometric <= math.log(config.geo_mis_high))
            weights, raw = xp.where(inside, one, 0.0), one
        case _:
            rest = -xp.expm1(p)
            weights, raw = xp.minimum(ratio, 1.0 + config.cis_lambda * xp.clip(rest, config.cis_kappa, 1.0)), ratio
            if config.weight == "cis_two_sided":
                weights = xp.maximum(weights, 1.0 - 0.5 * rest)
    weights = xp.where(legal, weights, 0.0)

    kept = keep[:, None] & token_keep
    means = {
        "ratio/raw_mean": xp.sum(xp.where(legal, ratio, 0.0)),
        "weight/applied_mean": xp.sum(weights),
        "weight/applied_mean_square": xp.sum(weights * weights),
        "weight/capped_fraction": xp.sum(legal & (weights > 0) & (weights != raw)),
        "weight/dropped_fraction": xp.sum(legal & (weights == 0)),
        "kl/k1_mean": -xp.sum(log_ratio),
        "kl/k3_mean": xp.sum(xp.where(legal, k3, 0.0)),
        "tokens/kept_fraction": xp.sum(kept),
        "sequences/kept_fraction": xp.sum(keep),
        "logps/ppl_gap": xp.sum(mean(p) - mean(q)),
        "max/weight": xp.amax(xp.amax(weights, axis=1), axis=0),
        "max/ratio": xp.amax(xp.amax(xp.where(legal, ratio, 0.0), axis=1), axis=0),
        "max/k2": xp.amax(largest(0.5 * log_ratio**2), axis=0),
    }
    return {"sequence_keep": keep, "token_keep": token_keep, "importance_weights": weights, "totals": means}


def check_agreement(name: str, got: dict[str, Any], want: Any) -> None:
    """Refuses to time operators that decide otherwise (a handful of slots may round to the other side)."""
    for field in ("sequence_keep", "token_keep", "importance_weights"):
        a, b = np.asarray(got[field], np.float64), np.asarray(getattr(want, field), np.float64)
        differing = np.mean(~np.isclose(a, b, rtol=1e-4, atol=1e-6))
        if differing > 1e-4:
            raise RuntimeError(f"{name}: {field} differs at {differing:.2%} of its slots: not the same operator")
    for metric, total in got["totals"].items():
        ours = float(want.metrics[metric][0])
        # The eager k3 cancels near 0, and float32 sums over millions of tokens differ by their order.
        if not math.isclose(float(total), ours, rel_tol=2e-2, abs_tol=1e-4 * float(want.metrics[metric][1])):
            raise RuntimeError(f"{name}: {metric} is {float(total)} and {ours}: not the same operator")


class _Counting(np.ndarray[Any, Any]):
    """An array that counts the bytes of the operands and results of whatever is computed with it."""

    total = 0

    @classmethod
    def count(cls, *values: Any) -> None:
        arrays = [v for v in jax.tree.leaves(values) if isinstance(v, np.ndarray)]
        cls.total += sum(v.nbytes for v in arrays)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [np.asarray(x) if isinstance(x, np.ndarray) else x for x in inputs]
        kwargs.pop("out", None)
        result = getattr(ufunc, method)(*plain, **kwargs)
        self.count(plain, result)
        return np.asarray(result).view(_Counting)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        plain = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, np.ndarray) else x, args)
        result = func(*plain, **kwargs)
        self.count(plain, result)
        return np.asarray(result).view(_Counting)


def numpy_bytes(batch: dict[str, Any], config: correction.CorrectionConfig) -> int:
    """Bytes of the operands and results of every NumPy operation."""
    _Counting.total = 0
    with np.errstate(all="ignore"):
        eager_correction(np, {name: x.view(_Counting) for name, x in batch.items()}, config)
    return _Counting.total


def torch_bytes(torch: Any, batch: dict[str, Any], config: correction.CorrectionConfig) -> int:
    """Bytes of the operands and results of every PyTorch operation."""
    mode = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode

    class Counting(mode):  # type: ignore[misc, valid-type]
        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            leaves = [x for x in jax.tree.leaves((args, result)) if isinstance(x, torch.Tensor)]
            self.total += sum(x.numel() * x.element_size() for x in leaves)
            return result

    with Counting() as counter:
        eager_correction(torch, batch, config)
    return int(counter.total)


# Measuring.


def timed(call: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Least and median wall time with quartiles, in milliseconds, after one call that is not counted.

    The least is the one to compare on a machine that others use as well.
    """
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    quartiles = statistics.quantiles(times, n=4) if repeats > 1 else [times[0]] * 3
    spread = [quartiles[0], quartiles[2]]
    return {"least_ms": min(times), "median_ms": statistics.median(times), "quartiles_ms": spread, "all_ms": times}


def minimum_bytes(scored: ScoredBatch, config: correction.CorrectionConfig) -> int:
    """One read of every input, one write of every output."""
    outputs = jax.eval_shape(functools.partial(correction.correct, config=config), scored)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((scored, outputs)))


def _sizes(shape: str) -> list[tuple[int, bool]]:
    """Bytes of each array in an HLO shape, and whether it stands in main memory (memory space 0)."""
    arrays = re.findall(r"([a-z]+\d*)\[([\d,]*)\](?:\{([^}]*)\})?", shape)
    return [
        (_ITEM.get(kind, 4) * math.prod(int(d) for d in dims.split(",") if d), "S(1)" not in layout)
        for kind, dims, layout in arrays
    ]


def hbm_bytes(hlo: str) -> int:
    """Bytes that the scheduled entry computation moves from and to main memory.

    A fusion reads its operands and writes its results there unless their layout names another memory space; an
    asynchronous copy has one end there.
    """
    shapes: dict[str, str] = {}
    moved = 0
    for line in hlo[hlo.index("\nENTRY") :].splitlines():
        found = re.match(r"\s+(?:ROOT )?(%[\w.-]+) = (.*?) ([a-z-]+)\((.*)", line)
        if not found:
            continue
        name, shape, kind, rest = found.groups()
        shapes[name] = shape
        if kind in ("fusion", "copy", "reduce", "convert"):
            operands = re.findall(r"%[\w.-]+", rest.split("), ")[0])
            touched = [shape, *(shapes[operand] for operand in operands)]
            moved += sum(size for text in touched for size, main in _sizes(text) if main)
        elif kind in ("copy-done", "slice-done"):
            moved += sum(size for size, _ in _sizes(shape))
    return moved


def compiled_for(scored: ScoredBatch, config: correction.CorrectionConfig, sharding: Any) -> Any:
    """``correct`` compiled for shapes alone."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), scored)
    return jax.jit(correction.correct, static_argnums=1).lower(shapes, config).compile()


def measure_tpu(name: str, topology_name: str, options: Options) -> dict[str, Any]:
    """Bytes by the TPU compiler."""
    from jax.experimental import topologies

    config = correction.preset(name)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=topology_name)
    scored = sample(config, 8, options.length)
    scored = jax.tree.map(lambda x: np.broadcast_to(x[:1], (options.rows, *x.shape[1:])), scored)
    compiled = compiled_for(scored, config, jax.sharding.SingleDeviceSharding(topology.devices[0]))
    least = minimum_bytes(scored, config)
    hbm = hbm_bytes(compiled.as_text())
    return {
        "preset": name,
        "minimum_bytes": least,
        "compiled_bytes": int(compiled.cost_analysis()["bytes accessed"]),
        "hbm_bytes": hbm,
        "ratio": hbm / least,
        "temporary_bytes": int(compiled.memory_analysis().temp_size_in_bytes),
    }


def measure(name: str, options: Options) -> dict[str, Any]:
    """Bytes and time here."""
    config = correction.preset(name)
    scored = sample(config, options.rows, options.length)
    on_device = jax.tree.map(jnp.asarray, scored)
    compiled = compiled_for(scored, config, None)
    least = minimum_bytes(scored, config)
    accessed = int(compiled.cost_analysis()["bytes accessed"])
    result: dict[str, Any] = {
        "preset": name,
        "minimum_bytes": least,
        "compiled_bytes": accessed,
        "ratio": accessed / least,
        "temporary_bytes": int(compiled.memory_analysis().temp_size_in_bytes),
        "jit": timed(lambda: jax.block_until_ready(compiled(on_device)), options.repeats),
    }
    if not options.eager:
        return result
    want = jax.device_get(compiled(on_device))
    arrays = {field.name: v for field in dataclasses.fields(scored) if (v := getattr(scored, field.name)) is not None}
    with np.errstate(all="ignore"):
        check_agreement(f"numpy {name}", eager_correction(np, arrays, config), want)
        result["numpy"] = timed(lambda: eager_correction(np, arrays, config), options.repeats)
    result["numpy"]["eager_bytes"] = numpy_bytes(arrays, config)
    if importlib.util.find_spec("torch"):
        torch = importlib.import_module("torch")
        tensors = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in arrays.items()}
        check_agreement(f"torch {name}", eager_correction(torch, tensors, config), want)
        result["torch"] = timed(lambda: eager_correction(torch, tensors, config), options.repeats)
        result["torch"]["eager_bytes"] = torch_bytes(torch, tensors, config)
    return result


def environment(options: Options) -> dict[str, Any]:
    """Where and with what."""

    def run(*command: str) -> str:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()

    packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    if importlib.util.find_spec("torch"):
        packages["torch"] = importlib.metadata.version("torch")
    return {
        "commit": run("git", "rev-parse", "HEAD") + ("-dirty" if run("git", "status", "--porcelain", "-uno") else ""),
        "device": options.tpu_topology or jax.devices()[0].device_kind,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "shape": [options.rows, options.length],
        "dtype": "float32",
        "python": platform.python_version(),
        "packages": packages,
    }


def _table(results: list[dict[str, Any]], *, tpu: bool) -> Table:
    forms = [] if tpu else ["jit", *(form for form in ("numpy", "torch") if form in results[0])]
    table = Table("preset", "minimum MB", "moved MB", "ratio", box=None)
    for form in forms:
        table.add_column(f"{form} least ms", justify="right")
        if form != "jit":
            table.add_column("MB", justify="right")
    for r in results:
        moved = r["hbm_bytes"] if tpu else r["compiled_bytes"]
        row = [r["preset"], f"{r['minimum_bytes'] / 1e6:.1f}", f"{moved / 1e6:.1f}", f"{r['ratio']:.2f}"]
        for form in forms:
            row.append(f"{r[form]['least_ms']:.0f}")
            if form != "jit":
                row.append(f"{r[form]['eager_bytes'] / 1e6:.0f}")
        table.add_row(*row)
    return table


def main(options: Options) -> None:
    """Measures, prints a table, writes the JSON."""
    if options.tpu_topology:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    one = functools.partial(measure_tpu, topology_name=options.tpu_topology) if options.tpu_topology else measure
    names = options.presets or tuple(correction.presets)
    record = environment(options)
    record["results"] = [one(name, options=options) for name in track(names, "measuring", console=Console(stderr=True))]
    record["load_average_after"] = os.getloadavg()
    Console().print(_table(record["results"], tpu=options.tpu_topology is not None))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Options))
