"""Which implementation runs: by platform, by name, never silently another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from trm_jax import ops
from trm_jax.ops import _dispatch, _vmem
from trm_jax.ops._dispatch import choose_implementation
from trm_jax.ops.linear_logps._config import logps_blocks

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


@pytest.mark.parametrize("operator", ["linear_logps", "linear_vocab_divergence"])
@pytest.mark.parametrize(("width", "form"), [(1024, "pallas_tpu"), (16384, "chunked")])
def test_where_no_block_fits_the_chip_the_chunked_form_runs(
    operator: str,
    width: int,
    form: str,
    operands: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_dispatch.jax, "default_backend", lambda: "tpu")  # v5p's memory, with no TPU to ask
    monkeypatch.setattr(_dispatch.jax, "device_count", lambda: 1)
    given = operands(N, width, D)
    assert called(operator, given, chunk_size=4) == form
    if form == "chunked":
        with pytest.raises(NotImplementedError, match=rf"width.* {width}.* does not fit .*implementation='chunked'"):
            called(operator, given, implementation="pallas_tpu")


def test_forward_and_gradient_are_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a v4, 16 MiB: log-probs of bfloat16 and width 5,120 have a block for the forward pass only."""
    monkeypatch.setattr(_dispatch.jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(_dispatch.jax, "device_count", lambda: 1)
    monkeypatch.setattr(_vmem, "chip_of", lambda name: _vmem.CHIPS[name or "v4"])
    shapes = {"hidden": (N, 5120), "head": (D, 5120)}
    given = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    logps_blocks(_vmem.CHIPS["v4"], N, 5120, 2, 2, supported=False, gradient=False)
    assert called("linear_logps", given | {"tokens": np.zeros(N, int)}, chunk_size=4) == "chunked"


def test_the_mesh_says_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    monkeypatch.setattr(_dispatch.jax, "default_backend", lambda: "tpu")
    assert choose_implementation("op", None, mesh=mesh) == "chunked"  # the CPU's devices
    assert choose_implementation("op", None, mesh=mesh.abstract_mesh) == "chunked"
    without_devices = AbstractMesh((8,), ("tensor",))
    assert choose_implementation("op", None, mesh=without_devices) == "pallas_tpu"  # the default's
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert choose_implementation("op", None, mesh=without_devices) == "chunked"  # the context's


def test_a_context_says_the_platform_where_programs_are_compiled_for_another() -> None:
    chip = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((4,), ("tensor",), abstract_device=chip)):
        mesh = jax.sharding.get_abstract_mesh()
        assert choose_implementation("op", None, mesh=mesh) == "pallas_tpu"
        assert choose_implementation("op", "pallas_tpu", mesh=mesh) == "pallas_tpu"
    assert choose_implementation("op", None, mesh=mesh) == "pallas_tpu"


def test_numpys_float64_is_float32(operands: Callable[..., dict[str, Any]]) -> None:
    given = operands(N, D, V)
    args = (given["hidden"], given["head"], given["tokens"])
    wide = [x.astype(np.float64) for x in args[:2]]
    np.testing.assert_array_equal(ops.linear_logps(*wide, args[2]).logps, ops.linear_logps(*args).logps)
