"""One arm in numbers, and all of them in a table for the terminal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trm_jax.report import text
from trm_jax.report.estimates import Estimate, estimate_accuracy
from trm_jax.report.runs import Arm, ReportData, SeedRun

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["COLUMNS", "ArmSummary", "results_table", "rl_rows", "summarise"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArmSummary:
    """What the table and the sentences say about one arm. NaN means that nothing was recorded.

    Accuracies come from complete runs when there is one, else from the last evaluations. The other numbers run over
    the reinforcement-learning steps of every run: maxima of maxima, means over steps of means.

    Attributes:
      arm: the arm.
      state: ``complete``, or in words what is lacking.
      comparable: True when at least one run is complete with a final accuracy.
      start: held-out accuracy before the first update.
      final: held-out accuracy at the end.
      items: held-out problems behind each accuracy; 0 when unknown.
      token_kl_max: largest token KL, nats.
      token_kl_mean: mean token KL, nats.
      ppl_gap: mean PPL gap, nats a token.
      log_ratio_max_abs: largest absolute log ratio, nats.
      bitwise_equal: mean fraction of tokens equal to the bit.
      bitwise_equal_min: the same at the worst step.
      sequences_kept: mean kept fraction.
      tokens_kept: mean kept fraction.
      weight_mean: mean applied weight.
      weight_max: largest applied weight.
      weights_capped: mean capped fraction.
      staleness: mean age of the sampling weights, updates.
      dropped: prompts left out of their update because a sample was too old.
      skipped: steps whose update was skipped.
      steps: reinforcement-learning steps with a record, over all runs; an evaluation before the first is none.
      seconds: mean wall time of a run.
      tokens: sampled tokens over all runs; None when not every run recorded them.
    """

    arm: Arm
    state: str
    comparable: bool
    start: Estimate
    final: Estimate
    items: int
    token_kl_max: float
    token_kl_mean: float
    ppl_gap: float
    log_ratio_max_abs: float
    bitwise_equal: float
    bitwise_equal_min: float
    sequences_kept: float
    tokens_kept: float
    weight_mean: float
    weight_max: float
    weights_capped: float
    staleness: float
    dropped: int
    skipped: int
    steps: int
    seconds: float
    tokens: int | None

    @property
    def acted(self) -> bool:
        """False when the correction kept every token and its weights never left 1, as far as was recorded."""
        rejected = any(value < 1 for value in (self.sequences_kept, self.tokens_kept))
        return rejected or self.weights_capped > 0 or any(v != 1 for v in self._weights if not math.isnan(v))

    @property
    def _weights(self) -> tuple[float, float]:
        return self.weight_mean, self.weight_max


def summarise(arm: Arm) -> ArmSummary:
    """Puts one arm in numbers; an arm without runs gives NaN everywhere."""
    runs = arm.complete or arm.runs
    items = min((run.result.evaluation_items for run in runs), default=0)
    final = estimate_accuracy([run.result.accuracy_final for run in runs], items)
    tokens = [run.result.sampled_tokens for run in arm.runs]
    recorded = [count for count in tokens if count is not None]
    return ArmSummary(
        arm=arm,
        state=_state(arm),
        comparable=bool(arm.complete) and not math.isnan(final.value),
        start=estimate_accuracy([run.result.accuracy_start for run in runs], items),
        final=final,
        items=items,
        token_kl_max=_max(arm, "mismatch/token_kl_max"),
        token_kl_mean=_mean(arm, "mismatch/token_kl_mean"),
        ppl_gap=_mean(arm, "mismatch/ppl_gap"),
        log_ratio_max_abs=_max(arm, "mismatch/log_ratio_max_abs"),
        bitwise_equal=_mean(arm, "mismatch/bitwise_equal_fraction"),
        bitwise_equal_min=min(_values(arm, "mismatch/bitwise_equal_fraction"), default=math.nan),
        sequences_kept=_mean(arm, "correction/sequence_keep_fraction"),
        tokens_kept=_mean(arm, "correction/token_keep_fraction"),
        weight_mean=_mean(arm, "correction/weight_mean"),
        weight_max=_max(arm, "correction/weight_max"),
        weights_capped=_mean(arm, "correction/weight_capped_fraction"),
        staleness=_mean(arm, "rollout/staleness_mean"),
        dropped=round(sum(_values(arm, "rollout/dropped_groups"))),
        skipped=sum(value > 0 for value in _values(arm, "optim/skipped")),
        steps=sum(float(row["step"]) > 0 for run in arm.runs for row in rl_rows(run)),
        seconds=_average([run.result.seconds for run in runs]),
        tokens=sum(recorded) if recorded and len(recorded) == len(tokens) else None,
    )


def rl_rows(run: SeedRun) -> Iterator[dict[str, float | str]]:
    """The records of reinforcement learning; the warm start is left out."""
    return (dict(row) for row in run.rows if row.get("stage", "rl") == "rl")


COLUMNS: tuple[tuple[str, Callable[[ArmSummary], str]], ...] = (
    ("seeds", lambda s: f"{len(s.arm.complete)}/{len(s.arm.runs)}"),
    ("accuracy at start", lambda s: text.accuracy(s.start)),
    ("accuracy at end", lambda s: text.accuracy(s.final)),
    ("95% interval", lambda s: _ends(s.final)),
    ("largest token KL", lambda s: text.number(s.token_kl_max)),
    ("mean token KL", lambda s: text.number(s.token_kl_mean)),
    ("PPL gap", lambda s: text.number(s.ppl_gap)),
    ("sequences kept", lambda s: text.percent(s.sequences_kept)),
    ("weight mean / max", lambda s: f"{text.number(s.weight_mean)} / {text.number(s.weight_max)}"),
    ("time a seed", lambda s: text.duration(s.seconds)),
)
"""Heading and cell of each column after the arm's name; the HTML table and the terminal share them."""

