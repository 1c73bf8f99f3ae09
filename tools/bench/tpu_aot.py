"""Compiles the TPU kernels at real shapes for every TPU generation, without a TPU: what they hold in memory.

    python tools/bench/tpu_aot.py --output experiments/tpu_aot/results.json --missing
    python tools/bench/tpu_aot.py --chip v6e --model smollm2 --tokens 4096

    python tools/bench/tpu_aot.py --sharded '["v5p:2x2x1", "pallas_tpu", "divergence", 4, 4096, 4096, 151936]'

Needs libtpu. Each case is one kernel call compiled ahead of time; recorded are the bytes of temporaries in device
memory (``memory_analysis``), their share of one float32 ``[N, V]`` array, and whether the program has a buffer of that
size, padded or not, that is neither argument nor output. The compiler refuses a kernel whose blocks do not fit the
chip's vector memory: compiling is their test. A sharded case is a whole operator on a mesh of a topology's devices, the
head's rows over one axis and tokens over the other; recorded are also the bytes of every collective's result. Results
are added to the file, in place of earlier ones of the same case, with a hash of the program that the compiler was
given; ``--missing`` leaves out the cases that the file has of the same program and versions, so that a run that was
interrupted goes on, and one after a change compiles what the change concerns.
"""

from __future__ import annotations

import os

os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", JAX_PLATFORMS="cpu")
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # a program is then the same wherever its sources lie

import argparse
import hashlib
import importlib.metadata
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trm_jax import ops
from trm_jax.ops._operands import lies_turned
from trm_jax.ops.linear_logps._pallas_tpu import logps_statistics
from trm_jax.ops.linear_logps._pallas_tpu_gradients import logps_gradients
from trm_jax.ops.linear_vocab_divergence._pallas_tpu import divergence_statistics, divergence_tv

TOPOLOGIES = {"v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x2x1", "v5e": "v5e:2x2", "v4": "v4:2x2x1"}
MODELS = {"qwen3-8b": (4096, 151_936), "qwen1.5-moe": (2048, 151_936), "smollm2": (576, 49_152)}
TOKENS = (65_536, 4096)


class Case(NamedTuple):
    """One kernel call.

    Attributes:
      kernel: name in ``KERNELS``.
      chip: name in ``TOPOLOGIES``.
      tokens: N.
      width: D.
      vocabulary: V.
      dtype: of hidden states and heads.
      option: ``""``, ``"two_heads"``, ``"int8"``, ``"bias"``, ``"support"`` or ``"soft_cap"``.
    """

    kernel: str
    chip: str
    tokens: int
    width: int
    vocabulary: int
    dtype: str = "bfloat16"
    option: str = ""


class Sharded(NamedTuple):
    """One operator on a mesh.

    Attributes:
      topology: ``"v5p:2x2x1"``.
      form: implementation, ``"pallas_tpu"`` or ``"chunked"``.
      program: ``"logps"``, ``"gradient"`` (of the log-probs, in hidden states and head) or ``"divergence"``.
      tensor: devices along the vocabulary.
      tokens: of each device row; not D, or the head is an array of the logits' shape.
      width: D.
      vocabulary: V.
    """

    topology: str
    form: str
    program: str
    tensor: int = 4
    tokens: int = 8192
    width: int = 4096
    vocabulary: int = 151_936


SHARDED = [
    Sharded(topology, "pallas_tpu", program)
    for topology in ("v5p:2x2x1", "v5p:4x4x4", "v6e:8x8", "tpu7x:4x4x4")
    for program in ("logps", "gradient", "divergence")
]
# Heads that lie turned, whose rows are not to be had without a copy: SmolLM2's and gpt-oss's, on one device too.
SHARDED += [
    Sharded(topology, "pallas_tpu", program, 4, 4096, 576, 49_152)
    for topology in ("v5e:2x2", "v6e:2x2", "v5p:2x2x1", "tpu7x:2x2x1")
    for program in ("logps", "gradient", "divergence")
]
SHARDED += [
    Sharded(topology, "pallas_tpu", program, 4, 4096, 2880, 201_088)
    for topology in ("v6e:2x2", "v5p:2x2x1")
    for program in ("logps", "gradient", "divergence")
]
SHARDED += [
    Sharded(topology, "pallas_tpu", program, 1, 4096, 576, 49_152)
    for topology in ("v6e:2x2", "v5p:2x2x1")
    for program in ("logps", "divergence")
]

Spec = Callable[..., Any]


