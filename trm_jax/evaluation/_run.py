"""Every task asked and judged, a batch at a time, each batch on disk before the next."""

from __future__ import annotations

import contextlib
import functools
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from flax import nnx
from jaxtyping import Array

from trm_jax.data import MathVerifier, Problem, RewardFunction, format_prompt, open_reward, score_batch
from trm_jax.evaluation._answers import KnownIds, read_answers
from trm_jax.evaluation._ledger import Ledger
from trm_jax.evaluation._policy import Policy
from trm_jax.evaluation._results import summarize
from trm_jax.evaluation._settings import EvaluationSettings, EvaluationTask
from trm_jax.report.writers import write_atomically
from trm_jax.rollout import EngineConfig, InProcessEngine, RolloutNumerics, SamplingConfig
from trm_jax.types import PromptBatch

__all__ = ["Progress", "run_evaluation"]

_ROUND = 32  # prompt positions are a multiple: sets of problems of about one length share an engine
_PREFILL = 256  # prompt positions in one prefill call: whenever a slot is free one runs, filled up or not

Progress = Callable[[str, Sequence[dict[str, Any]], int, int, int], None]
"""``progress(task, rows judged, rows in all, answers ended and tokens sampled so far in the batch at work)``."""


def run_evaluation(
    policy: Policy,
    tasks: Sequence[EvaluationTask],
    settings: EvaluationSettings,
    directory: str | Path,
    *,
    resume: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Asks every problem of every task ``settings.samples`` times, and judges the answers.

    ``directory`` gets ``settings.json``, one ``TASK.jsonl`` a task with a line an answer (``index``, ``sample``,
    ``reward``, ``verdict``, ``finished``, ``tokens``, ``seconds``, ``reference``, ``response``), and ``results.json``.
    A process that is killed loses the batch it was working on; ``resume`` asks what is missing, to the same answers,
    because an answer's seed does not depend on what was asked before it. A resumed evaluation may have more problems,
    samples or tasks than before.

    Args:
      policy: what is asked.
      tasks: at least one, each name once.
      settings: how.
      directory: is made.
      resume: go on with what stands in ``directory``.
      progress: called after every chunk of decode steps and after every batch (see ``Progress``).

    Returns:
      What ``results.json`` holds (see ``summarize``).

    Raises:
      ValueError: a directory that holds other answers (or any, without ``resume``); a problem that cannot be put, by
        name; or answers that may outgrow the policy's context.
    """
    root = Path(directory)
    if not tasks or len({task.name for task in tasks}) != len(tasks):
        raise ValueError(f"tasks {[task.name for task in tasks]}: at least one is required, and every name once")
    prompts = {task.name: _encode(policy, task, settings) for task in tasks}
    _check_context(policy, prompts, settings.max_new_tokens)
    root.mkdir(parents=True, exist_ok=True)
    described = _describe(policy, tasks, settings)
    engine = functools.cache(functools.partial(_engine, policy, settings))
    with contextlib.ExitStack() as stack:
        ledgers = {}
        for task in tasks:  # all are locked before one is asked
            ledgers[task.name] = stack.enter_context(Ledger(root / f"{task.name}.jsonl"))
        _check_directory(root, described, any(ledger.rows for ledger in ledgers.values()), resume=resume)
        write_atomically(root / "settings.json", json.dumps(described, indent=1).encode())
        for task in tasks:
            _answer(policy, engine, task, prompts[task.name], settings, ledgers[task.name], progress)
        rows = {task.name: _asked(task, settings, ledgers[task.name]) for task in tasks}
    results = {"checkpoint": policy.name, **described, "tasks": summarize(rows)}
    write_atomically(root / "results.json", json.dumps(results, indent=1).encode())
    return results


def _problems(task: EvaluationTask, settings: EvaluationSettings) -> Sequence[Problem]:
    return task.problems[: settings.limit] if settings.limit else task.problems


def _encode(policy: Policy, task: EvaluationTask, settings: EvaluationSettings) -> dict[int, list[int]]:
    """Prompt ids by problem index."""
    encoded = {}
    for problem in _problems(task, settings):
        try:
            text = format_prompt(problem, task.prompt_format)
            encoded[problem.index] = policy.tokenizer.encode(text) if task.rendered else policy.encode(text)
        except ValueError as error:
            raise ValueError(f"task {task.name}, {problem.name}: {error}") from error
        if not encoded[problem.index]:
            raise ValueError(f"task {task.name}, {problem.name}: its prompt has no tokens")
    return encoded


def _check_context(policy: Policy, prompts: Mapping[str, Mapping[int, Sequence[int]]], new: int) -> None:
    """Beyond the context that it was trained for, a model writes nonsense and says nothing."""
    longest = {name: max(map(len, encoded.values())) for name, encoded in prompts.items()}
    name = max(longest, key=longest.__getitem__)
    if policy.context is not None and longest[name] + new > policy.context:
        raise ValueError(
            f"max_new_tokens={new} after the longest prompt of {name}, {longest[name]} tokens, is beyond the context "
            f"of {policy.name}, {policy.context} tokens; give at most {max(1, policy.context - longest[name])}"
        )


def _describe(policy: Policy, tasks: Sequence[EvaluationTask], settings: EvaluationSettings) -> dict[str, Any]:
    """What must not differ between the parts of one evaluation."""
    sampling = {name: getattr(settings, name) for name in ("temperature", "top_p", "max_new_tokens", "seed", "dtype")}
    return {
        "policy": dict(policy.identity),
        "sampling": {**sampling, "stop": list(settings.stop)},
        "files": {task.name: {"digest": task.digest, "prompt_format": task.prompt_format} for task in tasks},
    }


def _check_directory(root: Path, described: dict[str, Any], answered: bool, *, resume: bool) -> None:
    path = root / "settings.json"
    if not path.exists():
        if answered:
            raise ValueError(
                f"{str(root)!r} holds answers, but not the settings that they were given under ({path.name})"
            )
        return
    if not resume:
        raise ValueError(f"{str(root)!r} already holds an evaluation; continue it with --resume, or choose another")
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        differing = [name for name in ("policy", "sampling") if held[name] != described[name]]
        files = held["files"]
        differing += [name for name, file in described["files"].items() if files.get(name, file) != file]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not the record of an evaluation ({error}); choose another directory") from error
    if differing:
        raise ValueError(
            f"{str(root)!r} holds answers under other settings ({', '.join(differing)} differ; see {path}); give the "
            "same, or choose another directory"
        )
    described["files"] = {**files, **described["files"]}


def _asked(task: EvaluationTask, settings: EvaluationSettings, ledger: Ledger) -> list[dict[str, Any]]:
    keys = ((problem.index, sample) for problem in _problems(task, settings) for sample in range(settings.samples))
    return [ledger.rows[key] for key in keys if key in ledger.rows]


def _answer(
    policy: Policy,
    engine_for: Callable[[int], InProcessEngine],
    task: EvaluationTask,
    prompts: dict[int, list[int]],
    settings: EvaluationSettings,
    ledger: Ledger,
    progress: Progress | None,
) -> None:
    """Whatever the ledger lacks, batch by batch."""
    pending = [
        (problem, sample)
        for problem in _problems(task, settings)
        for sample in range(settings.samples)
        if (problem.index, sample) not in ledger.rows
    ]
    total = len(_problems(task, settings)) * settings.samples

    judged_rows = _asked(task, settings, ledger)

    def report(ended: int = 0, tokens: int = 0) -> None:
        if progress is not None:
            progress(task.name, judged_rows, total, ended, tokens)

    def decoding(ended: int, tokens: int) -> None:
        if tokens:
            report(ended, tokens)

    report()
    if not pending:
        return
    length = -(-max(map(len, prompts.values())) // _ROUND) * _ROUND
    engine = engine_for(length)
    calls = -(-len(pending) // settings.rows)
    size = -(-len(pending) // calls)  # about equal: another number is another program
    with _reward(task) as reward:
        for start in range(0, len(pending), size):
            batch = pending[start : start + size]
            began = time.perf_counter()
            problems = [problem for problem, _ in batch]
            rollout = engine.generate(_batch(policy, task, prompts, batch, length, settings.seed), on_progress=decoding)
            answers = read_answers(rollout, policy.tokenizer, stop=settings.stop)
            seconds = (time.perf_counter() - began) / len(batch)
            judged = _judge(reward, problems, [answer.text for answer in answers])
            ledger.append(
                [
                    {
                        "index": problem.index,
                        "sample": sample,
                        "reward": value,
                        "verdict": verdict,
                        "finished": answer.finished,
                        "tokens": answer.tokens,
                        "seconds": round(seconds, 4),
                        "reference": problem.reference,
                        "response": answer.text,
                    }
                    for (problem, sample), answer, (value, verdict) in zip(batch, answers, judged, strict=True)
                ]
            )
            judged_rows = _asked(task, settings, ledger)
            report()


def _judge(reward: RewardFunction, problems: Sequence[Problem], texts: Sequence[str]) -> list[tuple[float, str]]:
    """Rewards, and how they came about."""
    if isinstance(reward, MathVerifier):
        return [(float(verdict.correct), verdict.status) for verdict in reward.judge(problems, texts)]
    return [(float(value), "scored") for value in score_batch(reward, problems, texts)]


@contextlib.contextmanager
def _reward(task: EvaluationTask) -> Iterator[RewardFunction]:
    if isinstance(task.reward, str):
        with open_reward(task.reward) as reward:
            yield reward
    else:
        yield task.reward


def _engine(policy: Policy, settings: EvaluationSettings, length: int) -> InProcessEngine:
    greedy = settings.temperature == 0
    engine = InProcessEngine(
        policy.model,
        EngineConfig(
            slots=settings.slots,
            max_prompt_length=length,
            max_response_length=settings.max_new_tokens,
            prefill_rows=min(settings.slots, max(1, _PREFILL // length)),
        ),
        numerics=RolloutNumerics(dtype=settings.dtype),
        sampling=SamplingConfig(
            temperature=1.0 if greedy else settings.temperature,
            top_p=settings.top_p,
            greedy=greedy,
            stop=tuple(settings.stop),
        ),
        eos_ids=policy.tokenizer.eos_ids,
        record_hidden=False,
        record_support=False,
        tokenizer=KnownIds(policy.tokenizer),
    )
    engine.update_weights(0, nnx.state(policy.model, nnx.Param))
    return engine


def _batch(
    policy: Policy,
    task: EvaluationTask,
    prompts: dict[int, list[int]],
    batch: Sequence[tuple[Problem, int]],
    length: int,
    seed: int,
) -> PromptBatch:
    tokens = np.full((len(batch), length), policy.tokenizer.pad_id, np.int32)
    mask = np.zeros((len(batch), length), np.bool_)
    seeds = np.zeros(len(batch), np.uint32)
    for row, (problem, sample) in enumerate(batch):
        ids = prompts[problem.index]
        tokens[row, : len(ids)] = ids
        mask[row, : len(ids)] = True
        entropy = (seed, zlib.crc32(task.name.encode()), problem.index, sample)
        seeds[row] = np.random.SeedSequence(entropy).generate_state(1)[0]
    groups = np.asarray([problem.index for problem, _ in batch], np.int32)
    return PromptBatch(
        tokens=cast(Array, tokens), mask=cast(Array, mask), group_ids=cast(Array, groups), seeds=cast(Array, seeds)
    )