_ON_TERMINAL = (
    "seeds",
    "accuracy at start",
    "accuracy at end",
    "largest token KL",
    "sequences kept",
)


def results_table(data: ReportData) -> Table:
    """The arms as a rich table that fits a terminal of 80 columns (needs rich); the HTML report has every column."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=data.title,
        title_justify="left",
        caption=_caption(data),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("arm", overflow="fold", min_width=12)
    columns = [(heading, cell) for heading, cell in COLUMNS if heading in _ON_TERMINAL]
    for heading, _ in columns:
        shortest = max(len(word) for word in heading.split())
        table.add_column(heading, justify="right", overflow="fold", min_width=shortest)
    for arm in data.arms:
        row = summarise(arm)
        mark = "" if row.state == "complete" else " *"
        table.add_row(f"{arm.name}{mark}", *(cell(row) for _, cell in columns))
    return table


def _caption(data: ReportData) -> str:
    lines = ["Held-out accuracy; token KL over the whole vocabulary, in nats; seeds: complete/started."]
    if any(len(arm.complete) == 1 for arm in data.arms):
        lines.append("Arms with one complete seed: the interval does not cover the variation between seeds.")
    lines += [f"* {arm.name}: {state}" for arm in data.arms if (state := _state(arm)) != "complete"]
    return "\n".join(lines)


def _ends(estimate: Estimate) -> str:
    if math.isnan(estimate.low):
        return "–"
    return f"{estimate.low * 100:.1f}–{estimate.high * 100:.1f}%"


def _state(arm: Arm) -> str:
    if not arm.runs:
        return "not run"
    lacking = [run for run in arm.runs if run.result.status != "complete"]
    if not lacking:
        return "complete"
    return "; ".join(
        f"seed {run.seed} {run.result.status} at step {run.last_step}"
        + (f" ({run.result.reason})" if run.result.reason else "")
        for run in lacking
    )


def _values(arm: Arm, name: str) -> list[float]:
    found = [float(row[name]) for run in arm.runs for row in rl_rows(run) if name in row]
    return [value for value in found if not math.isnan(value)]


def _max(arm: Arm, name: str) -> float:
    return max(_values(arm, name), default=math.nan)


def _mean(arm: Arm, name: str) -> float:
    return _average(_values(arm, name))


def _average(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
