"""Progress of an evaluation: a live bar for a person, plain lines for a log."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EvaluationProgress"]


@final
class EvaluationProgress:
    """Shows task, answers, accuracy so far, throughput and the time left for the task.

    Throughput and time left are those of this process: answers that were there before count as done.

    Args:
      console: a rich console; None makes one on standard output.
      clock: seconds, monotonic.

    Example:
      >>> from rich.console import Console
      >>> row = {"reward": 1.0, "tokens": 30}
      >>> ticks = iter([0.0, 2.0])
      >>> with EvaluationProgress(Console(force_terminal=False, width=100), lambda: next(ticks)) as progress:
      ...     progress("gsm8k", [row], 4)
      ...     progress("gsm8k", [row, row, row], 4)
      gsm8k: 1/4 answers, accuracy 100.0%
      gsm8k: 3/4 answers, accuracy 100.0%, 30 tok/s, left 0:00:01
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console

        self._console = console or Console()
        self._clock = clock
        self._began: dict[str, tuple[float, int, int]] = {}
        self._bars: Any = self._make_bars() if self._console.is_terminal else None
        self._bar_of: dict[str, Any] = {}

    def __call__(self, task: str, rows: Sequence[Mapping[str, Any]], total: int) -> None:
        """Shows the state of a task."""
        tokens = sum(row["tokens"] for row in rows)
        if task not in self._began:
            self._began[task] = (self._clock(), len(rows), tokens)
        began, rows_then, tokens_then = self._began[task]
        parts = []
        if rows:
            parts.append(f"accuracy {sum(row['reward'] for row in rows) / len(rows):.1%}")
        if len(rows) > rows_then:
            seconds = max(1e-9, self._clock() - began)
            left = (total - len(rows)) * seconds / (len(rows) - rows_then)
            parts.append(f"{(tokens - tokens_then) / seconds:,.0f} tok/s")
            parts.append(f"left {datetime.timedelta(seconds=round(left))}")
        detail = ", ".join(parts)
        if self._bars is None:
            text = f"{task}: {len(rows)}/{total} answers{', ' if detail else ''}{detail}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        if task not in self._bar_of:
            self._bar_of[task] = self._bars.add_task(task, total=total, detail="")
        self._bars.update(self._bar_of[task], completed=len(rows), total=total, detail=detail)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def _make_bars(self) -> Any:
        from rich.progress import BarColumn, Progress, TextColumn

        bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[detail]}", markup=False),
            console=self._console,
        )
        bars.start()
        return bars
