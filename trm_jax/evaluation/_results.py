"""From judged answers to a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trm_jax.evaluation._interval import bootstrap_interval

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["evaluation_table", "summarize"]


def summarize(tasks: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Accuracy and lengths of each task's judged answers.

    Args:
      tasks: name → at least one row with ``index``, ``sample``, ``reward``, ``verdict``, ``finished``, ``tokens`` and
        ``seconds``.

    Returns:
      Name → ``problems``, ``samples`` (answers a problem), ``accuracy`` (mean over problems of the mean over samples:
      avg@k), ``low`` and ``high`` (95% bootstrap over problems), ``truncated`` (share of answers cut off at the length
      limit), ``right_truncated`` (right answers among those), ``unjudged`` (answers that count as wrong because judging
      them failed or took too long), ``tokens`` (mean length) and ``tokens_per_second``.

    Example:
      >>> row = {"sample": 0, "verdict": "scored", "finished": True, "tokens": 10, "seconds": 0.5}
      >>> found = summarize({"t": [{**row, "index": i, "reward": float(i < 3)} for i in range(4)]})["t"]
      >>> found["accuracy"], found["problems"], found["tokens_per_second"]
      (0.75, 4, 20.0)
    """
    return {name: _summary(rows) for name, rows in tasks.items()}


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    by_problem: dict[int, list[float]] = {}
    for row in rows:
        by_problem.setdefault(row["index"], []).append(row["reward"])
    means = np.array([np.mean(rewards) for rewards in by_problem.values()])
    low, high = bootstrap_interval(means)
    tokens, seconds = sum(row["tokens"] for row in rows), sum(row["seconds"] for row in rows)
    return {
        "problems": len(by_problem),
        "samples": max(map(len, by_problem.values())),
        "accuracy": round(float(means.mean()), 6),
        "low": round(low, 6),
        "high": round(high, 6),
        "truncated": round(1 - float(np.mean([row["finished"] for row in rows])), 6),
        "right_truncated": sum(row["reward"] >= 1 and not row["finished"] for row in rows),
        "unjudged": sum(row["verdict"] != "scored" for row in rows),
        "tokens": round(tokens / len(rows), 2),
        "tokens_per_second": round(tokens / seconds, 2) if seconds else None,
    }


def evaluation_table(results: Mapping[str, Any]) -> Table:
    """The results as a table for the terminal; ``results`` is what ``run_evaluation`` returns.

    Below it stands how many right answers were cut off at the length limit, where there are any: as a rule they mark no
    final answer, and were judged by the last expression in them.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(str(results["checkpoint"])), title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("task", no_wrap=True)
    for column in ("problems", "avg@", "accuracy", "95% interval", "cut off", "unjudged", "tokens", "tok/s"):
        table.add_column(column, justify="right")
    for name, row in results["tasks"].items():
        speed = row["tokens_per_second"]
        table.add_row(
            name,
            f"{row['problems']:,}",
            str(row["samples"]),
            f"{row['accuracy']:.1%}",
            f"{100 * row['low']:.1f}–{100 * row['high']:.1f}%",
            f"{row['truncated']:.1%}",
            str(row["unjudged"]),
            f"{row['tokens']:.0f}",
            "" if speed is None else f"{speed:,.0f}",
        )
    cut = [f"{name} {row['right_truncated']}" for name, row in results["tasks"].items() if row["right_truncated"]]
    if cut:
        table.caption = Text(f"right although cut off, by their last expression: {', '.join(cut)}")
        table.caption_justify = "left"
    return table
