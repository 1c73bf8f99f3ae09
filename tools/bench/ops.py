"""Time, memory and roofline of the operators, beside naive full logits and what peers do, on the device at hand.

    python tools/bench/ops.py --out experiments/ops_cpu/float32.json
    python tools/bench/ops.py --shapes qwen3-8b --dtype bfloat16 --out experiments/ops_v6e/bfloat16.json

Every line is one operator, implementation and shape: median and quartiles of the wall time of single calls (the forms
take turns), the processor's time, the compiler's bytes of temporaries and of the peak (with arguments and results), the
FLOPs and bytes that the algorithm needs at least, and the time that the device's peak rates allow for them. Peers:
"tokamax" (summed loss only, and only where the vocabulary is a multiple of its block, because it counts padded columns)
and "tunix" (its chunked per-token log-probs); reported as absent when not installed. "matmuls" are the chunked form's
matrix products and nothing else: what the device takes for them in chunks of that size, so that a form's time over
theirs is what all the rest costs. Peak rates are the vendor's for bfloat16 on a known accelerator, otherwise measured
by one matrix product and one copy.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from trm_jax import ops
from trm_jax.ops._dispatch import default_chunk_size
from trm_jax.ops._head import Head, head_logits, product_precision
from trm_jax.ops._rows import map_token_chunks
from trm_jax.ops.linear_logps._vocabulary_chunks import ContiguousChunks, vocabulary_chunks
from trm_jax.types import VocabDivergence

Array = jax.Array
SHAPES = {
    "smollm2": (1024, 576, 49_152),
    "qwen3-0.6b": (4096, 1024, 151_936),
    "qwen3-8b": (4096, 4096, 151_936),
}
PEAKS = {  # dense bfloat16 FLOP/s and bytes/s of device memory, by the vendor
    "TPU v5 lite": (197e12, 819e9),
    "TPU v5": (459e12, 2765e9),
    "TPU v6 lite": (918e12, 1640e9),
    "TPU7x": (1153e12, 3690e9),
    "NVIDIA A100-SXM4-80GB": (312e12, 2039e9),
    "NVIDIA H100 80GB HBM3": (989e12, 3350e9),
    "NVIDIA H200": (989e12, 4800e9),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      out: JSON file to write.
      shapes: names of (tokens, width, vocabulary).
      dtype: of hidden states and heads.
      repeats: timed calls of each line.
      only: parts of the names of the lines to measure; all when empty.
    """

    out: Path
    shapes: Sequence[Literal["smollm2", "qwen3-0.6b", "qwen3-8b"]] = ("smollm2",)
    dtype: Literal["float32", "bfloat16"] = "float32"
    repeats: int = 7
    only: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
      operator: "linear_logps", "linear_logps_gradient" or "linear_vocab_divergence".
      form: implementation or peer.
      function: of (hidden, head, rollout_hidden, tokens).
      products: how many ``2 N D V`` FLOPs its mathematics needs at least.
    """

    operator: str
    form: str
    function: Callable[..., Any]
    products: int


def _logits(hidden: Array, head: Array) -> Array:
    return jnp.dot(hidden, head.T, preferred_element_type=jnp.float32)


def _at(log_p: Array, tokens: Array) -> Array:
    return jnp.take_along_axis(log_p, tokens[:, None], axis=1)[:, 0]


def _naive_divergence(hidden: Array, head: Array, rollout_hidden: Array, tokens: Array) -> VocabDivergence:
    log_p, log_q = (jax.nn.log_softmax(_logits(h, head)) for h in (hidden, rollout_hidden))
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    return VocabDivergence(
        policy_logps=_at(log_p, tokens),
        rollout_logps=_at(log_q, tokens),
        token_kl=jnp.sum(q * (log_q - log_p), axis=-1),
        token_tv=0.5 * jnp.sum(jnp.abs(p - q), axis=-1),
        policy_entropy=-jnp.sum(p * log_p, axis=-1),
        rollout_entropy=-jnp.sum(q * log_q, axis=-1),
    )


def _naive_logps(hidden: Array, head: Array, rollout_hidden: Array, tokens: Array) -> tuple[Array, Array]:
    log_p = jax.nn.log_softmax(_logits(hidden, head))
    return _at(log_p, tokens), -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def _made(values: Array) -> Array:
    """Values that are computed, whatever of them is used."""
    out: Array = jax.lax.optimization_barrier(values)
    return out


def _forward_matmuls(heads: int) -> Callable[..., Any]:
    """A chunk of tokens against the head: logits of one policy or two, of which one column is kept."""

    def products(hidden: Array, head: Array, rollout_hidden: Array, tokens: Array) -> Any:
        def chunk(rows: tuple[Array, ...]) -> list[Array]:
            return [_made(head_logits(h, Head(head, None, None), None))[:, 0] for h in rows]

        size = default_chunk_size(jax.default_backend())
        return map_token_chunks(chunk, (hidden, rollout_hidden)[:heads], size)

    return products


def _gradient_matmuls(hidden: Array, head: Array, rollout_hidden: Array, tokens: Array) -> tuple[Array, ...]:
    """Forward, then chunks of the vocabulary against all tokens: logits again, and both gradients."""
    (n, width), vocabulary = hidden.shape, head.shape[0]
    size = default_chunk_size(jax.default_backend())
    chunks = ContiguousChunks(vocabulary, *vocabulary_chunks(vocabulary, n + 2 * width, size))
    precision = product_precision(hidden, head)
    wide = hidden.astype(jnp.float32)

    def step(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        grad_hidden, grad_head = carry
        part = chunks.chunk(head, index)
        dz = _made(head_logits(hidden, Head(part, None, None), None))
        grad_hidden += jnp.dot(dz, part.astype(jnp.float32), precision=precision)
        grad = jax.lax.dot_general(dz, wide, (((0,), (0,)), ((), ())), precision=precision)
        return grad_hidden, chunks.with_chunk(grad_head, grad.astype(head.dtype), index)

    (forward,) = _forward_matmuls(1)(hidden, head, rollout_hidden, tokens)
    start = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(head.shape, head.dtype)
    return forward, *jax.lax.fori_loop(0, chunks.number, step, start)


def _loss(logps: Callable[..., tuple[Array, ...]]) -> Callable[..., Any]:
    """Value and gradients of what a trainer needs: token log-probs with weights of their own."""

    def total(hidden: Array, head: Array, rollout_hidden: Array, tokens: Array) -> Array:
        return jnp.sum(logps(hidden, head, rollout_hidden, tokens)[0] * jnp.linspace(-1.0, 1.0, tokens.shape[0]))

    return jax.value_and_grad(total, (0, 1))


def _ours(implementation: str, vocabulary_divergence: bool, with_tv: bool = True) -> Callable[..., Any]:
    chosen: Any = implementation
    if vocabulary_divergence:
        return lambda h, w, r, y: ops.linear_vocab_divergence(h, w, r, w, y, with_tv=with_tv, implementation=chosen)
    return lambda h, w, r, y: ops.linear_logps(h, w, y, implementation=chosen)


def _tunix_logps(hidden: Array, head: Array, rollout_hidden: Array, tokens: Array) -> tuple[Array, ...]:
    """What ``tunix.rl.common.compute_per_token_logps`` does behind the model: rematerialised chunks of the sequence."""
    selective_log_softmax = importlib.import_module("tunix.rl.common").selective_log_softmax
    size = 128
    h, y = hidden.reshape(-1, size, hidden.shape[1]), tokens.reshape(-1, size)

    @jax.checkpoint
    def chunk(_: None, rows: tuple[Array, Array]) -> tuple[None, Array]:
        return None, selective_log_softmax(_logits(rows[0], head), rows[1])

    return (jax.lax.scan(chunk, None, (h, y))[1].reshape(-1),)


def _tokamax_loss(hidden: Array, head: Array, rollout_hidden: Array, tokens: Array) -> Array:
    importlib.import_module("absl.flags").FLAGS.mark_as_parsed()  # it would read this tool's command line
    loss: Array = importlib.import_module("tokamax").linear_softmax_cross_entropy_loss(
        hidden, tokens, head.T, reduction="sum"
    )
    return loss


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def cases(vocabulary: int) -> tuple[list[Case], dict[str, str]]:
    """The lines to measure, and why some are absent."""
    on_tpu = jax.default_backend() == "tpu"
    forms = ["reference", "chunked", *(["pallas_tpu"] if on_tpu else [])]
    absent = {} if on_tpu else {"pallas_tpu": "needs a TPU"}
    out = [
        Case("linear_logps", "matmuls", _forward_matmuls(1), 1),
        Case("linear_logps_gradient", "matmuls", _gradient_matmuls, 3),
        Case("linear_vocab_divergence", "matmuls", _forward_matmuls(2), 2),
        Case("linear_logps", "naive", _naive_logps, 1),
        *(Case("linear_logps", form, _ours(form, False), 1) for form in forms),
        Case("linear_logps_gradient", "naive", _loss(_naive_logps), 3),
        *(Case("linear_logps_gradient", form, _loss(_ours(form, False)), 3) for form in forms),
        Case("linear_vocab_divergence", "naive", _naive_divergence, 2),
        *(Case("linear_vocab_divergence", form, _ours(form, True), 2) for form in forms),
        *(Case("linear_vocab_divergence_no_tv", form, _ours(form, True, with_tv=False), 2) for form in forms),
    ]
    if _installed("tunix"):
        out += [
            Case("linear_logps", "tunix", _tunix_logps, 1),
            Case("linear_logps_gradient", "tunix", _loss(_tunix_logps), 3),
        ]
    else:
        absent["tunix"] = "google-tunix is not installed"
    if not _installed("tokamax"):
        absent["tokamax"] = "tokamax is not installed"
    elif vocabulary % 2048:
        absent["tokamax"] = f"wrong where its block of 2,048 does not divide the vocabulary, {vocabulary}"
    else:
        gradient = jax.value_and_grad(_tokamax_loss, (0, 1))
        out += [
            Case("linear_logps", "tokamax", _tokamax_loss, 1),
            Case("linear_logps_gradient", "tokamax", gradient, 3),
        ]
    return out, absent


def peaks(dtype: jnp.dtype) -> tuple[float, float, str]:
    """FLOP/s and bytes/s of the device, and where they come from; the vendors' rates are those of bfloat16."""
    device = jax.devices()[0]
    if device.device_kind in PEAKS and dtype == jnp.bfloat16:
        flops, rate = PEAKS[device.device_kind]
        return flops, rate, "vendor"
    n, d, v = (1024, 2048, 8192) if device.platform == "cpu" else (8192, 8192, 8192)
    a, b = jnp.ones((n, d), dtype), jnp.ones((d, v), dtype)
    exact = product_precision(a, b)  # as in the operators
    big = jnp.ones(1 << 26, jnp.float32)
    dot = jax.jit(lambda a, b: jnp.dot(a, b, precision=exact, preferred_element_type=jnp.float32))
    product = min(_times(dot, (a, b), 5))
    copy = min(_times(jax.jit(lambda x: x + 1), (big,), 5))
    return 2 * n * d * v / product, 2 * big.nbytes / copy, f"measured: product {n}x{d}x{v}, copy 256 MiB"


