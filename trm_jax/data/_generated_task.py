"""One reasoning-gym dataset: problems drawn by index, and a strict reward."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trm_jax.data._compact import CompactForm
from trm_jax.data._extras import import_extra
from trm_jax.data._gym_guards import MUST_HOLD
from trm_jax.data._problem import Problem, TaskSpec
from trm_jax.data._split import LazyProblems, held_out
from trm_jax.data._tokenizer import CharTokenizer
from trm_jax.data._worker_pool import WorkerPool

__all__ = ["ReasoningGymTask", "gym_factory"]

_SAMPLE = 256
_DRAWS_A_PROBLEM = 64
_BARREN_DRAWS = 10_000  # draws without a new held-out prompt, after which there is none
_TEST_CHUNK = 1000
_READ = 4096  # characters of a response's end that are looked at, or four times the reference's length
_SECONDS = 6.0
_PROGRAM = Path(__file__).with_name("_gym_worker.py")
# Datasets of reasoning-gym 0.1.25 whose scorers hand the answer to ``eval``, or to sympy, which does.
_EVALUATING = (
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24"),
    *("simple_integration", "spiral_matrix", "string_insertion"),
)


def gym_factory() -> Any:
    """reasoning-gym's own registry; ImportError when it is not installed."""
    gym = import_extra("reasoning_gym", extra="tasks", purpose="a reasoning-gym task")
    return gym.factory


