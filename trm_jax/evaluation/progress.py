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


_QUIET = 30.0  # seconds between two lines of a log within a batch


@final
class EvaluationProgress:
    """Shows task, answers, accuracy so far, throughput and the time left for the task.

    Throughput and time left are those of this process: answers that were there before count as done. Within a batch a
    log gets a line every half minute at most.

    Args:
      console: a rich console; None makes one on standard output.
      clock: seconds, monotonic.

    Example:
      >>> from rich.console import Console
      >>> row = {"reward": 1.0, "tokens": 300}
      >>> ticks = iter([0.0, 60.0, 120.0])
      >>> with EvaluationProgress(Console(force_terminal=False, width=100), lambda: next(ticks)) as progress:
      ...     progress("gsm8k", [row], 5)
      ...     progress("gsm8k", [row], 5, 1, 480)
      ...     progress("gsm8k", [row, row, row], 5)
      gsm8k: 1/5 answers, accuracy 100.0%
      gsm8k: 2/5 answers (1 not judged yet), accuracy 100.0%, 8 tok/s, left 0:03:00
      gsm8k: 3/5 answers, accuracy 100.0%, 5 tok/s, left 0:02:00
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console

        self._console = console or Console()
        self._clock = clock
        self._began: dict[str, tuple[float, int, int]] = {}
        self._said = 0.0
        self._bars: Any = self._make_bars() if self._console.is_terminal else None
        self._bar_of: dict[str, Any] = {}

    def __call__(
        self, task: str, rows: Sequence[Mapping[str, Any]], total: int, ended: int = 0, tokens: int = 0
    ) -> None:
        """Shows the state of a task.

        Args:
          task: its name.
          rows: judged answers.
          total: answers in all.
          ended: answers of the batch at work that are whole.
          tokens: sampled so far in that batch.
        """
        now, within = self._clock(), tokens > 0
        if within and self._bars is None and now - self._said < _QUIET:
            return
        self._said = now
        done, tokens = len(rows) + ended, tokens + sum(row["tokens"] for row in rows)
        began, done_then, tokens_then = self._began.setdefault(task, (now, done, tokens))
        parts = []
        if rows:
            parts.append(f"accuracy {sum(row['reward'] for row in rows) / len(rows):.1%}")
        seconds = max(1e-9, now - began)
        if tokens > tokens_then:
            parts.append(f"{(tokens - tokens_then) / seconds:,.0f} tok/s")
        if done > done_then:
            left = (total - done) * seconds / (done - done_then)
            parts.append(f"left {datetime.timedelta(seconds=round(left))}")
        detail = ", ".join(parts)
        if self._bars is None:
            waiting = f" ({ended} not judged yet)" if ended else ""
            text = f"{task}: {done}/{total} answers{waiting}{', ' if detail else ''}{detail}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        if task not in self._bar_of:
            self._bar_of[task] = self._bars.add_task(task, total=total, detail="")
        self._bars.update(self._bar_of[task], completed=done, total=total, detail=detail)

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
