"""The trained policy as a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from flax import nnx

from trm_jax.checkpoint import CheckpointError
from trm_jax.models import export_pretrained
from trm_jax.train.config import TrainConfig
from trm_jax.train.policy import pretrained_place

__all__ = ["export_policy", "exported_policy"]

_RECORD = "trm_jax.json"


def export_policy(
    graphdef: Any, params: nnx.State[Any, Any], config: TrainConfig, directory: Path, *, step: int
) -> Path:
    """Writes ``directory``, whole or not at all; an earlier one there is replaced.

    Args:
      graphdef: of the ``Transformer``.
      params: its parameters.
      config: ``checkpoint.export`` is the type of the weights; of a checkpoint in ``model.path``, tokenizer, chat
        template and settings come along.
      directory: the new directory; beside the model it says step and type (``exported_policy``).
      step: after which the policy is taken.

    Returns:
      The directory.

    Raises:
      CheckpointError: when the disk refuses.
    """
    partial = directory.with_name(f"{directory.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        export_pretrained(
            nnx.merge(graphdef, params),
            partial,
            dtype=config.checkpoint.export,
            like=pretrained_place(config.model.path) if config.model.path else None,
        )
        record = {"step": step, "dtype": config.checkpoint.export}
        (partial / _RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"could not export the policy to {directory}: {error.strerror}. Free some space there, then continue with "
            "--resume."
        ) from error
    return directory


def exported_policy(directory: Path) -> tuple[int, str] | None:
    """Step and type of the policy that ``export_policy`` left there; None when there is none that says so."""
    try:
        record = json.loads((directory / _RECORD).read_text(encoding="utf-8"))
        return int(record["step"]), str(record["dtype"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
