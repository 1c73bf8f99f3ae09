"""What a driver counts and says of itself, and the errors with which it refuses."""

from __future__ import annotations

import dataclasses

__all__ = ["Counters", "Health", "QueueFull", "Unavailable"]


class QueueFull(RuntimeError):
    """As many requests wait as may; try again later."""


class Unavailable(RuntimeError):
    """The driver is dead or stopping and takes no requests."""


@dataclasses.dataclass
class Counters:
    """Totals since the start; read without a lock.

    Attributes:
      tokens: sampled for requests.
      chunks: decode calls.
      prefills: prefill calls.
      finished: requests answered in full.
      failed: requests ended by a fault.
      cancelled: requests whose client went away.
      refused: requests that found the queue full.
      restarts: times a thread went on after an exception.
      updates: weights taken.
    """

    tokens: int = 0
    chunks: int = 0
    prefills: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    restarts: int = 0
    updates: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Health:
    """What the driver says of itself.

    Attributes:
      live: whether requests are being answered.
      reason: why not, or an empty string.
      queue_depth: requests that wait for their prefill.
      slots_busy: slots that decode.
    """

    live: bool
    reason: str
    queue_depth: int
    slots_busy: int