def _times(function: Callable[..., Any], args: Sequence[Any], repeats: int) -> list[float]:
    jax.block_until_ready(function(*args))
    out = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        out.append(time.perf_counter() - start)
    return out


@dataclasses.dataclass
class Program:
    """A compiled case, and what has been measured of it.

    Attributes:
      case: what it is.
      call: the executable.
      line: of the record.
      times: wall seconds of each call.
      cpu: processor seconds of each call, which other work on the machine moves less.
    """

    case: Case
    call: Callable[..., Any]
    line: dict[str, Any]
    times: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)

    def time(self, args: Sequence[Any]) -> None:
        """One call."""
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(self.call(*args))
        self.times.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)


def arguments(shape: tuple[int, int, int], dtype: jnp.dtype) -> tuple[Array, ...]:
    """Hidden states, head, rollout's hidden states, tokens."""
    n, d, v = shape
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(n, d))
    rollout = hidden + 0.02 * rng.normal(size=(n, d))
    head = rng.normal(size=(v, d)) * 2 / np.sqrt(d)
    return *(jnp.asarray(x, dtype) for x in (hidden, head, rollout)), jnp.asarray(rng.integers(0, v, n))


def prepare(case: Case, shape: tuple[int, int, int], dtype: jnp.dtype, args: Sequence[Array]) -> Program:
    """Compiles, calls once, and notes the memory."""
    n, d, v = shape
    started = time.perf_counter()
    compiled = jax.jit(case.function).lower(*args).compile()
    compile_seconds = time.perf_counter() - started
    jax.block_until_ready(compiled(*args))
    memory: Any = compiled.memory_analysis()
    item = jnp.dtype(dtype).itemsize
    heads = 1 if case.products < 3 else 2  # a gradient is written as well
    line = {
        "operator": case.operator,
        "form": case.form,
        "tokens": n,
        "width": d,
        "vocabulary": v,
        "dtype": jnp.dtype(dtype).name,
        "compile_seconds": compile_seconds,
        "temporary_bytes": int(memory.temp_size_in_bytes),
        "argument_bytes": int(memory.argument_size_in_bytes),
        "output_bytes": int(memory.output_size_in_bytes),
        "peak_bytes": int(memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes),
        "least_flops": 2 * n * d * v * case.products,
        "least_bytes": heads * v * d * item + 2 * heads * n * d * item,
    }
    return Program(case, compiled, line)


