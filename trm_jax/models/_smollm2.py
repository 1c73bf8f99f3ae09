"""SmolLM2 as a ``Transformer`` with its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp

from trm_jax.models._hf_config import config_from_hf
from trm_jax.models._pretrained import fill_parameters
from trm_jax.models._sharding import RULES
from trm_jax.models._transformer import Transformer

if TYPE_CHECKING:
    from trm_jax.models.pretrained import PretrainedTokenizer

__all__ = ["find_smollm2", "load_smollm2_model"]


def find_smollm2(path: str | Path | None = None) -> Path:
    """The model's file; None looks into the cache.

    Raises:
      ValueError: there is none; the message says how to get it.
    """
    from trm_jax.models.pretrained import cached_path

    place = cached_path() if path is None else Path(path)
    if not place.is_file():
        raise ValueError(f"no model at {place}. Get it with: trm-jax fetch smollm2 (93 MB), or give model.path.")
    return place


def load_smollm2_model(path: str | Path | None = None) -> tuple[Transformer, PretrainedTokenizer]:
    """The pretrained policy and its tokenizer, from a GGUF file.

    Args:
      path: the file; None takes the one that ``trm-jax fetch smollm2`` put into the cache.

    Returns:
      A float32 ``Transformer`` and a ``PretrainedTokenizer``.

    Raises:
      ValueError: no file at that place, or one that is not this model.
    """
    from trm_jax.models.pretrained import open_smollm2

    place = find_smollm2(path)
    source, tokenizer = open_smollm2(place)
    config = config_from_hf({**source.config, "model_type": source.model_type}, str(place))
    model = fill_parameters(config, source, param_dtype=jnp.dtype("float32"), mesh=None, rules=RULES)
    return model, tokenizer
