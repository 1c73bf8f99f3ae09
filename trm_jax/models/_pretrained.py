"""Checkpoints into sharded parameters and back, one tensor at a time."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array

from trm_jax.models._config import TransformerConfig
from trm_jax.models._hf_config import config_from_hf
from trm_jax.models._hf_tensors import Slot, checkpoint_slots
from trm_jax.models._sharding import RULES, param_shardings
from trm_jax.models._transformer import Transformer

__all__ = ["TensorSource", "check_pretrained", "fill_parameters", "load_pretrained"]

_FLOAT32 = jnp.dtype("float32")
_BUFFERS = ".rotary_emb.inv_freq"  # stored by old versions of Transformers; computed here


class TensorSource(Protocol):
    """What a model can be filled from."""

    @property
    def path(self) -> Path:
        """Named in errors."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Hugging Face name to shape."""

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """One tensor, into ``out`` when it is given."""

    def dtype(self, name: str) -> np.dtype[Any]:
        """In which ``read`` returns it."""


def load_pretrained(
    path: str | Path,
    *,
    param_dtype: jnp.dtype = _FLOAT32,
    mesh: Mesh | None = None,
    rules: Mapping[str, str | None] = RULES,
) -> Transformer:
    """The model of a checkpoint: a Hugging Face directory, or a GGUF file (extra ``pretrained``).

    A directory holds ``config.json`` and ``model.safetensors``, or shards with their index. Supported model types:
    llama, qwen2, qwen3, qwen2_moe, qwen3_moe, deepseek_v2. Tensors go one at a time from the file into their place in
    the sharded parameters: besides those, the host holds one tensor (of a mixture, one layer's experts of one matrix),
    and for the moment of its transfer a second copy. A tied head that is stored nevertheless must equal the embedding.
    Pickled files are never opened.

    Args:
      path: the directory or the ``.gguf`` file.
      param_dtype: type of the parameters, whatever that of the file is.
      mesh: where the parameters shall lie; None is the default device.
      rules: logical axis to mesh axis (see ``param_shardings``).

    Returns:
      The model; ``model.config`` is its shape.

    Raises:
      FileNotFoundError: no such path, no ``config.json``, no weights.
      ValueError: a field or value of ``config.json`` that is not supported; a damaged file; missing, surplus or wrongly
        shaped tensors; parameters that do not divide over the mesh. Each by its name.

    >>> load_pretrained("no/such/directory")
    Traceback (most recent call last):
    FileNotFoundError: no/such/directory: no such directory.
    """
    config, source = _open(Path(path))
    return fill_parameters(config, source, param_dtype=param_dtype, mesh=mesh, rules=rules)


def check_pretrained(path: str | Path) -> TransformerConfig:
    """The shape of a checkpoint, after every check that needs no weight; a stored copy of a tied head is read.

    Args:
      path: as ``load_pretrained`` takes it.

    Raises:
      FileNotFoundError: no such path, no ``config.json``, no weights.
      ValueError: as ``load_pretrained``, but for values and places: the headers alone are read.
    """
    config, source = _open(Path(path))
    _check_tensors(source, list(checkpoint_slots(config)))
    return config


def _open(path: Path) -> tuple[TransformerConfig, TensorSource]:
    if path.suffix == ".gguf":
        from trm_jax.models.pretrained import read_gguf

        model = read_gguf(path)
        return config_from_hf({**model.config, "model_type": model.model_type}, str(path)), model
    if path.is_file():
        raise ValueError(f"{path} is a file, and not a .gguf; give the directory that holds config.json.")
    from trm_jax.models.pretrained import open_safetensors

    files = open_safetensors(path)
    config = config_from_hf(read_config(path), str(path / "config.json"))
    # Some checkpoints store a tied head nevertheless (Qwen3-0.6B does).
    return config, files.without_copy("lm_head.weight", "model.embed_tokens.weight") if config.tie_embeddings else files


