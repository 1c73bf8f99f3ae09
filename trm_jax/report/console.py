"""Progress on the terminal while arms run: live bars for a person, plain lines for a log."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["ConsoleProgress", "PlannedRun"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of the plan; the runs of one seed are planned in the order in which they will be started.

    Attributes:
      arm: the name that the person reads.
      seed: its seed.
      steps: how many steps it takes, >= 1.
      stage: runs of one stage are taken to be equally fast when the time left is estimated.
    """

    arm: str
    seed: int
    steps: int
    stage: str = "rl"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be >= 1, got {self.steps}")


@final
class ConsoleProgress:
    """Shows arm, seed, stage, step, reward, kept fraction, throughput, and the time left for the arm and overall.

    On a terminal it draws two bars; otherwise it prints one plain line every ``every`` steps (about 20 lines a run at
    most), at the first and the last step and at evaluations. The time left comes from steps of the same stage after the
    first (which compiles).

    Args:
      runs: the whole plan, at least one run.
      every: steps between plain lines, >= 1.
      console: a rich console; None makes one on standard output.
      clock: seconds, monotonic.

    Raises:
      ValueError: the plan is empty or names a run twice, ``every`` is below 1, or a run is started that is not in it.

    Example:
      >>> from rich.console import Console
      >>> console = Console(force_terminal=False, width=120)
      >>> with ConsoleProgress(runs=[PlannedRun(arm="lag only", seed=0, steps=2)], console=console) as progress:
      ...     progress.start_run("lag only", 0)
      ...     progress.update(1, {"stage": "rl", "reward/mean": 0.25})
      ...     progress.finish_run("complete")
      lag only (arm 1/1), seed 0: rl 1/2, reward 0.250
      lag only (arm 1/1), seed 0: complete
    """

    def __init__(
        self,
        *,
        runs: Sequence[PlannedRun],
        every: int = 10,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console

        if not runs:
            raise ValueError("runs is empty; ConsoleProgress needs the plan of at least one run")
        if every < 1:
            raise ValueError(f"every must be >= 1, got {every}")
        keys = [(run.arm, run.seed) for run in runs]
        if len(set(keys)) != len(keys):
            raise ValueError(f"runs names one arm and seed twice: {keys}")
        self._runs = dict(zip(keys, runs, strict=True))
        self._arms = list(dict.fromkeys(run.arm for run in runs))
        self._every = every
        self._clock = clock
        self._console = console or Console()
        self._ended: set[tuple[str, int]] = set()
        self._current: PlannedRun | None = None
        self._step = 0
        self._first: tuple[int, float] | None = None  # step and time of the first update: compilation is before it
        self._rates: dict[str, float] = {}
        self._stage = ""
        self._bars: Any = self._make_bars() if self._console.is_terminal else None

    def start_run(self, arm: str, seed: int, *, first_step: int = 0) -> None:
        """Begins a run of the plan; ``first_step`` is the number of steps already done when it resumes.

        The run before it, and earlier runs of its seed that were never begun (a warm start that is on disk), are
        no longer waited for.
        """
        if (arm, seed) not in self._runs:
            raise ValueError(f"arm {arm!r} with seed {seed} is not in the plan: {sorted(self._runs)}")
        if self._current is not None:
            self._ended.add((self._current.arm, self._current.seed))
        for key in self._runs:
            if key == (arm, seed):
                break
            if key[1] == seed:
                self._ended.add(key)
        self._ended.discard((arm, seed))
        self._current = self._runs[arm, seed]
        self._step, self._first, self._stage = first_step, None, ""
        if self._bars is not None:
            self._bars.reset(self._run_bar, total=self._current.steps, completed=first_step, start=True)
            self._draw({})

    def update(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Shows the state after ``step`` steps of the current run."""
        if self._current is None:
            raise ValueError("update came before start_run")
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        elif step > self._first[0]:
            self._rates[self._current.stage] = (now - self._first[1]) / (step - self._first[0])
        first = self._first[0] == step
        stage = str(metrics.get("stage", self._stage or self._current.stage))
        changed, self._stage, self._step = stage != self._stage, stage, step
        if self._bars is not None:
            self._draw(metrics)
        elif (
            first
            or changed
            or step % max(self._every, self._current.steps // 20) == 0
            or step == self._current.steps
            or _evaluated(metrics)
        ):
            left = "; ".join(part for part in (self._left_run("arm"), self._left_all("all")) if part)
            parts = [f"{stage} {step}/{self._current.steps}", *_readings(metrics)]
            self._line(", ".join(parts) + (f"; left: {left}" if left else ""))

    def finish_run(self, status: str, reason: str = "") -> None:
        """Ends the current run and says how; ``reason`` is shown for runs that were stopped or failed."""
        if self._current is None:
            raise ValueError("finish_run came before start_run")
        self._ended.add((self._current.arm, self._current.seed))
        self._line(f"{status}: {reason}" if reason else status)
        self._current = None
        if self._bars is not None:
            self._bars.update(self._all_bar, completed=self._done(), detail=self._left_all("left"))

    def note(self, message: str) -> None:
        """Prints a message of its own line, above the bars when there are any."""
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Takes the bars down; a second call does nothing."""
        if self._bars is not None:
            self._bars.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_bars(self) -> Any:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        bars = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20),
            TextColumn("{task.completed:.0f}/{task.total:.0f}", table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[detail]}", markup=False, table_column=Column(overflow="ellipsis", no_wrap=True)),
            console=self._console,
        )
        self._run_bar = bars.add_task("", total=1, detail="")
        self._all_bar = bars.add_task("all arms", total=sum(run.steps for run in self._runs.values()), detail="")
        bars.start()
        return bars

    def _draw(self, metrics: Mapping[str, float | str]) -> None:
        assert self._current is not None
        left = self._left_run("left")
        detail = ", ".join([self._stage or self._current.stage, *_readings(metrics), *([left] if left else [])])
        self._bars.update(self._run_bar, description=self._who(), completed=self._step, detail=detail)
        self._bars.update(self._all_bar, completed=self._done(), detail=self._left_all("left"))

    def _line(self, text: str) -> None:
        self.note(f"{self._who()}: {text}")

    def _who(self) -> str:
        assert self._current is not None
        place = f"{self._arms.index(self._current.arm) + 1}/{len(self._arms)}"
        return f"{self._current.arm} (arm {place}), seed {self._current.seed}"

    def _done(self) -> int:
        return sum(self._runs[key].steps for key in self._ended) + (self._step if self._current else 0)

    def _left_run(self, word: str) -> str:
        if self._current is None or self._current.stage not in self._rates:
            return ""
        return f"{word} {_duration((self._current.steps - self._step) * self._rates[self._current.stage])}"

    def _left_all(self, word: str) -> str:
        seconds = 0.0
        for key, run in self._runs.items():
            if key in self._ended:
                continue
            if run.stage not in self._rates:
                return ""
            seconds += (run.steps - (self._step if run is self._current else 0)) * self._rates[run.stage]
        return f"{word} {_duration(seconds)}"


def _evaluated(metrics: Mapping[str, float | str]) -> bool:
    return "accuracy/heldout" in metrics


def _readings(metrics: Mapping[str, float | str]) -> list[str]:
    forms: tuple[tuple[str, Callable[[float], str]], ...] = (
        ("reward/mean", lambda value: f"reward {value:.3f}"),
        ("accuracy/heldout", lambda value: f"held-out {value:.1%}"),
        ("correction/sequence_keep_fraction", lambda value: f"kept {value:.0%}"),
        ("time/tokens_per_s", lambda value: f"{value:,.0f} tok/s"),
    )
    return [form(float(metrics[name])) for name, form in forms if name in metrics]


def _duration(seconds: float) -> str:
    whole = max(0, math.ceil(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
