"""Weights on their way into a driver."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

from trm_jax.integrations.jetstream._engine import PolicyBox
from trm_jax.integrations.jetstream._state import Counters, Unavailable
from trm_jax.rollout import PolicyWeights

__all__ = ["WeightExchange"]


@dataclasses.dataclass
class _Update:
    policy: PolicyWeights
    finish_first: bool
    done: threading.Event = dataclasses.field(default_factory=threading.Event)


class WeightExchange:
    """Hands weights from the thread that brings them to the one that decodes.

    Args:
      policy: first weights.
    """

    def __init__(self, policy: PolicyWeights) -> None:
        self.box = PolicyBox(policy)
        self.version = int(policy.version)
        self._update: _Update | None = None
        self._update_lock, self._swap_lock = threading.Lock(), threading.Lock()

    @property
    def waiting(self) -> bool:
        """Whether weights wait to be taken."""
        return self._update is not None

    def offer(
        self,
        policy: PolicyWeights,
        *,
        finish_first: bool,
        timeout: float | None,
        why_not: Callable[[], str],
        wake: Callable[[], None],
    ) -> None:
        """Waits until the weights are taken.

        Args:
          policy: in the engine's format.
          finish_first: whether sequences in flight end before they are taken.
          timeout: seconds to wait.
          why_not: says why nobody will take them, or nothing.
          wake: has who takes them look.

        Raises:
          Unavailable: nobody will, or nobody did in time; they are then withdrawn.
        """
        with self._update_lock:
            update = _Update(policy, finish_first)
            self._update = update
            wake()
            deadline = None if timeout is None else time.monotonic() + timeout
            while not update.done.wait(0.05):
                reason = why_not()
                late = deadline is not None and time.monotonic() > deadline
                if late or reason:
                    with self._swap_lock:
                        if update.done.is_set():
                            return
                        self._update = None
                    raise Unavailable(reason or f"weights not taken within {timeout} s; the old ones stay")

    def take(self, counters: Counters, *, idle: bool) -> bool:
        """Swaps the weights if it is time; whether new samples must wait for a swap."""
        update = self._update
        if update is None:
            return False
        if update.finish_first and not idle:
            return True
        version = int(update.policy.version)
        with self._swap_lock:
            if self._update is not update:  # withdrawn in this moment
                return False
            self.box.current, self.version = update.policy, version
            self._update = None
            update.done.set()
        counters.updates += 1
        return False
