"""A maker of job folders with curves of our choosing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ARMS = (
    ("zero mismatch", "zero", "reference"),
    ("lag only", "lag", "lag_only"),
    ("numerics only", "numerics", "numerics_only"),
    ("mismatched, uncorrected", "none", "uncorrected"),
    ("mismatched, TRM", "trm", "corrected"),
    ("mismatched, CIS", "cis", "corrected"),
)


def write_run(folder: Path, rows: list[dict[str, Any]], result: dict[str, Any] | None, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps(config))
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))


def rows_of(
    final: float, kl: float, *, staleness: float, keep: float = 1.0, weight: float = 1.0
) -> list[dict[str, Any]]:
    """Ten steps from accuracy 0.25 to ``final``; the KL doubles from ``kl / 2`` to ``kl`` at the last step."""
    rows = []
    for step in range(1, 11):
        accuracy = 0.25 + (final - 0.25) * step / 10
        row: dict[str, Any] = {
            "step": step,
            "version": step,
            "stage": "rl",
            "reward/mean": accuracy,
            "mismatch/token_kl_mean": kl / 2 if step < 10 else kl,
            "mismatch/token_kl_max": 20 * kl if step == 7 else 10 * kl,
            "mismatch/ppl_gap": -kl,
            "mismatch/log_ratio_max_abs": 30 * kl,
            "mismatch/bitwise_equal_fraction": 1.0 if kl == 0 else 0.0625,
            "correction/sequence_keep_fraction": keep,
            "correction/weight_mean": 1.0 if weight == 1 else 0.97,
            "correction/weight_max": weight,
            "correction/weight_capped_fraction": 0.0 if weight == 1 else 0.02,
            "optim/grad_norm": 0.5,
            "optim/skipped": 0,
            "policy/entropy": 1.0 - step / 50,
            "rollout/staleness_mean": staleness,
            "rollout/dropped_groups": 0.0,
        }
        if step % 5 == 0:
            row["accuracy/heldout"] = accuracy
        rows.append(row)
    return rows


def result_of(final: float, seed: int, **changes: Any) -> dict[str, Any]:
    return {
        "status": "complete",
        "reason": "",
        "accuracy_start": 0.25,
        "accuracy_final": final,
        "evaluation_items": 1000,
        "seconds": 62.0,
        "steps": 10,
        "seed": seed,
        "sampled_tokens": 4000,
    } | changes


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Path]:
    """``job(finals, seeds=...)`` writes six arms; ``finals`` maps a slug to the final accuracy."""

    def make(finals: dict[str, float] | None = None, *, seeds: int = 1, title: str = "Which mismatch hurts?") -> Path:
        accuracy = {"zero": 0.84, "lag": 0.44, "numerics": 0.83, "none": 0.26, "trm": 0.78, "cis": 0.79} | (
            finals or {}
        )
        root = tmp_path / "job"
        (root / "arms").mkdir(parents=True)
        arms = [{"name": n, "slug": s, "role": r, "description": f"the {s} arm"} for n, s, r in ARMS]
        head = {"title": title, "command": "trm-jax train quickstart.toml", "created": "2026-11-29", "arms": arms}
        (root / "run.json").write_text(json.dumps(head))
        size = {"zero": 0.0, "lag": 0.08, "numerics": 0.02, "none": 0.12, "trm": 0.1, "cis": 0.1}
        for _, slug, _ in ARMS:
            for seed in range(seeds):
                final = accuracy[slug] + 0.01 * (seed - (seeds - 1) / 2)  # the mean over seeds is the wanted accuracy
                rows = rows_of(
                    final,
                    size[slug],
                    staleness=0.0 if slug in ("zero", "numerics") else 4.0,
                    keep=0.9 if slug == "trm" else 1.0,
                    weight=3.0 if slug == "cis" else 1.0,
                )
                config = {
                    "rollout": {"lag": 0 if slug in ("zero", "numerics") else 4},
                    "seed": seed,
                    "optim": {"rate": 0.1},
                }
                write_run(root / "arms" / slug / f"seed{seed}", rows, result_of(final, seed), config)
        return root

    return make