def read_config(directory: Path) -> dict[str, Any]:
    """The parsed ``config.json``.

    Raises:
      FileNotFoundError: when there is none.
      ValueError: when it is not a JSON object.
    """
    file = directory / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; a checkpoint needs its config.json.")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}).") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds no JSON object.")
    return raw


def fill_parameters(
    config: TransformerConfig,
    source: TensorSource,
    *,
    param_dtype: jnp.dtype,
    mesh: Mesh | None,
    rules: Mapping[str, str | None],
) -> Transformer:
    """A model of this shape with the tensors of ``source``; see ``load_pretrained``."""
    slots = list(checkpoint_slots(config))
    _check_tensors(source, slots)
    model: Transformer = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), param_dtype=param_dtype))
    graphdef, params = nnx.split(model, nnx.Param)
    if mesh is None:
        here = SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda v: v.replace(here), params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    else:
        shardings = param_shardings(params, mesh, rules)
    for path, group in itertools.groupby(sorted(slots, key=lambda s: s.path), key=lambda s: s.path):
        variable, sharding = _at(params, path), _at(shardings, path).get_value()
        variable.set_value(_fill(variable.get_value(), sharding, list(group), source))
    filled: Transformer = nnx.merge(graphdef, params)
    return filled


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _check_tensors(source: TensorSource, slots: list[Slot]) -> None:
    present = {name: shape for name, shape in source.shapes().items() if not name.endswith(_BUFFERS)}
    expected = {name: slot.shape for slot in slots for name in slot.names}
    problems = [f"missing: {name}" for name in expected if name not in present]
    problems += [f"surplus: {name} {list(shape)}" for name, shape in present.items() if name not in expected]
    problems += [
        f"wrong shape: {name} is {list(present[name])}, config.json requires {list(shape)}"
        for name, shape in expected.items()
        if present.get(name, shape) != shape
    ]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ValueError(f"{source.path}: {shown}.")


def _fill(target: Any, sharding: Any, slots: list[Slot], source: TensorSource) -> Array:
    """The parameter, made of its slots one after another."""
    if slots[0].layer is None:
        whole: Array = _placed(_read(slots[0], source), sharding).astype(target.dtype)
        return whole
    stack: Array = jax.jit(functools.partial(jnp.zeros, target.shape, target.dtype), out_shardings=sharding)()
    matrix = len(target.shape) > 2
    one_layer = _one_layer(sharding, len(target.shape), matrix)
    for slot in slots:
        stack = _set_layer(stack, _placed(_read(slot, source), one_layer), slot.layer, matrix, sharding)
        jax.block_until_ready(stack)  # else the host would read ahead and hold every tensor that waits
    return stack


def _one_layer(sharding: Any, rank: int, matrix: bool) -> Any:
    """The sharding of one layer's slice as the file orders it: ``[out, in]`` where the parameter has ``[in, out]``."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    axes = [*sharding.spec, *[None] * (rank - len(sharding.spec))][1:]
    if matrix:
        axes[-2:] = axes[-1], axes[-2]
    return NamedSharding(sharding.mesh, PartitionSpec(*axes))


def _read(slot: Slot, source: TensorSource) -> np.ndarray:
    if slot.expert_axis:
        value = np.empty((len(slot.names), *slot.shape), source.dtype(slot.names[0]))
        for expert, name in enumerate(slot.names):
            source.read(name, value[expert])
        return value
    value = source.read(slot.names[0])
    return value if slot.rows is None else value[slot.rows]


def _placed(value: np.ndarray, sharding: Any) -> Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


@functools.partial(jax.jit, static_argnums=(3, 4), donate_argnums=0)
def _set_layer(stack: Array, value: Array, layer: int, matrix: bool, sharding: Any) -> Array:
    value = value.swapaxes(-1, -2) if matrix else value
    updated = jax.lax.dynamic_update_index_in_dim(stack, value.astype(stack.dtype), layer, 0)
    placed: Array = jax.lax.with_sharding_constraint(updated, sharding)
    return placed
