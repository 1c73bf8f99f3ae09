"""The published files as their authors, and those who pass them on, write them: shapes, surprises, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trm_jax.data import BENCHMARKS, PROMPT_FORMATS, Problem, benchmark, format_prompt, read_benchmark


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def only(name: str, path: Path, **options: Any) -> Problem:
    (problem,) = read_benchmark(name, path, **options)
    return problem


def test_every_row_of_the_table_is_whole() -> None:
    assert [row.name for row in BENCHMARKS.values()] == list(BENCHMARKS)
    for row in BENCHMARKS.values():
        assert row.prompt_format in PROMPT_FORMATS
        assert ":" in row.source
    # Items as the calibrated importance sampling paper's table of benchmarks counts them.
    counted = {
        "gsm8k": 1319,
        "math500": 500,
        "svamp": 300,
        "minerva_math": 272,
        "olympiadbench": 674,
        "mmlu_stem": 3153,
    }
    assert {name: BENCHMARKS[name].items for name in counted} == counted
    with pytest.raises(ValueError, match="did you mean 'math500'"):
        benchmark("math-500")
    with pytest.raises(ValueError, match="there are gsm8k, math500"):
        benchmark("imagenet")


def test_gsm8k_loses_separators_and_calculator_marks(tmp_path: Path) -> None:
    row = {"question": "How many?", "answer": "2*600=<<2*600=1200>>1,200 apples\n#### 1,200"}
    problem = only("gsm8k", lines(tmp_path / "a.jsonl", row))
    assert (problem.prompt, problem.reference) == ("How many?", "1200")
    assert problem.demonstration == "2*600=1,200 apples\n#### 1,200"
    other = only("gsm8k", lines(tmp_path / "b.txt", {"problem": "How many?", "expected_answer": 1200}))
    assert (other.reference, other.demonstration) == ("1200", None)


def test_math_in_an_array_and_in_lines(tmp_path: Path) -> None:
    row = {
        "problem": "Half?",
        "solution": r"so $\boxed{\frac12}$.",
        "answer": r"\frac{1}{2}",
        "level": 3,
        "subject": "A",
    }
    array = tmp_path / "math.json"
    array.write_text("\ufeff" + json.dumps([row], indent=4), encoding="utf-8")
    one, two = only("math500", array), only("math500", lines(tmp_path / "math.jsonl", row))
    assert one.reference == two.reference == r"\frac{1}{2}"
    assert one.demonstration == row["solution"]
    assert one.metadata == {"level": 3, "subject": "A"}
    del row["answer"]
    assert only("math500", lines(tmp_path / "boxed.jsonl", row)).reference == r"\frac12"


def test_minerva_takes_the_last_box_and_writes_powers_of_ten_out(tmp_path: Path) -> None:
    texts = [
        r"\[ L = \boxed{4.5e33} \mathrm{ergs} \]",
        r"first \boxed{1}, then \boxed{1.6} cm",
        r"\boxed{np.arcsin(3/5)}",
    ]
    rows = [{"problem": "?", "solution": text, "type": "astronomy", "idx": i} for i, text in enumerate(texts)]
    problems = read_benchmark("minerva_math", lines(tmp_path / "m.jsonl", *rows))
    assert [problem.reference for problem in problems] == [r"4.5 \times 10^{33}", "1.6", r"\arcsin(3/5)"]
    assert all(problem.demonstration is None for problem in problems)


def test_svamp_joins_body_and_question_and_takes_floats(tmp_path: Path) -> None:
    row = {"ID": "x", "Body": "Dan has $ 3 left. ", "Question": "What did it cost?", "Answer": 51.0, "Type": "Sum"}
    problem = only("svamp", lines(tmp_path / "s.jsonl", row))
    assert (problem.prompt, problem.reference) == ("Dan has $ 3 left. What did it cost?", "51")
    assert only("svamp", lines(tmp_path / "half.jsonl", {**row, "Answer": 2.5})).reference == "2.5"


OLYMPIAD = {
    "id": 7, "context": None, "question": "Find all.", "solution": ["..."], "final_answer": ["$69$,$84$"],
    "is_multiple_answer": True, "unit": None, "answer_type": "Numerical", "error": None,
}  # fmt: skip


def test_olympiad_lists_units_margins_and_contexts(tmp_path: Path) -> None:
    rows = [
        OLYMPIAD,
        {**OLYMPIAD, "id": 8, "context": "Let $n>1$.", "final_answer": [r"$\frac{41}{12}$."], "unit": "$cm^2$"},
        {**OLYMPIAD, "id": 9, "final_answer": ["4.2"], "unit": "%", "error": "1e-1"},
        {**OLYMPIAD, "id": 10, "final_answer": ["$a=1$", "$b=2$"]},
    ]
    plain, context, margin, several = read_benchmark("olympiadbench", lines(tmp_path / "o.jsonl", *rows))
    assert (plain.prompt, plain.reference, plain.metadata) == ("Find all.", "69,84", {})
    assert context.prompt == "Let $n>1$.\nFind all."
    assert (context.reference, context.metadata) == (r"\frac{41}{12}", {"unit": "cm^2"})
    assert margin.metadata == {"unit": "%", "tolerance": 0.1}
    assert several.reference == "a=1, b=2"


def test_olympiad_keeps_english_text_only_open_ended_mathematics(tmp_path: Path) -> None:
    kept = {
        **OLYMPIAD,
        "language": "English",
        "modality": "Text-only",
        "question_type": "Open-ended",
        "subject": "Math",
    }
    others = [{**kept, key: "other"} for key in ("language", "modality", "question_type", "subject")]
    problems = read_benchmark("olympiadbench", lines(tmp_path / "o.jsonl", *others, kept))
    assert [problem.index for problem in problems] == [4]
    with pytest.raises(ValueError, match=r"o\.jsonl has no record of OlympiadBench"):
        read_benchmark("olympiadbench", lines(tmp_path / "o.jsonl", *others))


def test_olympiad_leaves_out_the_problem_that_its_authors_withdrew(tmp_path: Path) -> None:
    rows = [{**OLYMPIAD, "id": 1964}, {**OLYMPIAD, "id": 1965}, {**OLYMPIAD, "id": 1966}]
    assert [p.index for p in read_benchmark("olympiadbench", lines(tmp_path / "o.jsonl", *rows))] == [0, 2]


@pytest.mark.parametrize(
    ("row", "reference"),
    [
        ({"problem": "p", "answer": "025"}, "25"),
        ({"problem": "p", "answer": "000"}, "0"),
        ({"question": "p", "answer": 27.0}, "27"),
        ({"problem": "p", "expected_answer": "-1,234"}, "-1234"),
        ({"Problem": "p", "Answer": 5}, "5"),
        ({"problem": None, "question": "p", "answer": None, "expected_answer": "6"}, "6"),
        ({"prompt": [{"role": "user", "content": "p"}], "reward_model": {"ground_truth": "8"}}, "8"),
        ({"question": "p", "answer": r"336^\circ"}, "336"),
        ({"id": 1, "problem": "p", "solution": r"\boxed{033}", "url": "u"}, "33"),
        ({"question": "p", "answer": r"$336^{\circ}$"}, "336"),
        ({"id": "i", "problem": "p", "expected_answer": "588", "reference_solution": r"\boxed{589}"}, "588"),
    ],
)
def test_competitions_have_whole_numbers(tmp_path: Path, row: dict[str, Any], reference: str) -> None:
    for name in ("aime24", "aime25", "amc23"):
        problem = only(name, lines(tmp_path / "c.txt", row))
        assert (problem.prompt, problem.reference) == ("p", reference)


def test_mmlu_has_letters_and_leaves_other_subjects_out(tmp_path: Path) -> None:
    row = {"question": "Which?", "choices": ["1", 2, "three", "{question}"], "answer": 2, "subject": "anatomy"}
    letter = {**row, "answer": "D", "subject": "college_physics"}
    path = lines(tmp_path / "m.jsonl", row, {**row, "subject": "world_religions"}, letter)
    first, second = read_benchmark("mmlu_stem", path)
    assert (first.reference, second.reference, second.index) == ("C", "D", 2)
    shown = format_prompt(first, "options")
    assert shown.endswith("\n\nWhich?\n\n(A) 1\n(B) 2\n(C) three\n(D) {question}")


DAPO = PROMPT_FORMATS["answer_line"]


def dapo(problem: str, answer: str, index: str = "u") -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": DAPO.replace("{question}", problem)}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def check_dapo(path: Path) -> None:
    problems = read_benchmark("dapo_math_17k", path)
    assert [(p.prompt, p.reference, p.index) for p in problems] == [("Two\n\nlines?", "34", 0), ("B?", "-5", 2)]
    assert (
        format_prompt(problems[0], BENCHMARKS["dapo_math_17k"].prompt_format)
        == dapo("Two\n\nlines?", "")["prompt"][0]["content"]
    )


ROWS = [dapo("Two\n\nlines?", "34"), dapo("Two\n\nlines?", "34", "v"), dapo("B?", "-5"), dapo("Two\n\nlines?", "35")]


def test_dapo_is_unwrapped_and_each_problem_stands_once(tmp_path: Path) -> None:
    check_dapo(lines(tmp_path / "d.jsonl", *ROWS))


def test_dapo_from_parquet_and_arrow(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "whatever.bin", row_group_size=1)
    check_dapo(tmp_path / "whatever.bin")
    with arrow.ipc.new_stream(tmp_path / "d.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    check_dapo(tmp_path / "d.arrow")
    with arrow.ipc.new_file(tmp_path / "e.arrow", table.schema) as file:
        file.write_table(table)
    check_dapo(tmp_path / "e.arrow")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes((tmp_path / "whatever.bin").read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"broken\.parquet is not a whole Parquet file"):
        read_benchmark("dapo_math_17k", broken)


def test_other_peoples_columns(tmp_path: Path) -> None:
    row = {"q": {"text": "How many?"}, "gold": ["3"], "body": "x"}
    path = lines(tmp_path / "a.jsonl", row)
    problem = only("math500", path, columns={"question": "q.text", "answer": "gold"})
    assert (problem.prompt, problem.reference) == ("How many?", "3")
    with pytest.raises(ValueError, match="has no column 'text'; it has 'q', 'gold', 'body'"):
        read_benchmark("math500", path, columns={"question": "text", "answer": "gold"})
    with pytest.raises(ValueError, match="columns names prompt; it may name question, answer"):
        read_benchmark("math500", path, columns={"prompt": "q"})


GOOD = {"question": "q", "problem": "q", "answer": "1"}


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("gsm8k", {"question": "q", "answer": "it is 2"}, "line 2: no '#### answer' in 'it is 2'"),
        ("gsm8k", {"question": "q"}, "line 2 has no column 'answer'; it has 'question'"),
        ("gsm8k", {"problem": " ", "answer": "#### 2"}, "line 2: column 'problem' .* is empty"),
        (
            "math500",
            {"problem": "q", "solution": "none"},
            "line 2: there is no column 'answer', and in 'solution' no closed",
        ),
        ("math500", {"question": "q", "answer": "so\n#### 2"}, "line 2: the answer is a solution .* gsm8k's"),
        ("aime24", {"problem": "q", "answer": r"3^\circ C"}, "line 2: the answer is '3.*; a whole number"),
        ("math500", {"problem": "q"}, "line 2: there is neither an answer .* nor a 'solution'"),
        ("math500", {"problem": "q", "answer": "$$"}, "line 2: the answer is empty once"),
        ("math500", {"problem": "q", "answer": ["1", None]}, "line 2: column 'answer' holds None"),
        ("math500", {"problem": {"a": 1}, "answer": "1"}, "line 2: column 'problem' holds {'a': 1}; a text"),
        ("math500", ["q", "1"], "line 2 holds a list; an object"),
        ("svamp", {"Body": "b", "Answer": 1.0}, "line 2 has no column 'Question'"),
        ("olympiadbench", {**OLYMPIAD, "error": "small"}, "line 2: column 'error' holds 'small'; a number"),
        ("olympiadbench", {**OLYMPIAD, "final_answer": []}, r"line 2: column 'final_answer' holds \[\]"),
        ("aime24", {"problem": "q", "answer": "two"}, "line 2: the answer is 'two'; a whole number"),
        ("aime24", {"prompt": [], "answer": "2"}, r"line 2: the prompt holds \[\]; messages"),
        (
            "mmlu_stem",
            {"question": "q", "choices": ["1"], "answer": 0},
            r"line 2: 'choices' holds \['1'\]; a list of 2 to",
        ),
        (
            "mmlu_stem",
            {"question": "q", "choices": ["1", "2"], "answer": 2},
            "line 2: 'answer' holds 2; an index below 2",
        ),
        ("mmlu_stem", {"question": "q", "choices": ["1", "2"], "answer": True}, "line 2: 'answer' holds True"),
        ("mmlu_stem", {"question": "q", "choices": ["1", "2"], "answer": "AB"}, "line 2: 'answer' holds 'AB'"),
        (
            "dapo_math_17k",
            {"prompt": [{"role": "user"}], "answer": "1"},
            "line 2: the prompt holds .* a 'content' text",
        ),
    ],
)
def test_a_record_that_does_not_fit_is_named_by_line_and_column(
    tmp_path: Path, name: str, bad: Any, message: str
) -> None:
    good = {
        "gsm8k": {"question": "q", "answer": "#### 1"},
        "svamp": {"Body": "b", "Question": "q", "Answer": 1.0},
        "olympiadbench": OLYMPIAD,
        "mmlu_stem": {"question": "q", "choices": ["1", "2"], "answer": 1},
        "dapo_math_17k": dapo("q", "1"),
    }.get(name, GOOD)
    with pytest.raises(ValueError, match=rf"bad\.jsonl: {message}"):
        read_benchmark(name, lines(tmp_path / "bad.jsonl", good, bad))


def test_files_that_are_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none\.jsonl"):
        read_benchmark("gsm8k", tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="has no records"):
        read_benchmark("gsm8k", lines(tmp_path / "empty.jsonl"))


def test_prompt_formats() -> None:
    problem = Problem(prompt="1 {choices}?", reference="3", source="made", index=4)
    assert format_prompt(problem, "question") == "1 {choices}?"
    assert format_prompt(problem, "boxed").endswith(
        "?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    assert format_prompt(problem, "hashes").startswith("1 {choices}? Let's think step by step")
    assert format_prompt(problem, "Q: {question}") == "Q: 1 {choices}?"
    with pytest.raises(ValueError, match=r"made\[4\] has no choices, which prompt format 'options' shows"):
        format_prompt(problem, "options")
    with pytest.raises(ValueError, match="no prompt format 'boxd': choose one of question, boxed"):
        format_prompt(problem, "boxd")
