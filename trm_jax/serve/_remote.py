"""An ``Engine`` whose sampling happens in another process: the trainer uses it as it uses the engine of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from trm_jax.models import Transformer
from trm_jax.rollout import (
    EngineConfig,
    EngineWeights,
    Recording,
    Requests,
    RolloutNumerics,
    SamplingConfig,
    convert_weights,
    describe_numerics,
)
from trm_jax.serve._batch import batch_of
from trm_jax.serve._client import Connection, RolloutClient, ServingError
from trm_jax.serve._requests import Completion, SampleRequest
from trm_jax.serve._weights import WeightDirectory
from trm_jax.types import PromptBatch, RolloutBatch

__all__ = ["RemoteEngine", "check_server"]


class RemoteEngine:
    """``trm_jax.rollout.Engine`` at an address.

    Weights go through a directory that both processes see: ``update_weights`` writes a verified checkpoint there and
    has the server take it. A server that was restarted is given the weights again before it is asked for samples. What
    was sampled by weights that this engine did not write is never used.

    Args:
      model: the architecture (its parameters are not used).
      config: lengths; they must be the server's.
      numerics: the server's arithmetic, with which ``head_matrix`` is made; compared with what the server says.
      sampling: default options.
      eos_ids: ids that end a response; compared with the server's.
      connection: where the server is.
      weights: the directory; this engine is its one writer until it is closed.
      record_hidden: have final hidden states returned.
      record_routes: have the experts returned that ran.
      record_top_logps: have so many of the most likely tokens returned at every position.
      finish_first: let sequences in flight finish before weights change.
      in_flight: another thread may call ``update_weights`` during ``generate``: samples are then of whatever weights
        the server has, and the versions of their tokens tell.

    Raises:
      ValueError: the server is made for something else, naming the difference; or another trainer has the directory.
      ServingError: there is no server within the connection's patience.
    """

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        *,
        numerics: RolloutNumerics,
        sampling: SamplingConfig,
        eos_ids: Iterable[int],
        connection: Connection,
        weights: Path,
        record_hidden: bool = True,
        record_routes: bool = False,
        record_top_logps: int = 0,
        finish_first: bool = False,
        in_flight: bool = False,
    ) -> None:
        self._graphdef, self._shape = nnx.graphdef(model), model.config
        self._config, self._numerics, self._sampling = config, numerics, sampling
        self._finish_first, self._in_flight = finish_first, in_flight
        self._directory = WeightDirectory(weights)
        self._recording = Recording(hidden=record_hidden, top_logps=record_top_logps, routes=record_routes)
        self._weights: EngineWeights | None = None
        self._version = -1
        self._given = (-1, "")  # version and identity of the weights that the server shall have
        self._written: set[str] = set()
        self._giving = threading.Lock()
        with contextlib.ExitStack() as stack:
            self._client = RolloutClient(connection, on_return=self._give_weights_again)
            stack.callback(self._client.close)
            self._samples = _compare(
                self._client.status(),
                config,
                vocab_size=self._shape.vocab_size,
                numerics=numerics,
                eos_ids=eos_ids,
                recording=self._recording,
            )
            stack.enter_context(self._directory.owned())
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Ends the connection, and lets go of the directory."""
        self._stack.close()

    def interrupt(self) -> None:
        """Calls under way in other threads raise ``concurrent.futures.CancelledError``."""
        self._client.interrupt()

    @property
    def version(self) -> int:
        """Policy version of the weights in use; -1 before the first ``update_weights``."""
        return self._version

    def update_weights(self, version: int, params: nnx.State[Any, Any]) -> None:
        """Publishes the parameters and returns when the server samples from them.

        Raises:
          ServingError: the server refused them and keeps those it has.
        """
        self._directory.publish(version, params)
        before, new = self._given, (int(version), self._directory.identity(version))
        self._written.add(new[1])
        with self._giving:  # or who finds the server back in this moment would give it the old ones
            try:
                self._give(new)
            except BaseException:
                self._given = before
                raise
        self._weights = convert_weights(self._graphdef, params, self._numerics)
        self._version = int(version)

    def head_matrix(self) -> Float[Array, "V D"]:
        """The output head as the server multiplies with it, ``[V, D]`` in its compute dtype."""
        if self._weights is None:
            raise RuntimeError("the engine has no weights yet: call update_weights(version, params) first.")
        return self._weights.head_matrix(self._numerics.compute().jnp_dtype)

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig | None = None) -> RolloutBatch:
        """Answers every row of ``prompts``; neighbouring rows with one prompt share its prefill.

        Args:
          prompts: rows of at most ``max_prompt_length`` tokens, left-aligned.
          sampling: overrides the engine's own options for this call.

        Raises:
          ValueError: a prompt that the server does not take, naming the row.
          RuntimeError: before the first ``update_weights``.
          ServingError: the server failed, or stayed away longer than the connection's patience.
        """
        if self._version < 0:
            raise RuntimeError("the engine has no weights yet: call update_weights(version, params) first.")
        sampling = self._sampling if sampling is None else sampling
        requests = Requests.of(prompts, limit=self._config.max_prompt_length, vocab_size=self._shape.vocab_size)
        groups = requests.neighbours(self._samples)
        answers = self._client.generate(
            [
                SampleRequest(
                    prompt=requests.prompt(rows[0]).tolist(),
                    seeds=requests.seeds[rows].tolist(),
                    max_tokens=self._config.max_response_length,
                    sampling=sampling,
                    hidden=self._recording.hidden,
                    top_logps=self._recording.top_logps,
                    routes=self._recording.routes,
                    version=None if self._in_flight else self._version,
                    weights=None if self._in_flight else self._given[1],
                )
                for rows in groups
            ]
        )
        by_row = {
            row: self._known(completion)
            for rows, completions in zip(groups, answers, strict=True)
            for row, completion in zip(rows, completions, strict=True)
        }
        return batch_of(
            prompts,
            [by_row[row] for row in range(len(by_row))],
            shape=self._shape,
            config=self._config,
            recording=self._recording,
            sampling=sampling,
            dtype=self._numerics.compute().jnp_dtype,
        )

    def _known(self, completion: Completion) -> Completion:
        """The completion; without versions where weights of another trainer may have made a part of it."""
        if set(completion.weights) <= {"", *self._written}:  # "": the server's own, of version -1
            return completion
        return dataclasses.replace(completion, versions=np.full_like(completion.versions, -1))

    def _give(self, new: tuple[int, str]) -> None:
        self._given = new
        status = self._client.load(new[0], weights=new[1], finish_first=self._finish_first)
        if (status.version, status.weights) != new:
            raise ServingError(
                f"the server was given policy version {new[0]} ({new[1][:12]}...) and says that it has "
                f"{status.version} ({status.weights[:12] or 'no identity'}...): is it of an older trm_jax, or has "
                "another client changed its weights?"
            )

    def _give_weights_again(self) -> None:
        """After the server was away: it may be a new process with its first weights."""
        with self._giving:
            if self._given[0] >= 0:
                status = self._client.status()
                if (status.version, status.weights) != self._given:
                    self._give(self._given)


