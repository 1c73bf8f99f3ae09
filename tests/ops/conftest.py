"""What the tests of the operators share: random operands, and the collectives of a compiled program."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench" / "tpu_aot.py"


@pytest.fixture(scope="session")
def tpu_aot() -> ModuleType:
    """The tool that compiles for TPUs."""
    spec = importlib.util.spec_from_file_location("tpu_aot", TOOL)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # it sets variables for the TPU compiler
        patch.setattr("os.environ", dict(os.environ))
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def collectives_of(tpu_aot: ModuleType) -> Callable[[str], dict[str, list[int]]]:
    """Of that tool: bytes of every collective in optimised HLO."""
    out: Callable[[str], dict[str, list[int]]] = tpu_aot.collectives_of
    return out


@pytest.fixture
def operands() -> Callable[..., dict[str, Any]]:
    """``operands(n, d, v)``: two policies 5% apart, with everything that an operator can be given."""

    def make(n: int, d: int, v: int, seed: int = 0) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, v, n)
        support = rng.random((n, v)) < 0.5
        support[np.arange(n), tokens] = True
        bias = rng.normal(size=v).astype(np.float32)
        rollout_bias = bias + 0.1 * rng.normal(size=v).astype(np.float32)
        absent = np.setdiff1d(rng.permutation(v), tokens)[: v // 10]
        bias[absent] = rollout_bias[absent] = -np.inf
        hidden, head = rng.normal(size=(n, d)).astype(np.float32), rng.normal(size=(v, d)).astype(np.float32)
        scale = (np.abs(head).max(1) / 127).astype(np.float32)
        return {
            "hidden": hidden,
            "head": head,
            "rollout_hidden": hidden + 0.05 * rng.normal(size=(n, d)).astype(np.float32),
            "int8_head": np.rint(head / scale[:, None]).astype(np.int8),
            "scale": scale,
            "bias": bias,
            "rollout_bias": rollout_bias,
            "tokens": tokens,
            "support": np.packbits(support, axis=1, bitorder="little"),
        }

    return make
