"""Reads a GGUF file of a dense model into float32 arrays under Hugging Face names, one tensor at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from jaxtyping import Float32

from trm_jax.models.pretrained.gguf_tensors import LlamaConfig, expected_tensors

if TYPE_CHECKING:
    import gguf

__all__ = ["SUPPORTED_FORMATS", "GGUFModel", "read_gguf", "unpermute_rope"]

SUPPORTED_FORMATS = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K")
_ARCHITECTURES = ("llama", "qwen2", "qwen3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFModel:
    """A checked GGUF file. The file stays mapped, and must stay in place, while this object lives.

    Attributes:
      path: where it was read from.
      model_type: "llama", "qwen2" or "qwen3".
      config: its shape.
      tensors: Hugging Face name → float32 array, ``[out, in]`` for matrices; dequantised anew at each access, so that
        a pass over ``tensors.items()`` holds one tensor at a time. Model order.
      tokenizer: the ``tokenizer.*`` metadata, as ``PretrainedTokenizer`` takes them.
    """

    path: Path
    model_type: str
    config: LlamaConfig
    tensors: Mapping[str, Float32[np.ndarray, ...]]
    tokenizer: Mapping[str, Any]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name to shape of every tensor."""
        return {hf: shape for hf, shape, _ in expected_tensors(self.model_type, self.config).values()}

    def dtype(self, name: str) -> np.dtype[Any]:
        """Every tensor is read as float32."""
        return np.dtype("float32")

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """One tensor, dequantised; into ``out`` when it is given."""
        if out is None:
            return self.tensors[name]
        out[...] = self.tensors[name]
        return out


