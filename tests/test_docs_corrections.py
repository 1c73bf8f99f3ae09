"""The page of the corrections names everything that the package offers."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from trm_jax import bounds, correction, divergences, losses

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "corrections.md").read_text(encoding="utf-8")
NAMED = {name for code in re.findall(r"`([^`]+)`", PAGE) for name in re.findall(r"\w+", code)}
INTERNAL = {"logits_divergence", "softmax_statistics"}  # shared by the fused operators, shown there


def functions(room: object) -> dict[str, object]:
    return {name: f for name, f in vars(room).items() if callable(f) and not inspect.isclass(f) and name[0].islower()}


def test_every_preset_and_every_public_function_is_on_the_page() -> None:
    wanted = set(correction.presets) | set(functions(correction)) | set(functions(losses))
    assert wanted <= NAMED, wanted - NAMED


@pytest.mark.parametrize("room", [bounds, correction, divergences, losses])
def test_every_public_function_has_a_doctested_example(room: object) -> None:
    lacking = [name for name, f in functions(room).items() if ">>>" not in (f.__doc__ or "") and name not in INTERNAL]
    assert lacking == []
