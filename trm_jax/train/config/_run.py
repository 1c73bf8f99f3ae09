"""A configuration file as a whole: arms, each for every seed."""

from __future__ import annotations

import dataclasses

from trm_jax.train.config._train import TrainConfig

__all__ = ["WARM_START", "ArmConfig", "RunConfig"]

WARM_START = "warm start"
"""What progress calls the training before an arm."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArmConfig:
    """One way of running the same experiment.

    Attributes:
      slug: its directory.
      name: its name in tables and pictures.
      description: a sentence for the report.
      role: "reference", "lag_only", "numerics_only", "uncorrected" or "corrected"; what the report compares it as.
      train: the complete configuration of the arm.
    """

    slug: str
    name: str
    description: str
    role: str
    train: TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole configuration file: arms, each for every seed.

    Attributes:
      title: headline of the report.
      directory: where everything is written.
      seeds: seeds of every arm.
      arms: the arms in order.
    """

    title: str
    directory: str
    seeds: tuple[int, ...]
    arms: tuple[ArmConfig, ...]
