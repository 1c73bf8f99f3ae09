"""Optional packages: imported where they are used, and missed with the command that installs them."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

__all__ = ["import_extra"]


def import_extra(module: str, *, extra: str, purpose: str) -> Any:
    """Imports an optional package.

    Args:
      module: the module to import.
      extra: the extra of this package that installs it.
      purpose: what needs it, for the message.

    Returns:
      The module.

    Raises:
      ImportError: the module is not installed; the message says what to install.

    Example:
      >>> import_extra("json", extra="train", purpose="reading").loads("1")
      1
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # third parties compile with SyntaxWarnings and import deprecated names
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(f"{purpose} needs {error.name!r}: pip install 'trm-jax[{extra}]'", name=error.name) from error