class ReasoningGymTask:
    """One reasoning-gym dataset as a source of train and test problems and as a reward.

    Calling the task scores a response: it is the ``RewardFunction`` of its problems.
    Made by ``reasoning_gym_task``.
    """

    def __init__(
        self,
        name: str,
        *,
        params: Mapping[str, Any],
        seed: int,
        test_permille: int,
        form: CompactForm | None,
        alphabet: str,
    ) -> None:
        self._name = name
        self._params = dict(params)
        self._seed = seed
        self._test_permille = test_permille
        self._form = form
        self._alphabet = alphabet
        self._scorer = self._dataset(0, 1).score_answer
        self._scoring_errors = 0
        self._lock = threading.Lock()

    @property
    def scoring_errors(self) -> int:
        """How many responses made reasoning-gym's scorer raise; each was rewarded 0."""
        return self._scoring_errors

    @functools.cached_property
    def spec(self) -> TaskSpec:
        """What the task needs. For forms without exact bounds this draws a sample of problems once."""
        form = self._form
        if form is not None and form.bounds is not None:
            prompt, response = form.bounds(self._dataset(0, 1).config)
        else:
            sample = [self._draw(_SAMPLE, i, 0) for i in range(_SAMPLE)]
            self._check_alphabet(sample)
            prompt = _with_margin(max(len(problem.prompt) for problem in sample))
            response = _with_margin(max(len(problem.demonstration or "") for problem in sample))
        return TaskSpec(
            name=self._name,
            description=form.description if form is not None else f"the questions of reasoning-gym's {self._name}",
            alphabet=self._alphabet,
            max_prompt_chars=prompt,
            max_response_chars=response,
            bounds="exact" if form is not None and form.bounds is not None else "sampled",
        )

    def tokenizer(self) -> CharTokenizer:
        """The character tokenizer over the task's alphabet."""
        return CharTokenizer(self._alphabet)

    def train(self, size: int) -> Sequence[Problem]:
        """``size`` training problems, each generated when it is asked for.

        Problem ``i`` is the first of its draws whose prompt is not held out; prompts may repeat, as in the generator.

        Args:
          size: number of problems, at least 1.

        Returns:
          A lazy sequence.

        Raises:
          ValueError: the size is not positive; later, from an access: every draw was held out.
        """
        _check_size(size)
        return LazyProblems(functools.partial(self.train_problem, size), size)

    def test(self, size: int) -> tuple[Problem, ...]:
        """``size`` held-out problems with ``size`` different prompts, generated at once.

        Args:
          size: number of problems, at least 1.

        Returns:
          The problems, in the order of drawing: ``test(10)`` is the beginning of ``test(100)``.

        Raises:
          ValueError: the task has fewer held-out prompts; the message says how many were found.
        """
        _check_size(size)
        return self._test(size)

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a task lives as long as its run, and every arm asks for the same
    def _test(self, size: int) -> tuple[Problem, ...]:
        found: dict[str, Problem] = {}
        place, patience = 0, _BARREN_DRAWS if self._test_permille else 0
        while patience:
            problem = self._draw(_TEST_CHUNK, place % _TEST_CHUNK, -1 - place // _TEST_CHUNK)
            place, patience = place + 1, patience - 1
            fresh = problem.prompt not in found and problem.demonstration != ""  # an empty answer cannot be given
            if fresh and held_out(problem.prompt, test_permille=self._test_permille):
                found[problem.prompt] = dataclasses.replace(problem, index=len(found))
                if len(found) == size:
                    return tuple(found.values())
                # Of n equally likely prompts the last is missed by 20 n draws of them with probability e^-20.
                patience = max(_BARREN_DRAWS, 20 * len(found) * 1000 // self._test_permille)
        raise ValueError(
            f"task {self._name!r} gave only {len(found)} different held-out prompts (test_permille="
            f"{self._test_permille}), {size} were asked for; ask for fewer, raise test_permille, or widen params "
            f"{self._params}"
        )

    def __call__(self, problem: Problem, response: str) -> float:
        """1.0 when reasoning-gym gives the extracted answer its full score, else 0.0.

        Partial credit counts as 0, and so does a response on which the scorer raises or runs away (counted in
        ``scoring_errors``). Where a scorer takes wrong answers for right, more must hold. Scorers that would evaluate
        an answer as code run in a process of their own, which only takes plain arithmetic. Of a long response
        only the end is read.

        Args:
          problem: a problem of this task.
          response: the decoded response.

        Returns:
          0.0 or 1.0.
        """
        # Datasets whose puzzles have many solutions give no answer: their problems have no demonstration either.
        answer = None if problem.demonstration is None else problem.reference
        entry = {"question": problem.prompt, "answer": answer, "metadata": dict(problem.metadata)}
        response = response[-max(_READ, 4 * len(problem.reference)) :]
        try:
            given = self._form.extract(response) if self._form is not None else _tagged_or_whole(response)
            if self._name in MUST_HOLD and not MUST_HOLD[self._name](given, problem):
                return 0.0
            if self._name in _EVALUATING:
                return self._score_apart(given, entry)
            return float(self._scorer(answer=given, entry=entry) == 1.0)
        except Exception:  # a response is hostile input: whatever a scorer raises on it is a wrong answer
            self._scoring_errors += 1
            return 0.0

    @functools.cached_property
    def _process(self) -> WorkerPool:
        return WorkerPool(_PROGRAM, (self._name, json.dumps(self._params)), workers=1, time_limit=_SECONDS)

    def _score_apart(self, given: str, entry: dict[str, Any]) -> float:
        request = json.loads(json.dumps({"answer": given, "entry": entry}, default=str))
        with self._lock:
            ((status, correct),) = self._process.run([request])
        self._scoring_errors += status != "scored"
        return float(correct)

    def train_problem(self, size: int, index: int) -> Problem:
        """Problem ``index`` of ``train(size)``."""
        for attempt in range(_DRAWS_A_PROBLEM):
            problem = self._draw(size, index, attempt)
            if problem.demonstration != "" and not held_out(problem.prompt, test_permille=self._test_permille):
                return dataclasses.replace(problem, index=index)
        raise ValueError(
            f"all of {_DRAWS_A_PROBLEM} draws for training problem {index} of task {self._name!r} were held out "
            f"(test_permille={self._test_permille}); lower test_permille or widen params {self._params}"
        )

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a task lives as long as its run, and holds few datasets
    def _dataset(self, attempt: int, size: int) -> Any:
        digest = hashlib.sha256(f"{self._seed}/{attempt}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big") % 2**31
        try:
            return gym_factory().create_dataset(self._name, size=size, seed=seed, **self._params)
        except (AssertionError, ValueError, TypeError) as error:
            raise ValueError(f"reasoning-gym refuses params {self._params} for {self._name!r}: {error}") from error

    def _draw(self, size: int, index: int, attempt: int) -> Problem:
        entry = self._dataset(attempt, size)[index]
        prompt, demonstration, chain = (
            self._form.write(entry) if self._form is not None else (entry["question"], entry["answer"], None)
        )
        metadata = dict(entry["metadata"])
        if chain is not None:
            metadata["chain"] = chain
        return Problem(
            prompt=prompt,
            reference=entry["answer"] or "",
            demonstration=demonstration,
            metadata=metadata,
            source=f"reasoning_gym/{self._name}",
            index=index,
        )

    def _check_alphabet(self, sample: Sequence[Problem]) -> None:
        used = {c for problem in sample for text in (problem.prompt, problem.demonstration or "") for c in text}
        missing = "".join(sorted(used - set(self._alphabet)))
        if missing:
            raise ValueError(
                f"task {self._name!r} uses characters outside its alphabet: {missing!r}; pass an alphabet with them, "
                f"for instance alphabet=trm_jax.data.PRINTABLE_ASCII + {missing!r}"
            )


def _tagged_or_whole(response: str) -> str:
    """What the last ``<answer>`` tags enclose, or the whole response."""
    _, opened, tail = response.rpartition("<answer>")
    inside, closed, _ = tail.partition("</answer>")
    return inside.strip() if opened and closed else response.strip()


def _with_margin(length: int) -> int:
    """A quarter more than the longest of a sample, and at least the character by which an error may lengthen it."""
    return length + max(1, -(-length // 4))


def _check_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
