"""An ``Engine`` that runs JetStream's driver in this process: requests are handed to its threads, and nothing is copied
to the host but what decides when a sample ends.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import queue
import threading
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
from flax import nnx

from trm_jax.integrations.jetstream._driver import RolloutDriver
from trm_jax.integrations.jetstream._engine import RolloutEngine
from trm_jax.integrations.jetstream._state import Unavailable
from trm_jax.integrations.jetstream._work import Failure, Work
from trm_jax.models import Transformer
from trm_jax.rollout import (
    EngineConfig,
    LocalEngine,
    Recorder,
    RolloutNumerics,
    SamplingConfig,
    TextCodec,
)
from trm_jax.serve import Completion, SampleRequest, ServingError
from trm_jax.types import PromptBatch, RolloutBatch

__all__ = ["JetStreamEngine"]

_LOOK = 0.5  # seconds without an answer after which the driver is asked whether it lives
_STOP = 30.0  # seconds that its threads are given to end


class JetStreamEngine(LocalEngine):
    """``trm_jax.rollout.Engine`` by JetStream's driver in this process. Close it, or use ``with``.

    Prefill, decoding and what becomes of tokens have a thread each, so the device has its next call before the host has
    looked at the last one. Where numerics are ``batch_invariant``, samples are those of ``InProcessEngine`` to the bit;
    elsewhere prompts that are run together round together, and which ones are depends on timing.

    Weights change between two decode calls. ``update_weights`` may be called while another thread is in ``generate``:
    sequences in flight go on under the new ones, and the versions of their tokens tell.

    A fault of the driver is an error of the call that met it. The next call goes on with fresh slots, and after several
    faults in a row, or the death of a thread, with a fresh driver.

    Args:
      model: as the following ones, up to ``tokenizer``, of ``LocalEngine``.
      finish_first: let sequences in flight finish before weights change.
      stall_seconds: a decode call that takes longer is a fault; the first ones compile.

    Raises:
      ValueError: as ``LocalEngine``.

    >>> import jax.numpy as jnp
    >>> from trm_jax.models import TransformerConfig
    >>> model = Transformer(TransformerConfig(vocab_size=16), rngs=nnx.Rngs(0))
    >>> sizes = EngineConfig(slots=2, max_prompt_length=3, max_response_length=4)
    >>> prompts = PromptBatch(
    ...     tokens=jnp.array([[1, 2, 3], [1, 2, 3]]),
    ...     mask=jnp.ones((2, 3), bool),
    ...     group_ids=jnp.zeros(2, jnp.int32),
    ...     seeds=jnp.arange(2, dtype=jnp.uint32),
    ... )
    >>> options = {"numerics": RolloutNumerics(), "sampling": SamplingConfig(), "eos_ids": ()}
    >>> with JetStreamEngine(model, sizes, **options) as engine:
    ...     engine.update_weights(7, nnx.state(model, nnx.Param))
    ...     rollout = engine.generate(prompts)
    >>> print(rollout.response_tokens.shape, rollout.versions[0])
    (2, 4) [7 7 7 7]
    """

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        *,
        numerics: RolloutNumerics,
        sampling: SamplingConfig,
        eos_ids: Iterable[int],
        record_hidden: bool = True,
        record_routes: bool = False,
        record_top_logps: int = 0,
        record_support: bool = True,
        tokenizer: TextCodec | None = None,
        finish_first: bool = False,
        stall_seconds: float = 1800.0,
    ) -> None:
        super().__init__(
            model,
            config,
            numerics=numerics,
            sampling=sampling,
            eos_ids=eos_ids,
            record_hidden=record_hidden,
            record_routes=record_routes,
            record_top_logps=record_top_logps,
            record_support=record_support,
            tokenizer=tokenizer,
        )
        self._finish_first, self._stall_seconds = finish_first, stall_seconds
        self._driver: RolloutDriver | None = None
        self._lock = threading.Lock()  # of policy, version and driver
        self._works: set[Work] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the driver's threads, and whatever is being asked of them; a later call would start them anew."""
        with self._lock, contextlib.suppress(ServingError):  # they are daemons: one that hangs cannot hold the process
            self._retire()

    def interrupt(self) -> None:
        """Calls of ``generate`` under way in other threads raise ``concurrent.futures.CancelledError``."""
        for work in self._works.copy():
            work.fail(Failure(kind="cancelled", message="interrupted"))

    def update_weights(self, version: int, params: nnx.State[Any, Any]) -> None:
        """Copies the trainer's parameters of policy ``version`` in this engine's format; returns when they are used.

        On the device, by the driver's exchange: the old ones are let go of after the last call that uses them.
        """
        policy = self._slots.load(version, params)
        with self._lock:
            self._policy, self._version = policy, int(version)
            driver = self._driver
        if driver is not None:
            with contextlib.suppress(Unavailable):  # the next ``generate`` starts a driver with them, or says why not
                driver.update(policy, finish_first=self._finish_first)

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig | None = None) -> RolloutBatch:
        """Answers every row of ``prompts``; neighbouring rows with one prompt share its prefill.

        Args:
          prompts: rows of at most ``max_prompt_length`` tokens, left-aligned.
          sampling: overrides the engine's own options for this call.

        Returns:
          A ``RolloutBatch`` with ``T = max_response_length``.

        Raises:
          ValueError: an empty or too long prompt, or a token outside the vocabulary, naming the row; stop strings
            without a tokenizer.
          RuntimeError: before the first ``update_weights``.
          ServingError: the driver failed, saying how.
        """
        config, answers = self._slots.config, queue.SimpleQueue[tuple[list[int], Completion | Failure]]()
        requests, sampling = self._asked(prompts, sampling)
        driver = self._running()
        record = Recorder(self._slots, requests, sampling, support=self._record_support)
        works = [
            Work(
                SampleRequest(
                    prompt=requests.prompt(rows[0]).tolist(),
                    seeds=requests.seeds[rows].tolist(),
                    max_tokens=config.max_response_length,
                    sampling=sampling,
                ),
                functools.partial(_put, answers, rows),
                self._tokenizer,
                record=record,
                rows=rows,
            )
            for rows in requests.neighbours(len(requests))
        ]
        lengths, finished = np.zeros(len(requests), np.int32), np.zeros(len(requests), bool)
        self._works |= set(works)
        try:
            for work in works:
                driver.place(work)
            for _ in range(len(requests)):
                rows, answer = _next(answers, driver)
                if isinstance(answer, Failure):
                    raise _error(answer)
                row = rows[answer.sample]
                lengths[row], finished[row] = answer.tokens.size, answer.finish == "stop"
        except Unavailable as error:
            raise ServingError(f"sampling failed: {error}") from error
        finally:
            self._works -= set(works)
            for work in works:  # nobody waits for the others of a batch that failed
                driver.cancel(work)
        driver.rest()
        return record.rollout(prompts.group_ids, lengths=lengths, finished=finished)

    def _running(self) -> RolloutDriver:
        """The driver, a fresh one when there is none or it died."""
        with self._lock:
            policy = self._loaded()
            if self._driver is not None and not self._driver.health().live:
                self._retire()
            if self._driver is None:
                self._driver = RolloutDriver(
                    RolloutEngine(self._slots), policy, queue_limit=0, stall_seconds=self._stall_seconds
                )
            return self._driver

    def _retire(self) -> None:
        """Ends the driver.

        Raises:
          ServingError: one of its threads does not return; it has the device, and another driver would hang as it does.
        """
        if self._driver is None:
            return
        reason = self._driver.health().reason
        ending = threading.Thread(target=self._driver.stop, name="rollouts-ending", daemon=True)
        ending.start()
        ending.join(_STOP)
        if ending.is_alive():
            raise ServingError(f"sampling failed: {reason}, nor within {_STOP:g} s more; start the process again.")
        self._driver = None


def _put(answers: Any, rows: list[int], answer: Completion | Failure) -> None:
    answers.put((rows, answer))


def _next(answers: Any, driver: RolloutDriver) -> tuple[list[int], Completion | Failure]:
    """The next answer; a driver that does not answer any more gives each request a ``Failure``."""
    while True:
        try:
            answer: tuple[list[int], Completion | Failure] = answers.get(timeout=_LOOK)
        except queue.Empty:
            driver.watch()
        else:
            return answer


def _error(failure: Failure) -> Exception:
    if failure.kind == "cancelled":
        return concurrent.futures.CancelledError(failure.message)
    return ServingError(f"sampling failed: {failure.message}")
