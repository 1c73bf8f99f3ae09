r"""Final answers: where a response or a solution marks one, and how a file's way to write one becomes ours."""

from __future__ import annotations

import contextlib
import re
from typing import Literal, NamedTuple

from trm_jax.data._records import shorten

__all__ = ["MarkedAnswer", "boxed_answer", "gsm8k_answer", "marked_answer", "plain_answer", "plain_number"]

_HASHES = re.compile(r"####\s*(\S[^\n]*)")
_ANSWER_LINE = re.compile(
    r"(?:^[ \t>*_#]*(?:the[ \t]+)?(?:final[ \t]+)?answer|\banswer is)[*_ \t]*:[*_ \t]*([^\n]+)",
    re.IGNORECASE | re.MULTILINE,
)
_BOX = "\\boxed{"
_EXPONENT = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]\+?(-?\d+)", re.ASCII)
_NUMPY = re.compile(r"\bnp\.(?=[a-z])")
_THOUSANDS = re.compile(r"[-+]?\$?\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
_WHOLE = re.compile(r"([-+]?)0*(\d+)(?:\.0+)?", re.ASCII)


class MarkedAnswer(NamedTuple):
    """A final answer and what marked it."""

    text: str
    mark: Literal["box", "hashes", "line"]


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
    matches = _HASHES.findall(text)
    if not matches:
        raise ValueError(f"no '#### answer' in {shorten(text)!r}")
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
    start = text.rfind(_BOX)
    depth = 0
    if start >= 0:
        start += len(_BOX)
        for position in range(start, len(text)):
            if text[position] == "{":
                depth += 1
            elif text[position] == "}":
                if depth == 0:
                    return text[start:position].strip()
                depth -= 1
    raise ValueError(rf"no closed \boxed{{...}} in {shorten(text)!r}")


def marked_answer(response: str) -> MarkedAnswer | None:
    r"""The answer that a response marks as its final one; of several marks the last counts.

    Marks are ``\boxed{...}`` (closed), ``####``, and ``Answer:`` at the beginning of a line or ``answer is:`` anywhere
    (the rest of their line).

    Args:
      response: any text.

    Returns:
      The answer and its mark, or None.

    Example:
      >>> marked_answer("#### 3\nno, wait\nAnswer: 4"), marked_answer("it is 4")
      (MarkedAnswer(text='4', mark='line'), None)
    """
    found: list[tuple[int, MarkedAnswer]] = []
    with contextlib.suppress(ValueError):
        found.append((response.rfind(_BOX), MarkedAnswer(boxed_answer(response), "box")))
    hashes = response.rfind("####")
    if hashes >= 0:
        text = response[hashes + 4 :].strip().split("\n")[0].strip()
        found.append((hashes, MarkedAnswer(text, "hashes")))
    lines = list(_ANSWER_LINE.finditer(response))
    if lines:
        found.append((lines[-1].start(), MarkedAnswer(lines[-1][1].strip().strip("*").strip(), "line")))
    return max(found, key=lambda item: item[0])[1] if found else None


def plain_number(text: str) -> str:
    """A number as files of competitions and word problems write it, without its frills; any other text as it is.

    Example:
      >>> [plain_number(text) for text in ("025", "27.0", "1,450,000", "-3.50", "x")]
      ['25', '27', '1450000', '-3.50', 'x']
    """
    text = text.strip().strip("$").strip()
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "").replace("$", "")
    whole = _WHOLE.fullmatch(text)
    if whole is None:
        return text
    sign = "-" if whole[1] == "-" and whole[2] != "0" else ""
    return f"{sign}{whole[2]}"


def plain_answer(text: str) -> str:
    r"""An answer as LaTeX that math-verify reads: no dollar signs, no full stop at its end, powers of ten written out.

    Example:
      >>> print(plain_answer("4.5e33"), plain_answer("$69$,$84$"), plain_answer(r"$\frac12$."))
      4.5 \times 10^{33} 69,84 \frac12
    """
    text = text.replace(r"\$", "").replace("$", "").strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    text = _NUMPY.sub(r"\\", text)
    exponent = _EXPONENT.fullmatch(text)
    return rf"{exponent[1]} \times 10^{{{exponent[2]}}}" if exponent else text
