"""Both operators on a mesh, compiled ahead of time for real TPU topologies: what travels, and what is held."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.tpu_aot,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install trm-jax[tpu]"),
]

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "bench" / "tpu_aot.py"
TENSOR, TOKENS, WIDTH, VOCABULARY = 4, 4096, 512, 151_936  # tokens of each device row; 151,936 / 4 is not 128 · n
PROGRAMS = ("logps", "gradient", "divergence")


def compile_for(topology: str, form: str) -> dict[str, dict[str, Any]]:
    """In a process of its own, because the TPU compiler reads its environment once."""
    cases = [(topology, form, program, TENSOR, TOKENS, WIDTH, VOCABULARY) for program in PROGRAMS]
    arguments = [text for case in cases for text in ("--sharded", json.dumps(case))]
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(TOOL), *arguments], env=environ, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {record["program"]: record for record in records}


@pytest.mark.parametrize(("topology", "form"), [("v6e:8x8", "chunked"), ("v5p:4x4x4", "pallas_tpu")])
def test_only_statistics_and_gradients_travel(topology: str, form: str) -> None:
    share = -(-VOCABULARY // TENSOR)
    at_once = 1024  # tokens of a chunk
    programs = compile_for(topology, form)
    found = {name: program["collectives"] for name, program in programs.items()}
    for name, kinds in found.items():
        assert list(kinds) == ["all-reduce"], (name, kinds)
    assert sum(found["logps"]["all-reduce"]) == 20 * TOKENS
    assert sum(found["divergence"]["all-reduce"]) == 60 * TOKENS
    gradients = 4 * TOKENS * WIDTH + 4 * share * WIDTH  # the head's is data parallelism itself
    assert sum(found["gradient"]["all-reduce"]) == 20 * TOKENS + gradients  # in float32
    # D is not N here: the head's gradient, in float32 and its sum over devices beside it, is an eighth of the logits.
    assert programs["gradient"]["temp_bytes"] < 2 * gradients + (
        0 if form == "pallas_tpu" else 2.5 * 4 * at_once * share
    )
    for name, program in programs.items():
        assert not program["has_logits_buffer"], name
    if form == "pallas_tpu":  # neither logits nor a copy of the head's share
        for name in ("logps", "divergence"):
            assert programs[name]["temp_bytes"] < share * WIDTH * 2 / 2, name
    else:
        assert programs["logps"]["temp_bytes"] < 2.5 * 4 * at_once * share
        assert programs["divergence"]["temp_bytes"] < 4.5 * 4 * at_once * share
