"""One record of a published file → a problem: how each benchmark's authors, and those who pass it on, name things."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from trm_jax.data._answers import boxed_answer, gsm8k_answer, plain_answer, plain_number
from trm_jax.data._records import Record, as_text, shorten

__all__ = ["Entry", "competition", "dapo", "gsm8k", "mathematics", "minerva", "mmlu_stem", "olympiad", "svamp"]

_CALCULATION = re.compile(r"<<[^<>]*>>")
_DEGREES = re.compile(r"\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|°)$")
_QUESTIONS = ("problem", "question", "Problem", "Question")
_ANSWERS = ("answer", "expected_answer", "final_answer", "reward_model.ground_truth", "Answer")
_LETTERS = "ABCDEFGHIJ"
_DAPO = re.compile(
    r"Solve the following math problem step by step\. The last line of your response should be of the form Answer: "
    r"\$Answer \(without quotes\) where \$Answer is the answer to the problem\.\n\n(.*)\n\n"
    r'Remember to put your answer on its own line after "Answer:"\.',
    re.DOTALL,
)
STEM_SUBJECTS = frozenset(
    f"{prefix}{name}"
    for prefix, names in {
        "": "abstract_algebra anatomy astronomy computer_security conceptual_physics electrical_engineering "
        "elementary_mathematics machine_learning",
        "college_": "biology chemistry computer_science mathematics physics",
        "high_school_": "biology chemistry computer_science mathematics physics statistics",
    }.items()
    for name in names.split()
)
"""The 19 subjects that MMLU's authors count as STEM."""
_WITHDRAWN = 1965  # id of the one problem that OlympiadBench's release of July 2024 no longer has


class Entry(NamedTuple):
    """What a record gives to a problem."""

    prompt: str
    reference: str
    demonstration: str | None = None
    metadata: Mapping[str, Any] = {}


def gsm8k(record: Record) -> Entry:
    """``question``; ``answer`` that ends in ``#### N``."""
    question = record.text("question", *_QUESTIONS)
    if record.has("answer", "expected_answer"):
        return Entry(question, plain_number(record.text("answer", "expected_answer")))
    solution = record.text("answer", "answer")
    try:
        return Entry(question, gsm8k_answer(solution), _CALCULATION.sub("", solution))
    except ValueError as error:
        raise record.fail(error) from error


def mathematics(record: Record) -> Entry:
    r"""``problem``; ``answer``, or the last ``\boxed{...}`` of ``solution``."""
    question = record.text("question", *_QUESTIONS)
    solution = record.text("solution", "solution") if record.has("solution", "solution") else None
    kept = {name: record.value(name, name) for name in ("level", "subject", "type") if record.has(name, name)}
    return Entry(question, _not_empty(plain_answer(_given_or_boxed(record)), record), solution, kept)


def minerva(record: Record) -> Entry:
    """As ``mathematics``, the solution no demonstration: many box several steps."""
    return mathematics(record)._replace(demonstration=None)


def competition(record: Record) -> Entry:
    """``problem``; a whole number in one of several columns, or boxed: leading zeros and degrees are dropped."""
    question = _last_message(record, *_QUESTIONS, "prompt")
    reference = plain_number(_DEGREES.sub("", _given_or_boxed(record).strip().strip("$")))
    if not re.fullmatch(r"-?\d+", reference):
        raise record.fail(f"the answer is {shorten(reference)!r}; a whole number is required")
    return Entry(question, reference)


def svamp(record: Record) -> Entry:
    """``Body`` and ``Question`` with a space between; ``Answer`` a float."""
    body, question = record.text("body", "Body", "body"), record.text("question", "Question", "question")
    return Entry(f"{body.strip()} {question.strip()}", plain_number(record.text("answer", "Answer", "answer")))


