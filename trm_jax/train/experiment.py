"""What a configuration stands for: problems, reward, tokenizer and an untrained (or pretrained) policy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from trm_jax.data import (
    MathVerifier,
    Problem,
    ReasoningGymTask,
    RewardFunction,
    Tokenizer,
    drop_long_prompts,
    gsm8k_sample_path,
    held_out,
    read_gsm8k,
    reasoning_gym_task,
    score_batch,
)
from trm_jax.models import ComputeConfig, Transformer, TransformerConfig, find_smollm2, load_smollm2_model, make_mesh
from trm_jax.train.config import ModelConfig, TrainConfig

__all__ = ["Experiment", "check_experiment", "open_experiment"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Attributes:

    train: problems to learn from.
    test: held-out problems; no prompt of ``train`` is among them.
    validation: held-out problems apart from those of ``test``; empty unless the warm start ends by them.
    reward: scores a response's text, in [0, 1].
    tokenizer: text to ids and back.
    model: the policy with its initial weights.
    """

    train: Sequence[Problem]
    test: Sequence[Problem]
    reward: RewardFunction | MathVerifier
    tokenizer: Tokenizer
    model: Transformer
    validation: Sequence[Problem] = ()

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> Any:
        """Rewards ``[N]`` float32 of responses to problems."""
        if isinstance(self.reward, MathVerifier):
            return self.reward.score_batch(problems, responses)
        return score_batch(self.reward, problems, responses)

    @property
    def graphdef(self) -> Any:
        """The model's structure, without weights."""
        return nnx.graphdef(self.model)


def training_compute(config: ModelConfig) -> ComputeConfig:
    """The training side's arithmetic."""
    return ComputeConfig(dtype=config.dtype, batch_invariant=config.batch_invariant)


@contextlib.contextmanager
def open_experiment(config: TrainConfig) -> Iterator[Experiment]:
    """Builds the experiment; worker processes of its verifier live as long as the context.

    Raises:
      ValueError: for anything that cannot work, before any compilation: unknown task, missing or malformed data,
        prompts or answers that cannot fit the lengths, an empty held-out set.
    """
    if config.task.kind == "reasoning_gym":
        yield _generated(config)
        return
    with MathVerifier() as verifier:
        yield _pretrained(config, verifier)


def check_experiment(config: TrainConfig) -> None:
    """What ``open_experiment`` would refuse, without building the policy: devices, data, lengths, held-out problems.

    Raises:
      ValueError: saying what does not fit.
    """
    make_mesh(config.mesh.data, config.mesh.tensor)
    if config.task.kind == "gsm8k":
        _word_problems(config)
        find_smollm2(config.model.path or None)
        return
    task, ways = _task(config), config.mesh.tensor
    _held_out(task, config)
    size = task.tokenizer().vocab_size
    if size % ways:
        raise ValueError(f"mesh.tensor={ways} must divide the {size} token ids of task {config.task.name!r}.")


def _task(config: TrainConfig) -> ReasoningGymTask:
    options = config.task
    task = _named_task(options.name, json.dumps(options.params, sort_keys=True), options.test_permille)
    task.spec.check_lengths(
        max_prompt_length=config.rollout.max_prompt_length, max_response_length=config.rollout.max_response_length
    )
    return task


@functools.lru_cache(maxsize=32)
def _named_task(name: str, params: str, test_permille: int) -> ReasoningGymTask:
    """One task for all arms: its held-out problems are drawn once."""
    try:
        return reasoning_gym_task(name, params=json.loads(params), test_permille=test_permille)
    except ValueError as error:
        raise ValueError(f"task: {error}") from error


def _held_out(task: ReasoningGymTask, config: TrainConfig) -> tuple[Sequence[Problem], Sequence[Problem]]:
    """Test and validation problems."""
    tested, wanted = config.eval.prompts, config.eval.prompts + config.warmstart.validation
    if not wanted:
        return (), ()
    try:
        held = task.test(wanted)
    except ValueError as error:
        raise ValueError(f"eval.prompts={tested} and warmstart.validation_prompts: {error}") from error
    return held[:tested], held[tested:]


def _generated(config: TrainConfig) -> Experiment:
    """A procedurally generated task and a small policy over the task's own characters."""
    options, task = config.task, _task(config)
    tokenizer = task.tokenizer()
    test, validation = _held_out(task, config)
    return Experiment(
        train=task.train(options.train_size),
        test=test,
        validation=validation,
        reward=task,
        tokenizer=tokenizer,
        model=_scratch(config, tokenizer.vocab_size),
    )


