"""Writes a checkpoint as safetensors, one tensor at a time, in one file or in shards with an index."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trm_jax.models.pretrained.safetensors_reader import DTYPES, INDEX_NAME, SINGLE_NAME

__all__ = ["write_safetensors"]


def write_safetensors(
    directory: str | Path,
    shapes: Mapping[str, tuple[int, ...]],
    fetch: Callable[[str], np.ndarray],
    *,
    dtype: str,
    shard_bytes: int,
) -> list[Path]:
    """Writes the tensors in the order of ``shapes``; each is fetched when its turn comes.

    A file appears under its name when it is whole, and the index when all shards are.

    Args:
      directory: exists.
      shapes: name to shape.
      fetch: name to array of that shape, of ``dtype``.
      dtype: "float32", "float16" or "bfloat16".
      shard_bytes: largest shard; a larger tensor has a shard of its own.

    Returns:
      The files, in order.

    Raises:
      ValueError: another dtype, or an array that is not what was announced, by name.
    """
    codes = {name: code for code, name in DTYPES.items()}
    if dtype not in codes:
        raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(codes)}.")
    path, item = Path(directory), np.dtype(dtype).itemsize
    shards = _plan({name: math.prod(shape) * item for name, shape in shapes.items()}, shard_bytes)
    single = len(shards) == 1
    names = [SINGLE_NAME] if single else [_shard_name(i, len(shards)) for i in range(1, len(shards) + 1)]
    for file, members in zip(names, shards, strict=True):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in members:
            end = at + math.prod(shapes[name]) * item
            header[name] = {"dtype": codes[dtype], "shape": list(shapes[name]), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        partial = path / f"{file}.partial"
        with partial.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in members:
                array = np.ascontiguousarray(fetch(name))
                if array.shape != shapes[name] or array.dtype != np.dtype(dtype):
                    raise ValueError(f"tensor {name}: {array.dtype} {array.shape}, not {dtype} {shapes[name]}.")
                stream.write(array.reshape(-1).view(np.uint8).data)
        os.replace(partial, path / file)
    if not single:
        weight_map = {name: file for file, members in zip(names, shards, strict=True) for name in members}
        total = sum(math.prod(shape) * item for shape in shapes.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()
        partial = path / f"{INDEX_NAME}.partial"
        partial.write_bytes(text)
        os.replace(partial, path / INDEX_NAME)
    return [path / file for file in names]


def _plan(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"
