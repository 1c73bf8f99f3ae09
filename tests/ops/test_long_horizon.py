"""A response of 32,768 tokens over Qwen's vocabulary: exact KL and TV within 4 GiB, where full logits take 40."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_exact_divergences_of_a_long_response() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environ |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    tool = ROOT / "tools" / "bench" / "long_horizon.py"
    done = subprocess.run(
        [sys.executable, str(tool), "--width", "32"],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    print(result)
    assert (result["tokens"], result["vocabulary"]) == (32_768, 151_936)
    assert result["peak_bytes"] < 4 * 2**30, result
    assert result["finite"], result
    assert result["pinsker"], result
    # Float32 hidden states of 6e-8 relative rounding, 1e-4 apart at least, move a KL by 1e-3 of itself.
    assert result["kl_error"] < 1e-2, result
    assert result["tv_error"] < 1e-2, result
