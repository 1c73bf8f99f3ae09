"""What sections say of a value that breaks a rule: the key, the value, the rule."""

from __future__ import annotations

import math

__all__ = ["at_least", "at_most", "positive", "require"]


def require(condition: bool, message: str) -> None:
    """Raises ``ValueError(message)`` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def at_least(section: object, least: float, *names: str) -> None:
    """Every named field of ``section`` is ``least`` or more."""
    for name in names:
        value = getattr(section, name)
        require(value >= least, f"{name}={value}: must be at least {least}.")


def at_most(section: object, most: float, *names: str) -> None:
    """Every named field of ``section`` is ``most`` or less."""
    for name in names:
        value = getattr(section, name)
        require(value <= most, f"{name}={value}: must be at most {most}.")


def positive(section: object, name: str) -> None:
    """The named field of ``section`` is above 0 and finite."""
    value = getattr(section, name)
    require(0 < value < math.inf, f"{name}={value}: must be above 0 and finite.")
