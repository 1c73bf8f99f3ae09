"""Tiny models with every parameter off its starting value, and a transformer in float64 NumPy, written from equations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flax import nnx

from trm_jax.models import Transformer, TransformerConfig

SHAPES = {
    "dense": {},
    "gqa": {"n_heads": 4, "n_kv_heads": 2},
    "tied": {"tie_embeddings": True},
    "moe": {"n_experts": 4, "experts_per_token": 2},
}


def make_model(kind: str, **changes: Any) -> Transformer:
    """A model of one of ``SHAPES``; the norms, which start at one, are moved so that a test can see them."""
    shape = {"vocab_size": 13, "d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "head_dim": 8, "d_ff": 24}
    model = Transformer(TransformerConfig(**{**shape, **SHAPES[kind], **changes}), rngs=nnx.Rngs(3))
    rng = np.random.default_rng(11)
    for norm in (model.final_norm, model.blocks.attention_norm, model.blocks.mlp_norm):
        value = norm.get_value()
        norm.set_value((1.0 + 0.3 * rng.standard_normal(value.shape)).astype(np.float32))
    return model


def numpy_params(model: Transformer) -> dict[str, Any]:
    """The parameters as float64 arrays, the blocks' under "blocks"."""

    def widen(tree: Any) -> Any:
        return {k: widen(v) for k, v in tree.items()} if isinstance(tree, dict) else np.asarray(tree, np.float64)

    return widen(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def oracle(params: dict[str, Any], config: TransformerConfig, row: np.ndarray) -> tuple[np.ndarray, list[Any], float]:
    """One row ``[S]`` through the transformer, a token and a head at a time.

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