def _word_problems(config: TrainConfig) -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems from their files."""
    task = config.task
    every = _read("task.path", task.path or gsm8k_sample_path())
    if task.test_path:
        train, seen = every, {problem.prompt for problem in every}
        test = [problem for problem in _read("task.test_path", task.test_path) if problem.prompt not in seen]
    else:
        test = [p for p in every if held_out(p.prompt, test_permille=task.test_permille)]
        train = [p for p in every if not held_out(p.prompt, test_permille=task.test_permille)]
    if not train:
        raise ValueError(f"task.test_permille={task.test_permille} leaves no problem to train on; lower it.")
    if config.eval.prompts and not test:
        raise ValueError("no held-out problem: give task.test_path, raise task.test_permille, or set eval.prompts=0.")
    wanted = config.eval.prompts + config.warmstart.validation
    if config.warmstart.validation and len(test) < wanted:
        raise ValueError(
            f"warmstart.target_accuracy needs {wanted} held-out problems, eval.prompts + warmstart.validation_prompts; "
            f"there are {len(test)}. Lower warmstart.validation_prompts, or set warmstart.target_accuracy=0."
        )
    return train, test


def _read(key: str, path: str | Path) -> list[Problem]:
    try:
        return read_gsm8k(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}: {error}") from error


def _pretrained(config: TrainConfig, verifier: MathVerifier) -> Experiment:
    """Word problems from a file, asked in the pretrained model's own chat format."""
    task, limit = config.task, config.rollout.max_prompt_length
    train, test = _word_problems(config)
    model, words = load_smollm2_model(config.model.path or None)
    train, test = ([_as_chat(p, words, task.system_prompt) for p in part] for part in (train, test))
    tokenizer = _ChatTokenizer(words)
    if task.drop_long_prompts:
        train, dropped = drop_long_prompts(train, tokenizer, max_prompt_length=limit)
        if test:
            test, also = drop_long_prompts(test, tokenizer, max_prompt_length=limit)
            dropped += also
        if dropped:
            print(f"left out {dropped} problems whose prompt is longer than rollout.max_prompt_length={limit} tokens")
    else:
        _refuse_long_prompts([*train, *test[: config.eval.prompts]], tokenizer, limit)
    tested = config.eval.prompts
    return Experiment(
        train=train,
        test=test[:tested],
        validation=test[tested : tested + config.warmstart.validation],
        reward=verifier,
        tokenizer=tokenizer,
        model=model,
    )


def _refuse_long_prompts(problems: Sequence[Problem], tokenizer: Tokenizer, limit: int) -> None:
    lengths = [len(tokenizer.encode(problem.prompt)) for problem in problems]
    long = [problem.name for problem, length in zip(problems, lengths, strict=True) if length > limit]
    if long:
        raise ValueError(
            f"{len(long)} of {len(problems)} prompts are longer than rollout.max_prompt_length={limit} tokens, first "
            f"{long[0]}; the longest takes {max(lengths)}. Raise the limit, or set task.drop_long_prompts=true."
        )


def _scratch(config: TrainConfig, vocab_size: int) -> Transformer:
    model = config.model
    shape = TransformerConfig(
        vocab_size=vocab_size,
        d_model=model.d_model,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        n_kv_heads=model.n_heads,
        head_dim=model.d_model // model.n_heads,
        d_ff=model.d_ff,
        n_experts=model.n_experts,
        experts_per_token=model.experts_per_token,
    )
    return Transformer(shape, rngs=nnx.Rngs(params=config.seed), param_dtype=jnp.dtype("float32"))


def _as_chat(problem: Problem, tokenizer: Any, system_prompt: str) -> Problem:
    messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": problem.prompt}]
    try:
        return dataclasses.replace(problem, prompt=tokenizer.render_chat(messages, add_generation_prompt=True))
    except ValueError as error:
        raise ValueError(f"{problem.name}: {error}") from error


class _ChatTokenizer:
    """Reads the control tokens of a rendered chat; ``render_chat`` has refused them in its content."""

    def __init__(self, words: Any) -> None:
        self._words = words

    @property
    def vocab_size(self) -> int:
        return int(self._words.vocab_size)

    @property
    def pad_id(self) -> int:
        return int(self._words.pad_id)

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset(self._words.eos_ids)

    def encode(self, text: str) -> list[int]:
        return list(self._words.encode(text, allow_special=True))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._words.decode(ids))
