"""Problems from files under a column mapping: any JSON lines, JSON array, Parquet or Arrow file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trm_jax.data._problem import Problem
from trm_jax.data._records import read_records

__all__ = ["read_problems", "shipped_problems"]

_FIELDS = ("prompt", "reference", "demonstration")


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
      >>> shipped_problems("one_step").name
      'one_step.jsonl'
    """
    folder = Path(__file__).parent / "files"
    names = sorted(path.stem for path in folder.glob("*.jsonl"))
    if name not in names:
        raise ValueError(f"no problems called {name!r} come with this package; there are {', '.join(names)}")
    return folder / f"{name}.jsonl"


def read_problems(
    path: str | Path,
    *,
    columns: Mapping[str, str],
    metadata_columns: Sequence[str] = (),
    extract: Callable[[str], str] | None = None,
) -> list[Problem]:
    """Problems of a file, under a column mapping.

    Several columns joined by ``+`` become one text with a space between, as SVAMP's ``"Body+Question"`` needs; a dot
    leads into a nested object (``"reward_model.ground_truth"``). Whole floats become whole numbers (``51.0`` → ``51``),
    and a list of one item that item. ``read_benchmark`` knows the columns of the published files.

    Args:
      path: JSON lines or one JSON array, UTF-8, whatever its suffix; Parquet or Arrow with the extra ``parquet``.
      columns: this package's name → the file's column, for ``prompt`` and ``reference`` and, optionally,
        ``demonstration``.
      metadata_columns: further columns to keep in ``metadata``.
      extract: finds the answer in the reference column's text (``gsm8k_answer``, ``boxed_answer``); None takes it all.

    Returns:
      The problems, in file order; ``index`` counts records from 0.

    Raises:
      ValueError: no records, a line that is not a JSON object, a missing column or an unusable value, each by file and
        line (record, for an array or a table), or a mapping with a wrong name.
      FileNotFoundError: there is no such file.

    Example:
      >>> from trm_jax.data import gsm8k_answer
      >>> columns = {"prompt": "question", "reference": "answer"}
      >>> problems = read_problems(shipped_problems("gsm8k_sample"), columns=columns, extract=gsm8k_answer)
      >>> problems[0].reference, problems[0].demonstration is None
      ('7', True)
    """
    unknown = sorted(set(columns) - set(_FIELDS))
    lacking = [name for name in _FIELDS[:2] if name not in columns]
    if unknown or lacking:
        raise ValueError(
            f"columns names {sorted(columns)}; 'prompt' and 'reference' are required and 'demonstration' is allowed"
        )
    problems = []
    for index, record in enumerate(read_records(path)):
        texts = {field: record.text(field, column) for field, column in columns.items()}
        if extract is not None:
            try:
                texts["reference"] = extract(texts["reference"])
            except ValueError as error:
                raise record.fail(error) from error
        metadata = {column: record.value(column, column) for column in metadata_columns}
        problems.append(Problem(**texts, metadata=metadata, source=str(path), index=index))
    return problems
