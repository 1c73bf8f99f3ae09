"""Endless, seeded, resumable streams of problems and of supervised batches, on Grain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from jaxtyping import Bool, Int32

from trm_jax.data._corruption import corrupt_demonstration
from trm_jax.data._extras import import_extra
from trm_jax.data._problem import Problem
from trm_jax.data._tokenizer import Tokenizer

__all__ = ["Stream", "SupervisedBatch", "drop_long_prompts", "prompt_stream", "supervised_stream"]

Item = TypeVar("Item")
_ENDLESS = 2**50


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedBatch:
    """Prompts with their demonstrations, for next-token training on the demonstrations.

    Attributes:
      tokens: ``[B, S]`` int32; prompt, demonstration, end-of-sequence, then padding.
      loss_mask: ``[B, S]`` bool, True on the tokens to be predicted: demonstration and end-of-sequence. Position ``s``
        is predicted from position ``s - 1``, and position 0 is never True.
    """

    tokens: Int32[np.ndarray, "B S"]
    loss_mask: Bool[np.ndarray, "B S"]


class Stream(Generic[Item]):
    """An endless iterator whose place can be saved and found again.

    The order is global: with ``n`` processes, step ``t`` of all processes together holds the same problems as step
    ``t`` of a single process, so a run may resume on another number of processes.
    """

    def __init__(self, iterator: Any, identity: dict[str, int]) -> None:
        self._iterator = iterator
        self._identity = identity

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        item: Item = next(self._iterator)
        return item

    def get_state(self) -> dict[str, int]:
        """The place of the next batch, as a JSON-able dict: ``next_index`` (the step) and what fixes the order."""
        return {**self._identity, "next_index": int(self._iterator.get_state()["next_index"])}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes to a saved place; the next batch is the one that was next when the state was taken.

        Args:
          state: what ``get_state`` of a stream over the same problems gave.

        Raises:
          ValueError: the state belongs to a stream with another seed, size or batch size.
        """
        expected = {*self._identity, "next_index"}
        if set(state) != expected:
            raise ValueError(f"state has keys {sorted(state)}; a state of this stream has {sorted(expected)}")
        for key, value in self._identity.items():
            if state[key] != value:
                raise ValueError(
                    f"state was taken from a stream with {key}={state[key]}, this one has {key}={value}; "
                    "build the stream with the saved run's settings to resume it"
                )
        self._iterator.set_state({"next_index": int(state["next_index"])})


