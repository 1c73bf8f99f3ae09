"""New weights for a server: an export in a directory that both see, and a call that has it loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flax import nnx

from trm_jax.integrations.openai._http import Client, ServerFailed
from trm_jax.models import Transformer, export_pretrained

__all__ = ["Publish", "WeightExports", "sglang_publish"]

Publish = Callable[[int, Path], None]
"""``(version, directory)``: has the server sample from that Hugging Face directory, and returns when it does. Keys and
values cached from older weights must be gone by then."""


class WeightExports:
    """Versions of the policy as Hugging Face directories ``version_00000012`` under one root.

    Args:
      root: on a file system that trainer and server share; made when absent.
      graphdef: of the ``Transformer``.
      dtype: type of the exported weights.
      like: a directory whose configuration and tokenizer files are copied along, or None.
      keep: newest versions kept.
    """

    def __init__(self, root: Path, graphdef: Any, *, dtype: str, like: Path | None, keep: int = 2) -> None:
        self._root, self._graphdef, self._dtype, self._like, self._keep = (
            Path(root).absolute(),
            graphdef,
            dtype,
            like,
            keep,
        )
        self._written: list[Path] = []

    def write(self, version: int, params: nnx.State[Any, Any]) -> Path:
        """Writes a version, whole or not at all; an earlier one of that number is replaced."""
        if not 0 <= version < 10**8:
            raise ValueError(f"policy version {version}: must lie in [0, 10^8).")
        path = self._root / f"version_{version:08d}"
        partial = path.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        model: Transformer = nnx.merge(self._graphdef, params)
        export_pretrained(model, partial, dtype=self._dtype, like=self._like)
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
        self._written = [*(old for old in self._written if old != path), path]
        for old in self._written[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        self._written = self._written[-self._keep :]
        return path


def sglang_publish(client: Client) -> Publish:
    """SGLang's own way: ``/update_weights_from_disk``, which also empties its cache of keys and values."""

    def publish(version: int, directory: Path) -> None:
        body = {"model_path": str(directory), "weight_version": str(version), "flush_cache": True}
        answer = client.ask("/update_weights_from_disk", body, lambda found: found)
        if not answer.get("success"):
            raise ServerFailed(f"SGLang did not take policy version {version}: {answer.get('message')}")

    return publish