def unpermute_rope(weight: Float32[np.ndarray, "out in"], n_heads: int) -> Float32[np.ndarray, "out in"]:
    """Undoes llama.cpp's reordering of query or key rows.

    llama.cpp turns neighbouring coordinates ``(2j, 2j + 1)`` of a head, Hugging Face ``(j, j + head_dim/2)``; its
    converter therefore interleaves the two halves of each head's rows. This puts them back (``permute`` of
    llama.cpp's ``convert_hf_to_gguf.py``, inverted).

    Args:
      weight: projection in GGUF row order; ``out = n_heads * head_dim``, ``head_dim`` even.
      n_heads: query heads for a query projection, key/value heads for a key projection.

    Returns:
      The same rows in Hugging Face order.

    Raises:
      ValueError: when the rows do not split into ``n_heads`` heads of even width.

    Example:
      >>> import numpy as np
      >>> unpermute_rope(np.array([[0], [2], [1], [3]], np.float32), n_heads=1).ravel().tolist()
      [0.0, 1.0, 2.0, 3.0]
    """
    rows, columns = weight.shape
    if n_heads < 1 or rows % (2 * n_heads):
        raise ValueError(f"{rows} rows do not split into n_heads={n_heads} heads of even width.")
    return weight.reshape(n_heads, rows // n_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_gguf(path: str | Path) -> GGUFModel:
    """Opens a GGUF file and checks that it holds exactly the tensors its metadata promise.

    Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Supported: the dense
    architectures ``llama``, ``qwen2`` and ``qwen3`` with plain rotary positions; tensor formats F32, F16, Q8_0, Q4_0,
    Q4_1 and Q4_K. Needs the ``pretrained`` extra.

    Args:
      path: the ``.gguf`` file.

    Returns:
      Config, lazily dequantised tensors and tokenizer metadata. A tensor with a NaN or infinite value raises
      ValueError when it is read.

    Raises:
      FileNotFoundError: when there is no such file.
      ValueError: for a truncated or damaged file, another architecture, and missing, surplus, wrongly shaped or
        unsupported tensors, each by its name.
      ImportError: when the ``gguf`` package is not installed.

    Example:
      >>> read_gguf("no/such.gguf")
      Traceback (most recent call last):
      FileNotFoundError: no/such.gguf: no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file.")
    try:
        import gguf
    except ImportError as error:
        raise ImportError("Reading GGUF files needs the 'gguf' package: pip install 'trm-jax[pretrained]'.") from error

    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        size = path.stat().st_size
        raise ValueError(
            f"{path} ({size} bytes) is not a whole GGUF file: truncated, damaged or of another kind ({error}). "
            "Fetch it again."
        ) from error
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise ValueError(f"{path}: big-endian GGUF is not supported; convert it with gguf-convert-endian.")

    present = {tensor.name: tensor for tensor in reader.tensors}
    kind, config = _read_config(path, reader, tied="output.weight" not in present)
    expected = expected_tensors(kind, config)
    _check_tensors(path, present, expected)
    sources = {hf: (present[name], heads) for name, (hf, _, heads) in expected.items()}
    tokenizer = {key: field.contents() for key, field in reader.fields.items() if key.startswith("tokenizer.")}
    return GGUFModel(
        path=path, model_type=kind, config=config, tensors=_LazyTensors(path, sources), tokenizer=tokenizer
    )


class _LazyTensors(Mapping[str, np.ndarray]):
    def __init__(self, path: Path, sources: dict[str, tuple[gguf.ReaderTensor, int | None]]) -> None:
        self._path = path
        self._sources = sources

    def __getitem__(self, name: str) -> Float32[np.ndarray, ...]:
        import gguf

        tensor, heads = self._sources[name]
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        if np.may_share_memory(weight, tensor.data):  # F32 comes as a view of the read-only file
            weight = np.array(weight)
        if not np.isfinite(weight).all():
            raise ValueError(f"{self._path}: tensor {tensor.name} holds NaN or infinite values; fetch the file again.")
        return weight if heads is None else unpermute_rope(weight, heads)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _read_config(path: Path, reader: gguf.GGUFReader, *, tied: bool) -> tuple[str, LlamaConfig]:
    def get(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    def need(key: str) -> Any:
        value = get(key)
        if value is None:
            raise ValueError(f"{path}: metadata key {key!r} is missing.")
        if isinstance(value, list):
            raise ValueError(f"{path}: metadata key {key!r} differs by layer ({value}); one value is required.")
        return value

    architecture = need("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = " or ".join(map(repr, _ARCHITECTURES))
        raise ValueError(f"{path}: architecture {architecture!r} is not supported; {known} is required.")
    own = architecture
    if experts := get(f"{own}.expert_count", 0):
        raise ValueError(f"{path}: {own}.expert_count={experts}: only dense models are supported.")
    if (scaling := get(f"{own}.rope.scaling.type", "none")) != "none":
        raise ValueError(f"{path}: {own}.rope.scaling.type={scaling!r}: only plain rotary positions are supported.")

    hidden_size, heads = int(need(f"{own}.embedding_length")), int(need(f"{own}.attention.head_count"))
    head_dim = int(get(f"{own}.attention.key_length", hidden_size // heads))
    for key in (f"{own}.rope.dimension_count", f"{own}.attention.value_length"):
        if get(key, head_dim) != head_dim:
            raise ValueError(f"{path}: {key}={get(key)} must equal the head width {head_dim}.")
    kv_key = f"{own}.attention.head_count_kv"
    vocab_size = get(f"{own}.vocab_size") or len(get("tokenizer.ggml.tokens", []))
    if not vocab_size:
        raise ValueError(f"{path}: metadata key '{own}.vocab_size' is missing.")
    return own, LlamaConfig(
        vocab_size=int(vocab_size),
        hidden_size=hidden_size,
        intermediate_size=int(need(f"{own}.feed_forward_length")),
        num_hidden_layers=int(need(f"{own}.block_count")),
        num_attention_heads=heads,
        num_key_value_heads=heads if get(kv_key) is None else int(need(kv_key)),
        head_dim=head_dim,
        rms_norm_eps=_shortest(need(f"{own}.attention.layer_norm_rms_epsilon")),
        rope_theta=_shortest(get(f"{own}.rope.freq_base", 10_000.0)),
        max_position_embeddings=int(need(f"{own}.context_length")),
        tie_word_embeddings=tied,
        bos_token_id=get("tokenizer.ggml.bos_token_id"),
        eos_token_id=get("tokenizer.ggml.eos_token_id"),
        pad_token_id=get("tokenizer.ggml.padding_token_id"),
    )


def _shortest(value: float) -> float:
    """GGUF stores float32: 9.999999747378752e-06 was meant to be 1e-05."""
    return float(str(np.float32(value)))


def _check_tensors(
    path: Path,
    present: Mapping[str, gguf.ReaderTensor],
    expected: Mapping[str, tuple[str, tuple[int, ...], int | None]],
) -> None:
    problems = [f"missing: {name}" for name in expected if name not in present]
    for name, tensor in present.items():
        shape = tuple(int(size) for size in reversed(cast("list[int]", tensor.shape.tolist())))  # ggml counts backwards
        if name not in expected:
            problems.append(f"surplus: {name} {shape}")
        elif shape != expected[name][1]:
            problems.append(f"wrong shape: {name} is {shape}, the metadata require {expected[name][1]}")
        elif tensor.tensor_type.name not in SUPPORTED_FORMATS:
            formats = ", ".join(SUPPORTED_FORMATS)
            problems.append(f"unsupported format: {name} is {tensor.tensor_type.name}, supported are {formats}")
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ValueError(f"{path}: {shown}.")
