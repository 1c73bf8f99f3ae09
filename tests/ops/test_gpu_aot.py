"""The chunked operators compile for an H200 and hold no logits. Needs JAX's CUDA plugin, but no GPU."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trm_jax import ops

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu_aot,
    pytest.mark.skipif(
        not any(map(importlib.util.find_spec, PLUGINS)), reason="needs the CUDA plugin: pip install 'jax[cuda13]'"
    ),
]

# What the compiler asks of a device, from NVIDIA's data sheet of the H200 and the limits of compute capability 9.0.
H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 1 patch: 1 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  device_memory_size: 150000000000
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""
TOKENS, WIDTH, VOCABULARY = 4096, 2048, 151_936
LOGITS = 4 * TOKENS * VOCABULARY


def compiled(program: str, devices: int) -> Any:
    """A program of the chunked form, the head's rows over all devices."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x1x{devices}", target_config=H200
    )
    mesh = Mesh(np.array(topology.devices), ("tensor",), axis_types=(AxisType.Auto,))
    placed: Any = {"mesh": mesh, "vocab_axis": "tensor"} if devices > 1 else {}

    def spec(*shape: int, dtype: Any = jnp.bfloat16, axes: tuple[str, ...] = ()) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    def logps(h: Any, w: Any, y: Any) -> Any:
        return ops.linear_logps(h, w, y, implementation="chunked", **placed).logps

    programs: dict[str, Callable[..., Any]] = {
        "logps": lambda h, w, r, y: logps(h, w, y),
        "gradient": lambda h, w, r, y: jax.grad(lambda h, w: jnp.sum(logps(h, w, y)), (0, 1))(h, w),
        "divergence": lambda h, w, r, y: ops.linear_vocab_divergence(h, w, r, w, y, implementation="chunked", **placed),
    }
    hidden = spec(TOKENS, WIDTH)
    head, tokens = spec(VOCABULARY, WIDTH, axes=("tensor",)), spec(TOKENS, dtype=jnp.int32)
    return jax.jit(programs[program]).lower(hidden, head, hidden, tokens).compile()


@pytest.mark.parametrize("program", ["logps", "gradient", "divergence"])
def test_no_logits_are_held(program: str) -> None:
    done = compiled(program, 1)
    assert done.memory_analysis().temp_size_in_bytes < LOGITS / 4
    text = done.as_text()
    assert f"[{WIDTH}" in text or f",{WIDTH}]" in text  # the text is a program with shapes
    assert not re.search(rf"\[(?:{TOKENS},{VOCABULARY}|{VOCABULARY},{TOKENS})\]", text)


@pytest.mark.parametrize("program", ["logps", "gradient", "divergence"])
def test_shards_of_the_vocabulary_exchange_sums_alone(program: str) -> None:
    text = compiled(program, 4).as_text()
    kinds = r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(?:-start)?\("
    assert set(re.findall(kinds, text)) == {"all-reduce"}
