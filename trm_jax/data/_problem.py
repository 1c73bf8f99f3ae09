"""A problem with a checkable answer, what its task needs, and how a response becomes a reward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

__all__ = ["BatchReward", "Problem", "RewardFunction", "TaskSpec", "score_batch"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One prompt whose answer can be checked.

    Attributes:
      prompt: the text that the policy continues; never empty.
      reference: the gold answer, in the form that the task's reward compares against; empty when the reward judges by
        ``metadata`` alone.
      demonstration: a worked response that the reward accepts, for a supervised warm start, or None when there is none.
      metadata: whatever else the reward needs; small, and never written to.
      source: where the problem comes from, such as ``reasoning_gym/chain_sum`` or a file path.
      index: its position in that source.

    Example:
      >>> Problem(prompt="1+2=", reference="3", source="example", index=0).demonstration is None
      True
    """

    prompt: str
    reference: str
    source: str
    index: int
    demonstration: str | None = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"problem {self.index} of {self.source} has an empty prompt; a prompt needs some text")

    @property
    def name(self) -> str:
        """``source[index]``, for messages."""
        return f"{self.source}[{self.index}]"


RewardFunction = Callable[[Problem, str], float]
"""``reward(problem, response) -> float``; plain text in, one number out, and no exception on any response."""


@runtime_checkable
class BatchReward(Protocol):
    """A reward function that also scores a whole batch at once."""

    def __call__(self, problem: Problem, response: str) -> float:
        """The reward of one response."""
        ...

    def score_batch(self, problems: Sequence[Problem], responses: Sequence[str]) -> Sequence[float] | np.ndarray:
        """The rewards of a batch, one a response."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """What a task asks of the tokenizer and of the sequence lengths, known before anything is compiled.

    Attributes:
      name: the task's name.
      description: one sentence for people.
      alphabet: every character that prompts and demonstrations use, in the order that fixes token ids.
      max_prompt_chars: length of the longest prompt, in characters.
      max_response_chars: length of the longest demonstration (a corrupted one included), in characters. The
        end-of-sequence token comes on top.
      bounds: ``"exact"`` when no problem can be longer; ``"sampled"`` when the lengths are the largest of a sample and
        a quarter more: ``drop_long_prompts`` sees to the rest.
    """

    name: str
    description: str
    alphabet: str
    max_prompt_chars: int
    max_response_chars: int
    bounds: Literal["exact", "sampled"]

    def check_lengths(self, *, max_prompt_length: int, max_response_length: int) -> None:
        """Refuses sequence lengths that the task cannot fit, for a tokenizer of one token a character.

        Args:
          max_prompt_length: prompt positions, in tokens.
          max_response_length: response positions, in tokens, the end-of-sequence token included.

        Raises:
          ValueError: a length is too small; the message says which and what the task needs.

        Example:
          >>> spec = TaskSpec(name="t", description="", alphabet="01", max_prompt_chars=8, max_response_chars=4,
          ...                 bounds="exact")
          >>> spec.check_lengths(max_prompt_length=8, max_response_length=5)
        """
        if max_prompt_length < self.max_prompt_chars:
            raise ValueError(
                f"max_prompt_length={max_prompt_length} is too short for task {self.name!r}: its longest prompt has "
                f"{self.max_prompt_chars} characters; raise max_prompt_length or make the task's numbers smaller"
            )
        if max_response_length < self.max_response_chars + 1:
            raise ValueError(
                f"max_response_length={max_response_length} is too short for task {self.name!r}: its longest response "
                f"has {self.max_response_chars} characters and an end-of-sequence token, "
                f"{self.max_response_chars + 1} in all; raise max_response_length or make the task's numbers smaller"
            )


def score_batch(
    reward: RewardFunction, problems: Sequence[Problem], responses: Sequence[str]
) -> Float32[np.ndarray, " B"]:
    """Rewards of a batch of responses, one call a row.

    A ``BatchReward`` (such as ``MathVerifier``, with its worker processes) is asked for the whole batch at once.

    Args:
      reward: a reward function.
      problems: ``B`` problems; a problem with several samples stands once a sample.
      responses: ``B`` decoded responses.

    Returns:
      ``[B]`` float32 rewards; empty input gives an empty array.

    Raises:
      ValueError: the two lists differ in length, or a reward is not finite.

    Example:
      >>> problem = Problem(prompt="1+2=", reference="3", source="example", index=0)
      >>> score_batch(lambda problem, response: float(response == problem.reference), [problem] * 2, ["3", "4"])
      array([1., 0.], dtype=float32)
    """
    if len(problems) != len(responses):
        raise ValueError(f"{len(problems)} problems but {len(responses)} responses; one response a problem is required")
    values = (
        reward.score_batch(problems, responses)
        if isinstance(reward, BatchReward)
        else [float(reward(problem, response)) for problem, response in zip(problems, responses, strict=True)]
    )
    rewards = np.asarray(values, dtype=np.float32).reshape(len(problems))
    for row, value in enumerate(rewards):
        if not math.isfinite(value):
            raise ValueError(f"the reward of {problems[row].name} (row {row}) is {value}; rewards must be finite")
    return rewards
