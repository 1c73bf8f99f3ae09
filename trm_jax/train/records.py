"""What an experiment leaves on disk: ``run.json``, and settings, metrics and result of each run."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import json
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trm_jax.checkpoint import CheckpointError
from trm_jax.report import JsonlWriter, MultiWriter, TensorBoardWriter
from trm_jax.report.writers import write_atomically
from trm_jax.train.config import ArmConfig, RunConfig, TrainConfig
from trm_jax.train.engines import engine_of
from trm_jax.train.loop import RunOutcome

__all__ = ["NEVER_BEGAN", "RunRecords", "lock_root", "metric_writers", "prepare_root", "read_record", "withdraw_root"]

NEVER_BEGAN = RunOutcome(
    status="failed", step=0, accuracy_start=math.nan, accuracy_final=math.nan, evaluation_items=0, sampled_tokens=0
)
"""Of a run that failed before its first step."""

_MAY_DIFFER = frozenset(
    {
        "checkpoint.export",
        *(f"rollout.{key}" for key in ("engine", "address", "weights", "certificate", "token_file", "patience")),
    }
)
"""Settings with which a run may be resumed though it began with others: with ``batch_invariant`` numerics none of its
numbers depends on them, elsewhere how they are rounded does."""


def prepare_root(config: RunConfig, *, resume: bool, command: Sequence[str]) -> None:
    """Writes ``run.json``; on resuming, what stands there is joined.

    Raises:
      ValueError: the directory holds a run already (without ``resume``).
    """
    root = Path(config.directory)
    description = {
        "title": config.title,
        "command": shlex.join(command),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "arms": [
            {"name": arm.name, "slug": arm.slug, "description": arm.description, "role": arm.role}
            for arm in config.arms
        ],
        "seeds": list(config.seeds),
    }
    path = root / "run.json"
    if (path.exists() or (root / "arms").exists()) and not resume:
        raise ValueError(
            f"directory {str(root)!r} already holds a run. Continue it with --resume, choose another with "
            "directory=PATH, or remove it."
        )
    if path.exists():
        held = read_record(path, created=str, command=str, seeds=list, arms=list)
        here = {arm.slug for arm in config.arms}
        description |= {"created": held["created"], "command": held["command"]}
        description["seeds"] = sorted({*held["seeds"], *config.seeds})
        description["arms"] = [*description["arms"], *(arm for arm in held["arms"] if arm["slug"] not in here)]
    _write_record(path, description)


@contextlib.contextmanager
def lock_root(root: Path) -> Iterator[None]:
    """Makes the directory and keeps other processes out; the kernel lets go when this one ends, however it ends.

    Raises:
      ValueError: it cannot be written, or another process is running there.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / ".lock").open("w")
    except OSError as error:
        raise ValueError(
            f"cannot write to the run directory {str(root)!r}: {error.strerror}. Choose another with directory=PATH."
        ) from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another process is running in {str(root)!r}. Wait for it, end it, or choose another directory with "
                "directory=PATH."
            ) from error
        yield


def withdraw_root(root: Path) -> None:
    """Takes ``run.json`` back when no arm has begun, so that a mended command is not told to resume."""
    if not (root / "arms").exists() and not (root / "warmstart").exists():
        (root / "run.json").unlink(missing_ok=True)


class RunRecords:
    """The records of one arm at one seed.

    Args:
      root: the experiment's directory.
      arm: names the run's own directory.
      train: its settings and seed.
    """

    def __init__(self, root: Path, arm: ArmConfig, train: TrainConfig) -> None:
        self.directory = root / "arms" / arm.slug / f"seed{train.seed}"
        self._train = train
        self._settings = json.loads(json.dumps(dataclasses.asdict(train)))

    @property
    def complete(self) -> bool:
        """Whether the run ended by itself before."""
        path = self.directory / "result.json"
        return path.exists() and bool(read_record(path, status=str)["status"] == "complete")

    def check(self) -> None:
        """Compares the settings with those on disk. An export may be asked for later, and the server be another.

        Raises:
          ValueError: the directory holds a run with other settings; or a record there cannot be read.
        """
        path = self.directory / "config.json"
        if path.exists():
            keys = sorted({*_differences(read_record(path), self._settings)} - _MAY_DIFFER)
            if keys:
                raise ValueError(
                    f"{path.parent} was run with another configuration ({', '.join(keys)} differ). Resume with the "
                    "same options, or choose another directory with directory=PATH."
                )

    def begin(self) -> None:
        """Writes ``config.json``, unless it is there with other settings (as ``check``)."""
        self.check()
        self.directory.mkdir(parents=True, exist_ok=True)
        _write_record(self.directory / "config.json", self._settings)

    def end(self, outcome: RunOutcome, reason: str, seconds: float) -> None:
        """Writes ``result.json``; the time adds up over resumptions, and the engine is the last one."""
        path = self.directory / "result.json"
        before = read_record(path, seconds=float)["seconds"] if path.exists() else 0.0
        start, final = (
            None if math.isnan(value) else value for value in (outcome.accuracy_start, outcome.accuracy_final)
        )
        record = {
            "status": outcome.status,
            "reason": reason,
            "accuracy_start": start,
            "accuracy_final": final,
            "evaluation_items": outcome.evaluation_items,
            "sampled_tokens": outcome.sampled_tokens,
            "seconds": round(before + seconds, 2),
            "steps": outcome.step,
            "seed": self._train.seed,
            "engine": engine_of(self._train.rollout),
        }
        _write_record(path, record)


@contextlib.contextmanager
def metric_writers(directory: Path, *, after: int | None) -> Iterator[Callable[[int, dict[str, float | str]], None]]:
    """JSONL and TensorBoard; rows past ``after`` (written by a run that was killed before its checkpoint) are removed.

    With ``after`` None, a row replaces those from its step on: the first row of a resumed warm start does it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    jsonl = JsonlWriter(directory / "metrics.jsonl")
    if after is not None:
        jsonl.truncate_after(after if after > 0 else -1)
    with contextlib.ExitStack() as stack:
        stack.callback(jsonl.close)
        writers: list[MultiWriter] = []

        def write(step: int, record: dict[str, float | str]) -> None:
            if not writers:  # a complete warm start writes nothing, and leaves no empty event file
                if after is None:
                    jsonl.truncate_after(step - 1)
                board = TensorBoardWriter(directory / "tensorboard", resume_after=step - 1 if after is None else after)
                stack.callback(board.close)
                writers.append(MultiWriter(jsonl, board))
            try:
                writers[0].write(step, record)
            except OSError as error:
                raise CheckpointError(
                    f"could not write the metrics of step {step} under {directory}: {error.strerror}. Free some space "
                    "there, then continue with --resume."
                ) from error

        yield write


def read_record(path: Path, **types: type) -> dict[str, Any]:
    """One of these records, with the keys that its reader needs.

    Raises:
      ValueError: naming the file that is not JSON, or not such a record.
    """
    mend = "Put a copy back, or start in another directory (directory=PATH)."
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON ({error}). {mend}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds a {type(record).__name__}, not a record of a run. {mend}")
    for key, kind in types.items():
        if not isinstance(record.get(key), kind):
            raise ValueError(f"{path} has {key}={record.get(key)!r}; a {kind.__name__} is required. {mend}")
    return record


def _write_record(path: Path, record: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(record, indent=1).encode())


def _differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {*a, *b}:
            yield from _differences(a.get(key), b.get(key), f"{where}.{key}" if where else key)
    elif a != b:
        yield where
