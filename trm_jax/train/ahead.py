"""Sampling ahead of training, in a thread of its own: which batch, by which weights, and when.

Batch ``t`` is what step ``t`` learns from, ``W_t`` the weights after ``t`` steps, ``q`` how many batches may be ahead.

* fixed: batch ``t`` comes from ``W_max(0, t-q)``, and begins as soon as these weights and the engine are there. It is
  then at most ``q`` steps old, exactly so from step ``q`` on, whatever takes how long: a run repeats to the bit. With
  one update a step, none of them skipped, it is to the bit the run in turn with ``lag = q``.
* newest: batch ``t`` begins when batch ``t-q`` has been taken, by the newest weights there are; at an address and with
  engine="jetstream", newer ones reach the sequences that are being sampled.

Neither has more than ``q`` batches beyond the one whose turn it is. A checkpoint holds no batch: it holds the weights
``W_{s-q} ... W_s`` (fixed) or ``W_s`` (newest) and the place of the prompt stream after what was taken; what waited is
sampled again, to the same bits where the schedule is fixed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from trm_jax.train.config import TrainConfig
from trm_jax.train.engines import SamplingError
from trm_jax.train.sampling import Sampled, Sampler
from trm_jax.train.source import copy_of

__all__ = ["Ahead"]


class Ahead:
    """A source that samples while the policy learns.

    Args:
      sampler: prompts and engine; used by the thread alone, but for weights that change in flight.
      config: of the run; ``config.ahead`` is at least 1.
      params: policy version 0; copied.
      context: what the thread samples inside of: its programs must be those of the policy's mesh.
    """

    def __init__(
        self,
        sampler: Sampler,
        config: TrainConfig,
        params: Any,
        *,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._sampler, self._context = sampler, context
        self._queue, self._steps = config.ahead, config.steps
        self._fixed, self._in_flight = config.rollout.schedule == "fixed", config.rollout.in_flight
        self._weights: deque[tuple[int, Any]] = deque(maxlen=self._queue + 1 if self._fixed else 1)
        self._weights.append((0, copy_of(params)))
        self._done = self._taken = self._next = 0  # steps done, batches taken, batch that is sampled next
        self._place = sampler.place
        self._ready: deque[Sampled] = deque()
        self._changed = threading.Condition()
        self._fault: BaseException | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def held(self) -> list[tuple[int, Any]]:
        """The weights after each of the last ``q + 1`` steps, or only the newest."""
        with self._changed:
            return list(self._weights)

    @property
    def waiting(self) -> int:
        """Batches that are sampled and not taken."""
        return len(self._ready)

    def start(self) -> None:
        """Begins to sample, from the first batch that was not taken."""
        self._ready.clear()
        self._next, self._fault, self._stopping = self._taken, None, False
        self._sampler.place = self._place
        if self._in_flight:
            self._sampler.load(*self._weights[-1])
        self._thread = threading.Thread(target=self._run, name="rollouts-ahead", daemon=True)
        self._thread.start()

    def take(self) -> Sampled:
        """The next batch, as soon as it is there; what went wrong in the thread is raised here."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._fault is not None)
            if self._fault is not None:
                raise self._fault
            sampled = self._ready.popleft()
            self._taken, self._place = self._taken + 1, sampled.place
            self._changed.notify_all()
        return sampled

    def after_update(self, version: int, params: Any) -> None:
        """Weights are taken when a step ends."""

    def after_step(self, version: int, params: Any) -> None:
        """Takes a copy, or the one it has when the policy did not move; the next batch may begin."""
        newest, held = self._weights[-1]
        mine = held if newest == version else copy_of(params)
        fault: SamplingError | None = None
        if self._in_flight:
            try:
                self._sampler.load(version, mine)
            except SamplingError as error:  # this step is done: it is the next one that cannot be
                fault = error
        with self._changed:
            self._fault = self._fault or fault
            self._weights.append((version, mine))
            self._done += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the thread; what it is sampling is discarded, and sampled again after another ``start``."""
        if self._thread is None:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        while self._thread.is_alive():  # it may not have begun to ask when it was interrupted first
            self._sampler.interrupt()
            self._thread.join(timeout=0.1)
        self._thread = None

    def close(self) -> None:
        """Ends the thread, and lets go of the engine."""
        self.stop()
        self._sampler.close()

    def get_state(self) -> dict[str, Any]:
        """Versions held, and the place of the prompt stream after what was taken."""
        return {"held_versions": [version for version, _ in self.held], "stream": self._place}

    def set_state(self, step: int, state: dict[str, Any], held: list[Any]) -> None:
        """As ``get_state`` gave it; before ``start``."""
        self._weights.clear()
        self._weights.extend(zip(state["held_versions"], held, strict=True))
        self._done = self._taken = step
        self._place = state["stream"]

    def _run(self) -> None:
        try:
            with self._context():
                while self._sample_next():
                    pass
        except BaseException as error:
            with self._changed:
                self._fault = error
                self._changed.notify_all()

    def _sample_next(self) -> bool:
        """Samples one batch when its time has come; False when there is none left to sample."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._may_begin() or self._next >= self._steps)
            if self._stopping or self._next >= self._steps:
                return False
            step = self._next
            version, params = self._weights_of(step)
        if not self._in_flight:
            self._sampler.load(version, params)
        sampled = self._sampler.sample(step)
        with self._changed:
            if self._stopping:
                return False
            self._ready.append(sampled)
            self._next += 1
            self._changed.notify_all()
        return True

    def _may_begin(self) -> bool:
        if self._fixed:
            return self._next <= self._done + self._queue
        return self._next < self._taken + self._queue

    def _weights_of(self, step: int) -> tuple[int, Any]:
        """Of the batch of that step. ``self._weights`` ends with ``W_done``."""
        if not self._fixed:
            return self._weights[-1]
        wanted = max(0, step - self._queue)
        return self._weights[wanted - self._done - 1]