def finish(program: Program, flops: float, rate: float) -> dict[str, Any]:
    """The line with its times and its bound."""
    line = program.line
    median = statistics.median(program.times)
    low, _, high = statistics.quantiles(program.times, n=4) if len(program.times) > 1 else [median] * 3
    line |= {"seconds_median": median, "seconds_quartiles": [low, high], "seconds_all": program.times}
    line |= {"cpu_seconds_median": statistics.median(program.cpu), "cpu_seconds_all": program.cpu}
    line["bound_seconds"] = max(line["least_flops"] / flops, line["least_bytes"] / rate)
    line["share_of_bound"] = line["bound_seconds"] / median
    return line


ROOT = Path(__file__).resolve().parents[2]


def _git(*args: str) -> str:
    command = ["git", "-C", str(ROOT), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def compare(lines: list[dict[str, Any]]) -> None:
    """Adds to each line its time over that of full logits and of the products alone."""
    by_key = {(line["operator"], line["vocabulary"], line["form"]): line for line in lines}
    for line in lines:
        operator = line["operator"].removesuffix("_no_tv")
        for form in ("naive", "matmuls"):
            if other := by_key.get((operator, line["vocabulary"], form)):
                line[f"time_over_{form}"] = line["seconds_median"] / other["seconds_median"]
                line[f"cpu_time_over_{form}"] = line["cpu_seconds_median"] / other["cpu_seconds_median"]
                if form == "naive":
                    line["temporaries_over_naive"] = line["temporary_bytes"] / other["temporary_bytes"]


def main(options: Options) -> None:
    """Measures and writes."""
    if options.repeats < 1:
        raise SystemExit(f"--repeats must be at least 1, given {options.repeats}")
    dtype = jnp.dtype(options.dtype)
    flops, rate, source = peaks(dtype)
    lines: list[dict[str, Any]] = []
    absent: dict[str, str] = {}
    for name in options.shapes:
        shape = SHAPES[name]
        wanted, missing = cases(shape[2])
        absent |= missing
        chosen = [
            c for c in wanted if not options.only or any(part in f"{c.operator} {c.form}" for part in options.only)
        ]
        args = arguments(shape, dtype)
        programs = [prepare(case, shape, dtype, args) for case in track(chosen, description=f"{name}: compile")]
        # The forms take turns: what else the machine does meets all of them.
        for _ in track(range(options.repeats), description=f"{name}: time"):
            for program in programs:
                program.time(args)
        lines += [finish(program, flops, rate) for program in programs]
    compare(lines)
    device = jax.devices()[0]
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "device": device.device_kind,
        "platform": device.platform,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "jax": jax.__version__,
        "peers": {
            n: importlib.metadata.version(p)
            for n, p in (("tunix", "google-tunix"), ("tokamax", "tokamax"))
            if _installed(n)
        },
        "absent": absent,
        "peak_flops": flops,
        "peak_bytes_per_second": rate,
        "peak_source": source,
        "lines": lines,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print_table(lines)


def print_table(lines: list[dict[str, Any]]) -> None:
    """A row a line."""
    table = Table(
        caption="FLOPs and bytes that the mathematics needs at least; the bound is what peak rates make of them"
    )
    for name in (
        "operator",
        "form",
        "N, D, V",
        "s",
        "temporaries",
        "peak",
        "GFLOP",
        "bytes",
        "GFLOP/s",
        "of bound",
        "/ naive",
        "CPU / naive",
        "/ matmuls",
    ):
        table.add_column(name, justify="left" if name in ("operator", "form") else "right")
    for line in lines:
        ratios = (line.get(name, math.nan) for name in ("time_over_naive", "cpu_time_over_naive", "time_over_matmuls"))
        table.add_row(
            line["operator"],
            line["form"],
            f"{line['tokens']}, {line['width']}, {line['vocabulary']}",
            f"{line['seconds_median']:.3g}",
            f"{line['temporary_bytes'] / 2**20:.0f} MiB",
            f"{line['peak_bytes'] / 2**20:.0f} MiB",
            f"{line['least_flops'] / 1e9:.0f}",
            f"{line['least_bytes'] / 2**20:.0f} MiB",
            f"{line['least_flops'] / line['seconds_median'] / 1e9:.0f}",
            f"{line['share_of_bound']:.0%}",
            *(f"{ratio:.2f}" for ratio in ratios),
        )
    Console(width=170).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
