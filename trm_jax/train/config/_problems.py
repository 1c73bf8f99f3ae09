"""Sections about the problems: where they come from, and how answers to held-out ones are graded."""

from __future__ import annotations

import dataclasses
from typing import Any

from trm_jax.data import BENCHMARKS, Problem, format_prompt
from trm_jax.train.config._rules import at_least, at_most, positive, require

__all__ = ["EvalConfig", "TaskConfig"]


_MOST_PROMPTS = 100_000  # every one is generated at the start and asked at every evaluation


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What is to be learnt: problems and their reward.

    Attributes:
      kind: "reasoning_gym" (procedurally generated, scored by the library), or the format of a published file by its
        name: "gsm8k", "dapo_math_17k", "math500", ... (data.BENCHMARKS), judged as that set is (most by math-verify).
      name: for reasoning_gym, the task's name, e.g. "chain_sum"; `trm-jax tasks` lists them with what each needs.
      params: for reasoning_gym, the task's own parameters.
      train_size: for reasoning_gym, how many training problems are drawn.
      test_permille: share of prompts held out from training, in thousandths (a hash of the prompt decides).
      path: of a published format, the file to train on; or, without a suffix, GSM8K-like problems that ship with the
        package: "one_step" or "gsm8k_sample".
      test_path: the same to evaluate on; empty evaluates on the training file's held-out share.
      system_prompt: of a published format, the chat template's system message; empty gives none.
      prompt_format: of a published format, the user's message by a name of data.PROMPT_FORMATS ("boxed",
        "answer_line", ...) or a template with {question} in it.
      shots: of a published format, worked examples that stand before the question as earlier turns of the chat: the
        first training problems, which are then not trained on.
      drop_long_prompts: leave out prompts above the limit (counted, aloud) instead of refusing them.
    """

    kind: str = "reasoning_gym"
    name: str = "chain_sum"
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    train_size: int = 50_000
    test_permille: int = 100
    path: str = "one_step"
    test_path: str = ""
    system_prompt: str = "Solve the problem step by step. Put your final answer within \\boxed{}."
    prompt_format: str = "question"
    shots: int = 0
    drop_long_prompts: bool = False

    def __post_init__(self) -> None:
        known = ("reasoning_gym", *BENCHMARKS)
        require(self.kind in known, f"kind={self.kind!r}: choose one of {', '.join(known)}.")
        any_problem = Problem(prompt="?", reference="?", source="?", index=0, metadata={"choices": ["?"]})
        format_prompt(any_problem, self.prompt_format)
        lettered = self.in_words and BENCHMARKS[self.kind].prompt_format == "options"
        require(
            not lettered or self.prompt_format != "question",
            f"kind={self.kind!r} asks for the letter of an option: set prompt_format='options', which shows them.",
        )
        at_least(self, 1, "train_size")
        at_least(self, 0, "shots")
        at_most(self, 2**31 - 1, "train_size")
        require(0 <= self.test_permille < 1000, f"test_permille={self.test_permille}: must lie in [0, 1000).")

    @property
    def in_words(self) -> bool:
        """Whether the problems are text for a pretrained policy."""
        return self.kind != "reasoning_gym"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Accuracy on held-out prompts, with the trainer's own arithmetic.

    Attributes:
      prompts: held-out prompts, one response each; 0 leaves evaluation out.
      every: steps between evaluations; the first and the last step are always evaluated.
      temperature: sampling temperature.
      greedy: take the most likely token instead.
    """

    prompts: int = 512
    every: int = 20
    temperature: float = 1.0
    greedy: bool = False

    def __post_init__(self) -> None:
        at_least(self, 0, "prompts")
        at_most(self, _MOST_PROMPTS, "prompts")
        require(
            not self.greedy or self.temperature == 1.0,
            f"temperature={self.temperature}: greedy=true takes the most likely token and ignores it; leave one out.",
        )
        at_least(self, 1, "every")
        positive(self, "temperature")
