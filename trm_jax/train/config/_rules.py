"""What sections say of a value that breaks a rule: the key, the value, the rule."""

from __future__ import annotations

import math

__all__ = ["at_least", "positive", "require"]


def require(condition: bool, message: str) -> None:
    """Raises ``ValueError(message)`` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def at_least(section: object, least: float, *names: str) -> None:
    """Every named field of ``section`` is ``least`` or more."""
    for name in names:
        value = getattr(section, name)
        require(value >= least, f"{name}={value}: must be at least {least}.")


def positive(section: object, name: str) -> None:
    """The named field of ``section`` is above 0 and finite."""
    value = getattr(section, name)
    require(0 < value < math.inf, f"{name}={value}: must be above 0 and finite.")
