"""Judged answers on disk, a JSON line each: nothing lost and nothing twice, however the process ends."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Ledger"]

_KEY = ("index", "sample")


class Ledger:
    """An append-only file of rows, each known by its ``index`` and ``sample``.

    Rows are whole or absent: a last line without its newline, which a killed process leaves, is cut off. Another
    process that opens the file is refused until this one ends.

    Args:
      path: made when absent.

    Raises:
      ValueError: another process has it open; or a line (named) is no such row, or stands there twice.

    Example:
      >>> import tempfile
      >>> with Ledger(Path(tempfile.mkdtemp()) / "rows.jsonl") as ledger:
      ...     ledger.append([{"index": 0, "sample": 0, "reward": 1.0}])
      ...     sorted(ledger.rows)
      [(0, 0)]
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(f"another process is writing {path}; wait for it, or choose another directory") from error
        try:
            self.rows = self._read(path)
        except ValueError:
            self._file.close()
            raise

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Writes rows and waits until the disk has them.

        Raises:
          ValueError: a row that is there already.
        """
        keys = [_key(row) for row in rows]
        if len({*self.rows, *keys}) != len(self.rows) + len(keys):
            raise ValueError(
                f"rows {sorted(set(keys) & set(self.rows)) or keys} would stand twice in {self._file.name}"
            )
        self._file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows.update(zip(keys, rows, strict=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _read(self, path: Path) -> dict[tuple[int, int], dict[str, Any]]:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        rows: dict[tuple[int, int], dict[str, Any]] = {}
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                row = json.loads(line)
                key = _key(row)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}: line {number} is no judged answer ({type(error).__name__}: {error}); put a copy back, or "
                    "start in another directory"
                ) from error
            if key in rows:
                raise ValueError(f"{path}: line {number} is a second answer for {dict(zip(_KEY, key, strict=True))}")
            rows[key] = row
        if whole < len(content):
            self._file.truncate(whole)
        return rows


def _key(row: dict[str, Any]) -> tuple[int, int]:
    if not isinstance(row, dict):
        raise TypeError(f"a {type(row).__name__}")
    return int(row["index"]), int(row["sample"])
