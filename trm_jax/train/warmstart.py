"""Supervised training on (partly wrong) demonstrations, so that RL starts from a policy that sometimes succeeds."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from trm_jax import ops
from trm_jax.checkpoint import Checkpointer
from trm_jax.data import supervised_stream
from trm_jax.models import ComputeConfig, Transformer
from trm_jax.rescore import operator_layout
from trm_jax.train.config import ModelConfig, TrainConfig
from trm_jax.train.evaluate import Evaluator
from trm_jax.train.evidence import NonFiniteError, write_evidence
from trm_jax.train.experiment import Experiment
from trm_jax.train.rounding import apply_updates, in_float32
from trm_jax.train.state import TrainState, init_state, make_optimizer, on_mesh, state_shardings, warmstart_schedule

__all__ = ["warm_start", "warmstart_directory"]


def warmstart_directory(root: Path, config: TrainConfig) -> Path:
    """Where the warm start of this configuration lives; arms that share it share the directory."""
    model = dataclasses.replace(config.model, batch_invariant=False, replay_routes=False, remat="none")
    optimizer = dataclasses.replace(config.optimizer, learning_rate=1.0, warmup_steps=0, decay="constant")  # its own
    lengths = (config.rollout.max_prompt_length, config.rollout.max_response_length)
    parts = [dataclasses.asdict(x) for x in (config.task, model, config.warmstart, optimizer, config.mesh)]
    if config.warmstart.validation:  # its end depends on which prompts decide it, and how they are sampled
        parts.append(dataclasses.asdict(config.eval))
    digest = hashlib.sha256(json.dumps([parts, lengths, config.seed], sort_keys=True).encode()).hexdigest()
    return root / "warmstart" / f"seed{config.seed}-{digest[:10]}"


def warm_start(
    experiment: Experiment,
    config: TrainConfig,
    directory: Path,
    mesh: Mesh,
    *,
    on_step: Callable[[int, dict[str, float | str]], None],
    should_stop: Callable[[], bool] = lambda: False,
    note: Callable[[str], None] = print,
) -> nnx.State[Any, Any] | None:
    """Trains the initial policy, or takes it from ``directory`` when it is there.

    Args:
      experiment: problems with demonstrations, and the model.
      config: ``config.warmstart`` says how long, or how well.
      directory: its checkpoints; an interrupted warm start continues from the newest.
      mesh: devices.
      on_step: called with step and metrics.
      should_stop: asked after every step; True saves a checkpoint and ends early.
      note: called with sentences worth reading, such as that a checkpoint is damaged.

    Returns:
      The parameters, or None when it was stopped before the end.

    Raises:
      NonFiniteError: loss or gradient was not finite.
      CheckpointError: a checkpoint could not be written, or none that is there can be read.
    """
    with on_mesh(mesh):
        return _warm_start(experiment, config, directory, mesh, on_step, should_stop, note)


def _warm_start(
    experiment: Experiment,
    config: TrainConfig,
    directory: Path,
    mesh: Mesh,
    on_step: Callable[[int, dict[str, float | str]], None],
    should_stop: Callable[[], bool],
    note: Callable[[str], None],
) -> nnx.State[Any, Any] | None:
    options = config.warmstart
    graphdef, params = nnx.split(experiment.model)
    schedule = warmstart_schedule(options)
    optimizer = make_optimizer(config.optimizer, schedule)
    state = init_state(jax.tree.map(jnp.copy, params), optimizer)  # the update donates it
    shardings = state_shardings(state, optimizer, mesh)
    state = jax.device_put(state, shardings)
    stream = supervised_stream(
        experiment.train,
        experiment.tokenizer,
        batch_size=options.batch_size,
        sequence_length=config.rollout.max_prompt_length + config.rollout.max_response_length,
        seed=config.seed,
        corruption_probability=options.corruption,
    )
    checkpoints = Checkpointer(directory / "checkpoints", report=note)
    restored = checkpoints.restore_latest(lambda _: state)
    first, ended = 0, False
    if restored is not None:
        first, state, saved = restored
        ended = saved["ended"]
        stream.set_state(saved["stream"])
    validator = _validator(experiment, config) if options.validation and not ended else None
    step_fn = jax.jit(_make_step(graphdef, optimizer, config.model), donate_argnums=0, out_shardings=(shardings, None))
    for step in () if ended else range(first, options.steps):
        began = time.perf_counter()
        batch = next(stream)
        state, (loss, norm) = step_fn(state, batch.tokens, batch.loss_mask)
        record: dict[str, float | str] = {"step": step + 1, "version": step + 1, "stage": "warmstart"}
        record |= {"optim/loss": float(loss), "optim/grad_norm": float(norm)}
        if not (math.isfinite(float(loss)) and math.isfinite(float(norm))):
            evidence = write_evidence(directory / f"nonfinite_step{step + 1:08d}.npz", dataclasses.asdict(batch))
            raise NonFiniteError(
                f"warm start, step {step + 1}: loss {float(loss)} with gradient norm {float(norm)}. {evidence} Lower "
                "warmstart.learning_rate, and start again in another directory (directory=PATH)."
            )
        record |= {"optim/learning_rate": float(schedule(step))}
        record |= {"time/tokens_per_s": float(batch.loss_mask.sum() / (time.perf_counter() - began))}
        ended = step + 1 == options.steps
        if validator is not None and (ended or (step + 1) % options.check_every == 0):
            reached = record["accuracy/validation"] = validator(state.params)
            if ended and reached < options.target_accuracy:
                note(f"the warm start ends at accuracy {reached:.3f}, below warmstart.target_accuracy.")
            ended |= reached >= options.target_accuracy
        on_step(step + 1, record)
        stopped = should_stop()
        if ended or stopped or (step + 1) % (5 * config.checkpoint.every) == 0:
            checkpoints.save(step + 1, state, {"stream": stream.get_state(), "ended": ended})
        if ended:
            break
        if stopped:
            return None
    final: nnx.State[Any, Any] = state.params
    return final


def _validator(experiment: Experiment, config: TrainConfig) -> Evaluator:
    """In the warm start's own arithmetic, whichever arm runs it."""
    model = dataclasses.replace(config.model, batch_invariant=False, dtype="float32")
    return Evaluator(experiment, experiment.validation, dataclasses.replace(config, model=model))


def _make_step(
    graphdef: Any, optimizer: optax.GradientTransformation, config: ModelConfig
) -> Callable[[TrainState, Array, Array], tuple[TrainState, tuple[Array, Array]]]:
    compute = ComputeConfig(experts=config.experts)

    def loss_fn(params: nnx.State[Any, Any], tokens: Array, mask: Array) -> Array:
        model: Transformer = nnx.merge(graphdef, params)
        hidden = model(tokens, compute=compute, remat=config.remat).hidden[:, :-1]
        flat = hidden.reshape(-1, hidden.shape[-1])
        out = ops.linear_logps(flat, model.head(), tokens[:, 1:].reshape(-1), **operator_layout())
        logps = out.logps.reshape(hidden.shape[:2])
        target = mask[:, 1:]
        return -jnp.sum(jnp.where(target, logps, 0.0)) / jnp.sum(target)

    def step(state: TrainState, tokens: Array, mask: Array) -> tuple[TrainState, tuple[Array, Array]]:
        loss, grads = in_float32(jax.value_and_grad(loss_fn)(state.params, tokens, mask))
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        moved = TrainState(apply_updates(state.params, updates, state.version), opt_state, state.version + 1)
        return moved, (loss, optax.tree.norm(grads))

    return step
