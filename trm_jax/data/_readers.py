"""Problems from files: GSM8K's format, and any JSON lines or JSON array under a column mapping."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trm_jax.data._problem import Problem

__all__ = ["boxed_answer", "gsm8k_answer", "read_gsm8k", "read_jsonl", "shipped_problems"]

_FIELDS = ("prompt", "reference", "demonstration")
_CALCULATION = re.compile(r"<<[^<>]*>>")
_FINAL = re.compile(r"####\s*(\S[^\n]*)")
_SHOWN = 80


def shipped_problems(name: str) -> Path:
    """A file of problems in GSM8K's format that comes with this package.

    Args:
      name: ``"gsm8k_sample"``, a dozen problems of several steps, or ``"one_step"``, four dozen of one step with small
        numbers, of which a model of a hundred million parameters solves some.

    Returns:
      Its path.

    Raises:
      ValueError: there is no such file; the message lists those that there are.

    Example:
      >>> len(read_gsm8k(shipped_problems("gsm8k_sample"))), len(read_gsm8k(shipped_problems("one_step")))
      (12, 48)
    """
    folder = Path(__file__).parent / "files"
    names = sorted(path.stem for path in folder.glob("*.jsonl"))
    if name not in names:
        raise ValueError(f"no problems called {name!r} come with this package; there are {', '.join(names)}")
    return folder / f"{name}.jsonl"


def gsm8k_answer(text: str) -> str:
    """The final answer of a GSM8K solution: what follows the last ``####``, without thousands separators.

    Args:
      text: a solution.

    Returns:
      The answer.

    Raises:
      ValueError: there is no ``####`` with something after it.

    Example:
      >>> gsm8k_answer("3 times 500 is <<3*500=1500>>1,500. #### 1,500")
      '1500'
    """
    matches = _FINAL.findall(text)
    if not matches:
        raise ValueError(f"no '#### answer' in {_shorten(text)!r}")
    return str(matches[-1]).strip().replace(",", "")


def boxed_answer(text: str) -> str:
    r"""The content of the last ``\boxed{...}`` of a solution, braces matched.

    Args:
      text: a solution.

    Returns:
      The answer.

    Raises:
      ValueError: there is no closed ``\boxed{...}``.

    Example:
      >>> boxed_answer(r"so $x = \boxed{\frac{1}{2}}$.")
      '\\frac{1}{2}'
    """
    start = text.rfind(r"\boxed{")
    depth = 0
    if start >= 0:
        start += len(r"\boxed{")
        for position in range(start, len(text)):
            if text[position] == "{":
                depth += 1
            elif text[position] == "}":
                if depth == 0:
                    return text[start:position].strip()
                depth -= 1
    raise ValueError(rf"no closed \boxed{{...}} in {_shorten(text)!r}")


def read_gsm8k(path: str | Path) -> list[Problem]:
    """Problems of a file in GSM8K's format: ``question``, and ``answer`` that ends in ``#### N``.

    The reference is ``N`` without thousands separators; the demonstration is the solution without its ``<<...>>``
    calculator marks. Source: https://github.com/openai/grade-school-math.

    Args:
      path: a JSON lines file.

    Returns:
      The problems, in file order.

    Raises:
      ValueError: as for ``read_jsonl``, and for an answer without ``#### N``.
      FileNotFoundError: there is no such file.

    Example:
      >>> read_gsm8k(shipped_problems("gsm8k_sample"))[0].reference
      '7'
    """
    columns = {"prompt": "question", "reference": "answer", "demonstration": "answer"}
    problems = read_jsonl(path, columns=columns, extract=gsm8k_answer)
    return [
        Problem(
            prompt=problem.prompt,
            reference=problem.reference,
            demonstration=_CALCULATION.sub("", problem.demonstration or ""),
            source=problem.source,
            index=problem.index,
        )
        for problem in problems
    ]


def read_jsonl(
    path: str | Path,
    *,
    columns: Mapping[str, str],
    metadata_columns: Sequence[str] = (),
    extract: Callable[[str], str] | None = None,
) -> list[Problem]:
    """Problems of a JSON lines file (or a file that holds one JSON array), under a column mapping.

    Several columns joined by ``+`` become one text with a space between, as SVAMP's ``"Body+Question"`` needs. Whole
    floats become whole numbers (``51.0`` → ``51``), and a list of one item that item. Blank lines are skipped.

    Args:
      path: the file, UTF-8, whatever its suffix.
      columns: this package's name → the file's column, for ``prompt`` and ``reference`` and, optionally,
        ``demonstration``.
      metadata_columns: further columns to keep in ``metadata``.
      extract: finds the answer in the reference column's text (``gsm8k_answer``, ``boxed_answer``); None takes it all.

    Returns:
      The problems, in file order; ``index`` counts records from 0.

    Raises:
      ValueError: no records, a line that is not a JSON object, a missing column or an unusable value, each by file and
        line (record, for an array), or a mapping with a wrong name.
      FileNotFoundError: there is no such file.

    Example:
      >>> problems = read_jsonl(shipped_problems("gsm8k_sample"), columns={"prompt": "question", "reference": "answer"},
      ...                       extract=gsm8k_answer)
      >>> problems[0].demonstration is None
      True
    """
    path = Path(path)
    unknown = sorted(set(columns) - set(_FIELDS))
    lacking = [name for name in _FIELDS[:2] if name not in columns]
    if unknown or lacking:
        raise ValueError(
            f"columns names {sorted(columns)}; 'prompt' and 'reference' are required and 'demonstration' is allowed"
        )
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}; name a JSON lines file or a JSON array")
    problems = []
    for index, (place, record) in enumerate(_records(path)):
        texts = {field: _text(record, column, place) for field, column in columns.items()}
        if extract is not None:
            try:
                texts["reference"] = extract(texts["reference"])
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
        for field in _FIELDS[:2]:
            if not texts[field].strip():
                raise ValueError(f"{place}: column {columns[field]!r} (for {field!r}) is empty; a text is required")
        metadata = {column: _value(record, column, place) for column in metadata_columns}
        problems.append(Problem(**texts, metadata=metadata, source=str(path), index=index))
    if not problems:
        raise ValueError(f"{path} has no records; at least one is required")
    return problems


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each record with its place, for messages."""
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
            yield _object(record, f"{path}: record {number}")
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}: line {number}"
        try:
            record = json.loads(line, parse_constant=_refuse)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{place} is not JSON: {error.msg} at character {error.colno}: {_shorten(line)!r}"
            ) from error
        except (ValueError, RecursionError) as error:  # a number too long, or nesting too deep, for Python
            raise ValueError(f"{place} cannot be read: {error}: {_shorten(line)!r}") from error
        yield _object(record, place)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON value")


def _object(record: Any, place: str) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(record, dict):
        raise ValueError(f"{place} holds a {type(record).__name__}; an object with named columns is required")
    return place, record


def _value(record: Mapping[str, Any], column: str, place: str) -> Any:
    if column not in record:
        raise ValueError(f"{place} has no column {column!r}; it has {', '.join(map(repr, record)) or 'none'}")
    return record[column]


def _text(record: Mapping[str, Any], columns: str, place: str) -> str:
    parts = []
    for column in columns.split("+") if columns not in record else [columns]:
        value = _value(record, column, place)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(
                f"{place}: column {column!r} holds {_shorten(repr(value))}; a text or a number is required"
            )
        parts.append(str(value))
    text = " ".join(parts)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: column {columns!r} holds half a character (a lone surrogate)") from error
    return text


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"
