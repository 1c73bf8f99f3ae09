"""The benchmarks and training sets by name: what a file holds, how it is asked, how answers are judged."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from pathlib import Path

from trm_jax.data import _benchmark_records as records
from trm_jax.data._benchmark_records import Entry
from trm_jax.data._problem import Problem
from trm_jax.data._records import Record, read_records
from trm_jax.data._rewards import RewardKind

__all__ = ["BENCHMARKS", "Benchmark", "benchmark", "read_benchmark", "read_gsm8k"]

_RENAMED = ("question", "answer", "solution", "context", "choices", "subject", "body")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One row of the table.

    Attributes:
      name: what it is called here.
      title: what its authors call it, and the split.
      items: problems that the papers count; 0 where they count none.
      source: where its authors publish it, and the file.
      prompt_format: how it is asked (``PROMPT_FORMATS``).
      reward: how an answer is judged (``open_reward``).
      entry: one record → a problem, or None for a record of another subset.
      unique: keep the first of problems with the same text.
    """

    name: str
    title: str
    items: int
    source: str
    entry: Callable[[Record], Entry | None]
    prompt_format: str = "boxed"
    reward: RewardKind = "math"
    unique: bool = False


_TABLE = (
    Benchmark(
        name="gsm8k",
        title="GSM8K, test",
        items=1319,
        source="openai/grade-school-math: grade_school_math/data/test.jsonl",
        entry=records.gsm8k,
    ),
    Benchmark(
        name="math500",
        title="MATH-500",
        items=500,
        source="HuggingFaceH4/MATH-500: test.jsonl",
        entry=records.mathematics,
    ),
    Benchmark(
        name="svamp",
        title="SVAMP, test",
        items=300,
        source="arkilpatel/SVAMP: SVAMP.json (all 1,000) or its test split (300)",
        entry=records.svamp,
    ),
    Benchmark(
        name="minerva_math",
        title="Minerva-Math",
        items=272,
        source="QwenLM/Qwen2.5-Math: evaluation/data/minerva_math/test.jsonl",
        entry=records.minerva,
    ),
    Benchmark(
        name="olympiadbench",
        title="OlympiadBench, English, text-only, open-ended",
        items=674,
        source="Hothan/OlympiadBench: OE_TO_maths_en_COMP; or QwenLM/Qwen2.5-Math: "
        "evaluation/data/olympiadbench/test.jsonl (675, one of which was withdrawn and is left out)",
        entry=records.olympiad,
    ),
    Benchmark(
        name="aime24",
        title="AIME 2024",
        items=30,
        source="QwenLM/Qwen2.5-Math: evaluation/data/aime24/test.jsonl",
        entry=records.competition,
    ),
    Benchmark(
        name="aime25",
        title="AIME 2025",
        items=30,
        source="NVIDIA/NeMo-Skills: nemo_skills/dataset/aime25/test.txt",
        entry=records.competition,
    ),
    Benchmark(
        name="amc23",
        title="AMC 2023",
        items=40,
        source="QwenLM/Qwen2.5-Math: evaluation/data/amc23/test.jsonl",
        entry=records.competition,
    ),
    Benchmark(
        name="mmlu_stem",
        title="MMLU, the 19 STEM subjects, test",
        items=3153,
        source="cais/mmlu, or QwenLM/Qwen2.5-Math: evaluation/data/mmlu_stem/test.jsonl (3,018, without anatomy)",
        entry=records.mmlu_stem,
        prompt_format="options",
        reward="option",
    ),
    Benchmark(
        name="dapo_math_17k",
        title="DAPO-Math-17k, deduplicated",
        items=0,
        source="BytedTsinghua-SIA/DAPO-Math-17k: data/dapo-math-17k.parquet (1.79 million rows, each about 100 times)",
        entry=records.dapo,
        prompt_format="answer_line",
        unique=True,
    ),
)
BENCHMARKS: dict[str, Benchmark] = {row.name: row for row in _TABLE}
"""Every benchmark by its name."""


def benchmark(name: str) -> Benchmark:
    """The row of the table.

    Raises:
      ValueError: there is no such benchmark; the message lists those that there are.

    Example:
      >>> benchmark("mmlu_stem").reward
      'option'
    """
    if name not in BENCHMARKS:
        close = difflib.get_close_matches(name, BENCHMARKS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(BENCHMARKS)}"
        raise ValueError(f"there is no benchmark {name!r}; {hint}")
    return BENCHMARKS[name]


def read_benchmark(name: str, path: str | Path, *, columns: Mapping[str, str] | None = None) -> list[Problem]:
    """The problems of a published file.

    The columns of the authors' file and of the usual copies are known; files in other people's columns need a mapping.
    References lose thousands separators, dollar signs and leading zeros; an answer that only stands in the solution's
    last ``\\boxed{...}`` is taken from there; several final answers stand with commas between.

    Args:
      name: a name of ``BENCHMARKS``.
      path: JSON lines or one JSON array, whatever its suffix; Parquet or Arrow with the extra ``parquet``.
      columns: ``question``, ``answer``, ``solution``, ``context``, ``choices``, ``subject`` or ``body`` → the file's
        column, which may lead into an object by dots or join several by ``+``.

    Returns:
      The problems, in file order; ``index`` counts records from 0, those left out included. ``dapo_math_17k`` keeps the
      first of records with the same problem text: its file repeats each about a hundred times.

    Raises:
      ValueError: an unknown name; or a record that does not fit, by file, line (or record) and column.
      FileNotFoundError: there is no such file.

    Example:
      >>> from trm_jax.data import shipped_problems
      >>> problems = read_benchmark("gsm8k", shipped_problems("gsm8k_sample"))
      >>> len(problems), problems[0].reference
      (12, '7')
    """
    row = benchmark(name)
    if unknown := sorted(set(columns or {}) - set(_RENAMED)):
        raise ValueError(f"columns names {', '.join(unknown)}; it may name {', '.join(_RENAMED)}")
    problems: list[Problem] = []
    seen: set[str] = set()
    for index, record in enumerate(read_records(path, columns)):
        entry = row.entry(record)
        if entry is None or (row.unique and entry.prompt in seen):
            continue
        seen.add(entry.prompt)
        problems.append(Problem(**entry._asdict(), source=str(path), index=index))
    if not problems:
        raise ValueError(f"{path} has no record of {row.title}; is it another set?")
    return problems


def read_gsm8k(path: str | Path) -> list[Problem]:
    """Problems of a file in GSM8K's format: ``question``, and ``answer`` that ends in ``#### N``.

    The reference is ``N`` without thousands separators; the demonstration is the solution without its ``<<...>>``
    calculator marks. Source: https://github.com/openai/grade-school-math.

    Args:
      path: a JSON lines file.

    Returns:
      The problems, in file order.

    Raises:
      ValueError: as for ``read_benchmark``.
      FileNotFoundError: there is no such file.

    Example:
      >>> from trm_jax.data import shipped_problems
      >>> len(read_gsm8k(shipped_problems("gsm8k_sample"))), len(read_gsm8k(shipped_problems("one_step")))
      (12, 48)
    """
    return read_benchmark("gsm8k", path)
