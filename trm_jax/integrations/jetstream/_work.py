"""A request on its way through the driver, and the tokens of its samples until they are sent."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from trm_jax.integrations.jetstream._library import jetstream
from trm_jax.integrations.jetstream._state import Counters
from trm_jax.serve import Columns, Completion, FinishReason, PolicyWeights, Prefix, SampleRequest

__all__ = ["Failure", "Outstanding", "Prefilled", "Sample", "Work"]

_ACTIVE: Any = jetstream().orchestrator.ActiveRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """What ends a request without its samples.

    Attributes:
      kind: "internal" (the request's own), "unavailable" (the server's: another try may succeed) or "cancelled".
      message: for the client.
    """

    kind: str
    message: str


class Work(_ACTIVE):  # type: ignore[misc]
    """A request in the driver.

    Args:
      request: checked against the engine's limits.
      emit: takes each ``Completion`` and at most one ``Failure``; called from the driver's threads, must not block.
    """

    __hash__ = object.__hash__  # a dataclass that compares by value has none
    __eq__ = object.__eq__

    def __init__(self, request: SampleRequest, emit: Callable[[Completion | Failure], None]) -> None:
        super().__init__(max_tokens=request.max_tokens, return_channel=None)
        self.request = request
        self.samples = [Sample(self, i, seed) for i, seed in enumerate(request.seeds)]
        self._emit = emit
        self._left = len(self.samples)
        self._lock = threading.Lock()
        self.ended = False
        self.failure: Failure | None = None
        self.on_end: Callable[[Work], None] = lambda work: None

    def send(self, completion: Completion) -> None:
        """Passes on a piece; the last one of the last sample ends the work."""
        with self._lock:
            if self.ended:
                return
            self._left -= completion.finish != ""
            last = self.ended = self._left == 0
        if last:
            self.on_end(self)  # first: who has the last piece finds it counted
        self._emit(completion)

    def fail(self, failure: Failure) -> None:
        """Ends the work, unless it has ended; its slots are freed when the driver next looks at them."""
        with self._lock:
            if self.ended:
                return
            self.ended, self.failure = True, failure
        self.on_end(self)
        self._emit(failure)


class Prefilled(_ACTIVE):  # type: ignore[misc]
    """Requests whose prompts have been run together.

    Args:
      works: one a row of ``prefix``.
      prefix: their keys and values.
      policy: weights that made them.
    """

    def __init__(self, works: list[Work], prefix: Prefix, policy: PolicyWeights) -> None:
        super().__init__(max_tokens=0, return_channel=None)
        self.works, self.prefix, self.policy = works, prefix, policy


class Sample:
    """One sample of a request: where its tokens gather.

    Args:
      work: the request.
      index: place among its samples.
      seed: its own.
    """

    def __init__(self, work: Work, index: int, seed: int) -> None:
        self.work, self.index, self.seed = work, index, seed
        self._parts: list[tuple[Columns, int, int]] = []
        self._extras: list[tuple[Any, Any, Any]] = []
        self._waiting = 0

    def take(self, columns: Columns, slot: int, count: int, extras: tuple[Any, Any, Any]) -> None:
        """Notes that a chunk holds ``count`` tokens of this sample.

        Args:
          columns: the chunk; kept, it is small and every slot's.
          slot: the sample's.
          count: its tokens there, at the front.
          extras: hidden states, log-sum-exp and support bits of all slots, or None each; the sample's part is copied.
        """
        request = self.work.request
        wanted = (request.hidden, request.hidden, request.sampling.cuts)
        parts = [array[slot, :count].copy() if want else None for array, want in zip(extras, wanted, strict=True)]
        self._parts.append((columns, slot, count))
        self._extras.append((parts[0], parts[1], parts[2]))
        self._waiting += count

    def due(self) -> bool:
        """Whether enough tokens wait to be sent before the sample has ended."""
        return 0 < self.work.request.stream_every <= self._waiting

    def flush(self, finish: FinishReason, vocab_size: int) -> Completion:
        """The waiting tokens, in one piece."""
        parts, extras = self._parts, self._extras
        self._parts, self._extras, self._waiting = [], [], 0
        request = self.work.request

        def joined(name: str) -> np.ndarray:
            return np.concatenate([getattr(columns, name)[slot, :n] for columns, slot, n in parts])

        hidden = logsumexp = tokens = offsets = None
        if request.hidden:
            hidden = np.concatenate([states for states, _, _ in extras])
            logsumexp = np.concatenate([lse for _, lse, _ in extras])
        if request.sampling.cuts:
            bits = np.concatenate([bits for _, _, bits in extras])
            kept = np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little")
            tokens = np.nonzero(kept)[1].astype(np.int32)
            offsets = np.concatenate([[0], np.cumsum(kept.sum(axis=1, dtype=np.int64))]).astype(np.int32)
        versions = [np.full(n, columns.versions[slot], np.int32) for columns, slot, n in parts]
        return Completion(
            sample=self.index,
            tokens=joined("tokens"),
            logps=joined("logps"),
            model_logps=joined("model_logps"),
            versions=np.concatenate(versions),
            finish=finish,
            support_tokens=tokens,
            support_offsets=offsets,
            hidden=hidden,
            logsumexp=logsumexp,
        )


class Outstanding:
    """The requests that have not ended.

    Args:
      counters: where their ends are counted.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._works: set[Work] = set()
        self._lock = threading.Lock()  # any thread may end a request

    def __len__(self) -> int:
        return len(self._works)

    def add(self, work: Work) -> None:
        """A new one, until it ends."""
        work.on_end = self._ended
        with self._lock:
            self._works.add(work)

    def discard(self, work: Work) -> None:
        """One that was not accepted."""
        with self._lock:
            self._works.discard(work)

    def fail_all(self, failure: Failure) -> None:
        """Ends every one."""
        with self._lock:
            works = list(self._works)
        for work in works:
            work.fail(failure)

    def _ended(self, work: Work) -> None:
        with self._lock:
            self._works.discard(work)
            kind = "finished" if work.failure is None else work.failure.kind
            self._counters.finished += kind == "finished"
            self._counters.cancelled += kind == "cancelled"
            self._counters.failed += kind not in ("finished", "cancelled")
