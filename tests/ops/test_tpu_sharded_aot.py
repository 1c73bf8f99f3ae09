"""Both operators on a mesh, compiled ahead of time for real TPU topologies: what travels, and what is held."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.tpu_aot,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install trm-jax[tpu]"),
]

ROOT = Path(__file__).resolve().parents[2]
TENSOR, TOKENS, WIDTH, VOCABULARY = 4, 4096, 512, 151_936  # tokens of each device row; 151,936 / 4 is not 128 · n

# In a process of its own, because the TPU compiler reads its environment once.
PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from trm_jax import ops

topology, form, tensor, tokens, width, vocabulary = sys.argv[1:3] + [int(x) for x in sys.argv[3:]]
devices = np.asarray(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
mesh = Mesh(devices.reshape(-1, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
n = tokens * mesh.shape["data"]
options = dict(implementation=form, mesh=mesh, vocab_axis="tensor", token_axis="data")

def spec(shape, dtype, *axes):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

h, w = spec((n, width), jnp.bfloat16, "data"), spec((vocabulary, width), jnp.bfloat16, "tensor")
y = spec((n,), jnp.int32, "data")
programs = {
    "logps": (lambda h, w, y: ops.linear_logps(h, w, y, **options), (h, w, y)),
    "gradient": (
        jax.grad(lambda h, w, y: jnp.sum(ops.linear_logps(h, w, y, **options).logps), (0, 1)), (h, w, y)
    ),
    "divergence": (lambda h, w, r, y: ops.linear_vocab_divergence(h, w, r, w, y, **options), (h, w, h, y)),
}
out = {}
for name, (function, args) in programs.items():
    compiled = jax.jit(function).lower(*args).compile()
    out[name] = {"text": compiled.as_text(), "temporaries": compiled.memory_analysis().temp_size_in_bytes}
print(json.dumps(out))
"""


def compile_for(topology: str, form: str) -> dict[str, dict[str, Any]]:
    arguments = [topology, form, *map(str, (TENSOR, TOKENS, WIDTH, VOCABULARY))]
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
    environ["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return out


@pytest.mark.parametrize("form", ["chunked", "pallas_tpu"])
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v5p:4x4x4", "v6e:8x8", "tpu7x:4x4x4"])
def test_only_statistics_and_gradients_travel(
    topology: str, form: str, collectives_of: Callable[[str], dict[str, list[int]]]
) -> None:
    share = -(-VOCABULARY // TENSOR)
    # The chunked form merges each of its chunks of 1,024 tokens; an instruction in a loop counts once.
    at_once = 1024 if form == "chunked" else TOKENS
    programs = compile_for(topology, form)
    found = {name: collectives_of(program["text"]) for name, program in programs.items()}
    for name, kinds in found.items():
        assert list(kinds) == ["all-reduce"], (name, kinds)
    assert sum(found["logps"]["all-reduce"]) == 20 * TOKENS
    assert sum(found["divergence"]["all-reduce"]) <= 60 * at_once
    gradients = 4 * TOKENS * WIDTH + (4 * share * WIDTH if topology != "v5p:2x2x1" else 0)  # one row of devices there
    assert sum(found["gradient"]["all-reduce"]) <= 20 * TOKENS + gradients
    if form == "pallas_tpu":  # neither logits nor a copy of the head's share
        for name in ("logps", "divergence"):
            assert programs[name]["temporaries"] < share * WIDTH * 2 / 2, name
    else:
        assert programs["logps"]["temporaries"] < 2.5 * 4 * at_once * share
        assert programs["divergence"]["temporaries"] < 4.5 * 4 * at_once * share
