"""Parameters back into a Hugging Face directory."""

from __future__ import annotations

import functools
import json
import operator
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trm_jax.models._config import TransformerConfig
from trm_jax.models._hf_config import config_from_hf
from trm_jax.models._hf_config_write import config_to_hf
from trm_jax.models._hf_tensors import Slot, checkpoint_slots
from trm_jax.models._pretrained import read_config
from trm_jax.models._transformer import Transformer

__all__ = ["export_pretrained"]

_COPIED = (".json", ".jinja", ".txt", ".model")


def export_pretrained(
    model: Transformer,
    directory: str | Path,
    *,
    dtype: str | None = None,
    like: str | Path | None = None,
    longest: int = 4096,
    shard_bytes: int = 5 * 10**9,
) -> Path:
    """Writes a model as a Hugging Face directory, which ``load_pretrained``, Transformers and serving engines read.

    Tensors leave the devices one at a time. A checkpoint that was loaded and written again in its own type has the same
    bytes in every tensor.

    Args:
      model: with parameters in floating point.
      directory: is made; must be empty or not exist.
      dtype: "float32", "float16" or "bfloat16"; None is the parameters' own.
      like: the checkpoint that the model came from. Of a directory, ``config.json`` and other small files (tokenizer,
        generation settings) are copied; of a ``.gguf`` file, its tokenizer, chat template and end tokens are written as
        such files. None writes a ``config.json`` from the model's shape, and no tokenizer.
      longest: ``max_position_embeddings`` of a ``config.json`` that comes from the shape alone.
      shard_bytes: largest file of weights.

    Returns:
      The directory.

    Raises:
      FileExistsError: ``directory`` holds something.
      ValueError: a shape that no supported model type has; ``like`` of another shape, naming what differs; or a GGUF
        file whose tokenizer is not supported.
    """
    from trm_jax.models.pretrained import load_tokenizer, write_safetensors

    config, place = model.config, Path(directory)
    dtype = str(model.embedding.get_value().dtype) if dtype is None else dtype
    raw = _described(config, None if like is None else Path(like), dtype=dtype, longest=longest)
    raw["dtype" if "dtype" in raw else "torch_dtype"] = dtype
    words = load_tokenizer(like) if like is not None and Path(like).is_file() else None
    place.mkdir(parents=True, exist_ok=True)
    if there := sorted(file.name for file in place.iterdir()):
        raise FileExistsError(f"{place} is not empty (it holds {there[0]}); export into a new directory.")
    slots = {name: (slot, at) for slot in checkpoint_slots(config) for at, name in enumerate(slot.names)}
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))

    def fetch(name: str) -> np.ndarray:
        slot, expert = slots[name]
        return _tensor(params, slot, expert, np.dtype(dtype))

    shapes = {name: slot.shape for name, (slot, _) in slots.items()}
    write_safetensors(place, shapes, fetch, dtype=dtype, shard_bytes=shard_bytes)
    if words is not None:
        words.save_pretrained(place)
    elif like is not None:
        for file in sorted(Path(like).iterdir()):
            if file.is_file() and file.suffix in _COPIED and "safetensors" not in file.name:
                shutil.copy(file, place / file.name)
    (place / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    return place


def _described(config: TransformerConfig, like: Path | None, *, dtype: str, longest: int) -> dict[str, Any]:
    """What ``config.json`` shall hold."""
    if like is None:
        return config_to_hf(config, dtype=dtype, longest=longest)
    if like.is_dir():
        raw = read_config(like)
        _check_same(config, raw, like / "config.json")
        return raw
    from trm_jax.models.pretrained import read_gguf

    source = read_gguf(like)
    _check_same(config, {**source.config, "model_type": source.model_type}, like)
    raw = config_to_hf(config, dtype=dtype, longest=source.config["max_position_embeddings"])
    ids = {name: source.config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return raw | {name: index for name, index in ids.items() if index is not None}


def _check_same(config: TransformerConfig, raw: dict[str, Any], file: Path) -> None:
    if (other := config_from_hf(raw, str(file))) != config:
        raise ValueError(f"{file} describes {other}, the model is {config}.")


def _tensor(params: dict[str, Any], slot: Slot, expert: int, dtype: np.dtype[Any]) -> np.ndarray:
    """One tensor in the checkpoint's order, on the host."""
    array: Any = functools.reduce(operator.getitem, slot.path, params)
    for index in (*([] if slot.layer is None else [slot.layer]), *([expert] if slot.expert_axis else [])):
        array = array[index]
    host = np.asarray(jax.device_get(jnp.asarray(array).astype(dtype)))
    if host.ndim == 2 and slot.layer is not None:
        host = host.T
    if slot.rows is None:
        return host
    ordered = np.empty_like(host)
    ordered[slot.rows] = host
    return ordered
