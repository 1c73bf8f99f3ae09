"""The kernels compile for real TPU generations and hold no logits in device memory. Needs libtpu, but no TPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench" / "tpu_aot.py"

pytestmark = [
    pytest.mark.tpu_aot,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
]


def compiled(*cases: tuple[object, ...], option: str = "--case") -> list[dict[str, object]]:
    """In a process of its own, whose JAX has never seen another platform."""
    arguments = [text for case in cases for text in (option, json.dumps(case))]
    done = subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("kernel", "chip"),
    [
        ("logps_statistics", "v5e"),
        ("logps_gradients", "v5p"),
        ("divergence_statistics", "v6e"),
        ("divergence_tv", "tpu7x"),
    ],
)
def test_real_shape(kernel: str, chip: str) -> None:
    """SmolLM2's, whose width is no multiple of 128; the larger ones are in ``experiments/tpu_aot``."""
    (record,) = compiled((kernel, chip, 4096, 576, 49_152))
    assert "error" not in record, record
    assert record["temp_share_of_logits"] <= 0.01, record
    assert record["temp_bytes"] <= 8 * 2**20, record  # a copy of the head would be 63 MB
    assert not record["has_logits_buffer"], record


def test_operands_are_read_as_they_lie() -> None:
    """Supports of 6,157 bytes a row, no multiple of 128, lie turned, 25 MB; so does a head of width 632, 62 MB."""
    narrow, option = (4096, 128, 49_256), ("bfloat16", "support")
    records = compiled(
        ("logps_statistics", "v5e", *narrow, *option),
        ("logps_gradients", "v5p", *narrow, *option),
        ("divergence_statistics", "v6e", *narrow, *option),
        ("divergence_tv", "tpu7x", *narrow, *option),
        ("logps_statistics", "v6e", 4096, 632, 49_152),
        ("divergence_statistics", "v5p", 4096, 632, 49_152, "bfloat16", "int8"),
    )
    assert len(records) == 6
    for record in records:
        assert "error" not in record, record
        assert record["temp_bytes"] <= 2**20, record


def test_an_operator_copies_no_head_that_lies_turned() -> None:
    """Rows of its 49,152 cannot be gathered without a copy of all, 63 MB: the kernel picks the tokens' logits out."""
    cases = [("v5p:2x2x1", "pallas_tpu", program, 1, 4096, 576, 49_152) for program in ("logps", "divergence")]
    records = compiled(*cases, option="--sharded")
    assert len(records) == 2
    for record in records:
        assert not record["has_logits_buffer"], record
        assert record["temp_bytes"] <= 2 * 2**20, record


def test_options_and_ragged_shapes() -> None:
    records = compiled(
        ("divergence_statistics", "v4", 200, 4096, 1500),
        ("divergence_statistics", "v6e", 300, 64, 1500, "bfloat16", "int8"),
        ("divergence_statistics", "tpu7x", 300, 64, 1500, "bfloat16", "bias"),
        ("divergence_tv", "v5e", 1, 576, 1500, "float32", "support"),
        ("logps_gradients", "v5p", 300, 576, 1501, "bfloat16", "support"),
        ("logps_gradients", "v5e", 300, 100, 7, "float32", "soft_cap"),
    )
    assert [record for record in records if "error" in record] == []
    assert len(records) == 6
