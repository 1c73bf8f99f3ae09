"""Static schedule of the TPU kernels: cycles of one grid step and matrix unit occupancy, from the compiler's dumps.

    python tools/bench/tpu_schedule.py --output experiments/tpu_schedule/results.json --missing
    python tools/bench/tpu_schedule.py --chip v6e --kernel divergence_tv --width 4096

Needs libtpu, no TPU. **Static figures, not timings**: the compiler lists the bundles that it will issue, one a cycle,
and knows neither memory nor contention. Where the matrix unit needs longer than the bundles say (its occupancy is not
modelled on every generation), the ideal counts: occupancy is ``ideal / max(bundles, ideal)``, ideal being the
operations of the products over the peak per cycle. Recorded is the usual tile, the one without the check of a ragged
vocabulary: a small vocabulary that the block divides has the same one, and compiles in half the time. Results are added
to the file, in place of earlier ones of the same kernel, chip and width, with a hash of the program that the compiler
was given; ``--missing`` leaves out what the file has of the same program and versions.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trm_jax.ops._vmem import CHIPS
from trm_jax.ops.linear_logps._config import logps_blocks
from trm_jax.ops.linear_vocab_divergence._config import divergence_blocks

PRODUCTS = {
    "logps_statistics": ("logps_statistics", 1),
    "logps_hidden_gradient": ("logps_gradients", 2),
    "logps_head_gradient": ("logps_gradients", 2),
    "divergence_statistics": ("divergence_statistics", 2),
    "divergence_tv": ("divergence_tv", 2),
}
"""The call that contains each kernel, and its products of a block of tokens with a block of the head."""

TOKENS = 1024
VOCABULARY = {"divergence_statistics": 16_384}  # of fewer tiles its curvature takes more work
_USUAL_VOCABULARY = 2048


def regions(bundles: Path, utilisation: Path) -> list[dict[str, Any]]:
    """Straight-line stretches of a kernel, in cycles, with the share of each unit's slots that they use."""
    rows = [line.split() for line in utilisation.read_text().splitlines()]
    names = next(line for line in utilisation.read_text().splitlines() if line.startswith("MXU"))
    units = [name.strip() for name in names.split(",")]
    capacity, *used = [[int(x) for x in row] for row in rows if len(row) == len(units) and row[0].isdigit()]
    starts, last = [0], 0
    for line in bundles.read_text(errors="ignore").splitlines():
        if found := re.match(r"\s*(0x[0-9a-f]+)\s+(LB|LH|LE|PB|PF|CT)?\s*:", line):
            last = int(found[1], 16)
            if found[2]:
                starts.append(last)
    out = []
    for begin, end in zip(starts, [*starts[1:], last + 1], strict=True):
        if end > begin:
            sums = [sum(row[i] for row in used[begin:end]) for i in range(len(units))]
            shares = {u: round(s / c / (end - begin), 3) for u, s, c in zip(units, sums, capacity, strict=True)}
            out.append({"cycles": end - begin, "units": shares})
    return out


def usual_tile(stretches: list[dict[str, Any]]) -> dict[str, Any]:
    """The shortest stretch that is a tile at all."""
    longest = max(stretch["cycles"] for stretch in stretches)
    return min((s for s in stretches if s["cycles"] > longest / 2), key=lambda s: int(s["cycles"]))


MADE_BY = ("jax", "libtpu", "lowered")


def _tpu_aot(call: str, chip: str, width: int, *options: str, **environ: str) -> dict[str, str]:
    """The other tool's run of one case: versions, and the hash of the program."""
    case = json.dumps([call, chip, TOKENS, width, VOCABULARY.get(call, _USUAL_VOCABULARY)])
    command = [sys.executable, str(Path(__file__).with_name("tpu_aot.py")), "--case", case, *options]
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True)
    if done.returncode or '"error"' in done.stdout:
        raise RuntimeError(f"{case} did not compile: {done.stdout[-500:]} {done.stderr[-500:]}")
    record = json.loads(done.stdout.splitlines()[-1])
    return {name: record[name] for name in MADE_BY}


