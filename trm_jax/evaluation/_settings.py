"""What is asked, and how."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from trm_jax.data import (
    BENCHMARKS,
    PROMPT_FORMATS,
    Problem,
    RewardFunction,
    RewardKind,
    benchmark,
    read_benchmark,
    shipped_problems,
)

__all__ = ["EvaluationSettings", "EvaluationTask", "parse_task"]

_SHIPPED = ("gsm8k_sample", "one_step")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """How problems are asked.

    Attributes:
      samples: answers a problem, ``k`` of avg@k.
      temperature: of sampling; 0 takes the most likely token.
      top_p: nucleus mass in (0, 1].
      max_new_tokens: longest answer, the end token included.
      stop: texts at which an answer ends.
      seed: of sampling; an answer's own seed is made of it, the task's name, the problem's index and the sample.
      limit: only the first so many problems of each task; 0 takes all.
      dtype: type of activations and of the key/value cache, "float32" or "bfloat16".
      slots: answers that are decoded together.
      batch: answers between two writes to disk; 0 is four times ``slots``.

    Raises:
      ValueError: naming field, value and rule.
    """

    samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    stop: tuple[str, ...] = ()
    seed: int = 0
    limit: int = 0
    dtype: str = "float32"
    slots: int = 16
    batch: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("samples", 1),
            ("max_new_tokens", 1),
            ("slots", 1),
            ("limit", 0),
            ("batch", 0),
            ("seed", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: must be a finite number, 0 (most likely token) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must lie in (0, 1]")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"samples={self.samples}: at temperature 0 all samples of a problem are the same; set a temperature "
                "(avg@32 of the TRM paper: samples 32, temperature 1, top_p 0.95)"
            )
        if self.temperature == 0 and self.top_p < 1:
            raise ValueError(f"top_p={self.top_p}: has no effect at temperature 0; leave it out, or set a temperature")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r}: choose float32 or bfloat16")
        if any(not word for word in self.stop):
            raise ValueError("stop holds an empty text, at which every answer would end")

    @property
    def rows(self) -> int:
        """Answers between two writes."""
        return self.batch or 4 * self.slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationTask:
    """Problems under a name.

    Attributes:
      name: names the file of its answers.
      problems: what is asked; each ``index`` once.
      reward: judges an answer, by a name of ``open_reward`` or a reward function.
      prompt_format: how a problem is put (``trm_jax.data.format_prompt``).
      digest: of what the problems were read from; answers to other problems are never mixed.
      rendered: the prompts are whole as they are, and are encoded without a chat around them.
    """

    name: str
    problems: Sequence[Problem]
    reward: RewardKind | RewardFunction
    prompt_format: str
    digest: str
    rendered: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError(
                f"a task's name is letters, digits, '.', '_' and '-', for it names a file; got {self.name!r}"
            )
        if not self.problems or len({problem.index for problem in self.problems}) != len(self.problems):
            raise ValueError(f"task {self.name}: at least one problem is required, and every index once")


def parse_task(text: str, *, prompt_format: str = "") -> EvaluationTask:
    """A task from ``NAME=PATH``: a benchmark's name and its file; or the name of problems that ship with the package.

    Args:
      text: such as ``math500=data/math500.json``, or ``gsm8k_sample``.
      prompt_format: instead of the benchmark's own.

    Raises:
      ValueError: an unknown name, no path, a format that hides the options of a question about them, or a file that
        does not fit, by record and column.
      FileNotFoundError: there is no such file.

    Example:
      >>> task = parse_task("one_step")
      >>> task.name, len(task.problems), task.reward, task.prompt_format
      ('one_step', 48, 'math', 'boxed')
    """
    name, given, path = text.partition("=")
    if not given and name in _SHIPPED:
        row, path = BENCHMARKS["gsm8k"], str(shipped_problems(name))
    else:
        try:
            row = benchmark(name)
        except ValueError as error:
            raise ValueError(f"{error}; shipped with the package: {', '.join(_SHIPPED)}") from error
        if not path:
            raise ValueError(f"{name}: give its file, {name}=PATH; it is published as {row.source}")
    asked_as = prompt_format or row.prompt_format
    if row.reward == "option" and "{choices}" not in PROMPT_FORMATS.get(asked_as, asked_as):
        raise ValueError(
            f"{name} asks for the letter of an option, which prompt format {asked_as!r} does not show: leave it at "
            f"{row.prompt_format!r}, or give a template with {{question}} and {{choices}} in it"
        )
    problems = read_benchmark(row.name, path)
    with Path(path).open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return EvaluationTask(name=name, problems=problems, reward=row.reward, prompt_format=asked_as, digest=digest)
