"""Two tiny models, and rollouts whose records are computed in float64 from full logits of the second."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.models import ComputeConfig, Transformer, TransformerConfig
from trm_jax.rescore import rescore
from trm_jax.types import RolloutBatch

VOCAB, PROMPT, RESPONSE = 12, 4, 5

# Compiling is nearly all the time of these tests; where no bits are compared across programs, less optimisation by the
# compiler halves it.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
quick_jit = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)


@functools.cache
def make_model(seed: int = 0, n_experts: int = 0) -> Transformer:
    """Seed 0 trains; seed ``s`` is 0 with its weights moved by 10%, a policy nearby."""
    config = TransformerConfig(
        vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=32, n_experts=n_experts
    )
    model: Transformer = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model, nnx.Param)
    base, moved = np.random.default_rng(0), np.random.default_rng(seed)

    def fill(variable: nnx.Variable[Any]) -> nnx.Variable[Any]:
        value = variable.get_value()
        noise = base.standard_normal(value.shape)
        if seed:
            noise = noise + 0.1 * moved.standard_normal(value.shape)
        is_norm = "norm" in variable.get_metadata("logical_axes")
        filled = 1.0 + 0.1 * noise if is_norm else 1.2 * noise / np.sqrt(value.shape[-2])
        return variable.replace(jnp.asarray(filled, jnp.float32))

    filled: Transformer = nnx.merge(graphdef, jax.tree.map(fill, params, is_leaf=lambda x: isinstance(x, nnx.Variable)))
    return filled


@functools.partial(quick_jit, static_argnames="graphdef")
def _forward(graphdef: Any, params: Any, tokens: Any) -> Any:
    return nnx.merge(graphdef, params)(tokens).hidden


def hidden_of(model: Transformer, prompts: np.ndarray, lengths: np.ndarray, responses: np.ndarray) -> np.ndarray:
    """States ``[B, T, D]`` behind each response token, from one row a sequence without padding in between."""
    rows = np.zeros((len(prompts), prompts.shape[1] + responses.shape[1]), np.int32)
    for b, n in enumerate(lengths):
        rows[b, : n + responses.shape[1]] = np.concatenate([prompts[b, :n], responses[b]])
    hidden = np.asarray(_forward(*nnx.split(model, nnx.Param), rows))
    return hidden[np.arange(len(rows))[:, None], lengths[:, None] - 1 + np.arange(responses.shape[1])]


def log_softmax64(hidden: Any, head: Any, temperature: float, kept: np.ndarray | None = None) -> np.ndarray:
    """Log-probs of the vocabulary in float64, within the kept tokens."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / temperature
    if kept is not None:
        logits = np.where(kept, logits, -np.inf)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@dataclasses.dataclass(frozen=True)
class Case:
    """A rollout and the float64 log-probs ``[B, T, V]`` of both policies behind it."""

    rollout: RolloutBatch
    rollout_head: jax.Array
    policy: np.ndarray
    sampler: np.ndarray
    kept: np.ndarray | None

    @property
    def mask(self) -> np.ndarray:
        return np.asarray(self.rollout.response_mask)

    def at_tokens(self, logps: np.ndarray) -> np.ndarray:
        """``[B, T, V]`` at the sampled tokens, valid slots only."""
        return np.take_along_axis(logps, np.asarray(self.rollout.response_tokens)[..., None], -1)[..., 0][self.mask]


@functools.cache
def make_case(*, rows: int = 4, temperature: float = 1.0, truncated: bool = False, sampler: int = 1) -> Case:
    """Responses of model ``sampler``; token 0, which also pads, is among the sampled ones."""
    rng = np.random.default_rng(7)
    prompts = rng.integers(0, VOCAB, (rows, PROMPT))
    lengths = rng.integers(1, PROMPT + 1, rows)
    responses = rng.integers(0, VOCAB, (rows, RESPONSE))
    response_lengths = rng.integers(1, RESPONSE + 1, rows)
    response_lengths[0], responses[0] = RESPONSE, [0, 3, 0, 0, 5]
    mask = np.arange(RESPONSE) < response_lengths[:, None]
    kept = None
    if truncated:
        kept = rng.random((rows, RESPONSE, VOCAB)) < 0.5
        np.put_along_axis(kept, responses[..., None], True, axis=-1)
    model, trainer = make_model(sampler), make_model()
    hidden = hidden_of(model, prompts, lengths, responses)
    sampled = log_softmax64(hidden, model.head(), temperature, kept)
    policy = log_softmax64(hidden_of(trainer, prompts, lengths, responses), trainer.head(), temperature, kept)
    recorded = np.take_along_axis(sampled, responses[..., None], -1)[..., 0]
    rollout = RolloutBatch(
        prompt_tokens=jnp.asarray(prompts, jnp.int32),
        prompt_mask=jnp.asarray(np.arange(PROMPT) < lengths[:, None]),
        response_tokens=jnp.asarray(np.where(mask, responses, 0), jnp.int32),
        response_mask=jnp.asarray(mask),
        rollout_logps=jnp.asarray(np.where(mask, recorded, 0), jnp.float32),
        versions=jnp.zeros((rows, RESPONSE), jnp.int32),
        finished=jnp.zeros((rows,), bool),
        group_ids=jnp.arange(rows, dtype=jnp.int32),
        hidden=jnp.asarray(np.where(mask[..., None], hidden, 0), jnp.float32),
        support=None if kept is None else jnp.packbits(jnp.asarray(kept & mask[..., None]), axis=-1, bitorder="little"),
        temperature=temperature,
        top_p=0.9 if truncated else 1.0,
    )
    return Case(rollout, model.head(), policy, sampled, kept)


@functools.partial(quick_jit, static_argnames=("graphdef", "compute", "microbatches"))
def compiled_rescore(
    graphdef: Any, params: Any, rollout: Any, head: Any, compute: ComputeConfig, microbatches: int = 1
) -> Any:
    return rescore(graphdef, params, rollout, head, compute=compute, microbatches=microbatches)


@dataclasses.dataclass(frozen=True)
class Tools:
    """The functions above, for tests."""

    model: Callable[..., Transformer] = make_model
    case: Callable[..., Case] = make_case
    rescore: Callable[..., Any] = compiled_rescore
    jit: Callable[..., Any] = quick_jit


@pytest.fixture(scope="session")
def tools() -> Tools:
    return Tools()
