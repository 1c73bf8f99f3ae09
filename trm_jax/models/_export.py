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
      like: a directory whose ``config.json`` and other small files (tokenizer, generation settings) are copied; None
        writes a ``config.json`` from the model's shape.
      longest: ``max_position_embeddings`` of a new ``config.json``.
      shard_bytes: largest file of weights.

    Returns:
      The directory.

    Raises:
      FileExistsError: ``directory`` holds something.
      ValueError: a shape that no supported model type has, or ``like`` of another shape, naming what differs.
    """
    from trm_jax.models.pretrained import write_safetensors

    config, place = model.config, Path(directory)
    dtype = str(model.embedding.get_value().dtype) if dtype is None else dtype
    raw = config_to_hf(config, dtype=dtype, longest=longest) if like is None else _same_shape(config, Path(like))
    raw["dtype" if "dtype" in raw else "torch_dtype"] = dtype
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
    if like is not None:
        for file in sorted(Path(like).iterdir()):
            if (
                file.is_file()
                and file.suffix in (".json", ".jinja", ".txt", ".model")
                and "safetensors" not in file.name
            ):
                shutil.copy(file, place / file.name)
    (place / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    return place


def _same_shape(config: TransformerConfig, like: Path) -> dict[str, Any]:
    raw = read_config(like)
    if (other := config_from_hf(raw, str(like / "config.json"))) != config:
        raise ValueError(f"{like / 'config.json'} describes {other}, the model is {config}.")
    return raw


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