def _logps(case: Case, s: Spec) -> tuple[Callable[..., Any], list[Any]]:
    n, d, v = case.tokens, case.width, case.vocabulary
    operands = {
        "hidden": s((n, d), case.dtype),
        "head": s((v, d), case.dtype),
        "bias": s((v,), "float32") if case.option == "bias" else None,
        "support": s((n, -(-v // 8)), "uint8") if case.option == "support" else None,
        "tokens": s((n,), "int32"),
        "token_logit": None if picks(case) else s((n,), "float32"),
    }

    def call(*arrays: Any) -> Any:
        given = dict(zip(operands, arrays, strict=True))
        out = logps_statistics(**given, **_static(case))
        return out if picks(case) else out[0]

    return call, list(operands.values())


def _gradients(case: Case, s: Spec) -> tuple[Callable[..., Any], list[Any]]:
    n, d, v = case.tokens, case.width, case.vocabulary
    operands = {
        "hidden": s((n, d), case.dtype),
        "head": s((v, d), case.dtype),
        "bias": s((v,), "float32") if case.option == "bias" else None,
        "support": s((n, -(-v // 8)), "uint8") if case.option == "support" else None,
        "tokens": s((n,), "int32"),
        **{name: s((n,), "float32") for name in ("logsumexp", "token_slope", "slope", "entropy_slope")},
    }

    def call(*arrays: Any) -> Any:
        given = dict(zip(operands, arrays, strict=True))
        return logps_gradients(**given, hidden_grad_dtype=jnp.dtype(case.dtype), **_static(case))

    return call, list(operands.values())


def picks(case: Case) -> bool:
    """Whether the kernel picks the tokens' logits out, as the operators have it do."""
    return lies_turned(np.empty((case.vocabulary, case.width), bool))


def _divergence(function: Callable[..., Any], rows: tuple[str, ...]) -> Callable[[Case, Spec], Any]:
    def build(case: Case, s: Spec) -> tuple[Callable[..., Any], list[Any]]:
        n, d, v = case.tokens, case.width, case.vocabulary
        int8, bias = case.option == "int8", case.option == "bias"
        other = int8 or case.option == "two_heads"
        first = function is divergence_statistics
        alone, logits = first and picks(case), ("policy_token_logit", "rollout_token_logit")
        operands = {
            "policy_hidden": s((n, d), case.dtype),
            "policy_head": s((v, d), case.dtype),
            "policy_bias": s((v,), "float32") if bias else None,
            "rollout_hidden": s((n, d), case.dtype),
            "rollout_head": s((v, d), "int8" if int8 else case.dtype) if other else None,
            "rollout_scale": s((v,), "float32") if int8 else None,
            "rollout_bias": s((v,), "float32") if bias else None,
            "support": s((n, -(-v // 8)), "uint8") if case.option == "support" else None,
            "tokens": s((n,), "int32"),
            **{name: None if alone else s((n,), "float32") for name in logits},
            **{name: s((n,), "float32") for name in rows},
        }

        def call(*arrays: Any) -> Any:
            given = dict(zip(operands, arrays, strict=True))
            if given["rollout_head"] is None:
                given["rollout_head"] = given["policy_head"]
            given["token_logits"] = tuple(given.pop(name) for name in logits)
            if alone:
                given["token_logits"] = None
            out = function(**given, **_static(case))
            return out[0] if first and not alone else out

        return call, list(operands.values())

    return build


def _static(case: Case) -> dict[str, Any]:
    cap = 30.0 if case.option == "soft_cap" else None
    return {"temperature": 1.0, "logit_soft_cap": cap, "chip": case.chip}


KERNELS: dict[str, Callable[[Case, Spec], Any]] = {
    "logps_statistics": _logps,
    "logps_gradients": _gradients,
    "divergence_statistics": _divergence(divergence_statistics, ()),
    "divergence_tv": _divergence(
        divergence_tv, ("policy_top", "policy_log_total", "rollout_top", "rollout_log_total", "normaliser")
    ),
}


def lower_case(case: Case) -> Any:
    """The program of one case, for the compiler."""
    mesh = Mesh(devices_of(TOPOLOGIES[case.chip])[:1], ("all",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def spec(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    call, operands = KERNELS[case.kernel](case, spec)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(call).lower(*operands)


def compile_case(case: Case, lowered: Any) -> dict[str, Any]:
    """Compiles one case; the compiler's refusal is recorded under ``error``."""
    record: dict[str, Any] = case._asdict()
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except Exception as error:  # the compiler's own exception classes are private
        return record | {"error": str(error)[:400]}
    memory: Any = compiled.memory_analysis()
    return record | {
        "temp_bytes": memory.temp_size_in_bytes,
        "temp_share_of_logits": memory.temp_size_in_bytes / (4 * case.tokens * case.vocabulary),
        "has_logits_buffer": has_logits(compiled, case.tokens, case.vocabulary),
        "compile_seconds": round(time.perf_counter() - start, 1),
    }


_PADDING = 1024
"""A dimension that was padded to whole blocks is less than this larger."""


def has_logits(compiled: Any, tokens: int, vocabulary: int) -> bool:
    """Whether a device makes an array of that size, which is no output: at N = D a head's gradient has as many elements
    as the logits."""
    outputs = jax.tree.leaves(compiled.out_info), jax.tree.leaves(compiled.output_shardings)
    known = {sharding.shard_shape(tuple(out.shape)) for out, sharding in zip(*outputs, strict=True)}
    return bool(logits_in(compiled.as_text() or "", tokens, vocabulary) - known)


def logits_in(text: str, tokens: int, vocabulary: int) -> set[tuple[int, ...]]:
    """Shapes in optimised HLO, but of arguments, that hold a logit of every token and vocabulary entry, padded or not;
    every member of a tuple is looked at."""

    def holds(shape: tuple[int, ...]) -> bool:
        sides = sorted(size for size in shape if size > 1)
        excess = [size - least for size, least in zip(sides, sorted((tokens, vocabulary)), strict=False)]
        padded = tokens > 1 and len(sides) == 2 and all(0 <= x < _PADDING for x in excess)
        return padded or math.prod(shape) == tokens * vocabulary

    results = re.findall(r"= (.*?) (?!parameter\()[\w-]+\(", text)
    shapes = {tuple(map(int, dims.split(","))) for result in results for dims in re.findall(r"\w\[([\d,]+)\]", result)}
    return set(filter(holds, shapes))


_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "u8": 1, "s8": 1, "pred": 1}
_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"


_COMPUTATION = re.compile(r"(ENTRY )?%([\w.-]+) \(.*\{$")
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%([\w.-]+)")


def _rounds(loop: str, condition: list[str]) -> int:
    """How often a loop's body runs, negative where that is not to be seen: as the compiler says, or a counter from 0,
    as JAX's are, to a constant."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop):
        return int(known[1])
    text = "\n".join(condition)
    limits = re.findall(r" constant\((\d+)\)", text)
    return int(limits[0]) if len(limits) == 1 and "direction=LT" in text else -1


def collectives_of(text: str) -> dict[str, list[int]]:
    """Bytes of every collective's result in optimised HLO, by kind, as often as the program runs it.

    Raises:
      ValueError: on a collective in a loop whose number of rounds the compiler does not know.
    """
    runs: dict[str, int] = {}  # of each computation; a caller stands below what it calls
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines[header[2]] = []
            if header[1]:
                runs[header[2]] = 1
        elif lines:
            list(lines.values())[-1].append(line)
    found: dict[str, list[int]] = {}
    for name in reversed(lines):
        times = runs.get(name, 0)
        for line in lines[name]:
            rounds = times
            if condition := re.search(r" while\(.*condition=%([\w.-]+)", line):
                rounds = _rounds(line, lines[condition[1]]) * times
            for called in _CALLED.findall(line):
                runs[called] = rounds if rounds < 0 else runs.get(called, 0) + rounds
            if match := re.search(rf"= (.*?) ({_KINDS})(?:-start)?\(", line):
                if times < 0:
                    raise ValueError(f"a collective in a loop of unknown length: {line.strip()[:200]}")
                sizes = [
                    _BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
                    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", match[1])
                ]
                found.setdefault(match[2], []).extend([sum(sizes)] * times)
    return found


def devices_of(topology: str) -> Any:
    """The topology's devices, an array of them."""
    return np.asarray(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


def lower_sharded(case: Sharded) -> Any:
    """One operator, for all devices of a topology."""
    mesh = Mesh(devices_of(case.topology).reshape(-1, case.tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    n = case.tokens * mesh.shape["data"]
    options: Any = dict(implementation=case.form, mesh=mesh, vocab_axis="tensor", token_axis="data")

    def spec(shape: tuple[int, ...], dtype: Any, axis: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(axis)))

    h, w = spec((n, case.width), jnp.bfloat16, "data"), spec((case.vocabulary, case.width), jnp.bfloat16, "tensor")
    y = spec((n,), jnp.int32, "data")

    def logps(h: Any, w: Any, y: Any) -> Any:
        return ops.linear_logps(h, w, y, **options)

    def gradient(h: Any, w: Any, y: Any) -> Any:
        return jax.grad(lambda h, w: jnp.sum(logps(h, w, y).logps), (0, 1))(h, w)

    def divergence(h: Any, w: Any, y: Any, r: Any) -> Any:
        return ops.linear_vocab_divergence(h, w, r, w, y, **options)

    programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "logps": (logps, (h, w, y)),
        "gradient": (gradient, (h, w, y)),
        "divergence": (divergence, (h, w, y, h)),
    }
    function, args = programs[case.program]
    return jax.jit(function).lower(*args)


def compile_sharded(case: Sharded, lowered: Any) -> dict[str, Any]:
    """Compiles it."""
    start = time.perf_counter()
    compiled = lowered.compile()
    memory: Any = compiled.memory_analysis()
    found = collectives_of(compiled.as_text() or "")
    return case._asdict() | {
        "has_logits_buffer": has_logits(compiled, case.tokens, -(-case.vocabulary // case.tensor)),
        "devices": devices_of(case.topology).size,
        "temp_bytes": memory.temp_size_in_bytes,
        "collectives": found,
        "bytes_per_token": sum(map(sum, found.values())) / case.tokens,
        "compile_seconds": round(time.perf_counter() - start, 1),
    }


def matrix(chips: list[str], models: list[str], tokens: list[int]) -> Iterator[Case]:
    """Every kernel, chip, model and token count; once a chip heads of their own and a support, whose bytes are no whole
    number of tiles, at the largest width, the other options and a single token at the smallest. Of v4, whose core v5p's
    resembles, only the kernels at the largest width."""
    for chip in chips:
        if chip == "v4":
            for kernel in KERNELS:
                yield Case(kernel, chip, 4096, *MODELS["qwen3-8b"])
            continue
        for model in models:
            for n in tokens:
                for kernel in KERNELS:
                    yield Case(kernel, chip, n, *MODELS[model])
        for model, options in (
            ("qwen3-8b", ("two_heads", "int8", "support")),
            ("smollm2", ("two_heads", "int8", "bias", "support", "soft_cap")),
        ):
            for option in options:
                for kernel in KERNELS:
                    if option in ("two_heads", "int8") and kernel.startswith("logps"):
                        continue
                    yield Case(kernel, chip, 4096, *MODELS[model], "bfloat16", option)
        for kernel in KERNELS:
            yield Case(kernel, chip, 4096, *MODELS["smollm2"], "float32")
            yield Case(kernel, chip, 1, *MODELS["smollm2"])


def main() -> None:
    """One line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", action="append", choices=list(TOPOLOGIES))
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--tokens", action="append", type=int)
    parser.add_argument("--case", action="append", help='one case as JSON: ["logps_statistics", "v5e", 1, 64, 7]')
    parser.add_argument("--sharded", action="append", help="one sharded case as JSON, the fields of Sharded in order")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--missing", action="store_true", help="only cases whose program --output does not have")
    parser.add_argument("--programs", action="store_true", help="print versions and hashes of the programs alone")
    args = parser.parse_args()
    if args.missing and args.output is None:
        parser.error("--missing needs --output, the file to compare with")
    cases: list[Case | Sharded] = [Case(*json.loads(text)) for text in args.case or ()]
    cases += [Sharded(*json.loads(text)) for text in args.sharded or ()]
    if not cases:
        chips, models = args.chip or list(TOPOLOGIES), args.model or list(MODELS)
        if not (args.chip or args.model or args.tokens):
            cases += SHARDED
        cases += matrix(chips, models, args.tokens or list(TOKENS))
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    for case in cases:
        lowered = lower_case(case) if isinstance(case, Case) else lower_sharded(case)
        made_by = versions | {"lowered": hashlib.sha256(lowered.as_text().encode()).hexdigest()[:12]}
        if args.programs:
            print(json.dumps(case._asdict() | made_by), flush=True)
            continue
        if args.missing and any(is_of(case, old) and made_by.items() <= old.items() for old in results_of(args.output)):
            continue
        record = compile_case(case, lowered) if isinstance(case, Case) else compile_sharded(case, lowered)
        print(json.dumps(record | made_by), flush=True)
        if args.output:
            add_to(args.output, case, record | made_by)


def results_of(output: Path) -> list[dict[str, Any]]:
    """What the file holds, nothing when there is none."""
    records: list[dict[str, Any]] = json.loads(output.read_text())["results"] if output.exists() else []
    return records


def is_of(case: Case | Sharded, record: dict[str, Any]) -> bool:
    """Whether the record is a result of this case."""
    return all(record.get(k) == v for k, v in case._asdict().items())


def add_to(output: Path, case: Case | Sharded, record: dict[str, Any]) -> None:
    """Writes the file after each case, so that an interrupted run keeps what it has."""
    kept = [old for old in results_of(output) if not is_of(case, old)]
    output.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(one) for one in [*kept, record])
    output.write_text(f'{{"results": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
