"""Problems from files, and the plain comparison of numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trm_jax.data import (
    Problem,
    boxed_answer,
    gsm8k_answer,
    number_reward,
    read_gsm8k,
    read_problems,
    shipped_problems,
)

COLUMNS = {"prompt": "question", "reference": "answer"}


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n", encoding="utf-8")
    return path


def test_the_sample_is_right() -> None:
    problems = read_gsm8k(shipped_problems("gsm8k_sample"))
    assert [p.reference for p in problems] == [
        "7",
        "1200",
        "-3",
        "65",
        "24",
        "52",
        "21",
        "20",
        "13",
        "1320",
        "-13",
        "90",
    ]
    assert len({p.prompt for p in problems}) == 12


@pytest.mark.parametrize(("name", "count"), [("gsm8k_sample", 12), ("one_step", 48)])
def test_shipped_problems_add_up(name: str, count: int) -> None:
    problems = read_gsm8k(shipped_problems(name))
    assert len({p.prompt for p in problems}) == count
    lines = shipped_problems(name).read_text(encoding="utf-8").splitlines()
    for line, problem in zip(lines, problems, strict=True):
        answer = json.loads(line)["answer"]
        steps = re.findall(r"<<([-+*/.0-9]+)=([-.0-9]+)>>", answer)
        assert steps
        assert answer.count("<<") == len(steps)
        for expression, value in steps:
            assert eval(expression) == float(value)
        assert steps[-1][1] == problem.reference
        assert "<<" not in (problem.demonstration or "<<")
        assert number_reward(problem, problem.demonstration or "") == 1.0


def test_problems_that_are_not_shipped_are_named() -> None:
    with pytest.raises(ValueError, match=r"'nope'.*gsm8k_sample, one_step"):
        shipped_problems("nope")


def test_gsm8k_answers_lose_separators_and_keep_signs(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"question": "How many?", "answer": "2*600=<<2*600=1200>>1,200 apples\n#### 1,200"},
        "",
        {"question": "How cold?", "answer": "#### -5"},
    )
    first, second = read_gsm8k(path)
    assert (first.reference, second.reference) == ("1200", "-5")
    assert first.demonstration == "2*600=1,200 apples\n#### 1,200"
    assert (second.index, second.source, second.name) == (1, str(path), f"{path}[1]")


def test_an_answer_without_its_mark_is_named_by_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "q", "answer": "#### 1"}, {"question": "q", "answer": "it is 2"})
    with pytest.raises(ValueError, match=r"a\.jsonl: line 2: no '#### answer' in 'it is 2'"):
        read_gsm8k(path)


def test_other_peoples_columns_arrays_and_value_types(tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    path.write_text(
        json.dumps(
            [
                {"Body": "A dog.", "Question": "Legs?", "Answer": 4.0, "level": 2},
                {"Body": "B", "Question": "C?", "Answer": ["2.5"], "level": 3},
            ],
            indent=1,
        ),
        encoding="utf-8",
    )
    one, two = read_problems(
        path, columns={"prompt": "Body+Question", "reference": "Answer"}, metadata_columns=["level"]
    )
    assert (one.prompt, one.reference, one.metadata) == ("A dog. Legs?", "4", {"level": 2})
    assert (two.reference, two.demonstration) == ("2.5", None)


def test_a_column_whose_name_holds_a_plus_is_one_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"a+b": "text", "answer": "1"})
    assert read_problems(path, columns={"prompt": "a+b", "reference": "answer"})[0].prompt == "text"


def test_answers_that_only_stand_in_a_box(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", {"problem": "p", "solution": r"\boxed{1} no, \boxed{\frac{1}{\sqrt{2}}} it is"})
    columns = {"prompt": "problem", "reference": "solution", "demonstration": "solution"}
    (problem,) = read_problems(path, columns=columns, extract=boxed_answer)
    assert problem.reference == r"\frac{1}{\sqrt{2}}"
    for text in (r"\boxed{1", "1"):
        with pytest.raises(ValueError, match="no closed"):
            boxed_answer(text)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"question": "q", "answer": "1"}', '{"question": "q", '], "line 2 is not JSON: .*question"),
        (['"text"'], "line 1 holds a str; an object"),
        (['{"question": "q", "solution": "1"}'], "line 1 has no column 'answer'; it has 'question', 'solution'"),
        (['{"question": "q", "answer": null}'], "line 1: column 'answer' holds None; a text or a number"),
        (['{"question": "q", "answer": true}'], "column 'answer' holds True"),
        (['{"question": "q", "answer": ["1", "2"]}'], r"column 'answer' holds \['1', '2'\]"),
        (['{"question": "  ", "answer": "1"}'], "column 'question' .* is empty"),
        (["", "  "], "has no records"),
        (["[1, 2]"], "record 0 holds a int"),
        (["[{]"], "line 1 is not JSON"),
    ],
)
def test_bad_files_are_named_with_place_and_reason(tmp_path: Path, lines: list[str], message: str) -> None:
    path = write(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(ValueError, match=rf"bad\.jsonl.*{message}"):
        read_problems(path, columns=COLUMNS)


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none\.jsonl"):
        read_problems(tmp_path / "none.jsonl", columns=COLUMNS)
    with pytest.raises(ValueError, match="'prompt' and 'reference' are required"):
        read_problems(tmp_path / "none.jsonl", columns={"prompt": "q"})
    with pytest.raises(ValueError, match=r"columns names \['answer', 'prompt', 'reference'\]"):
        read_problems(tmp_path / "none.jsonl", columns={"prompt": "q", "reference": "a", "answer": "a"})
    binary = tmp_path / "b.jsonl"
    binary.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match="not UTF-8 text"):
        read_problems(binary, columns=COLUMNS)
    pytest.importorskip("pyarrow")
    binary = tmp_path / "b.parquet"
    binary.write_bytes(b"PAR1\xff\xfe")
    with pytest.raises(ValueError, match="is not a whole Parquet file"):
        read_problems(binary, columns=COLUMNS)


@pytest.mark.parametrize(
    ("reference", "response", "reward"),
    [
        ("1200", "so 3 boxes hold 1,200", 1.0),
        ("1200", "#### $1,200.00 for 3", 1.0),
        ("1200", "#### 1200\nBut 7", 1.0),
        ("-5", "it is -5", 1.0),
        ("-5", "it is 5", 0.0),
        ("0.5", "about .5", 1.0),
        ("12", "1,2", 0.0),  # no thousands separator: the last number is 2
        ("3", "4 then 3", 1.0),
        ("3", "3 then 4", 0.0),
        ("3", "", 0.0),
        ("3", "####", 0.0),
        ("3", "٣", 0.0),  # an Arabic three is no ASCII digit
        ("1,000", "1000", 1.0),
        ("7", "9" * 1_000_000 + " 7", 1.0),
    ],
)
def test_the_final_number_counts(reference: str, response: str, reward: float) -> None:
    assert number_reward(Problem(prompt="?", reference=reference, source="made", index=0), response) == reward


def test_number_reward_needs_a_number() -> None:
    with pytest.raises(ValueError, match=r"made\[0\] is 'Friday'"):
        number_reward(Problem(prompt="?", reference="Friday", source="made", index=0), "1")


def test_gsm8k_answer_takes_the_last_mark() -> None:
    assert gsm8k_answer("#### 1\n#### 2,000 ") == "2000"