def check_server(
    connection: Connection,
    config: EngineConfig,
    *,
    vocab_size: int,
    numerics: RolloutNumerics,
    eos_ids: Iterable[int],
    recording: Recording,
) -> None:
    """Compares a server with what a run expects of it, as ``RemoteEngine`` does; nothing is changed there.

    Raises:
      ValueError: the server is made for something else, naming the difference.
      ServingError: there is no server within the connection's patience.
    """
    with RolloutClient(connection) as client:
        _compare(
            client.status(),
            config,
            vocab_size=vocab_size,
            numerics=numerics,
            eos_ids=eos_ids,
            recording=recording,
        )


def _compare(
    status: Any,
    config: EngineConfig,
    *,
    vocab_size: int,
    numerics: RolloutNumerics,
    eos_ids: Iterable[int],
    recording: Recording,
) -> int:
    """Compares the server with what is expected; samples that a request may have."""
    expected = {
        "max_prompt_length": config.max_prompt_length,
        "max_response_length": config.max_response_length,
        "vocab_size": vocab_size,
        "numerics": describe_numerics(numerics),
        "eos_ids": sorted(int(i) for i in eos_ids),
    }
    for name, value in expected.items():
        found = list(status.eos_ids) if name == "eos_ids" else getattr(status, name)
        if found != value:
            raise ValueError(
                f"the server has {name}={found!r}, this run expects {value!r}: start it with this run's file (and arm)."
            )
    if recording.hidden and not status.hidden:
        raise ValueError("this run records hidden states and the server does not: set rollout.record_hidden there.")
    if recording.routes and not status.routes:
        raise ValueError(
            "this run replays the engine's experts and the server does not record them: set model.replay_routes there."
        )
    return int(status.max_samples)
