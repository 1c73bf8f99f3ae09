"""Which implementation runs: by platform, by name, never silently another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from trm_jax import ops
from trm_jax.ops import _dispatch
from trm_jax.ops._dispatch import choose_implementation

N, D, V = 8, 16, 40


def called(operator: str, given: dict[str, Any], **options: Any) -> str:
    """Which form the traced program of an operator contains: the kernel, a loop over chunks, or neither."""
    if operator == "linear_logps":
        args = (given["hidden"], given["head"], given["tokens"])
    else:
        args = (given["hidden"], given["head"], given["rollout_hidden"], given["head"], given["tokens"])
    text = str(jax.make_jaxpr(lambda *a: getattr(ops, operator)(*a, **options))(*args))
    if "pallas_call" in text:
        return "pallas_tpu"
    return "chunked" if "scan[" in text else "reference"


@pytest.mark.parametrize("operator", ["linear_logps", "linear_vocab_divergence"])
def test_the_named_implementation_runs(operator: str, operands: Callable[..., dict[str, Any]]) -> None:
    given = operands(N, D, V)
    assert called(operator, given, chunk_size=4) == "chunked"
    assert called(operator, given, chunk_size=4, implementation="chunked") == "chunked"
    assert called(operator, given, chunk_size=4, implementation="chunked", interpret=True) == "chunked"
    assert called(operator, given, chunk_size=4, implementation="reference") == "reference"
    assert called(operator, given, implementation="pallas_tpu", interpret=True) == "pallas_tpu"
    assert called(operator, given, interpret=True) == "pallas_tpu"
    with pytest.raises(NotImplementedError, match=r"needs a TPU, given platform 'cpu'.*interpret=True"):
        called(operator, given, implementation="pallas_tpu")


@pytest.mark.parametrize("operator", ["linear_logps", "linear_vocab_divergence"])
def test_a_tpu_runs_the_kernel(
    operator: str, operands: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dispatch.jax, "default_backend", lambda: "tpu")
    given = operands(N, D, V)
    # Eight devices and no mesh: the compiler shards the chunked form, and could only gather a kernel's operands.
    assert called(operator, given, chunk_size=4) == "chunked"
    monkeypatch.setattr(_dispatch.jax, "device_count", lambda: 1)
    assert called(operator, given) == "pallas_tpu"
    assert called(operator, given, implementation="pallas_tpu") == "pallas_tpu"
    assert called(operator, given, implementation="chunked", chunk_size=4) == "chunked"


def test_the_mesh_says_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    monkeypatch.setattr(_dispatch.jax, "default_backend", lambda: "tpu")
    assert choose_implementation("op", None, mesh=mesh) == "chunked"  # the CPU's devices
    assert choose_implementation("op", None, mesh=mesh.abstract_mesh) == "pallas_tpu"  # no devices: the default's


def test_unknown_names_and_types(operands: Callable[..., dict[str, Any]]) -> None:
    given = operands(N, D, V)
    args = (given["hidden"], given["head"], given["rollout_hidden"], given["int8_head"], given["tokens"])
    with pytest.raises((ValueError, TypeError), match="pallas_tpv"):
        choose_implementation("op", "pallas_tpv")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"rollout_head must be .* given int8 without a scale"):
        ops.linear_vocab_divergence(*args)
    with pytest.raises(TypeError, match=r"rollout_head must be .* given float32 with a scale"):
        ops.linear_vocab_divergence(*args[:3], given["head"], args[4], rollout_head_scale=given["scale"])
    with pytest.raises((ValueError, TypeError), match="rollout_head_scale"):
        ops.linear_vocab_divergence(*args, rollout_head_scale=np.ones(3, np.float32))
    with pytest.raises((ValueError, TypeError), match="policy_bias"):
        ops.linear_vocab_divergence(*args, rollout_head_scale=given["scale"], policy_bias=np.ones(3, np.float32))
    with pytest.raises(ValueError, match="logit_soft_cap must lie in"):
        ops.linear_logps(given["hidden"], given["head"], given["tokens"], logit_soft_cap=0.0)
