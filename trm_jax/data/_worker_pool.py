"""Requests over several worker processes, each of which may hang, die or be killed without harm to the others."""

from __future__ import annotations

import collections
import functools
import time
import weakref
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from trm_jax.data._worker_process import Outcome, WorkerProcess

__all__ = ["WorkerPool"]


class WorkerPool:
    """Worker processes of one program; see ``WorkerProcess``. Not for several threads at once.

    Args:
      program: of every worker.
      arguments: of every worker.
      workers: how many, at least 1.
      time_limit: seconds of wall-clock that a request may take; a worker that overruns is killed and replaced.
    """

    def __init__(self, program: Path, arguments: Sequence[str], *, workers: int, time_limit: float) -> None:
        self._start = functools.partial(WorkerProcess, program, arguments, time_limit)
        self._workers = [self._start() for _ in range(workers)]
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(worker.pid for worker in self._workers)

    @property
    def closed(self) -> bool:
        """Whether the workers are gone for good."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Ends the workers; a second call does nothing."""
        self._finalizer()

    def run(self, requests: Sequence[dict[str, Any]]) -> list[Outcome]:
        """What became of each request, in order; ``("error", False)`` where the worker died on it twice.

        Raises:
          RuntimeError: a worker could not start; the pool is closed then.
        """
        outcomes: list[Outcome] = [("error", False)] * len(requests)
        again = set(range(len(requests)))  # a death may have had another cause than the request: each is tried twice
        pending = collections.deque(range(len(requests)))
        try:
            while pending or any(worker.job is not None for worker in self._workers):
                for place, worker in enumerate(self._workers):
                    if not pending or not worker.idle:
                        continue
                    if worker.send(pending[0], requests[pending[0]]):
                        pending.popleft()
                    else:
                        self._replace(place)  # it died while idle; the request stays pending
                for job, outcome in self._wait():
                    if outcome[0] == "died" and job in again:
                        again.remove(job)
                        pending.append(job)
                    else:
                        outcomes[job] = outcome if outcome[0] != "died" else ("error", False)
        except BaseException:
            self.close()  # replies that are still on their way would answer the wrong requests
            raise
        return outcomes

    def _wait(self) -> list[tuple[int, Outcome]]:
        """Waits for a reply or the next deadline; says what came."""
        came = []
        active = {worker.output: place for place, worker in enumerate(self._workers) if not worker.idle}
        nearest = min((self._workers[place].deadline for place in active.values()), default=0.0)
        speaking = connection.wait(list(active), timeout=max(0.0, nearest - time.monotonic()))
        for output, place in active.items():
            worker = self._workers[place]
            if output in speaking:
                outcome = worker.receive()
            elif time.monotonic() >= worker.deadline:
                outcome = worker.overrun()
            else:
                continue
            if outcome is not None and worker.job is not None:
                came.append((worker.job, outcome))
                worker.job = None
            if worker.dead:
                self._replace(place)
        return came

    def _replace(self, place: int) -> None:
        self._workers[place].stop()
        self._workers[place] = self._start()


def _stop_all(workers: list[WorkerProcess]) -> None:
    for worker in workers:
        worker.stop()
