"""Compiles the TPU kernels at real shapes for every TPU generation, without a TPU: what they hold in memory.

    python tools/bench/tpu_aot.py --output experiments/tpu_aot/results.json
    python tools/bench/tpu_aot.py --chip v6e --model smollm2 --tokens 4096

Needs libtpu. Each case is one kernel call compiled ahead of time; recorded are the bytes of temporaries in device
memory (``memory_analysis``), their share of one float32 ``[N, V]`` array, and whether the program has a buffer of that
size. The compiler refuses a kernel whose blocks do not fit the chip's vector memory: compiling is their test.
"""

from __future__ import annotations

import os

os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", JAX_PLATFORMS="cpu")

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trm_jax.ops.linear_logps._pallas_tpu import logps_statistics
from trm_jax.ops.linear_logps._pallas_tpu_gradients import logps_gradients
from trm_jax.ops.linear_vocab_divergence._pallas_tpu import divergence_statistics, divergence_tv

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
MODELS = {"qwen3-8b": (4096, 151_936), "qwen1.5-moe": (2048, 151_936), "smollm2": (576, 49_152)}
TOKENS = (1, 4096, 65_536)


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


Spec = Callable[..., Any]


def _logps(case: Case, s: Spec) -> tuple[Callable[..., Any], list[Any]]:
    n, d, v = case.tokens, case.width, case.vocabulary
    int8 = case.option == "int8"
    operands = {
        "hidden": s((n, d), case.dtype),
        "head": s((v, d), "int8" if int8 else case.dtype),
        "bias": s((v,), "float32") if case.option == "bias" else None,
        "support": s((n, -(-v // 8)), "uint8") if case.option == "support" else None,
        "tokens": s((n,), "int32"),
        "token_logit": s((n,), "float32"),
        "scale": s((v,), "float32") if int8 else None,
    }

    def call(*arrays: Any) -> Any:
        given = dict(zip(operands, arrays, strict=True))
        return logps_statistics(**given, **_static(case))

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


def _divergence(function: Callable[..., Any], rows: tuple[str, ...]) -> Callable[[Case, Spec], Any]:
    def build(case: Case, s: Spec) -> tuple[Callable[..., Any], list[Any]]:
        n, d, v = case.tokens, case.width, case.vocabulary
        int8, bias = case.option == "int8", case.option == "bias"
        other = int8 or case.option == "two_heads"
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
            **{name: s((n,), "float32") for name in ("policy_token_logit", "rollout_token_logit", *rows)},
        }

        def call(*arrays: Any) -> Any:
            given = dict(zip(operands, arrays, strict=True))
            if given["rollout_head"] is None:
                given["rollout_head"] = given["policy_head"]
            return function(**given, **_static(case))

        return call, list(operands.values())

    return build


def _static(case: Case) -> dict[str, Any]:
    cap = 30.0 if case.option == "soft_cap" else None
    return {"temperature": 1.0, "logit_soft_cap": cap, "chip": case.chip}


KERNELS: dict[str, Callable[[Case, Spec], Any]] = {
    "logps_statistics": _logps,
    "logps_gradients": _gradients,
    "divergence_statistics": _divergence(divergence_statistics, ()),
    "divergence_tv": _divergence(divergence_tv, ("shift", "normaliser", "policy_logsumexp", "rollout_logsumexp")),
}


def compile_case(case: Case) -> dict[str, Any]:
    """Compiles one case; the compiler's refusal is recorded under ``error``."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[case.chip])
    mesh = Mesh(np.array(topology.devices[:1]), ("all",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def spec(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    call, operands = KERNELS[case.kernel](case, spec)
    record: dict[str, Any] = case._asdict()
    start = time.perf_counter()
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = jax.jit(call).lower(*operands).compile()
    except Exception as error:  # the compiler's own exception classes are private
        return record | {"error": str(error)[:400]}
    logits = 4 * case.tokens * case.vocabulary
    memory: Any = compiled.memory_analysis()
    sizes = [
        int(np.prod([int(x) for x in dims.split(",")], dtype=np.int64))
        for dims in re.findall(r"= \(?\w+\[([\d,]+)\]", compiled.as_text() or "")
    ]
    return record | {
        "temp_bytes": memory.temp_size_in_bytes,
        "temp_share_of_logits": memory.temp_size_in_bytes / logits,
        "has_logits_buffer": case.tokens * case.vocabulary in sizes,
        "compile_seconds": round(time.perf_counter() - start, 1),
    }


def matrix(chips: list[str], models: list[str], tokens: list[int]) -> Iterator[Case]:
    """Every kernel, chip, model and token count; the options once a chip, at the smallest width."""
    for chip in chips:
        for model in models:
            width, vocabulary = MODELS[model]
            for kernel in KERNELS:
                for n in tokens:
                    yield Case(kernel, chip, n, width, vocabulary)
        width, vocabulary = MODELS["smollm2"]
        for option in ("two_heads", "int8", "bias", "support", "soft_cap"):
            for kernel in KERNELS:
                if option == "two_heads" and kernel.startswith("logps"):
                    continue
                if option == "int8" and kernel == "logps_gradients":
                    continue
                yield Case(kernel, chip, 4096, width, vocabulary, "bfloat16", option)
        for kernel in KERNELS:
            yield Case(kernel, chip, 4096, width, vocabulary, "float32")


def main() -> None:
    """One line a case; the file is written after each, so that an interrupted run keeps what it has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", action="append", choices=list(TOPOLOGIES))
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--tokens", action="append", type=int)
    parser.add_argument("--case", action="append", help='one case as JSON: ["logps_statistics", "v5e", 1, 64, 7]')
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    cases = [Case(*json.loads(text)) for text in args.case or ()] or list(
        matrix(args.chip or list(TOPOLOGIES), args.model or list(MODELS), args.tokens or list(TOKENS))
    )
    results: list[dict[str, Any]] = []
    for case in cases:
        results.append(compile_case(case))
        print(json.dumps(results[-1]), flush=True)
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            versions = {"jax": jax.__version__}
            args.output.write_text(json.dumps({"versions": versions, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
