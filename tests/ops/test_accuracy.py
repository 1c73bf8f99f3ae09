"""Small divergences keep their digits: the table of ``tools/bench/divergence_accuracy.py``, over Qwen's vocabulary."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench" / "divergence_accuracy.py"


@pytest.fixture(scope="module")
def measure() -> Callable[..., dict[str, Any]]:
    spec = importlib.util.spec_from_file_location("divergence_accuracy", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    function: Callable[..., dict[str, Any]] = module.measure
    return function


@pytest.mark.parametrize("with_tv", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(name, marks=() if name == "peaked" else pytest.mark.slow)
        for name in ("peaked", "flat", "near_deterministic", "constant_offset", "large_offset", "unrelated")
    ],
)
def test_relative_errors(shape: str, with_tv: bool, measure: Callable[..., dict[str, Any]]) -> None:
    for target in (1.0,) if shape == "unrelated" else (4e-7, 2e-5, 1e-2, 1.0):
        line = measure(shape, target, implementation="chunked", with_tv=with_tv, rows=2, vocabulary=151_936)
        assert line["kl_min"] >= 1e-7
        assert line["kl_error"] <= (1e-2 if line["kl_min"] < 1e-5 else 1e-3), line
        if with_tv:
            assert line["tv_min"] >= 1e-6
            assert line["tv_error"] <= 1e-3, line
