"""A request on its way through the driver, and the tokens of its samples until they are sent."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trm_jax.integrations.jetstream._library import jetstream
from trm_jax.integrations.jetstream._state import Counters
from trm_jax.rollout import Columns, PolicyWeights, Prefix, Recorder, StopStrings, TextCodec
from trm_jax.serve import Completion, FinishReason, SampleRequest

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
      tokenizer: finds the request's stop strings; needed when it has some.
      record: where to keep on the device what is sampled; a completion then has no more than its columns.
      rows: the row there of every sample.
    """

    __hash__ = object.__hash__  # a dataclass that compares by value has none
    __eq__ = object.__eq__

    def __init__(
        self,
        request: SampleRequest,
        emit: Callable[[Completion | Failure], None],
        tokenizer: TextCodec | None = None,
        *,
        record: Recorder | None = None,
        rows: Sequence[int] = (),
    ) -> None:
        super().__init__(max_tokens=request.max_tokens, return_channel=None)
        self.request, self.record, self.rows = request, record, rows
        self.samples = [Sample(self, i, seed, tokenizer) for i, seed in enumerate(request.seeds)]
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
      tokenizer: as in ``Work``.

    Attributes:
      extras: the chunk's arrays that are wanted on the host besides its columns.
      prompt: set when it starts: the routes of its prefill and its row there, or None.
    """

    def __init__(self, work: Work, index: int, seed: int, tokenizer: TextCodec | None) -> None:
        self.work, self.index, self.seed = work, index, seed
        self.prompt: tuple[Any, int] | None = None
        self._parts: list[tuple[Columns, int, int]] = []
        self._arrays: list[dict[str, np.ndarray]] = []
        self._waiting = 0
        request = work.request
        self._watch: StopStrings | None = None
        if request.sampling.stop:
            assert tokenizer is not None
            self._watch = StopStrings(tokenizer, request.sampling.stop)
        self.extras = tuple(
            name
            for name, wanted in (
                ("hidden", request.hidden),
                ("logsumexp", request.hidden),
                ("support", request.sampling.cuts),
                ("top_tokens", request.top_logps),
                ("top_logps", request.top_logps),
                ("routes", request.routes),
            )
            if wanted and work.record is None
        )

    def take(self, columns: Columns, slot: int, count: int, extras: dict[str, np.ndarray]) -> int | None:
        """Notes that a chunk holds tokens of this sample.

        Args:
          columns: the chunk; kept, it is small and every slot's.
          slot: the sample's.
          count: its tokens there, at the front.
          extras: arrays of all slots by name; the sample's part is copied.

        Returns:
          How many of them belong to it because a stop string ends there, or None.
        """
        stopped = None if self._watch is None else self._watch.take(columns.tokens[slot, :count].tolist())
        count = count if stopped is None else stopped
        self._parts.append((columns, slot, count))
        self._arrays.append({name: extras[name][slot, :count].copy() for name in self.extras})
        self._waiting += count
        return stopped

    def due(self) -> bool:
        """Whether enough tokens wait to be sent before the sample has ended."""
        return 0 < self.work.request.stream_every <= self._waiting

    def flush(self, finish: FinishReason, vocab_size: int) -> Completion:
        """The waiting tokens, in one piece."""
        parts, arrays = self._parts, self._arrays
        self._parts, self._arrays, self._waiting = [], [], 0

        def joined(name: str) -> np.ndarray:
            return np.concatenate([getattr(columns, name)[slot, :n] for columns, slot, n in parts])

        extras = {name: np.concatenate([part[name] for part in arrays]) for name in self.extras}
        tokens = offsets = None
        if "support" in extras:
            kept = np.unpackbits(extras["support"], axis=1, count=vocab_size, bitorder="little")
            tokens = np.nonzero(kept)[1].astype(np.int32)
            offsets = np.concatenate([[0], np.cumsum(kept.sum(axis=1, dtype=np.int64))]).astype(np.int32)
        return Completion(
            sample=self.index,
            tokens=joined("tokens"),
            logps=joined("logps"),
            model_logps=joined("model_logps"),
            versions=np.concatenate([np.full(n, columns.versions[slot], np.int32) for columns, slot, n in parts]),
            finish=finish,
            support_tokens=tokens,
            support_offsets=offsets,
            hidden=extras.get("hidden"),
            logsumexp=extras.get("logsumexp"),
            top_tokens=self._top(extras.get("top_tokens")),
            top_logps=self._top(extras.get("top_logps")),
            routed_experts=self._with_prompt(extras.get("routes")),
        )

    def _top(self, array: np.ndarray | None) -> np.ndarray | None:
        """As many as were asked for of those that the engine records."""
        return None if array is None else array[:, : self.work.request.top_logps]

    def _with_prompt(self, routes: np.ndarray | None) -> np.ndarray | None:
        """The first piece's routes, after those of the prompt but its last token, which decoding runs again."""
        if routes is None or self.prompt is None:
            return routes
        (of_all, row), self.prompt = self.prompt, None
        return np.concatenate([np.asarray(of_all)[row, : len(self.work.request.prompt) - 1], routes])


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
