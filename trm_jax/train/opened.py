"""The policy of a run's newest checkpoint, to be asked by ``trm_jax.evaluation``."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from trm_jax.checkpoint import Checkpointer, CheckpointError
from trm_jax.data import Tokenizer
from trm_jax.evaluation import EvaluationTask, Policy
from trm_jax.train._structured import structured
from trm_jax.train.config import TrainConfig
from trm_jax.train.experiment import Experiment, open_experiment
from trm_jax.train.records import read_record
from trm_jax.train.state import init_state, make_optimizer, make_schedule
from trm_jax.train.words import ChatTokenizer

__all__ = ["is_run", "open_run", "run_config"]


def is_run(path: str | Path) -> bool:
    """Whether a directory is that of one run (an arm at a seed)."""
    return (Path(path) / "checkpoints").is_dir() and (Path(path) / "config.json").is_file()


def run_config(directory: str | Path) -> TrainConfig:
    """What a run was made with.

    Args:
      directory: as for ``open_run``.

    Raises:
      ValueError: a record that cannot be read.
    """
    config: TrainConfig = structured(read_record(Path(directory) / "config.json"), TrainConfig, "")
    return config


@contextlib.contextmanager
def open_run(directory: str | Path) -> Iterator[tuple[Policy, EvaluationTask | None]]:
    """The policy of a run, and its own held-out problems as a task called ``heldout``; None where it has none.

    Args:
      directory: ``RUN/arms/ARM/seedN``, with ``config.json`` and ``checkpoints``.

    Raises:
      ValueError: a record that cannot be read.
      CheckpointError: there is no good checkpoint.
    """
    root = Path(directory)
    config = run_config(root)
    with open_experiment(config) as experiment:
        step, params, weights = _restore(root, config, experiment.model)
        tokenizer = experiment.tokenizer
        model = nnx.merge(experiment.graphdef, params)
        policy = Policy(
            name=f"{root} (step {step})",
            model=model,
            tokenizer=tokenizer,
            encode=_encoder(config, tokenizer),
            identity={"weights": weights, "system": config.task.system_prompt},
        )
        yield policy, _held_out(experiment) if experiment.test else None


def _held_out(experiment: Experiment) -> EvaluationTask:
    asked = json.dumps([(problem.prompt, problem.reference) for problem in experiment.test])
    return EvaluationTask(
        name="heldout",
        problems=[dataclasses.replace(p, index=i) for i, p in enumerate(experiment.test)],
        reward=experiment.reward,
        prompt_format="question",
        digest=hashlib.sha256(asked.encode()).hexdigest(),
        rendered=True,
    )


def _encoder(config: TrainConfig, tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """A message as the run puts it: in the chat of its pretrained model, or as it is."""
    if not isinstance(tokenizer, ChatTokenizer):
        return tokenizer.encode
    said = config.task.system_prompt
    system = [{"role": "system", "content": said}] if said else []

    def encode(message: str) -> list[int]:
        return list(tokenizer.words.apply_chat_template([*system, {"role": "user", "content": message}]))

    return encode


def _restore(root: Path, config: TrainConfig, model: nnx.Module) -> tuple[int, Any, str]:
    """Step, parameters and digest of the newest good checkpoint."""
    optimizer = make_optimizer(
        config.optimizer, make_schedule(config.optimizer, config.steps * config.loss.minibatches)
    )
    params = nnx.state(model, nnx.Param)
    state = jax.eval_shape(lambda p: init_state(p, optimizer), params)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state)

    def template(saved: dict[str, Any]) -> Any:
        return {"state": abstract, "held": [abstract.params] * len(saved["held_versions"])}

    checkpoints = Checkpointer(root / "checkpoints", keep=config.checkpoint.keep)
    restored = checkpoints.restore_latest(template)
    if restored is None:
        raise CheckpointError(f"{root / 'checkpoints'} holds no checkpoint; has the run made a step?")
    step, arrays, _ = restored
    return step, arrays["state"].params, checkpoints.digest(step)
