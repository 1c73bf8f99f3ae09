"""Requests on their way to a slot: in the queue for their prefill, and with their prompt run, as samples."""

from __future__ import annotations

import contextlib
import queue
from collections import deque

from trm_jax.integrations.jetstream._work import Prefilled, Sample, Work

__all__ = ["Pending", "drop_ended", "gather"]

_GATHER = 0.003  # seconds that a prefill waits for company: one of few prompts makes the next calls one of few slots


def gather(backlog: queue.Queue[Work | None], first: Work, most: int) -> tuple[list[Work], bool]:
    """``first`` and the requests that come soon after it, at most ``most``; and whether the queue has ended."""
    works = [first]
    with contextlib.suppress(queue.Empty):
        while len(works) < most:
            more = backlog.get(timeout=_GATHER)
            if more is None:
                return works, True
            works.append(more)
    return works, False


def drop_ended(backlog: queue.Queue[Work | None]) -> None:
    """Takes requests whose client has gone out of the queue: nobody shall be refused for them."""
    with backlog.mutex:
        waiting = [work for work in backlog.queue if work is None or not work.ended]
        backlog.queue.clear()
        backlog.queue.extend(waiting)


class Pending:
    """Samples whose prompts have been run, in the order in which they get slots."""

    def __init__(self) -> None:
        self._samples: deque[tuple[Sample, int, Prefilled]] = deque()

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def works(self) -> list[Work]:
        """The request of each."""
        return [sample.work for sample, _, _ in self._samples]

    @property
    def group(self) -> Prefilled:
        """The prefill of the first."""
        return self._samples[0][2]

    def add(self, prefilled: Prefilled) -> None:
        """All samples of a prefill."""
        self._samples.extend(
            (sample, row, prefilled) for row, work in enumerate(prefilled.works) for sample in work.samples
        )

    def take(self, slots: queue.Queue[int]) -> tuple[list[tuple[int, int, Sample]], bool]:
        """``(slot, row of the prefill, sample)`` for samples of the first group; and whether the slots ran out.

        Samples of requests that have ended are passed over.
        """
        taken: list[tuple[int, int, Sample]] = []
        group = self.group
        try:
            while self._samples and self.group is group:
                if self._samples[0][0].work.ended:
                    self._samples.popleft()
                    continue
                slot = slots.get_nowait()
                sample, row, _ = self._samples.popleft()
                taken.append((slot, row, sample))
        except queue.Empty:
            return taken, True
        return taken, False
