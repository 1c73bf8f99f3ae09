"""A checkpoint as something that can be asked: weights, tokenizer, and how a message becomes a prompt."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp

from trm_jax.data import Tokenizer
from trm_jax.models import Transformer, YarnConfig, find_smollm2, load_pretrained

if TYPE_CHECKING:
    from trm_jax.models.pretrained import PretrainedTokenizer

__all__ = ["ChatMode", "Policy", "open_policy"]

ChatMode = Literal["auto", "chat", "plain"]
_EDGE = 2**20  # bytes at both ends of a file of weights that its fingerprint reads
_WEIGHTS = (".safetensors", ".gguf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """What is evaluated.

    Attributes:
      name: for the table.
      model: with its weights.
      tokenizer: writes responses as text, and knows end and padding.
      encode: a user's message → the ids of its prompt.
      identity: what makes these answers this checkpoint's; a resumed evaluation must have the same.
      context: tokens of prompt and answer together that it was made for; None where nothing is known.
    """

    name: str
    model: Transformer
    tokenizer: Tokenizer
    encode: Callable[[str], list[int]]
    identity: Mapping[str, Any]
    context: int | None = None


def open_policy(checkpoint: str | Path, *, chat: ChatMode = "auto", system: str = "", dtype: str = "float32") -> Policy:
    """A pretrained model with its tokenizer.

    Args:
      checkpoint: a Hugging Face directory (safetensors, ``tokenizer.json``), a ``.gguf`` file, or ``smollm2``, which
        ``trm-jax fetch smollm2`` puts into the cache.
      chat: ``chat`` writes a message by the checkpoint's template, ``plain`` as it is with a newline after it, after
        the beginning-of-sequence token where the tokenizer adds one; ``auto`` is ``chat`` where there is a template.
      system: the system message of a chat; empty leaves it to the template.
      dtype: of its weights, "float32" or "bfloat16".

    Returns:
      The policy.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: a checkpoint that is not supported, or options that do not go together.
      ImportError: without the extra ``pretrained``.
    """
    from trm_jax.models.pretrained import load_tokenizer

    path = find_smollm2() if str(checkpoint) == "smollm2" else Path(checkpoint)
    if not path.exists():
        raise FileNotFoundError(
            f"there is no checkpoint {str(checkpoint)!r}: give a Hugging Face directory, a .gguf file, the directory "
            "of a run (RUN/arms/ARM/seedN), or smollm2"
        )
    if path.is_file() and path.suffix != ".gguf":
        raise ValueError(f"{path} is a file, and not a .gguf; give the directory that holds config.json")
    if runs := sorted(path.glob("arms/*/seed*")):
        raise ValueError(f"{path} is an experiment of {len(runs)} runs; name one of them, such as {runs[0]}")
    words = load_tokenizer(path)
    if chat == "chat" and words.chat_template is None:
        raise ValueError(f"{path} carries no chat template; choose chat=plain")
    chats = words.chat_template is not None and chat != "plain"
    if system and not chats:
        raise ValueError(f"system={system!r}: a plain prompt has no system message; leave it out, or choose chat=chat")
    model = load_pretrained(path, param_dtype=jnp.dtype(dtype))
    if words.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"{path}: the tokenizer has {words.vocab_size} ids, the model {model.config.vocab_size}; do they belong "
            "together?"
        )
    return Policy(
        name=str(checkpoint),
        model=model,
        tokenizer=words,
        encode=_encoder(words, system) if chats else _plain_encoder(words),
        identity={
            "weights": _fingerprint(path),
            "tokenizer": words.fingerprint,
            "chat": chats,
            "system": system,
        },
        context=_context(path, model.config.yarn),
    )


def _context(path: Path, yarn: YarnConfig | None) -> int | None:
    """``max_position_embeddings``, or what YaRN makes of the context of pretraining."""
    from trm_jax.models.pretrained import read_gguf

    raw = read_gguf(path).config if path.is_file() else json.loads((path / "config.json").read_text(encoding="utf-8"))
    said = raw.get("max_position_embeddings")
    stretched = 0 if yarn is None else int(yarn.factor * yarn.original_length)
    return max(int(said or 0), stretched) or None


def _encoder(words: PretrainedTokenizer, system: str) -> Callable[[str], list[int]]:
    first = [{"role": "system", "content": system}] if system else []
    return lambda message: words.apply_chat_template([*first, {"role": "user", "content": message}])


def _plain_encoder(words: PretrainedTokenizer) -> Callable[[str], list[int]]:
    return lambda message: [*words.prefix_ids, *words.encode(f"{message}\n")]


def _fingerprint(path: Path) -> str:
    """SHA-256 over the names, sizes and both ends of the weights, and all of ``config.json``."""
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in _WEIGHTS)
    digest = hashlib.sha256()
    if (path / "config.json").is_file():
        digest.update((path / "config.json").read_bytes())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_EDGE))
            stream.seek(max(0, size - _EDGE))
            digest.update(stream.read(_EDGE))
    return digest.hexdigest()
