"""How far decode calls run ahead of the host, and how long they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from trm_jax.rollout import chunk_steps

__all__ = ["Pace"]


class Pace:
    """Keeps the device busy without letting slots stand empty.

    While nobody waits for a slot, the device has its next call before the host has read the last one. While somebody
    does, each call is read first: the slots that it freed are filled before the next.

    Args:
      most: decode steps of a call at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._left: dict[int, int] = {}
        self._unread = 0
        self._changed = threading.Condition()

    @property
    def unread(self) -> int:
        """Calls whose result the host has not seen."""
        return self._unread

    def started(self, slot: int, tokens: int) -> None:
        """A sample of at most ``tokens`` has been put in a slot."""
        self._left[slot] = tokens

    def steps(self, free: Iterable[int]) -> int:
        """Decode steps of the next call, which is counted as asked for; ``free`` are the slots without a sample."""
        empty = set(free)
        self._left = {slot: left for slot, left in self._left.items() if slot not in empty}
        steps = chunk_steps(self._most, [left for left in self._left.values() if left > 0], free=bool(empty))
        self._left = {slot: left - steps for slot, left in self._left.items()}
        with self._changed:
            self._unread += 1
        return steps

    def read(self) -> None:
        """A call has been read, and the slots that it freed are known."""
        with self._changed:
            self._unread -= 1
            self._changed.notify_all()

    def wait(self, unread: int, going: Callable[[], bool]) -> None:
        """Returns when at most ``unread`` calls have not been read, or nothing is going on any more."""
        with self._changed:
            while self._unread > unread and going():
                self._changed.wait(0.5)
