"""Where a step's samples come from, and what becomes of the weights that it makes: in turn, or ahead (``ahead``)."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from trm_jax.rollout import WeightLag
from trm_jax.train.sampling import Sampled, Sampler

__all__ = ["InTurn", "Source"]


class Source(Protocol):
    """What the loop asks of its rollout side."""

    @property
    def held(self) -> list[tuple[int, Any]]:
        """Versions and parameters that later samples come from: what a checkpoint must keep."""

    def start(self) -> None:
        """Before the first step."""

    def take(self) -> Sampled:
        """The samples of the next step."""

    def after_update(self, version: int, params: Any) -> None:
        """The policy moved; its next update donates ``params``."""

    def after_step(self, version: int, params: Any) -> None:
        """A step ended, whether or not the policy moved in it."""

    def stop(self) -> None:
        """After the last step; ``start`` may follow."""

    def close(self) -> None:
        """Lets go of the engine."""

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the arrays of ``held``."""

    def set_state(self, step: int, state: dict[str, Any], held: list[Any]) -> None:
        """Goes back to a saved place, after ``step`` steps, with the parameters held there."""


class InTurn:
    """Samples when asked, by weights that are ``lag`` updates old.

    Args:
      sampler: prompts and engine.
      lag: ``rollout.lag``.
      params: policy version 0; copied.
    """

    def __init__(self, sampler: Sampler, lag: int, params: Any) -> None:
        self._sampler, self._lag = sampler, lag
        self._weights = WeightLag(lag)
        self._step, self._place = 0, sampler.place
        self.after_update(0, params)

    @property
    def held(self) -> list[tuple[int, Any]]:
        """The last ``lag + 1`` versions."""
        return self._weights.held

    def start(self) -> None:
        """Nothing runs by itself."""

    def take(self) -> Sampled:
        """Samples them now."""
        self._sampler.load(*self._weights.oldest)
        sampled = self._sampler.sample(self._step)
        self._step, self._place = self._step + 1, sampled.place
        return sampled

    def after_update(self, version: int, params: Any) -> None:
        """Takes a copy."""
        self._weights.push(version, copy_of(params))

    def after_step(self, version: int, params: Any) -> None:
        """Every update has been seen."""

    def stop(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Lets go of the engine."""
        self._sampler.close()

    def get_state(self) -> dict[str, Any]:
        """Versions held, and the place of the prompt stream after what was taken."""
        return {"held_versions": [version for version, _ in self.held], "stream": self._place}

    def set_state(self, step: int, state: dict[str, Any], held: list[Any]) -> None:
        """As ``get_state`` gave it."""
        self._step, self._weights = step, WeightLag(self._lag)
        for version, params in zip(state["held_versions"], held, strict=True):
            self._weights.push(version, params)
        self._place = self._sampler.place = state["stream"]


def copy_of(params: Any) -> Any:
    """Arrays of one's own: those of the policy are donated by its next update."""
    return jax.tree.map(jnp.copy, params)
