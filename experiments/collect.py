"""Writes an experiment's ``results.json`` from the run directories of ``trm-jax train``.

    python experiments/collect.py experiments/quickstart/results.json runs/quickstart --device "2 CPU cores"

Several run directories (a seed each, say) are put together; runs that did not end by themselves are named, and left out
of the means.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from trm_jax.report import SeedRun, collect


def main() -> None:
    """Reads the command line and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--what", required=True, help="one sentence")
    parser.add_argument("--command", required=True, help="what was run")
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    out: dict[str, Any] = {"what": options.what, "command": options.command, "device": options.device}
    out |= summarise([seed for root in options.runs for seed in _runs(root)])
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")


def _runs(root: Path) -> list[tuple[str, str, SeedRun]]:
    return [(arm.slug, arm.name, run) for arm in collect(root).arms for run in arm.runs]


def summarise(runs: list[tuple[str, str, SeedRun]]) -> dict[str, Any]:
    """Arms with their seeds: accuracy curve, mismatch, correction; mean and sample standard deviation over seeds.

    Args:
      runs: slug, name and records of every run.
    """
    arms: dict[str, Any] = {}
    incomplete = []
    for slug, name, run in runs:
        if run.result.status != "complete":
            incomplete.append(f"{slug}, seed {run.seed}: {run.result.status} after step {run.last_step}")
            continue
        arms.setdefault(slug, {"name": name, "seeds": []})["seeds"].append(_seed(run))
    for arm in arms.values():
        arm["seeds"].sort(key=lambda seed: seed["seed"])
        starts = [seed["accuracy"][0][1] for seed in arm["seeds"]]
        finals = [seed["accuracy"][-1][1] for seed in arm["seeds"]]
        arm |= {"start_mean": _round(statistics.mean(starts)), "final_mean": _round(statistics.mean(finals))}
        if len(finals) > 1:
            arm |= {"start_sd": _round(statistics.stdev(starts)), "final_sd": _round(statistics.stdev(finals))}
    return {"arms": arms, "incomplete": incomplete}


def _seed(run: SeedRun) -> dict[str, Any]:
    def values(name: str) -> list[float]:
        return [float(row[name]) for row in run.rows if name in row]

    evaluated = [row for row in run.rows if "accuracy/heldout" in row]
    return {
        "seed": run.seed,
        "accuracy": [[int(row["step"]), _round(float(row["accuracy/heldout"]))] for row in evaluated],
        "token_kl_mean": _round(statistics.mean(values("mismatch/token_kl_mean"))),
        "token_kl_max": _round(max(values("mismatch/token_kl_max"))),
        "sequence_keep_fraction": _round(statistics.mean(values("correction/sequence_keep_fraction"))),
        "bitwise_equal_fraction_min": _round(min(values("mismatch/bitwise_equal_fraction"))),
        "seconds": run.result.seconds,
    }


def _round(value: float) -> float:
    return round(value, 4)


if __name__ == "__main__":
    main()
