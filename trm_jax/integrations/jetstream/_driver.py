"""JetStream's ``Driver`` with its prefill, generate and detokenize threads made fit for reinforcement learning.

Kept: its queues, slots, threads, and how they hand requests on. Changed, each for a fault of the stock driver:

* an exception ends the requests that it concerns, and the thread goes on with fresh slots; the stock one kills the
  process. After ``_MOST_FAILURES`` in a row the driver declares itself dead and refuses new work;
* records, per-request sampling and limits, end tokens returned, a reason for every end;
* a bounded queue; cancelled requests give their slots back at the next chunk;
* weights change between two decode calls, at once or when what decodes has finished;
* waiting prompts are prefilled together, and samples of a prompt share its run;
* programs are started by one thread at a time: over several devices, two that come in one order on some and in another
  on others wait for each other for ever.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from trm_jax.integrations.jetstream._delivery import deliver, keep_prompts
from trm_jax.integrations.jetstream._engine import RolloutEngine
from trm_jax.integrations.jetstream._exchange import WeightExchange
from trm_jax.integrations.jetstream._library import jetstream
from trm_jax.integrations.jetstream._pace import Pace
from trm_jax.integrations.jetstream._state import Counters, Health, QueueFull, Unavailable
from trm_jax.integrations.jetstream._waiting import Pending, drop_ended, gather
from trm_jax.integrations.jetstream._work import Failure, Outstanding, Prefilled, Sample, Work
from trm_jax.rollout import PolicyWeights, Prefix

__all__ = ["RolloutDriver"]

_DRIVER: Any = jetstream().orchestrator.Driver
_MOST_FAILURES = 3


def _on_mesh(loop: Callable[[RolloutDriver, int], None]) -> Callable[[RolloutDriver, int], None]:
    """A thread's function that compiles for the driver's mesh."""

    @functools.wraps(loop)
    def run(driver: RolloutDriver, idx: int) -> None:
        with contextlib.nullcontext() if driver.mesh.empty else jax.set_mesh(driver.mesh):
            loop(driver, idx)

    return run


class RolloutDriver(_DRIVER):  # type: ignore[misc]
    """Runs one engine; starts its threads at once. Use as a context manager, or call ``stop``.

    What the threads compile sees the mesh (``jax.set_mesh``) inside of which the driver is made.

    Args:
      engine: what decodes.
      policy: first weights.
      queue_limit: requests that may wait; 0 for any number.
      stall_seconds: a decode call that takes longer is reported as a fault; the first calls compile.

    Attributes:
      mesh: of the threads' programs; empty without one.
      counters: what it has done so far.
    """

    def __init__(
        self, engine: RolloutEngine, policy: PolicyWeights, *, queue_limit: int, stall_seconds: float = 300.0
    ) -> None:
        # The base class starts the threads, so everything they read comes before it.
        self._engine, self._exchange = engine, WeightExchange(policy)
        self.counters = Counters()
        self._outstanding = Outstanding(self.counters)
        self._pace = Pace(engine.slots.config.decode_chunk)
        self._stall_seconds = stall_seconds
        self._dead = ""
        self._in_prefill = 0
        self._fault: BaseException | None = None
        self._failures = 0
        self._progress = time.monotonic()
        self.mesh = jax.sharding.get_mesh()
        self._launching = threading.RLock()
        super().__init__(
            prefill_engines=[engine],
            generate_engines=[engine],
            prefill_params=[self._exchange.box],
            generate_params=[self._exchange.box],
            interleaved_mode=True,
            jax_padding=False,
        )
        self._prefill_backlog.maxsize = queue_limit
        self._detokenize_backlogs[0].maxsize = 0  # ``Pace`` bounds it

    def __enter__(self) -> RolloutDriver:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        return self._exchange.version

    @property
    def queue_limit(self) -> int:
        """Requests that may wait."""
        return int(self._prefill_backlog.maxsize)

    def place(self, work: Work) -> None:
        """Queues a request that has been checked.

        Raises:
          QueueFull: ``queue_limit`` requests wait.
          Unavailable: the driver is dead or stopping.
        """
        health = self.health()
        if not health.live:
            raise Unavailable(health.reason)
        self._outstanding.add(work)
        try:
            try:
                self.place_request_on_prefill_queue(work)
            except queue.Full:
                drop_ended(self._prefill_backlog)
                self.place_request_on_prefill_queue(work)
        except queue.Full:
            self._outstanding.discard(work)
            self.counters.refused += 1
            raise QueueFull(
                f"{self._prefill_backlog.maxsize} requests wait already; try again later, or raise queue_limit."
            ) from None

    def update(self, policy: PolicyWeights, *, finish_first: bool = False, timeout: float | None = None) -> None:
        """Changes the weights between two decode calls; returns when they are in use.

        Args:
          policy: in the engine's format.
          finish_first: sequences in flight end under the old weights, new ones wait for them; otherwise sequences go
            on under the new weights with the keys and values that they have.
          timeout: seconds to wait.

        Raises:
          Unavailable: the driver is dead, or the change did not come in time; it is then withdrawn.
        """
        self._exchange.offer(
            policy, finish_first=finish_first, timeout=timeout, why_not=lambda: self.health().reason, wake=self._wake
        )

    def health(self) -> Health:
        """Whether all threads live and decode calls return."""
        busy = self._engine.max_concurrent_decodes - self._generate_slots[0].qsize()
        reason = self._dead
        if not reason and not self.live:
            reason = "the driver is stopping"
        if not reason:
            gone = [thread.name for thread in self._all_threads if not thread.is_alive()]
            if gone:
                reason = f"thread {', '.join(gone)} died"
            elif busy and time.monotonic() - self._progress > self._stall_seconds:
                reason = f"no decode call returned for {self._stall_seconds:g} s"
        return Health(live=not reason, reason=reason, queue_depth=self._prefill_backlog.qsize(), slots_busy=busy)

    def watch(self) -> Health:
        """``health``, and when it is bad, an end to every request that waits for a driver that does not answer."""
        health = self.health()
        if not health.live:
            self._dead = self._dead or health.reason
            self._outstanding.fail_all(Failure(kind="unavailable", message=health.reason))
        return health

    def rest(self) -> None:
        """Returns when nothing decodes or is about to, so that nothing of it comes between what is started next."""
        while self.health().live:
            with self._launching:
                if self._idle(0) and not self._coming(0) and not self._pace.unread:
                    return
            time.sleep(0.0005)

    def stop(self) -> None:
        """Ends every request and the threads."""
        self._dead = self._dead or "the driver is stopping"
        self._outstanding.fail_all(Failure(kind="unavailable", message=self._dead))
        super().stop()

    def _count_tokens(self, count: int) -> None:
        self.counters.tokens += count

    def cancel(self, work: Work) -> None:
        """Ends a request whose client is gone."""
        work.fail(Failure(kind="cancelled", message="the client cancelled the request"))

    # ---- prefill thread

    @_on_mesh
    def _prefill_thread(self, idx: int) -> None:
        while self.live:
            work = self._prefill_backlog.get()
            if work is None:
                return
            self._in_prefill = 1
            works, last = gather(self._prefill_backlog, work, self._engine.slots.config.prefill_rows)
            works = [work for work in works if not work.ended]
            if works:
                try:
                    self._transfer_backlogs[idx].put(self._run_prompts(works))
                except BaseException as error:
                    self._report_failure("prefill", error, works)
            self._in_prefill = 0
            if last:
                return

    def _run_prompts(self, works: list[Work]) -> Prefilled:
        with self._launching:
            policy = self._exchange.box.current
            prefix: Prefix = self._engine.slots.prefill(policy, [work.request.prompt for work in works])
        self.counters.prefills += 1
        return Prefilled(works, prefix, policy)

    def _report_failure(self, what: str, error: BaseException, works: list[Work]) -> None:
        self.counters.restarts += 1
        failure = Failure(kind="internal", message=f"{what} failed: {type(error).__name__}: {error}")
        for work in works:
            work.fail(failure)

    # ---- generate thread

    @_on_mesh
    def _generate_thread(self, idx: int) -> None:
        while self.live and not self._dead:
            pending = Pending()
            try:
                self._decode_until_stopped(idx, pending)
                return
            except BaseException as error:
                self._failures += 1
                self._report_failure("decoding", error, pending.works)
                self._put_result(idx, ("failed", error))
                self._await_free_slots(idx)
                if self._failures >= _MOST_FAILURES:
                    self._dead = (
                        f"decoding failed {self._failures} times in a row, last: {type(error).__name__}: {error}"
                    )
                    self._outstanding.fail_all(Failure(kind="unavailable", message=self._dead))

    def _await_free_slots(self, idx: int) -> None:
        """Waits until what decoded has been given up, so that nothing decodes for nobody."""
        while self.live and self._generate_slots[idx].qsize() < self._engine.max_concurrent_decodes:
            time.sleep(0.001)

    def _decode_until_stopped(self, idx: int, pending: Pending) -> None:
        slots = self._generate_slots[idx]
        with self._launching:
            state = self._engine.init_decode_state()
        while self.live:
            self._pace.wait(0 if pending or self._coming(idx) else 1, lambda: self.live and not self._dead)
            fault, self._fault = self._fault, None
            if fault is not None:
                raise fault
            draining = self._exchange.take(self.counters, idle=self._idle(idx))
            if not draining and not self._fetch(idx, pending):
                return
            with self._launching:  # with the look at what is idle, or ``rest`` could miss a call that is just begun
                state, started = self._start(state, pending, slots, draining=draining)
                if started:
                    self._put_result(idx, ("started", started))
                elif self._idle(idx):
                    self._progress = time.monotonic()
                    continue
                steps = self._pace.steps(list(slots.queue))
                try:
                    state, result = self._engine.generate(self._exchange.box, state, steps)
                    result.copy_to_host_async()
                except BaseException:
                    self._pace.read()
                    raise
            self._put_result(idx, ("chunk", result))

    def _idle(self, idx: int) -> bool:
        """Whether no slot decodes."""
        return bool(self._generate_slots[idx].qsize() == self._engine.max_concurrent_decodes)

    def _wake(self) -> None:
        """Has the generate thread look at what there is to do, if it waits for requests."""
        with contextlib.suppress(queue.Full):
            self._generate_backlogs[0].put_nowait(("wake", None))

    def _coming(self, idx: int) -> bool:
        """Whether a request waits for its prefill or for a slot."""
        queues = (self._prefill_backlog, self._transfer_backlogs[idx], self._generate_backlogs[idx])
        return bool(self._in_prefill) or not all(waiting.empty() for waiting in queues)

    def _fetch(self, idx: int, pending: Pending) -> bool:
        """Takes prefilled requests, waiting for one under way while slots are free; False when the thread shall end."""
        slots, backlog = self._generate_slots[idx], self._generate_backlogs[idx]
        while len(pending) < slots.qsize():
            coming = self._coming(idx)
            try:
                prefilled = backlog.get(block=coming or (self._idle(idx) and not pending), timeout=0.05)
            except queue.Empty:
                if self._exchange.waiting or not (coming and self.live):
                    return True
                continue
            if prefilled is None:
                return False
            if isinstance(prefilled, tuple):
                return True
            pending.add(prefilled)
        return True

    def _start(
        self, state: Any, pending: Pending, slots: queue.Queue[int], *, draining: bool
    ) -> tuple[Any, list[tuple[int, Sample]]]:
        """Puts pending samples into free slots."""
        started: list[tuple[int, Sample]] = []
        while pending and not draining:
            group = pending.group
            if group.policy is not self._exchange.box.current:  # no sample starts from keys and values of older weights
                again = self._run_prompts(group.works)
                group.prefix, group.policy = again.prefix, again.policy
            taken, draining = pending.take(slots)
            if not taken:
                continue
            started += [(slot, sample) for slot, _, sample in taken]
            for slot, row, sample in taken:
                self._pace.started(slot, sample.work.request.max_tokens)
                sample.prompt = None if group.prefix.routes is None else (group.prefix.routes, row)
            starts = [
                (slot, row, sample.seed, sample.work.request.max_tokens, sample.work.request.sampling)
                for slot, row, sample in taken
            ]
            try:
                state = self._engine.slots.insert(group.prefix, state, starts)
            except BaseException:
                self._put_result(0, ("started", started))  # so that their slots and requests are known to be given up
                raise
        return state, started

    def _put_result(self, idx: int, item: tuple[Any, Any]) -> None:
        while self.live:
            with contextlib.suppress(queue.Full):
                self._detokenize_backlogs[idx].put(item, timeout=0.5)
                return

    # ---- detokenize thread: from arrays to requests

    def _detokenize_thread(self, idx: int) -> None:
        backlog, slots = self._detokenize_backlogs[idx], self._generate_slots[idx]
        running: dict[int, Sample] = {}
        while self.live:
            item = backlog.get()
            if item is None:
                return
            kind, value = item
            try:
                if kind == "started":
                    running.update(value)
                    keep_prompts(value, self._launching)
                    continue
                if kind == "failed":
                    raise value
                freed = deliver(value.chunk, running, self._engine.slots, self._count_tokens, self._launching)
                self.counters.chunks += 1
                self._failures = 0
            except BaseException as error:
                if kind != "failed":
                    self._fault = error  # the generate thread starts anew: its state may be what failed
                self._report_failure("decoding", error, [sample.work for sample in running.values()])
                freed = list(running)
            self._progress = time.monotonic()
            for slot in freed:
                del running[slot]
                slots.put_nowait(slot)
            if kind == "chunk":
                self._pace.read()
