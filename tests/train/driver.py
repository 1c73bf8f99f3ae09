"""A toy experiment, and a program that runs ``trm-jax train`` on it, with a kill built in where a test asks for one.

The toy stands in for a real task because a test needs seconds: one digit is asked, and an even digit is rewarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trm_jax import checkpoint, cli, train
from trm_jax.data import CharTokenizer, Problem
from trm_jax.report import JsonlWriter
from trm_jax.train import arms
from trm_jax.train.config import TrainConfig
from trm_jax.train.experiment import Experiment
from trm_jax.train.policy import random_policy

ALPHABET = "0123456789+="  # 12 characters, pad and end: a vocabulary of 14, which two devices can share


def problems(first: int, last: int) -> list[Problem]:
    return [
        Problem(prompt=f"{i}+{i % 7}=", reference=str(i), demonstration=str(2 * i % 10), source="toy", index=i)
        for i in range(first, last)
    ]


def even_digit(problem: Problem, response: str) -> float:
    return float(response[:1] in ("0", "2", "4", "6", "8"))


def toy_experiment(config: TrainConfig, reward: Any = even_digit) -> Experiment:
    tokenizer = CharTokenizer(ALPHABET)
    return Experiment(
        train=problems(0, 8),
        test=problems(8, 10)[: config.eval.prompts],
        reward=reward,
        tokenizer=tokenizer,
        model=random_policy(config, tokenizer.vocab_size),
    )


def tiny(directory: str) -> dict[str, Any]:
    """A configuration of seconds, as a file would hold it."""
    return {
        "directory": directory,
        "steps": 5,
        "model": {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 16},
        "correction": {"preset": "none"},
        "warmstart": {"steps": 4, "batch_size": 4, "warmup_steps": 1},
        "rollout": {
            "prompts_per_step": 2,
            "samples_per_prompt": 4,
            "max_prompt_length": 4,
            "max_response_length": 3,
            "slots": 8,
            "prefill_rows": 2,
            "decode_chunk": 3,
            "lag": 2,
        },
        "loss": {"minibatches": 2},
        "optimizer": {"learning_rate": 1e-2},
        "eval": {"prompts": 2, "every": 2},
        "checkpoint": {"every": 2},
    }


@contextlib.contextmanager
def _open_toy(config: TrainConfig) -> Iterator[Experiment]:
    yield toy_experiment(config)


def _kill_in_save(step: str) -> None:
    """SIGKILL when the arrays of that step are on disk and its manifest is not."""
    make = checkpoint._manifest

    def manifest(path: Path) -> Any:
        if path.name == f"step_{int(step):08d}.partial" and "arms" in path.parts:
            os.kill(os.getpid(), signal.SIGKILL)
        return make(path)

    checkpoint._manifest = manifest


def _signal_after(where: str) -> None:
    """``SIGINT@arms@3``: that signal as soon as the row of step 3 of a run under ``arms/`` is written."""
    name, stage, step = where.split("@")
    write = JsonlWriter.write

    def write_and_signal(self: JsonlWriter, at: int, metrics: Any) -> None:
        write(self, at, metrics)
        if at == int(step) and stage in self._path.parts:
            os.kill(os.getpid(), signal.Signals[name])

    JsonlWriter.write = write_and_signal


def _at_every_reply(act: Callable[[int], Any]) -> None:
    """Has a server await ``act(n)`` before its ``n``-th reply to a request for samples; each holds one sample."""
    from trm_jax.integrations.jetstream import _service

    decode, count = _service.RolloutService.decode, itertools.count(1)

    async def decode_and_act(self: Any, message: Any, context: Any) -> Any:
        async for reply in decode(self, message, context):
            await act(next(count))
            yield reply

    _service.RolloutService.decode = decode_and_act


def _kill_before_reply(which: str) -> None:
    """SIGKILL of a server before that reply."""

    async def act(n: int) -> None:
        if n == int(which):
            os.kill(os.getpid(), signal.SIGKILL)

    _at_every_reply(act)


def _delay_replies(seconds: str) -> None:
    """A slow server."""

    async def act(n: int) -> None:
        await asyncio.sleep(float(seconds) * (n % 3))

    _at_every_reply(act)


OPTIONS = {
    "--kill-in-save": _kill_in_save,
    "--signal": _signal_after,
    "--kill-before-reply": _kill_before_reply,
    "--delay-replies": _delay_replies,
}


def main(argv: list[str]) -> int:
    """``driver.py [OPTION=VALUE]... ARGUMENTS...``, the rest as ``trm-jax`` has it."""
    train.open_experiment = _open_toy
    arms.open_experiment = _open_toy
    arms.check_experiment = lambda config: None
    arms.write_report = lambda root: root / "report.html"
    rest = []
    for text in argv:
        option, _, value = text.partition("=")
        if option in OPTIONS:
            OPTIONS[option](value)
        else:
            rest.append(text)
    return cli.main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
