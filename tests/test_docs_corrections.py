"""The page of the corrections names everything that the package offers."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from trm_jax import bounds, correction, divergences, losses, ops

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "corrections.md").read_text(encoding="utf-8")
NAMED = {name for code in re.findall(r"`([^`]+)`", PAGE) for name in re.findall(r"\w+", code)}


def functions(room: object) -> dict[str, object]:
    return {name: f for name, f in vars(room).items() if callable(f) and not inspect.isclass(f) and name[0].islower()}


def test_every_preset_and_every_public_function_is_on_the_page() -> None:
    wanted = set(correction.presets) | set(functions(correction)) | set(functions(losses))
    assert wanted <= NAMED, wanted - NAMED


@pytest.mark.parametrize("room", [bounds, correction, divergences, losses, ops])
def test_every_public_function_has_a_doctested_example(room: object) -> None:
    lacking = [name for name, f in functions(room).items() if ">>>" not in (f.__doc__ or "")]
    assert lacking == []


def committed(path: str) -> Any:
    return json.loads((ROOT / "experiments" / path).read_text(encoding="utf-8"))


def figure(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}e}".replace("e-0", "e-")


def test_accuracy_is_that_of_the_committed_table() -> None:
    page, record = PAGE.replace("\n", " "), committed("divergence_accuracy/results.json")
    lines = record["lines"]
    assert {line["implementation"] for line in lines} >= {"vocab_divergence", "chunked"}
    assert min(line["kl"] for line in lines) < 1.1e-8
    worst = max(lines, key=lambda line: line["kl_error"])
    assert f"error of KL is {figure(worst['kl_error'])}, met at a KL of {figure(worst['kl_min'], 0)} between" in page
    normal = max(line["kl_error"] for line in lines if line["kl_min"] >= 1e-7)
    assert f"{figure(normal)} from 1e-7 on" in page
    assert f"total variation {figure(max(line.get('tv_error', 0.0) for line in lines))}" in page
    assert f"{record['vocabulary']:,} tokens" in page


@pytest.mark.parametrize(("device", "words"), [("cpu", "at most {} times the bytes"), ("tpu_v5e", "compiler {} times")])
def test_cost_is_that_of_the_committed_measurements(device: str, words: str) -> None:
    ratios = [result["ratio"] for result in committed(f"correction_cost/{device}.json")["results"]]
    assert words.format(f"{max(ratios):.2f}") in PAGE.replace("\n", " ")


def test_bytes_beside_eager_frameworks_are_those_of_the_committed_measurements() -> None:
    results = committed("correction_cost/cpu.json")["results"]
    times = [r[form]["eager_bytes"] / r["compiled_bytes"] for r in results for form in ("numpy", "torch")]
    assert f"move {min(times):.0f} to {max(times):.0f} times as many bytes" in PAGE.replace("\n", " ")
    least = [r["jit"]["least_ms"] / 1e3 for r in results]
    assert f"{min(least):.1f} to {max(least):.1f} s on two busy cores" in PAGE.replace("\n", " ")
