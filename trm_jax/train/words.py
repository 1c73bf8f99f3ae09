"""Word problems from files, asked in the pretrained model's own chat format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trm_jax.data import (
    Problem,
    Tokenizer,
    drop_long_prompts,
    format_prompt,
    held_out,
    read_benchmark,
    shipped_problems,
)
from trm_jax.train.config import TrainConfig

__all__ = ["ChatTokenizer", "chat_problems", "word_problems"]

Split = tuple[list[Problem], list[Problem]]


def word_problems(config: TrainConfig) -> Split:
    """Training and held-out problems from their files."""
    task = config.task
    every = _read(task.kind, "task.path", task.path)
    if task.test_path:
        train, seen = every, {problem.prompt for problem in every}
        test = [problem for problem in _read(task.kind, "task.test_path", task.test_path) if problem.prompt not in seen]
    else:
        test = [p for p in every if held_out(p.prompt, test_permille=task.test_permille)]
        train = [p for p in every if not held_out(p.prompt, test_permille=task.test_permille)]
    if not train:
        raise ValueError(f"task.test_permille={task.test_permille} leaves no problem to train on; lower it.")
    if len(train) <= task.shots:
        raise ValueError(f"task.shots={task.shots} takes all of the {len(train)} problems to train on; lower it.")
    silent = [shot.name for shot in train[: task.shots] if not shot.demonstration]
    if silent:
        raise ValueError(f"task.shots={task.shots}: {silent[0]} comes without a worked solution; set task.shots=0.")
    missing = [problem.name for problem in train[task.shots :] if not problem.demonstration]
    if missing and config.warmstart.steps:
        raise ValueError(
            f"warmstart.steps={config.warmstart.steps}: {len(missing)} of {len(train) - task.shots} problems to train "
            f"on come without a worked solution, first {missing[0]}; set warmstart.steps=0."
        )
    format_prompt(train[0], task.prompt_format)
    if config.eval.prompts and not test:
        raise ValueError("no held-out problem: give task.test_path, raise task.test_permille, or set eval.prompts=0.")
    wanted = config.eval.prompts + config.warmstart.validation
    if config.warmstart.validation and len(test) < wanted:
        raise ValueError(
            f"warmstart.target_accuracy needs {wanted} held-out problems, eval.prompts + warmstart.validation_prompts; "
            f"there are {len(test)}. Lower warmstart.validation_prompts, or set warmstart.target_accuracy=0."
        )
    return train, test


def _read(kind: str, key: str, path: str) -> list[Problem]:
    """A file, or problems that ship with the package by their name."""
    try:
        return read_benchmark(kind, path if Path(path).suffix else shipped_problems(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}: {error}") from error


def chat_problems(
    config: TrainConfig, words: Any, problems: Split | None = None, *, note: Callable[[str], None] = print
) -> Split:
    """The problems as chats that fit ``rollout.max_prompt_length``.

    Args:
      config: says which problems, and what to do with long ones.
      words: the pretrained model's tokenizer.
      problems: ``word_problems(config)``, if they have been read.
      note: told how many were left out.

    Raises:
      ValueError: a problem that holds control tokens, prompts that do not fit and may not be dropped, or demonstrations
        that do not fit where there is a warm start.
    """
    task, limit = config.task, config.rollout.max_prompt_length
    train, test = word_problems(config) if problems is None else problems
    turns = [{"role": "system", "content": task.system_prompt}] if task.system_prompt else []
    for shot in train[: task.shots]:
        turns.append({"role": "user", "content": format_prompt(shot, task.prompt_format)})
        turns.append({"role": "assistant", "content": shot.demonstration or ""})
    parts = (train[task.shots :], test)
    train, test = ([_as_chat(p, words, turns, task.prompt_format) for p in part] for part in parts)
    tokenizer = ChatTokenizer(words)
    if not task.drop_long_prompts:
        asked = config.eval.prompts + config.warmstart.validation
        _refuse_long_prompts([*train, *test[:asked]], tokenizer, limit)
        _refuse_long_demonstrations(train, tokenizer, config)
        return train, test
    train, dropped = drop_long_prompts(train, tokenizer, max_prompt_length=limit)
    if test:
        test, also = drop_long_prompts(test, tokenizer, max_prompt_length=limit)
        dropped += also
    if dropped:
        note(f"left out {dropped} problems whose prompt is longer than rollout.max_prompt_length={limit} tokens")
    _refuse_long_demonstrations(train, tokenizer, config)
    return train, test


def _refuse_long_prompts(problems: Sequence[Problem], tokenizer: Tokenizer, limit: int) -> None:
    lengths = [len(tokenizer.encode(problem.prompt)) for problem in problems]
    long = [problem.name for problem, length in zip(problems, lengths, strict=True) if length > limit]
    if long:
        raise ValueError(
            f"{len(long)} of {len(problems)} prompts are longer than rollout.max_prompt_length={limit} tokens, first "
            f"{long[0]}; the longest takes {max(lengths)}. Raise the limit, or set task.drop_long_prompts=true."
        )


def _refuse_long_demonstrations(problems: Sequence[Problem], tokenizer: Tokenizer, config: TrainConfig) -> None:
    """What the warm start would refuse when it comes to the problem."""
    if not config.warmstart.steps:
        return
    limit = config.rollout.max_prompt_length + config.rollout.max_response_length
    lengths = [len(tokenizer.encode(p.prompt)) + len(tokenizer.encode(p.demonstration or "")) + 1 for p in problems]
    long = [problem.name for problem, length in zip(problems, lengths, strict=True) if length > limit]
    if long:
        raise ValueError(
            f"warmstart.steps={config.warmstart.steps}: {len(long)} of {len(problems)} worked solutions do not fit, "
            f"with their prompt, into rollout.max_prompt_length + max_response_length = {limit} tokens, first "
            f"{long[0]}; the longest takes {max(lengths)}. Raise max_response_length, or set warmstart.steps=0."
        )


def _as_chat(problem: Problem, tokenizer: Any, turns: list[dict[str, str]], prompt_format: str) -> Problem:
    try:
        messages = [*turns, {"role": "user", "content": format_prompt(problem, prompt_format)}]
        return dataclasses.replace(problem, prompt=tokenizer.render_chat(messages, add_generation_prompt=True))
    except ValueError as error:
        raise ValueError(f"{problem.name}: {error}") from error


class ChatTokenizer:
    """Reads the control tokens of a rendered chat; ``render_chat`` has refused them in its content.

    Args:
      words: the pretrained model's tokenizer.
      vocab_size: the policy's, which may pad the tokenizer's; an id past those that have a text is left out of one.

    Raises:
      ValueError: the tokenizer has ids that the policy has not.
    """

    def __init__(self, words: Any, vocab_size: int | None = None) -> None:
        self._words = words
        self._size = int(words.vocab_size if vocab_size is None else vocab_size)
        if words.vocab_size > self._size:
            raise ValueError(
                f"model.path: its tokenizer has {words.vocab_size} ids, its embedding {self._size} rows: they are of "
                "different models."
            )

    @property
    def words(self) -> Any:
        """The pretrained model's own tokenizer."""
        return self._words

    @property
    def vocab_size(self) -> int:
        return self._size

    @property
    def pad_id(self) -> int:
        return int(self._words.pad_id)

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset(self._words.eos_ids)

    def encode(self, text: str) -> list[int]:
        return list(self._words.encode(text, allow_special=True))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._words.decode([i for i in ids if i < self._words.vocab_size]))