def measure(call: str, chip_name: str, width: int) -> list[dict[str, Any]]:
    """Every kernel of one call, compiled in a process of its own that dumps its schedule."""
    chip = CHIPS[chip_name]
    with tempfile.TemporaryDirectory() as folder:
        made = _tpu_aot(
            call, chip_name, width, LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        )
        records = []
        for kernel, (owner, products) in PRODUCTS.items():
            if owner != call:
                continue
            if call.startswith("logps"):
                blocks = logps_blocks(chip, TOKENS, width, 2, 2, supported=False, gradient=call.endswith("gradients"))
            else:
                blocks = divergence_blocks(chip, TOKENS, (width, width), (2, 2), (2,), supported=False)
            bundles = [p for p in Path(folder).glob(f"*{kernel}*-final_bundles.txt") if "analysis" not in p.name]
            (used,) = Path(folder).glob(f"*{kernel}*-final_hlo-static-per-bundle-utilization.txt")
            tile = usual_tile(regions(bundles[0], used))
            ideal = 2 * products * blocks[0] * blocks[1] * width // chip.flops_per_cycle
            records.append(
                {
                    "kernel": kernel,
                    "chip": chip_name,
                    "width": width,
                    "block_tokens": blocks[0],
                    "block_vocabulary": blocks[1],
                    "static_cycles": tile["cycles"],
                    "ideal_cycles": ideal,
                    "occupancy": round(ideal / max(tile["cycles"], ideal), 4),
                    "slots_used": tile["units"],
                    **made,
                }
            )
        return records


def main() -> None:
    """Prints a table, and keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", action="append", choices=list(CHIPS))
    parser.add_argument("--kernel", action="append", choices=sorted({call for call, _ in PRODUCTS.values()}))
    parser.add_argument("--width", action="append", type=int)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--missing", action="store_true", help="only calls whose program --output does not have")
    args = parser.parse_args()
    if args.missing and args.output is None:
        parser.error("--missing needs --output, the file to compare with")
    for chip in args.chip or ("v5e", "v5p", "v6e", "tpu7x"):
        for width in args.width or (4096, 2048, 576):
            for call in args.kernel or dict.fromkeys(call for call, _ in PRODUCTS.values()):
                if args.missing and has(args.output, call, chip, width):
                    continue
                records = measure(call, chip, width)
                for record in records:
                    blocks = f"{record['block_tokens']}x{record['block_vocabulary']}"
                    print(
                        f"{record['kernel']:22} {chip:6} D={width:<5} {blocks:9} static {record['static_cycles']:6} "
                        f"ideal {record['ideal_cycles']:6} occupancy {record['occupancy']:.1%}",
                        flush=True,
                    )
                if args.output:
                    add_to(args.output, records)


def results_of(output: Path) -> list[dict[str, Any]]:
    """What the file holds, nothing when there is none."""
    records: list[dict[str, Any]] = json.loads(output.read_text())["results"] if output.exists() else []
    return records


def has(output: Path, call: str, chip: str, width: int) -> bool:
    """Whether the file has all kernels of this call, of the program that it is now."""
    kernels = [kernel for kernel, (owner, _) in PRODUCTS.items() if owner == call]
    made = _tpu_aot(call, chip, width, "--programs").items()
    old = [r["kernel"] for r in results_of(output) if (r["chip"], r["width"]) == (chip, width) and made <= r.items()]
    return set(kernels) <= set(old)


def add_to(output: Path, records: list[dict[str, Any]]) -> None:
    """Writes the file after each call, so that an interrupted run keeps what it has."""
    key = operator.itemgetter("chip", "width", "kernel")
    merged = {key(record): record for record in (*results_of(output), *records)}
    note = "static figures from the compiler's schedule, not timings"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"note": note, "results": [merged[k] for k in sorted(merged)]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
