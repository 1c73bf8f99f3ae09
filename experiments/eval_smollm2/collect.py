"""Writes ``results.json`` of this folder from the directories of ``trm-jax eval``.

    python experiments/eval_smollm2/collect.py experiments/eval_smollm2/results.json OUT... --device "2 CPU cores" \\
        --command "trm-jax eval ..." --read verdicts.json

``verdicts.json`` is what a reader found who held answers against their verdicts: task → ``{"read": N,
"right_but_judged_wrong": [index, ...], "judged_right_without_a_final_answer": [index, ...], "note": ...}``; it is taken
over as it is.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

SHOWN = 600  # characters of an example
EXAMPLES = 2  # right ones and wrong ones, of each task


def main() -> None:
    """Reads the command line and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("evaluations", type=Path, nargs="+")
    parser.add_argument("--command", required=True, action="append", help="what was run")
    parser.add_argument("--device", required=True, help="and how busy it was")
    parser.add_argument("--read", type=Path, help="what was found by reading answers")
    options = parser.parse_args()
    out: dict[str, Any] = {
        "what": "SmolLM2-135M-Instruct (Q4_1 GGUF, float32 arithmetic), greedy, on the first problems of each file.",
        "commands": options.command,
        "device": options.device,
        "tasks": {},
    }
    for root in options.evaluations:
        found = json.loads((root / "results.json").read_text(encoding="utf-8"))
        for name, summary in found["tasks"].items():
            rows = [json.loads(line) for line in (root / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
            out["tasks"][name] = summary | {
                "max_new_tokens": found["sampling"]["max_new_tokens"],
                "prompt_format": found["files"][name]["prompt_format"],
                "file_sha256": found["files"][name]["digest"],
                "right": sorted(row["index"] for row in rows if row["reward"]),
                "examples": examples(rows),
            }
    if options.read:
        out["read_by_eye"] = json.loads(options.read.read_text(encoding="utf-8"))
    options.results.write_text(json.dumps(out, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def examples(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first right and the first wrong answers, the middle of long ones left out."""
    chosen = []
    for reward in (1.0, 0.0):
        chosen += [row for row in rows if row["reward"] == reward][:EXAMPLES]
    keep = ("index", "reward", "reference", "finished", "tokens")
    return [{key: row[key] for key in keep} | {"response": shorten(row["response"])} for row in chosen]


def shorten(text: str) -> str:
    """The beginning and the end."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"


if __name__ == "__main__":
    main()
