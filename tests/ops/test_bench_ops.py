"""The benchmark of the operators: products alone are the products, one repeat is enough, ratios are of like lines."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench" / "ops.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_ops", TOOL)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
    return module


def test_the_products_alone_are_those_of_the_chunked_form(bench: ModuleType) -> None:
    """With the logits themselves as their gradient, since nothing else is computed: z = hwᵀ, zw and zᵀh."""
    rng = np.random.default_rng(0)
    n, d, v = 520, 3, 42  # of 256 tokens a chunk three chunks, of the vocabulary another number of them
    h, r, w = (jnp.asarray(rng.normal(size=(k, d)), jnp.float32) for k in (n, n, v))
    tokens = jnp.zeros(n, int)
    z = np.asarray(h, float) @ np.asarray(w, float).T
    column, grad_hidden, grad_head = bench._gradient_matmuls(h, w, r, tokens)
    np.testing.assert_allclose(column, z[:, 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grad_hidden, z @ w, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.asarray(grad_head).reshape(-1, d)[:v], z.T @ h, rtol=1e-4, atol=1e-3)
    both = bench._forward_matmuls(2)(h, w, r, tokens)
    np.testing.assert_allclose(both, [z[:, 0], r @ w[0]], rtol=1e-5, atol=1e-5)


def test_one_repeat_is_enough(bench: ModuleType) -> None:
    case = bench.Case("linear_logps", "naive", abs, 1)
    line = {"least_flops": 100, "least_bytes": 1}
    program = bench.Program(case, abs, line, [2.0], [3.0])
    done = bench.finish(program, 100.0, 1.0)
    assert (done["seconds_median"], done["seconds_quartiles"], done["share_of_bound"]) == (2.0, [2.0, 2.0], 0.5)


def test_ratios_are_of_the_same_operator_and_shape(bench: ModuleType) -> None:
    def line(operator: str, form: str, seconds: float) -> dict[str, object]:
        times = {"seconds_median": seconds, "cpu_seconds_median": 2 * seconds, "temporary_bytes": 8 * seconds}
        return {"operator": operator, "vocabulary": 7, "form": form, **times}

    lines = [
        line("linear_vocab_divergence", "naive", 4.0),
        line("linear_vocab_divergence", "matmuls", 2.0),
        line("linear_logps", "matmuls", 1.0),
        line("linear_vocab_divergence_no_tv", "chunked", 3.0),
    ]
    bench.compare(lines)
    assert (lines[3]["time_over_naive"], lines[3]["time_over_matmuls"]) == (0.75, 1.5)
    assert lines[3]["temporaries_over_naive"] == 0.75
    assert "time_over_naive" not in lines[2]
