"""Records of a file of problems (JSON lines, a JSON array, Parquet or Arrow), and their fields, each with its place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trm_jax.data._extras import import_extra

__all__ = ["Record", "as_text", "read_records", "shorten"]

_SHOWN = 80
_BATCH = 1024  # records of a table that are in memory at a time


class Record:
    """One record of a file.

    Args:
      place: file and line (or record), for messages.
      values: its columns.
      rename: this package's name for a field → the file's column, which then is the only one looked for.
    """

    def __init__(self, place: str, values: Mapping[str, Any], rename: Mapping[str, str] | None = None) -> None:
        self.place = place
        self._values = values
        self._rename = rename or {}

    def has(self, field: str, *columns: str) -> bool:
        """Whether one of the columns is there and holds something."""
        found = self._find(field, columns)
        return found is not None and found[1] is not None

    def value(self, field: str, *columns: str) -> Any:
        """What the first of ``columns`` that the record has holds.

        A dot leads into a nested object (``reward_model.ground_truth``).

        Raises:
          ValueError: there is none of them.
        """
        found = self._find(field, columns)
        if found is None:
            wanted = [self._rename[field]] if field in self._rename else list(columns)
            name = " or ".join(map(repr, wanted))
            there = ", ".join(map(repr, self._values)) or "none"
            raise ValueError(f"{self.place} has no column {name}; it has {there}")
        return found[1]

    def text(self, field: str, *columns: str) -> str:
        """The same as a text that is not blank; several columns joined by ``+`` with a space between.

        Raises:
          ValueError: there is no such column, or it holds no text and no number.
        """
        held = [column for column in columns if self._has_all(column)]
        filled = [column for column in held if not (column in self._values and self._values[column] is None)]
        name = self._rename.get(field) or (filled or held or columns)[0]
        parts = name.split("+") if name not in self._values else [name]
        texts = [as_text(Record(self.place, self._values).value("", part), part, self.place) for part in parts]
        text = " ".join(texts)
        if not text.strip():
            raise ValueError(f"{self.place}: column {name!r} (for {field!r}) is empty; a text is required")
        return text

    def fail(self, reason: object) -> ValueError:
        """An error that begins with the place."""
        return ValueError(f"{self.place}: {reason}")

    def _has_all(self, name: str) -> bool:
        return name in self._values or all(self._lookup(part) is not None for part in name.split("+"))

    def _find(self, field: str, columns: Sequence[str]) -> tuple[str, Any] | None:
        wanted = (self._rename[field],) if field in self._rename else columns
        there = [found for column in wanted if (found := self._lookup(column)) is not None]
        return next((found for found in there if found[1] is not None), there[0] if there else None)

    def _lookup(self, column: str) -> tuple[str, Any] | None:
        if column in self._values:
            return column, self._values[column]
        value: Any = self._values
        for part in column.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        return column, value


def read_records(path: str | Path, rename: Mapping[str, str] | None = None) -> Iterator[Record]:
    """Each record of a file, in order; blank lines are skipped.

    Parquet is known by its first bytes, an Arrow stream or file by its suffix (extra ``parquet``), and read a few
    records at a time; everything else is JSON lines or one JSON array in UTF-8, whatever its suffix.

    Args:
      path: the file.
      rename: handed to every ``Record``.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: something that is no record, by file and line (record, for arrays and tables), or no record at all.
      ImportError: a table without the extra ``parquet``.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}; name a JSON lines file, a JSON array or Parquet")
    with path.open("rb") as stream:
        magic = stream.read(6)
    table = magic[:4] == b"PAR1" or magic == b"ARROW1" or path.suffix == ".arrow"
    records = _table(path, parquet=magic[:4] == b"PAR1", stream=magic != b"ARROW1") if table else _json(path)
    empty = True
    for place, values in records:
        empty = False
        if not isinstance(values, dict):
            raise ValueError(f"{place} holds a {type(values).__name__}; an object with named columns is required")
        yield Record(place, values, rename)
    if empty:
        raise ValueError(f"{path} has no records; at least one is required")


def as_text(value: Any, column: str, place: str) -> str:
    """A text or a number as text: whole floats become whole numbers (51.0 → 51), a list of one item that item."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{place}: column {column!r} holds {shorten(repr(value))}; a text or a number is required")
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: column {column!r} holds half a character (a lone surrogate)") from error
    return text


def shorten(text: str) -> str:
    """The beginning and the end of a long text, for messages."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); JSON lines or a JSON array are required") from error
    if text.lstrip().startswith("["):
        try:
            array = json.loads(text, parse_constant=_refuse)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {error.lineno} is not JSON: {error.msg}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        for number, record in enumerate(array):
            yield f"{path}: record {number}", record
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}: line {number}"
        try:
            yield place, json.loads(line, parse_constant=_refuse)
        except json.JSONDecodeError as error:
            shown = shorten(line)
            raise ValueError(f"{place} is not JSON: {error.msg} at character {error.colno}: {shown!r}") from error
        except (ValueError, RecursionError) as error:  # a number too long, or nesting too deep, for Python
            raise ValueError(f"{place} cannot be read: {error}: {shorten(line)!r}") from error


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON value")


def _table(path: Path, *, parquet: bool, stream: bool) -> Iterator[tuple[str, Any]]:
    arrow = import_extra("pyarrow", extra="parquet", purpose=f"reading {path}")
    try:
        with path.open("rb") as file:
            number = 0
            for batch in _batches(file, parquet=parquet, stream=stream):
                for row in batch.to_pylist():
                    yield f"{path}: record {number}", row
                    number += 1
    except (arrow.ArrowException, OSError) as error:
        kind = "Parquet" if parquet else "Arrow"
        raise ValueError(f"{path} is not a whole {kind} file: {shorten(' '.join(str(error).split()))}") from error


def _batches(file: Any, *, parquet: bool, stream: bool) -> Iterator[Any]:
    if parquet:
        tables = import_extra("pyarrow.parquet", extra="parquet", purpose="reading Parquet")
        yield from tables.ParquetFile(file).iter_batches(batch_size=_BATCH)
        return
    ipc = import_extra("pyarrow.ipc", extra="parquet", purpose="reading Arrow")
    reader = ipc.open_stream(file) if stream else ipc.open_file(file)
    batches = reader if stream else (reader.get_batch(i) for i in range(reader.num_record_batches))
    for batch in batches:
        yield from (batch.slice(start, _BATCH) for start in range(0, batch.num_rows, _BATCH))
