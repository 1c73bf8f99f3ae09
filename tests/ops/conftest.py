"""What the tests of the operators share: random operands, and the collectives of a compiled program."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "u8": 1, "s8": 1, "pred": 1}
_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"


def collectives_of(text: str) -> dict[str, list[int]]:
    """Bytes of every collective's result in optimised HLO, by kind; each instruction counts once."""
    found: dict[str, list[int]] = {}
    for line in text.splitlines():
        match = re.search(rf"= (.*?) ({_KINDS})(?:-start)?\(", line)
        if match:
            sizes = [
                _BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
                for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", match[1])
            ]
            found.setdefault(match[2], []).append(sum(sizes))
    return found


@pytest.fixture(name="collectives_of")
def _collectives_of() -> Callable[[str], dict[str, list[int]]]:
    return collectives_of


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
