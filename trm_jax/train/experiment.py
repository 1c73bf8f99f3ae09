"""What a configuration stands for: problems, reward, tokenizer and an untrained (or pretrained) policy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from flax import nnx

from trm_jax.data import (
    BENCHMARKS,
    Problem,
    ReasoningGymTask,
    RewardFunction,
    Tokenizer,
    open_reward,
    reasoning_gym_task,
    score_batch,
)
from trm_jax.models import Transformer, make_mesh
from trm_jax.train.config import TrainConfig
from trm_jax.train.engines import check_engine
from trm_jax.train.policy import check_policy, pretrained_policy, pretrained_shape, pretrained_tokenizer, random_policy
from trm_jax.train.words import ChatTokenizer, chat_problems, word_problems

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
    reward: RewardFunction
    tokenizer: Tokenizer
    model: Transformer
    validation: Sequence[Problem] = ()

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> Any:
        """Rewards ``[N]`` float32 of responses to problems."""
        return score_batch(self.reward, problems, responses)

    @property
    def graphdef(self) -> Any:
        """The model's structure, without weights."""
        return nnx.graphdef(self.model)


@contextlib.contextmanager
def open_experiment(config: TrainConfig) -> Iterator[Experiment]:
    """Builds the experiment; worker processes of its verifier live as long as the context.

    Raises:
      ValueError: for anything that cannot work, before any compilation: unknown task, missing or malformed data,
        prompts or answers that cannot fit the lengths, an empty held-out set.
    """
    if not config.task.in_words:
        yield _generated(config)
        return
    with open_reward(BENCHMARKS[config.task.kind].reward) as reward:
        yield _pretrained(config, reward)


def check_experiment(config: TrainConfig) -> None:
    """What ``open_experiment`` would refuse, without building the policy: devices, data, lengths, held-out problems.

    The server at ``rollout.address``, if there is one, is compared too.

    Raises:
      ImportError: the engine that the run asks for is not installed.
      ValueError: saying what does not fit.
      SamplingError: there is no server at the address.
    """
    make_mesh(config.mesh.data, config.mesh.tensor)
    if config.task.in_words:
        problems, shape = word_problems(config), pretrained_shape(config.model.path)
        check_policy(config, shape)
        words = pretrained_tokenizer(config.model.path)
        chat_problems(config, words, problems, note=lambda _: None)
        check_engine(config.rollout, shape, words.eos_ids, record_routes=config.model.replay_routes)
        return
    task, ways = _task(config), config.mesh.tensor
    _held_out(task, config)
    size = task.tokenizer().vocab_size
    if size % ways:
        raise ValueError(f"mesh.tensor={ways} must divide the {size} token ids of task {config.task.name!r}.")
    shape = config.model.scratch(size)
    check_policy(config, shape)
    check_engine(config.rollout, shape, task.tokenizer().eos_ids, record_routes=config.model.replay_routes)


def _task(config: TrainConfig) -> ReasoningGymTask:
    options = config.task
    task = _named_task(options.name, json.dumps(options.params, sort_keys=True), options.test_permille)
    task.spec.check_lengths(
        max_prompt_length=config.rollout.max_prompt_length, max_response_length=config.rollout.max_response_length
    )
    if config.warmstart.steps and task.train(1)[0].demonstration is None:
        raise ValueError(
            f"warmstart.steps={config.warmstart.steps}: problems of task {options.name!r} come without an answer to "
            "learn from; set warmstart.steps=0."
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
        model=random_policy(config, tokenizer.vocab_size),
    )


def _pretrained(config: TrainConfig, reward: RewardFunction) -> Experiment:
    """Word problems and the pretrained policy."""
    words = pretrained_tokenizer(config.model.path)
    train, test = chat_problems(config, words)
    model = pretrained_policy(config)
    tested = config.eval.prompts
    return Experiment(
        train=train,
        test=test[:tested],
        validation=test[tested : tested + config.warmstart.validation],
        reward=reward,
        tokenizer=ChatTokenizer(words, vocab_size=model.config.vocab_size),
        model=model,
    )
