"""What the committed records say of programs compiled for TPUs: complete, no logits held, only sums travel."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
MIB = 2**20


def records(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((EXPERIMENTS / name / "results.json").read_text(encoding="utf-8"))[
        "results"
    ]
    return found


def of(tpu_aot: ModuleType, cases: list[Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Each case and its one record."""
    found = []
    for case in cases:
        (record,) = [record for record in records("tpu_aot") if tpu_aot.is_of(case, record)]
        found.append((case, record))
    return found


def kernel_cases(tpu_aot: ModuleType) -> list[Any]:
    return list(tpu_aot.matrix(list(tpu_aot.TOPOLOGIES), list(tpu_aot.MODELS), list(tpu_aot.TOKENS)))


def test_every_case_of_the_matrix_has_one_record_and_no_other_has(tpu_aot: ModuleType) -> None:
    cases = [*kernel_cases(tpu_aot), *tpu_aot.SHARDED]
    assert len(of(tpu_aot, cases)) == len(set(cases)) == len(records("tpu_aot"))
    assert {record["jax"] for record in records("tpu_aot")} == {records("tpu_aot")[0]["jax"]}
    assert all(len(record["lowered"]) == 12 for record in records("tpu_aot"))


def test_kernels_compile_and_hold_no_logits(tpu_aot: ModuleType) -> None:
    for case, record in of(tpu_aot, kernel_cases(tpu_aot)):
        assert "error" not in record, record
        assert record["has_logits_buffer"] is False, record
        assert record["temp_share_of_logits"] == record["temp_bytes"] / (4 * case.tokens * case.vocabulary)
        if case.tokens == 1:  # one token's logits are as small as the rows of statistics of a block of tokens
            assert record["temp_bytes"] <= MIB / 2, record
        else:
            assert record["temp_share_of_logits"] <= 0.01, record
            assert record["temp_bytes"] <= 8 * MIB, record


def test_over_devices_only_sums_travel_and_no_logits_are_held(tpu_aot: ModuleType) -> None:
    for case, record in of(tpu_aot, tpu_aot.SHARDED):
        n, share = case.tokens, -(-case.vocabulary // case.tensor)
        assert "error" not in record, record
        assert record["has_logits_buffer"] is False, record
        shared = case.tensor > 1  # the vocabulary is; else nothing travels
        assert list(record["collectives"]) == ["all-reduce"] * shared, record
        travels = sum(record["collectives"].get("all-reduce", ()))
        assert record["bytes_per_token"] == travels / n
        # A device's share of the logits would be 4 · n · share bytes, 192 to 1,187 MiB.
        if case.program != "gradient":
            assert travels == {"logps": 20, "divergence": 60}[case.program] * n * shared
            assert record["temp_bytes"] <= 8 * MIB, record
            continue
        # Float32 gradients of the hidden states, over the vocabulary, and of the head, over rows of tokens.
        hidden, head = 4 * n * case.width, 4 * share * case.width * (record["devices"] > case.tensor)
        assert travels == 20 * n + hidden + head, record
        # A device holds its share of the head's gradient while it is summed; TPU7x the sum beside it.
        held = hidden + head * (2 if case.topology.startswith("tpu7x") else 1)
        assert record["temp_bytes"] <= held + 8 * MIB, record


def test_the_schedule_is_complete(tpu_aot: ModuleType) -> None:
    chips = ("v5e", "v5p", "v6e", "tpu7x")
    divergences = ("divergence_statistics", "divergence_tv")
    others = ("logps_statistics", "logps_hidden_gradient", "logps_head_gradient")
    found = Counter((record["kernel"], record["chip"], record["width"]) for record in records("tpu_schedule"))
    for chip in chips:
        for kernel in (*divergences, *others):
            assert found[kernel, chip, 4096] == 1, (kernel, chip)
        for kernel in divergences:
            assert found[kernel, chip, 2048] == found[kernel, chip, 576] == 1, (kernel, chip)
    assert max(found.values()) == 1
    for record in records("tpu_schedule"):
        assert record.keys() >= {"jax", "libtpu", "lowered"}, record


def test_the_matrix_unit_is_as_busy_as_asked() -> None:
    """At D = 4,096, by the compiler's own schedule; the shares are those of the ideal and the listed cycles."""
    least = {"divergence_statistics": 0.85, "divergence_tv": 0.9, "logps_statistics": 0.89}
    for record in records("tpu_schedule"):
        share = record["ideal_cycles"] / max(record["static_cycles"], record["ideal_cycles"])
        assert record["occupancy"] == pytest.approx(share, abs=1e-4)
        if record["width"] != 4096:
            continue
        want = least.get(record["kernel"], 0.94) if record["chip"] == "v6e" else 1.0
        assert record["occupancy"] >= want, record


def test_a_buffer_of_logits_is_found_wherever_it_stands(tpu_aot: ModuleType) -> None:
    def found(line: str) -> set[tuple[int, ...]]:
        return set(tpu_aot.logits_in(f"ENTRY %main {{\n  %x = {line}\n}}", 4096, 151_936))

    layout = "{1,0:T(8,128)}"
    assert found(f"f32[4096,151936]{layout} fusion(%a), kind=kLoop") == {(4096, 151_936)}
    assert found(f"bf16[151936,4096]{layout} fusion(%a)") == {(151_936, 4096)}
    assert found(f"(f32[8,4096]{layout}, f32[4096,151936]{layout}) custom-call(%a, %b)") == {(4096, 151_936)}
    assert found(f"f32[4096,152064]{layout} custom-call(%a)") == {(4096, 152_064)}  # whole blocks of 512
    assert found(f"f32[16,256,151936]{layout} copy(%a)") == {(16, 256, 151_936)}
    assert found(f"bf16[151936,4096]{layout} parameter(1)") == set()
    assert found(f"(f32[8,4096]{layout}, f32[4096,2048]{layout}) custom-call(%a)") == set()
