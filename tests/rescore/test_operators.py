"""Rescore and loss go through the operators: no ``[N, V]`` array, in the form that the devices call for."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax import ops
from trm_jax.models import ComputeConfig, make_mesh
from trm_jax.ops import _choice, _dispatch
from trm_jax.rescore import policy_logps, rescore

COPIES, VOCABULARY = 100, 12  # 2,000 tokens, in chunks of 256 on a CPU
KERNELS = {"logps_statistics", "divergence_statistics", "divergence_tv"}


def equations(jaxpr: Any) -> Iterator[Any]:
    """Of a program and of all that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@dataclasses.dataclass(frozen=True)
class Program:
    """What a traced program consists of."""

    primitives: set[str]
    kernels: set[str]
    full_logits: list[tuple[int, ...]]


def traced(tools: Any, *, gradient: bool) -> Program:
    case = tools.case(truncated=True)
    rollout = jax.tree.map(lambda x: jnp.repeat(x, COPIES, axis=0), case.rollout)
    graphdef, params = nnx.split(tools.model(), nnx.Param)

    def loss(params: Any) -> jax.Array:
        return jnp.sum(policy_logps(nnx.merge(graphdef, params), rollout, compute=ComputeConfig())[0])

    def score(params: Any) -> Any:
        return rescore(graphdef, params, rollout, case.rollout_head, compute=ComputeConfig())[0]

    found = list(equations(jax.make_jaxpr(jax.grad(loss) if gradient else score)(params).jaxpr))
    n = rollout.response_tokens.size
    shapes = [x.aval.shape for equation in found for x in equation.outvars if jnp.issubdtype(x.aval.dtype, np.floating)]
    kernels = {e.params["name"] for e in found if e.primitive.name == "pallas_call"}
    full = [s for s in shapes if VOCABULARY in s and math.prod(s) >= n * VOCABULARY]
    return Program({e.primitive.name for e in found}, kernels, full)


@pytest.mark.parametrize("gradient", [False, True])
def test_nothing_holds_full_logits(tools: Any, gradient: bool) -> None:
    program = traced(tools, gradient=gradient)
    assert program.full_logits == []
    assert (program.kernels, "shard_map" in program.primitives) == (set(), False)  # one CPU: the chunked form


def test_full_logits_would_show(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ops.linear_logps
    monkeypatch.setattr(ops, "linear_logps", lambda *a, **k: chosen(*a, **k, implementation="reference"))
    assert (2000, VOCABULARY) in traced(tools, gradient=True).full_logits


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("gradient", [False, True])
def test_tpus_run_the_kernels(tools: Any, monkeypatch: pytest.MonkeyPatch, devices: int, gradient: bool) -> None:
    """Of several, those of the mesh that the run is set to: each on its rows of the head."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    for module in (_dispatch, _choice):
        monkeypatch.setattr(module, "platform_of", lambda mesh: "tpu")  # the mesh says CPU
    with jax.set_mesh(make_mesh(data=4, tensor=2)) if devices > 1 else contextlib.nullcontext():
        program = traced(tools, gradient=gradient)
    if gradient:  # of the hidden states and of the head
        assert "logps_statistics" in program.kernels
        assert len(program.kernels) == 3, program.kernels
    else:
        assert program.kernels == KERNELS
    assert ("shard_map" in program.primitives) == (devices > 1)
    assert program.full_logits == []