def olympiad(record: Record) -> Entry | None:
    """``question`` after its ``context``; ``final_answer`` a list. None for another subset than the papers'.

    Copies of the release of March 2024 have 675 problems: the authors withdrew one of them in July.
    """
    if record.has("id", "id") and record.value("id", "id") == _WITHDRAWN:
        return None
    for column, wanted in (
        *(("language", "English"), ("modality", "Text-only"), ("question_type", "Open-ended"), ("subject", "Math")),
    ):
        if record.has(column, column) and record.text(column, column) != wanted:
            return None
    question = record.text("question", *_QUESTIONS)
    if record.has("context", "context"):
        question = f"{record.text('context', 'context')}\n{question}"
    metadata: dict[str, Any] = {}
    if record.has("unit", "unit"):
        metadata["unit"] = plain_answer(record.text("unit", "unit"))
    if record.has("error", "error"):
        margin = record.text("error", "error")
        try:
            metadata["tolerance"] = abs(float(margin))
        except ValueError as error:
            raise record.fail(f"column 'error' holds {margin!r}; a number is required") from error
    return Entry(question, _not_empty(plain_answer(_joined(record)), record), None, metadata)


def mmlu_stem(record: Record) -> Entry | None:
    """``question``, ``choices``; ``answer`` an index or a letter. None for a subject that is not STEM."""
    if record.has("subject", "subject", "type"):
        subject = record.text("subject", "subject", "type")
        if subject not in STEM_SUBJECTS:
            return None
    choices = record.value("choices", "choices", "options")
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(_LETTERS):
        raise record.fail(f"'choices' holds {shorten(repr(choices))}; a list of 2 to {len(_LETTERS)} texts is required")
    texts = [as_text(choice, "choices", record.place) for choice in choices]
    answer = record.value("answer", "answer")
    letters = _LETTERS[: len(texts)]
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(texts):
        letter = letters[answer]
    elif isinstance(answer, str) and answer.strip() in set(letters):
        letter = answer.strip()
    else:
        wanted = f"an index below {len(texts)} or a letter of {letters}"
        raise record.fail(f"'answer' holds {answer!r}; {wanted} is required")
    return Entry(record.text("question", "question"), letter, None, {"choices": texts})


def dapo(record: Record) -> Entry:
    """``prompt``, a list of messages whose last is the problem in DAPO's wrapping; ``reward_model.ground_truth``."""
    text = _last_message(record, "prompt", "problem", "question")
    wrapped = _DAPO.fullmatch(text.strip())
    question = wrapped[1] if wrapped else text
    answer = record.text("answer", "reward_model.ground_truth", "answer", "solution")
    return Entry(question.strip(), _not_empty(plain_answer(plain_number(answer)), record))


def _last_message(record: Record, *columns: str) -> str:
    """A text, or the content of the last of a list of chat messages."""
    value = record.value("question", *columns)
    if not isinstance(value, list):
        return record.text("question", *columns)
    last = value[-1] if value else None
    if not isinstance(last, Mapping) or not isinstance(last.get("content"), str) or not last["content"].strip():
        raise record.fail(f"the prompt holds {shorten(repr(value))}; messages with a 'content' text are required")
    return as_text(last["content"], "content", record.place)


def _joined(record: Record) -> str:
    """The answer, or a list of answers with commas between."""
    value = record.value("answer", *_ANSWERS)
    if isinstance(value, list) and len(value) > 1:
        return ", ".join(as_text(item, "answer", record.place) for item in value)
    return record.text("answer", *_ANSWERS)


def _given_or_boxed(record: Record) -> str:
    """The answer; without one, what the solution boxes last."""
    if record.has("answer", *_ANSWERS):
        answer = _joined(record)
        if "####" in answer:
            raise record.fail("the answer is a solution that ends in '#### N'; is it a file of gsm8k's?")
        return answer
    if not record.has("solution", "solution"):
        raise record.fail(
            rf"there is neither an answer ({' or '.join(map(repr, _ANSWERS))}) nor a 'solution' with a \boxed{{...}}"
        )
    try:
        return boxed_answer(record.text("solution", "solution"))
    except ValueError as error:
        raise record.fail(f"there is no column 'answer', and in 'solution' {error}") from error


def _not_empty(reference: str, record: Record) -> str:
    if not reference.strip():
        raise record.fail("the answer is empty once its dollar signs are gone; an answer is required")
    return reference
