"""The training state, its shardings, and the optimizer."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from trm_jax.models import param_shardings
from trm_jax.train.config import OptimizerConfig, WarmstartConfig
from trm_jax.train.rounding import in_float32

__all__ = [
    "TrainState",
    "init_state",
    "make_optimizer",
    "make_schedule",
    "on_mesh",
    "state_shardings",
    "warmstart_schedule",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Attributes:

    params: the policy's parameters.
    opt_state: the optimizer's state.
    version: scalar int32, optimizer updates so far: the policy version.
    """

    params: nnx.State[Any, Any]
    opt_state: Any
    version: Int[Array, ""]


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by update: linear warm-up, then constant or cosine to a tenth."""
    if config.decay == "cosine":
        return _warm_cosine(config.learning_rate, config.warmup_steps, steps)
    if config.warmup_steps:
        return optax.linear_schedule(
            config.learning_rate / config.warmup_steps, config.learning_rate, config.warmup_steps
        )
    return optax.constant_schedule(config.learning_rate)


def warmstart_schedule(config: WarmstartConfig) -> optax.Schedule:
    """Linear warm-up, then cosine decay to a tenth."""
    return _warm_cosine(config.learning_rate, config.warmup_steps, config.steps)


def _warm_cosine(peak: float, warmup: int, steps: int) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(
        peak / max(1, warmup), peak, warmup, max(steps, warmup + 1), end_value=peak / 10
    )


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW, in float32 whatever the parameters are; norms and biases are not decayed."""
    inner = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(schedule, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=_decayed),
    )

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return inner.update(in_float32(grads), state, in_float32(params))  # type: ignore[no-any-return]

    return optax.GradientTransformation(lambda params: inner.init(in_float32(params)), update)


def _decayed(params: Any) -> Any:
    def one(variable: nnx.Variable[Any]) -> Any:
        return variable.replace("norm" not in variable.get_metadata("logical_axes"))

    return jax.tree.map(one, params, is_leaf=lambda x: isinstance(x, nnx.Variable))


def init_state(params: nnx.State[Any, Any], optimizer: optax.GradientTransformation) -> TrainState:
    """A state at version 0."""
    return TrainState(params=params, opt_state=optimizer.init(params), version=jnp.zeros((), jnp.int32))


def state_shardings(state: TrainState, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The sharding of every leaf: parameters and their moments by the rules, everything else replicated."""
    replicated = NamedSharding(mesh, PartitionSpec())
    params = param_shardings(state.params, mesh)
    opt_state = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        state.opt_state,
        params,
        transform_non_params=lambda _: replicated,
    )
    return TrainState(params=params, opt_state=opt_state, version=replicated)  # type: ignore[arg-type]


def on_mesh(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """What is compiled inside sees the mesh: a mixture then sorts each device's own tokens by expert."""
    return jax.set_mesh(mesh) if mesh.size > 1 else contextlib.nullcontext()
