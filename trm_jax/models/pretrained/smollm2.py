"""SmolLM2-135M-Instruct: what its file must hold, and its parts in one call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from trm_jax.models.pretrained.gguf_reader import GGUFModel, read_gguf
from trm_jax.models.pretrained.gguf_tensors import LlamaConfig
from trm_jax.models.pretrained.tokenizer import PretrainedTokenizer

__all__ = ["SMOLLM2_135M", "load_smollm2", "open_smollm2"]

SMOLLM2_135M = LlamaConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1_536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=100_000.0,
    max_position_embeddings=8_192,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
)


def load_smollm2(
    path: str | Path,
) -> tuple[LlamaConfig, Iterator[tuple[str, Float32[np.ndarray, ...]]], PretrainedTokenizer]:
    """Opens SmolLM2-135M-Instruct (Allal et al., arXiv 2502.02737; Apache-2.0) for import into a model.

    Args:
      path: the file that ``fetch_smollm2()`` returns.

    Returns:
      ``(config, weights, tokenizer)``. ``weights`` yields each of the 272 ``(Hugging Face name, float32 array)`` pairs
      once, in model order, dequantised as it is asked for: the peak is about one tensor (113 MB for the embedding).
      Matrices are ``[out, in]``; the output head is the embedding.

    Raises:
      FileNotFoundError: when there is no such file.
      ValueError: for another model, naming what differs, and whatever ``read_gguf`` refuses.
      ImportError: without the ``pretrained`` extra.

    Example:
      >>> load_smollm2("no/such.gguf")
      Traceback (most recent call last):
      FileNotFoundError: no/such.gguf: no such file.
    """
    model, tokenizer = open_smollm2(path)
    return model.config, iter(model.tensors.items()), tokenizer


def open_smollm2(path: str | Path) -> tuple[GGUFModel, PretrainedTokenizer]:
    """The file, checked to be SmolLM2-135M-Instruct, and its tokenizer; raises what ``load_smollm2`` does."""
    model = read_gguf(path)
    found, required = dict(model.config), dict(SMOLLM2_135M)
    if differing := [f"{key}={found[key]} (not {required[key]})" for key in required if found[key] != required[key]]:
        raise ValueError(f"{model.path} is not SmolLM2-135M-Instruct: {', '.join(differing)}.")
    tokenizer = PretrainedTokenizer(model.tokenizer)
    if tokenizer.vocab_size != model.config["vocab_size"]:
        raise ValueError(
            f"{model.path}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding {required['vocab_size']}."
        )
    return model, tokenizer
