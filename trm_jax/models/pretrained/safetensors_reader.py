"""Reads a directory of safetensors files, one tensor at a time, and checks it before anything is read."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["DTYPES", "INDEX_NAME", "SINGLE_NAME", "SafetensorsDirectory", "StoredTensor", "open_safetensors"]

DTYPES: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_LARGEST_HEADER = 100 * 2**20
_CHECKED_AT_ONCE = 2**22


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
      file: the safetensors file.
      start: first byte in it.
      shape: as stored.
      dtype: a key of ``DTYPES``, as stored.
    """

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype as NumPy has it (bfloat16 is registered by JAX's ``ml_dtypes``)."""
        return np.dtype(DTYPES[self.dtype])


@dataclasses.dataclass(frozen=True)
class SafetensorsDirectory:
    """The checked files of one checkpoint.

    Attributes:
      path: the directory.
      tensors: name to place, in the order of the files.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of every tensor."""
        return {name: place.shape for name, place in self.tensors.items()}

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type in which a tensor is stored and read."""
        return self.tensors[name].numpy_dtype

    def without_copy(self, name: str, of: str) -> SafetensorsDirectory:
        """The same files without tensor ``name``, where it is stored and holds what ``of`` holds; else these.

        Both are read a piece at a time.

        Raises:
          ValueError: the two differ, naming both.
        """
        if not {name, of} <= self.tensors.keys():
            return self
        one, other = self.tensors[name], self.tensors[of]
        alike = (one.shape, one.dtype) == (other.shape, other.dtype)
        if not alike or any(mine != theirs for mine, theirs in zip(_pieces(one), _pieces(other), strict=True)):
            raise ValueError(
                f"{one.file}: tensor {name} differs from {of}, of which it must be a copy (tie_word_embeddings=true)."
            )
        return dataclasses.replace(self, tensors={key: place for key, place in self.tensors.items() if key != name})

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """One tensor in its stored type; nothing else is held.

        Args:
          name: of the tensor.
          out: contiguous array of its shape and type to read into; None makes one.

        Raises:
          KeyError: no such tensor.
          ValueError: NaN or infinite values, or a file that has become shorter, naming both.
        """
        place = self.tensors[name]
        if out is None:
            out = np.empty(place.shape, place.numpy_dtype)
        if out.shape != place.shape or out.dtype != place.numpy_dtype:
            raise ValueError(
                f"{place.file}: tensor {name} is {place.dtype} {list(place.shape)}, where {out.dtype} "
                f"{list(out.shape)} is required: the experts of a layer must be alike."
            )
        flat = out.reshape(-1)
        with place.file.open("rb") as file:
            file.seek(place.start)
            if file.readinto(flat.view(np.uint8).data) != flat.nbytes:
                raise ValueError(f"{place.file}: tensor {name} is cut short; copy the file again.")
        for start in range(0, flat.size, _CHECKED_AT_ONCE):
            if not np.isfinite(flat[start : start + _CHECKED_AT_ONCE]).all():
                raise ValueError(f"{place.file}: tensor {name} holds NaN or infinite values; the file is damaged.")
        return out


def open_safetensors(directory: str | Path) -> SafetensorsDirectory:
    """Opens ``model.safetensors``, or the shards that ``model.safetensors.index.json`` names.

    Format: https://huggingface.co/docs/safetensors: eight bytes with the length of a JSON header, the header (name to
    type, shape and byte range), the bytes. Headers are read and held against the files' sizes; no tensor is. Pickled
    weights (``*.bin``, ``*.pt``) are never opened.

    Args:
      directory: of the checkpoint.

    Returns:
      Its tensors by name.

    Raises:
      FileNotFoundError: no such directory, no safetensors in it, or a shard that the index names is missing.
      ValueError: a truncated or damaged file, a tensor of an unsupported type, an index that disagrees with its shards.

    >>> open_safetensors("no/such/directory")
    Traceback (most recent call last):
    FileNotFoundError: no/such/directory: no such directory.
    """
    path = Path(directory)
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such directory.")
    index = path / INDEX_NAME
    if index.is_file():
        weight_map = _read_index(index)
        tensors = _merge(_read_header(path / file) for file in sorted(set(weight_map.values())))
        wrong = [name for name in {**tensors, **weight_map} if _stored_in(tensors, name) != weight_map.get(name)]
        if wrong:
            name = wrong[0]
            raise ValueError(
                f"{index}: {len(wrong)} tensors are not where it says, first {name}: the index says "
                f"{weight_map.get(name)}, the shards say {_stored_in(tensors, name)}."
            )
        return SafetensorsDirectory(path, tensors)
    if (path / SINGLE_NAME).is_file():
        return SafetensorsDirectory(path, _read_header(path / SINGLE_NAME))
    there = sorted(file.name for file in path.iterdir())[:8]
    raise FileNotFoundError(
        f"{path} holds neither {SINGLE_NAME} nor {INDEX_NAME}, only {there}. Pickled weights are never loaded; convert "
        "them to safetensors."
    )


def _pieces(place: StoredTensor) -> Iterator[bytes]:
    left = math.prod(place.shape) * place.numpy_dtype.itemsize
    with place.file.open("rb") as file:
        file.seek(place.start)
        while left:
            piece = file.read(min(left, _CHECKED_AT_ONCE))
            if not piece:
                raise ValueError(f"{place.file} has become shorter; copy the file again.")
            left -= len(piece)
            yield piece


def _stored_in(tensors: Mapping[str, StoredTensor], name: str) -> str | None:
    return tensors[name].file.name if name in tensors else None


def _merge(parts: Iterable[dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    merged: dict[str, StoredTensor] = {}
    for part in parts:
        if twice := sorted(merged.keys() & part.keys()):
            files = merged[twice[0]].file.name, part[twice[0]].file.name
            raise ValueError(f"tensor {twice[0]} is stored twice, in {files[0]} and {files[1]}.")
        merged |= part
    return merged


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not an index of safetensors shards ({error!r}).") from error
    for file in sorted(set(names.values())):
        if Path(file).name != file:
            raise ValueError(f"{index}: shard {file!r} lies outside the directory.")
        if not (index.parent / file).is_file():
            raise FileNotFoundError(f"{index.parent / file}: the index names this shard, but it is missing.")
    return names


def _entry(name: str, fields: Mapping[str, Any]) -> tuple[int, int, str, str, tuple[int, ...]]:
    start, end = map(int, fields["data_offsets"])
    return start, end, name, str(fields["dtype"]), tuple(map(int, fields["shape"]))


def _read_header(file: Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    damaged = f"{file} ({size} bytes) is truncated, damaged or not a safetensors file"
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _LARGEST_HEADER):
            raise ValueError(f"{damaged}: its header would take {length} bytes.")
        try:
            header = json.loads(stream.read(length))
            entries = [_entry(name, fields) for name, fields in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{damaged}: its header cannot be read ({error!r}).") from error
    tensors: dict[str, StoredTensor] = {}
    at = 0
    for start, end, name, dtype, shape in sorted(entries):
        if dtype not in DTYPES:
            raise ValueError(f"{file}: tensor {name} is {dtype}; supported are {', '.join(DTYPES)}.")
        need = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        if start != at or end - start != need or min(shape, default=0) < 0:
            raise ValueError(
                f"{damaged}: tensor {name} {dtype} {list(shape)} takes {need} bytes from {at}, its header says "
                f"{start} to {end}."
            )
        tensors[name] = StoredTensor(file=file, start=8 + length + start, shape=shape, dtype=dtype)
        at = end
    if 8 + length + at != size:
        raise ValueError(f"{damaged}: its header describes {8 + length + at} bytes.")
    return tensors
