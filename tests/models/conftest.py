"""Tiny models, and a transformer in float64 NumPy, written from the equations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.models import (
    ComputeConfig,
    LatentConfig,
    Transformer,
    TransformerConfig,
    TransformerOutput,
    YarnConfig,
)

SHAPES = {
    "dense": {},
    "gqa": {"n_heads": 4, "n_kv_heads": 2},
    "tied": {"tie_embeddings": True},
    "moe": {"n_kv_heads": 1, "n_experts": 4, "experts_per_token": 2},
    "biased": {"n_heads": 4, "qkv_bias": True, "qk_norm": True},
    "shared": {"qkv_bias": True, "n_experts": 4, "normalize_experts": False, "d_ff_shared": 12, "shared_router": True},
    "latent": {
        "latent": LatentConfig(kv_rank=12, rope_dim=4, value_dim=6),
        "yarn": YarnConfig(factor=4.0, original_length=8, mscale_all_dim=0.7),
        "n_layers": 3,
        "n_experts": 4,
        "expert_scale": 1.5,
        "d_ff_shared": 12,
        "n_dense_layers": 1,
        "d_ff_dense": 20,
    },
}


@functools.cache
def make_model(kind: str, **changes: Any) -> Transformer:
    """A model of one of ``SHAPES`` with weights from NumPy; norms are off 1, where a test could not see them."""
    shape = {"vocab_size": 13, "d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "head_dim": 8, "d_ff": 24}
    config = TransformerConfig(**{**shape, **SHAPES[kind], **changes})
    model: Transformer = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model, nnx.Param)
    rng = np.random.default_rng(11)

    def fill(variable: nnx.Variable[Any]) -> nnx.Variable[Any]:
        value = variable.get_value()
        noise = rng.standard_normal(value.shape)
        is_norm = "norm" in variable.get_metadata("logical_axes")
        is_bias = "bias" in variable.get_metadata("logical_axes")
        filled = 1.0 + 0.3 * noise if is_norm else noise / np.sqrt(4 if is_bias else value.shape[-2])
        return variable.replace(jnp.asarray(filled, jnp.float32))

    params = jax.tree.map(fill, params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    filled: Transformer = nnx.merge(graphdef, params)
    return filled


# Compiling is nearly all the time of these tests. Where results are compared within a tolerance, not bit for bit, less
# optimisation by the compiler halves it.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.partial(
    jax.jit, static_argnames=("graphdef", "compute", "remat", "layer_states"), compiler_options=QUICK_COMPILE
)
def _forward(
    graphdef: Any,
    params: Any,
    tokens: Any,
    compute: ComputeConfig,
    remat: bool,
    layer_states: bool,
    arrays: dict[str, Any],
) -> Any:
    return nnx.merge(graphdef, params)(tokens, compute=compute, remat=remat, layer_states=layer_states, **arrays)


def compiled_forward(
    model: Transformer,
    tokens: Any,
    *,
    compute: ComputeConfig | None = None,
    remat: bool = False,
    layer_states: bool = False,
    **arrays: Any,
) -> TransformerOutput:
    """``model(tokens, ...)`` under ``jit``: one compilation a shape, shared by the tests."""
    graphdef, params = nnx.split(model, nnx.Param)
    return _forward(graphdef, params, np.asarray(tokens), compute or ComputeConfig(), remat, layer_states, arrays)


def numpy_params(model: Transformer) -> dict[str, Any]:
    """The parameters as float64 arrays, the blocks' under "blocks"."""

    def widen(tree: Any) -> Any:
        return {k: widen(v) for k, v in tree.items()} if isinstance(tree, dict) else np.asarray(tree, np.float64)

    return widen(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def oracle(
    params: dict[str, Any], config: TransformerConfig, row: np.ndarray, routes: np.ndarray | None = None
) -> tuple[np.ndarray, list[Any], float]:
    """One row ``[S]`` through the transformer, a token and a head at a time; ``routes`` ``[L, S, k]`` are forced.

    Returns the final hidden states, the chosen experts ``[layer][position]`` as sets, and the smallest gap between a
    chosen and an unchosen router logit (a comparison in float32 means something only when rounding cannot flip it).
    """
    width, group = config.head_dim, config.n_heads // config.n_kv_heads

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean() + config.norm_eps) * scale

    def rotate(x: np.ndarray, position: int) -> np.ndarray:
        out = np.empty_like(x)
        for i in range(width // 2):
            turn = np.exp(1j * position * config.rope_theta ** (-2 * i / width))
            z = (x[i] + 1j * x[i + width // 2]) * turn  # a pair of coordinates is one complex number
            out[i], out[i + width // 2] = z.real, z.imag
        return out

    def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        g = x @ gate
        return (g / (1 + np.exp(-g)) * (x @ up)) @ down

    stream = [params["embedding"][t].copy() for t in row]
    experts, gap = [], np.inf
    for layer in range(config.n_layers):
        w = {name: value[layer] for name, value in params["blocks"].items()}
        keys, values, after, chosen_here = [], [], [], []
        for position, x in enumerate(stream):
            y = norm(x, w["attention_norm"])
            q, k, v = (y @ w[name] for name in ("query", "key", "value"))
            keys.append([rotate(k[h * width : (h + 1) * width], position) for h in range(config.n_kv_heads)])
            values.append([v[h * width : (h + 1) * width] for h in range(config.n_kv_heads)])
            mixed = []
            for head in range(config.n_heads):
                turned = rotate(q[head * width : (head + 1) * width], position)
                scores = np.array([turned @ k[head // group] for k in keys]) / np.sqrt(width)
                p = np.exp(scores - scores.max())
                mixed.append(sum(a * v[head // group] for a, v in zip(p / p.sum(), values, strict=True)))
            x = x + np.concatenate(mixed) @ w["output"]
            y = norm(x, w["mlp_norm"])
            if config.n_experts:
                logits = y @ w["router"]
                order = np.argsort(-logits)
                chosen = order[: config.experts_per_token]
                if config.experts_per_token < config.n_experts:
                    gap = min(gap, logits[chosen[-1]] - logits[order[config.experts_per_token]])
                if routes is not None:
                    chosen = routes[layer, position]
                share = np.exp(logits[chosen] - logits[chosen].max())
                share /= share.sum()
                x = x + sum(
                    s * swiglu(y, w["gate"][e], w["up"][e], w["down"][e]) for s, e in zip(share, chosen, strict=True)
                )
                chosen_here.append(set(chosen.tolist()))
            else:
                x = x + swiglu(y, w["gate"], w["up"], w["down"])
            after.append(x)
        stream = after
        experts.append(chosen_here)
    return np.stack([norm(x, params["final_norm"]) for x in stream]), experts, float(gap)


@pytest.fixture(scope="session")
def build() -> Callable[..., Transformer]:
    return make_model


@pytest.fixture(scope="session")
def to_numpy() -> Callable[..., dict[str, Any]]:
    return numpy_params


@pytest.fixture(scope="session")
def numpy_forward() -> Callable[..., tuple[np.ndarray, list[Any], float]]:
    return oracle


@pytest.fixture(scope="session")
def forward() -> Callable[..., TransformerOutput]:
    return compiled_forward


@pytest.fixture(scope="session")
def quick_jit() -> Callable[..., Any]:
    return functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
