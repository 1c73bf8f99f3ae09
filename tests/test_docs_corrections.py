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
    page = " ".join(PAGE.split())
    forms, kernels = (committed(f"divergence_accuracy/{name}.json") for name in ("results", "kernels"))
    assert {line["implementation"] for line in forms["lines"]} >= {"vocab_divergence", "chunked"}
    assert f"{forms['vocabulary']:,} tokens" in page
    assert min(line["kl"] for line in forms["lines"]) < 1.1e-8
    worst = max(forms["lines"], key=lambda line: line["kl_error"])
    assert worst["shape"] in {"constant_offset", "large_offset"}
    assert f"down to a KL of {figure(worst['kl_min'], 0)} between logits that differ by a large constant" in page
    said = re.search(r"no relative error of KL is above (\S+), .* none of total variation above (\S+)\. The TPU", page)
    of_kernels = re.search(r"The TPU kernels \(in the interpreter\) are right to (\S+) in this table", page)
    assert said
    assert of_kernels
    for record, limits in ((forms, said.groups()), (kernels, [of_kernels[1]] * 2)):
        for kind, bound in zip(("kl", "tv"), map(float, limits), strict=True):
            largest = max(line.get(f"{kind}_error", 0.0) for line in record["lines"])
            assert bound / 5 <= largest <= bound, (kind, record["command"])


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
