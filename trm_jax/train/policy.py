"""The policy that a configuration names: its shape, held against everything that is asked of it, then its weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from trm_jax.models import (
    Transformer,
    TransformerConfig,
    check_pretrained,
    config_to_hf,
    find_smollm2,
    load_pretrained,
    make_mesh,
    param_shardings,
)
from trm_jax.rollout import convert_weights
from trm_jax.train.config import TrainConfig, check_mixture

if TYPE_CHECKING:
    from trm_jax.models.pretrained import PretrainedTokenizer

__all__ = [
    "check_policy",
    "pretrained_directory",
    "pretrained_place",
    "pretrained_policy",
    "pretrained_shape",
    "pretrained_tokenizer",
    "random_policy",
]


def random_policy(config: TrainConfig, vocab_size: int) -> Transformer:
    """Random weights, by the run's seed."""
    param_dtype = jnp.dtype(config.model.param_dtype)
    return Transformer(config.model.scratch(vocab_size), rngs=nnx.Rngs(params=config.seed), param_dtype=param_dtype)


def pretrained_policy(config: TrainConfig) -> Transformer:
    """The checkpoint in ``model.path``, tensor by tensor into its place on the run's devices."""
    return load_pretrained(
        pretrained_place(config.model.path),
        param_dtype=jnp.dtype(config.model.param_dtype),
        mesh=make_mesh(config.mesh.data, config.mesh.tensor),
    )


def pretrained_place(path: str) -> Path:
    """The directory or file that ``model.path`` means.

    Raises:
      ValueError: there is none; the message says how to get it.
    """
    place = find_smollm2(None) if path == "smollm2" else Path(path)
    if not place.exists():
        raise ValueError(
            f"model.path: there is nothing at {path!r}. Give a Hugging Face directory or a GGUF file, or 'smollm2' "
            "after: trm-jax fetch smollm2 (93 MB)."
        )
    return place


def pretrained_directory(path: str) -> Path | None:
    """The Hugging Face directory that ``model.path`` names; None for a GGUF file, or from scratch."""
    return Path(path) if path and Path(path).is_dir() else None


@functools.lru_cache(maxsize=8)
def pretrained_shape(path: str) -> TransformerConfig:
    """The checkpoint's shape, once its headers have been checked; no weight is read.

    Raises:
      ValueError: what is wrong with it.
    """
    place = pretrained_place(path)
    with _blaming("model.path"):
        return check_pretrained(place)


@functools.lru_cache(maxsize=2)
def pretrained_tokenizer(path: str) -> PretrainedTokenizer:
    """The tokenizer that came with the checkpoint.

    Raises:
      ValueError: what is wrong with it.
    """
    from trm_jax.models.pretrained import load_tokenizer

    place = pretrained_place(path)
    with _blaming("model.path"):
        return load_tokenizer(place)


def check_policy(config: TrainConfig, shape: TransformerConfig) -> None:
    """Holds the policy's shape against devices, engine, arithmetic and export, before anything is compiled.

    Raises:
      ValueError: naming the option, and the parameter that it does not fit.
    """
    check_mixture(config, shape)
    given = {"model.experts": config.model.experts, "rollout.numerics.experts": config.rollout.numerics.experts}
    for name, experts in given.items():
        if experts == "megablox" and jax.default_backend() != "tpu":
            raise ValueError(
                f"{name}='megablox' is a TPU kernel, and JAX runs on {jax.default_backend()!r}; leave it out, or "
                "choose 'blocked'."
            )
    model: Transformer = nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model, nnx.Param)
    with _blaming("mesh"):
        param_shardings(params, make_mesh(config.mesh.data, config.mesh.tensor))
    with _blaming("rollout.numerics"):
        jax.eval_shape(functools.partial(convert_weights, graphdef, numerics=config.rollout.numerics), params)
    if config.checkpoint.export != "none" and pretrained_directory(config.model.path) is None:
        with _blaming("checkpoint.export"):
            config_to_hf(shape, dtype=config.checkpoint.export, longest=1)


@contextlib.contextmanager
def _blaming(key: str) -> Iterator[None]:
    """Errors of what the user gave begin with the key that gave it."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}: {error}") from error
