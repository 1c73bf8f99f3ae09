"""A tiny model with weights from NumPy, engines that are built once, and a recomputation of what they recorded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.models import ComputeConfig, Transformer, TransformerConfig
from trm_jax.rollout import EngineConfig, InProcessEngine, RolloutNumerics, SamplingConfig
from trm_jax.types import PromptBatch, RolloutBatch

VOCAB, PROMPT, RESPONSE = 13, 5, 6
EOS = (3, 12)

# Compiling is nearly all the time of these tests; where no bits are compared across programs, less optimisation by the
# compiler halves it.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
quick_jit = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)


@functools.cache
def make_model(seed: int = 0, n_experts: int = 0) -> Transformer:
    config = TransformerConfig(
        vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=32, n_experts=n_experts
    )
    model: Transformer = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model, nnx.Param)
    rng = np.random.default_rng(seed)

    def fill(variable: nnx.Variable[Any]) -> nnx.Variable[Any]:
        value = variable.get_value()
        noise = rng.standard_normal(value.shape)
        is_norm = "norm" in variable.get_metadata("logical_axes")
        filled = 1.0 + 0.1 * noise if is_norm else 1.2 * noise / np.sqrt(value.shape[-2])
        return variable.replace(jnp.asarray(filled, jnp.float32))

    filled: Transformer = nnx.merge(graphdef, jax.tree.map(fill, params, is_leaf=lambda x: isinstance(x, nnx.Variable)))
    return filled


@functools.cache
def make_engine(
    numerics: RolloutNumerics = RolloutNumerics(),  # noqa: B008 - frozen
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen
    n_experts: int = 0,
    record_routes: bool = False,
    record_top_logps: int = 0,
    tokenizer: Any = None,
    **sizes: Any,
) -> InProcessEngine:
    """An engine with version 1 of the weights, built once. Its constructor wraps its functions with ``jax.jit``."""
    model = make_model(n_experts=n_experts)
    config = EngineConfig(
        **{"slots": 4, "prefill_rows": 2, "decode_chunk": 3, "max_prompt_length": PROMPT}
        | {"max_response_length": RESPONSE}
        | sizes
    )
    with mock.patch.object(jax, "jit", jax.jit if numerics.batch_invariant else quick_jit):
        engine = InProcessEngine(
            model,
            config,
            numerics=numerics,
            sampling=sampling,
            eos_ids=EOS,
            record_routes=record_routes,
            record_top_logps=record_top_logps,
            tokenizer=tokenizer,
        )
    engine.update_weights(1, nnx.state(model, nnx.Param))
    return engine


def make_prompts(rows: int, *, samples: int = 1, seed: int = 0) -> PromptBatch:
    """``rows`` rows of 1 to 5 tokens; ``samples`` rows in turn share a prompt; -7 stands on masked slots."""
    rng = np.random.default_rng(seed)
    groups = np.arange(rows) // samples
    lengths = rng.integers(1, PROMPT + 1, rows)[groups]
    tokens = rng.integers(0, VOCAB, (rows, PROMPT))[groups]
    mask = np.arange(PROMPT)[None, :] < lengths[:, None]
    return PromptBatch(
        tokens=jnp.asarray(np.where(mask, tokens, -7), jnp.int32),
        mask=jnp.asarray(mask),
        group_ids=jnp.asarray(groups, jnp.int32),
        seeds=jnp.asarray(100 + np.arange(rows), jnp.uint32),
    )


@functools.partial(jax.jit, static_argnames=("graphdef", "compute"))
def _forward(graphdef: Any, params: Any, tokens: Any, compute: ComputeConfig) -> Any:
    return nnx.merge(graphdef, params)(tokens, compute=compute).hidden


def teacher_forced(
    model: Transformer,
    rollout: RolloutBatch,
    compute: ComputeConfig = ComputeConfig(),  # noqa: B008 - frozen
) -> np.ndarray:
    """Hidden states ``[B, T, D]`` behind the sampled tokens from one full forward pass over joined rows."""
    tokens, masks = np.asarray(rollout.response_tokens), np.asarray(rollout.response_mask)
    batch, length = tokens.shape
    rows = np.zeros((batch, PROMPT + length), np.int32)
    states = np.zeros((batch, length), np.int64)
    for b in range(batch):
        prompt = np.asarray(rollout.prompt_tokens)[b][np.asarray(rollout.prompt_mask)[b]]
        joined = np.concatenate([prompt, tokens[b][masks[b]]])
        rows[b, : len(joined)] = joined
        states[b] = len(prompt) - 1 + np.arange(length)
    graphdef, params = nnx.split(model, nnx.Param)
    hidden = np.asarray(_forward(graphdef, params, rows, compute))
    return hidden[np.arange(batch)[:, None], states]


def log_softmax64(hidden: Any, head: Any, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of the vocabulary in float64."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / temperature
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def at_tokens(logps: np.ndarray, rollout: RolloutBatch) -> np.ndarray:
    """``[B, T, V]`` at the sampled tokens, 0 at masked slots."""
    tokens, mask = np.asarray(rollout.response_tokens), np.asarray(rollout.response_mask)
    return np.where(mask, np.take_along_axis(logps, tokens[..., None], axis=-1)[..., 0], 0.0)


@dataclasses.dataclass(frozen=True)
class Tools:
    """The functions above, for tests."""

    model: Callable[..., Transformer] = make_model
    engine: Callable[..., InProcessEngine] = make_engine
    prompts: Callable[..., PromptBatch] = make_prompts
    teacher_forced: Callable[..., np.ndarray] = teacher_forced
    log_softmax64: Callable[..., np.ndarray] = log_softmax64
    at_tokens: Callable[..., np.ndarray] = at_tokens
    eos: tuple[int, ...] = EOS


@pytest.fixture(scope="session")
def tools() -> Tools:
    return Tools()
