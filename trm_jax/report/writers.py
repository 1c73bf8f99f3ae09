"""Where the metrics of a run go: a JSON-lines file, TensorBoard, or several places at once."""

from __future__ import annotations

import abc
import contextlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, final

from trm_jax.report.catalogue import METRICS
from trm_jax.report.metrics import check_record

__all__ = ["JsonlWriter", "MetricWriter", "MultiWriter", "TensorBoardWriter", "read_metrics", "write_atomically"]

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricWriter(Protocol):
    """What the training loop writes to, one call a step."""

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Records the metrics of one step; names outside the catalogue raise ``ValueError``."""

    def close(self) -> None:
        """Writes out what is buffered and lets go of files; a second call does nothing."""


class _Closing(abc.ABC):
    """``with`` for the writers below."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_atomically(path: Path, data: bytes) -> None:
    """Puts ``data`` at ``path`` so that a reader sees the old file or the new one, never half of either."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@final
class JsonlWriter(_Closing):
    """Appends one strict JSON object a step to a file, flushed line by line.

    NaN and infinities, which JSON lacks, are written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``. A line that an
    earlier process left half written is removed when the file is opened. A file is one timeline: steps never go back
    (several records of one step are legal); call :meth:`truncate_after` when a run resumes from a checkpoint.

    Args:
      path: the file; it and its folders are made when missing.

    Raises:
      ValueError: an existing line is malformed (its number is named), or ``write`` is given a step before the last one.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder, JsonlWriter(Path(folder) / "metrics.jsonl") as writer:
      ...     writer.write(1, {"stage": "rl", "reward/mean": float("nan")})
      ...     print((Path(folder) / "metrics.jsonl").read_text(), end="")
      {"step": 1, "stage": "rl", "reward/mean": "nan"}
    """

    def __init__(self, path: Path) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        existing = self._path.read_bytes() if self._path.exists() else b""
        lines, torn = _split(existing)
        if torn or (lines and not existing.endswith(b"\n")):
            write_atomically(self._path, b"".join(lines))
        self._last_step = max(
            (int(_parse(line, i, self._path)["step"]) for i, line in enumerate(lines, 1)), default=None
        )
        self._stream = self._path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Appends one line; ``step`` may also stand in ``metrics`` if it is the same."""
        record = {"step": step, **metrics}
        check_record(record)
        if int(record["step"]) != step:
            raise ValueError(
                f"write was given step {step} and a record of step {record['step']}; they must be the same"
            )
        if self._last_step is not None and step < self._last_step:
            raise ValueError(
                f"step {step} comes after step {self._last_step} in {self._path}; a file is one timeline: call "
                f"truncate_after({step - 1}) before resuming, or write another stage to another file"
            )
        row = {name: _encode(name, value) for name, value in record.items()}
        self._stream.write(json.dumps(row, allow_nan=False) + "\n")
        self._stream.flush()
        self._last_step = step

    def truncate_after(self, step: int) -> int:
        """Removes, in one atomic replacement, every record of a later step than ``step``; returns how many."""
        self._stream.close()
        lines, _ = _split(self._path.read_bytes())
        steps = self._steps(lines)
        write_atomically(self._path, b"".join(line for line, at in zip(lines, steps, strict=True) if at <= step))
        self._stream = self._path.open("a", encoding="utf-8")
        self._last_step = max((at for at in steps if at <= step), default=None)
        return sum(at > step for at in steps)

    def close(self) -> None:
        """Closes the file; writing afterwards raises ``ValueError``."""
        self._stream.close()

    def _steps(self, lines: list[bytes]) -> list[int]:
        return [int(_parse(line, number, self._path)["step"]) for number, line in enumerate(lines, 1)]


@final
class TensorBoardWriter(_Closing):
    """Writes the numbers as TensorBoard scalars and each change of a label as text (needs tensorboardX).

    Args:
      directory: the log directory of this run.
      resume_after: the last step to keep of an earlier process; TensorBoard hides its later events.
    """

    def __init__(self, directory: Path, *, resume_after: int | None = None) -> None:
        from tensorboardX import SummaryWriter

        purge = None if resume_after is None else resume_after + 1
        self._writer: Any = SummaryWriter(str(directory), purge_step=purge)
        self._labels: dict[str, str] = {}

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Adds one point to every curve in ``metrics``."""
        check_record(metrics)
        for name, value in metrics.items():
            if name == "step":
                continue
            if METRICS[name].reduction != "label":
                self._writer.add_scalar(name, float(value), step)
            elif self._labels.get(name) != value:
                self._writer.add_text(name, str(value), step)
                self._labels[name] = str(value)

    def close(self) -> None:
        """Flushes the event file and closes it."""
        self._writer.close()


@final
class MultiWriter(_Closing):
    """Sends everything to each of several writers, in order; with none, it drops everything."""

    def __init__(self, *writers: MetricWriter) -> None:
        self._writers = writers

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Writes to each writer; the first error is raised."""
        for writer in self._writers:
            writer.write(step, metrics)

    def close(self) -> None:
        """Closes each writer, also when one of them raises."""
        with contextlib.ExitStack() as stack:
            for writer in reversed(self._writers):
                stack.callback(writer.close)


def read_metrics(path: Path) -> list[dict[str, float | str]]:
    """Reads a file that :class:`JsonlWriter` wrote; ``"nan"``, ``"inf"`` and ``"-inf"`` become numbers again.

    Args:
      path: the ``metrics.jsonl`` of one run.

    Returns:
      The records in file order; an empty file gives an empty list. A last line that a killed process left half written
      is dropped with a warning.

    Raises:
      ValueError: a line is not a JSON object with a ``step``, or holds an unknown metric; its number is named.
      FileNotFoundError: there is no such file.
    """
    lines, torn = _split(Path(path).read_bytes())
    rows = [_parse(line, number, path) for number, line in enumerate(lines, 1)]
    if torn:
        warnings.warn(f"{path}: line {len(lines) + 1} was cut off in writing and is dropped", stacklevel=2)
    return rows


def _encode(name: str, value: Any) -> float | int | str:
    if METRICS[name].reduction == "label":
        return str(value)
    number = float(value)
    if math.isfinite(number):
        return int(number) if name in ("step", "version") else number
    return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"


def _split(data: bytes) -> tuple[list[bytes], bool]:
    """Whole lines, each with its newline, and whether a torn rest was left out."""
    lines = data.splitlines(keepends=True)
    if not lines or lines[-1].endswith(b"\n"):
        return lines, False
    with contextlib.suppress(ValueError):
        if isinstance(json.loads(lines[-1]), dict):  # only the newline is missing
            return [*lines[:-1], lines[-1] + b"\n"], False
    return lines[:-1], True


def _parse(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        row = json.loads(line, parse_constant=_refuse_constant)
        if not isinstance(row, dict) or "step" not in row:
            raise ValueError("not a JSON object with a step")
        for name, value in row.items():
            metric = METRICS.get(name)
            if metric and metric.reduction != "label" and isinstance(value, str):
                row[name] = _NON_FINITE.get(value, value)
        check_record(row)
        if not math.isfinite(row["step"]):
            raise ValueError(f"step is {row['step']}")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: line {number} is malformed: {error}") from error
    return row


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not JSON; non-finite numbers are written as strings")
