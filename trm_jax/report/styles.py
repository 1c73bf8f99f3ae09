"""One colour and dash an arm, the same in every picture and legend."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trm_jax.report.runs import Arm

__all__ = ["ArmStyle", "arm_styles"]

# Okabe and Ito's palette without its yellow, which is too light for a line on white; roles have fixed colours.
_ROLE_STYLES = {
    "reference": ("#000000", ""),
    "lag_only": ("#E69F00", "1.5 1.5"),
    "numerics_only": ("#56B4E9", "6 1.5 1.5 1.5"),
    "uncorrected": ("#D55E00", "5 2"),
}
_FREE = (("#0072B2", ""), ("#009E73", "8 2"), ("#CC79A7", "3 1.5"), ("#7F5A2E", "6 1.5 1.5 1.5 1.5 1.5"))
_OTHER_STYLES = (*_FREE, *((colour, "1.5 1.5") for colour, _ in _FREE), ("#666666", ""), ("#666666", "5 2"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArmStyle:
    """How an arm is drawn.

    Attributes:
      colour: ``#rrggbb``.
      dash: on and off lengths in units of the line width; empty for a solid line.
    """

    colour: str
    dash: str

    def svg_dash(self, width: float) -> str:
        """The dash in pixels for a line of ``width``, as ``stroke-dasharray`` wants it."""
        return " ".join(f"{float(length) * width:g}" for length in self.dash.split())


def arm_styles(arms: Sequence[Arm]) -> dict[str, ArmStyle]:
    """A style for each arm by its slug; roles keep their colour, the others take what is free, in order.

    Example:
      >>> arm_styles([Arm(name="zero mismatch", slug="zero", role="reference")])["zero"].colour
      '#000000'
    """
    styles: dict[str, ArmStyle] = {}
    used: set[tuple[str, str]] = set()
    for place, arm in enumerate(arms):
        wanted = _ROLE_STYLES.get(arm.role or "")
        free = [style for style in _OTHER_STYLES if style not in used]
        colour, dash = wanted if wanted and wanted not in used else (free or _OTHER_STYLES)[0 if free else place % 4]
        used.add((colour, dash))
        styles[arm.slug] = ArmStyle(colour=colour, dash=dash)
    return styles