def prompt_stream(
    problems: Sequence[Problem],
    *,
    prompts_per_step: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> Stream[list[Problem]]:
    """Endless batches of problems: every epoch a new seeded permutation, batches running across its end.

    Args:
      problems: any sequence, lazy ones included; an item is made when its batch is.
      prompts_per_step: problems a step over all processes, a multiple of ``process_count``.
      seed: fixes the order, in [0, 2^32).
      process_index: this process, in [0, process_count).
      process_count: processes that share each step.

    Returns:
      A stream of lists of ``prompts_per_step / process_count`` problems.

    Raises:
      ValueError: no problems, or a number out of its range.
      ImportError: Grain is not installed.

    Example:
      >>> problems = [Problem(prompt=f"{i}=", reference=str(i), source="example", index=i) for i in range(5)]
      >>> stream = prompt_stream(problems, prompts_per_step=2, seed=0)
      >>> first = next(stream)
      >>> state, second = stream.get_state(), next(stream)
      >>> stream.set_state(state)
      >>> next(stream) == second
      True
    """

    def collect(batch: Sequence[Problem]) -> list[Problem]:
        return list(batch)

    return _stream(problems, None, collect, prompts_per_step, seed, process_index, process_count, "prompts_per_step")


def supervised_stream(
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    sequence_length: int,
    seed: int,
    corruption_probability: float = 0.0,
    process_index: int = 0,
    process_count: int = 1,
) -> Stream[SupervisedBatch]:
    """Endless batches of ``prompt + demonstration + end``, padded on the right to one length.

    A demonstration is corrupted afresh each time it is seen (see ``corrupt_demonstration``), by a generator derived
    from ``seed`` and the place in the global stream, so that a resumed run sees the same errors.

    Args:
      problems: problems that have demonstrations.
      tokenizer: makes the ids; the smallest of its ``eos_ids`` ends each row.
      batch_size: rows a step over all processes, a multiple of ``process_count``.
      sequence_length: ``S``, in tokens.
      seed: fixes order and errors, in [0, 2^32).
      corruption_probability: chance of an error at each place that can hold one, in [0, 1].
      process_index: this process, in [0, process_count).
      process_count: processes that share each step.

    Returns:
      A stream of ``SupervisedBatch`` with ``batch_size / process_count`` rows.

    Raises:
      ValueError: no problems, or a number out of its range; later, from ``next``: a problem without a demonstration,
        or one that does not fit into ``sequence_length``, by name.
      ImportError: Grain is not installed.

    Example:
      >>> from trm_jax.data import CharTokenizer
      >>> problem = Problem(prompt="1+2=", reference="3", demonstration="3", source="example", index=0)
      >>> stream = supervised_stream([problem], CharTokenizer("0123+="), batch_size=1, sequence_length=7, seed=0)
      >>> batch = next(stream)
      >>> batch.tokens[0].tolist(), batch.loss_mask[0].astype(int).tolist()
      ([1, 4, 2, 5, 3, 6, 7], [0, 0, 0, 0, 1, 1, 0])
    """
    if not 0.0 <= corruption_probability <= 1.0:
        raise ValueError(f"corruption_probability must be in [0, 1], got {corruption_probability}")
    if sequence_length < 2:
        raise ValueError(f"sequence_length must be at least 2, got {sequence_length}")
    end = min(tokenizer.eos_ids)

    def tokenize(place: int, problem: Problem) -> tuple[list[int], int]:
        text = problem.demonstration
        if text is None:
            raise ValueError(f"problem {problem.name} has no demonstration; supervised training needs one a problem")
        if corruption_probability > 0.0:
            text = corrupt_demonstration(problem, np.random.default_rng([seed, place]), corruption_probability)
        prompt = tokenizer.encode(problem.prompt)
        ids = [*prompt, *tokenizer.encode(text), end]
        if len(ids) > sequence_length:
            raise ValueError(
                f"problem {problem.name} takes {len(ids)} tokens with its demonstration, more than "
                f"sequence_length={sequence_length}; raise sequence_length or leave the problem out"
            )
        return ids, len(prompt)

    def collate(rows: Sequence[tuple[list[int], int]]) -> SupervisedBatch:
        tokens = np.full((len(rows), sequence_length), tokenizer.pad_id, np.int32)
        loss_mask = np.zeros((len(rows), sequence_length), np.bool_)
        for row, (ids, prompt_length) in enumerate(rows):
            tokens[row, : len(ids)] = ids
            loss_mask[row, prompt_length : len(ids)] = True
        return SupervisedBatch(tokens=tokens, loss_mask=loss_mask)

    return _stream(problems, tokenize, collate, batch_size, seed, process_index, process_count, "batch_size")


def drop_long_prompts(
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int,
    max_response_length: int | None = None,
) -> tuple[list[Problem], int]:
    """The problems that fit, and how many do not.

    Args:
      problems: all problems; each is made and tokenised once.
      tokenizer: counts the tokens.
      max_prompt_length: the limit for prompts, in tokens.
      max_response_length: the limit for demonstrations with their end-of-sequence token, in tokens; None for no limit.

    Returns:
      The fitting problems in their order, and the number left out.

    Raises:
      ValueError: nothing fits.

    Example:
      >>> from trm_jax.data import CharTokenizer
      >>> problems = [Problem(prompt=p, reference="", source="example", index=0) for p in ("1", "111")]
      >>> kept, dropped = drop_long_prompts(problems, CharTokenizer("1"), max_prompt_length=2)
      >>> len(kept), dropped
      (1, 1)
    """

    def fits(problem: Problem) -> bool:
        if len(tokenizer.encode(problem.prompt)) > max_prompt_length:
            return False
        if max_response_length is None or problem.demonstration is None:
            return True
        return len(tokenizer.encode(problem.demonstration)) + 1 <= max_response_length

    kept = [problem for problem in problems if fits(problem)]
    if not kept:
        raise ValueError(
            f"none of {len(problems)} problems fits into max_prompt_length={max_prompt_length} and "
            f"max_response_length={max_response_length} tokens"
        )
    return kept, len(problems) - len(kept)


def _stream(
    problems: Sequence[Problem],
    transform: Callable[[int, Problem], Any] | None,
    collate: Callable[[Sequence[Any]], Item],
    batch_size: int,
    seed: int,
    process_index: int,
    process_count: int,
    size_name: str,
) -> Stream[Item]:
    if len(problems) == 0:
        raise ValueError("there are no problems to stream; the sequence is empty")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index={process_index} must be in [0, process_count={process_count})")
    if batch_size <= 0 or batch_size % process_count:
        raise ValueError(
            f"{size_name}={batch_size} must be a positive multiple of process_count={process_count}, so that each "
            "process takes an equal share of a step"
        )
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} must be in [0, 2^32)")
    grain = import_extra("grain", extra="train", purpose="a data stream")
    # Shuffled, repeated and numbered before it is shared out: the global order does not depend on process_count.
    # Grain's own endless repeat has 2^63 - 1 items, which its batching rounds up past the largest length there is.
    epochs = _ENDLESS // len(problems)
    dataset = grain.MapDataset.source(problems).seed(seed).shuffle().repeat(epochs)
    if transform is not None:
        dataset = dataset.map_with_index(transform)
    dataset = dataset[process_index::process_count].batch(batch_size // process_count, batch_fn=collate)
    iterator = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
    return Stream(iterator, {"problems": len(problems), size_name: batch_size, "seed": seed})
