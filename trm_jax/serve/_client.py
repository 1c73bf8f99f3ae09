"""A client that asks a server for samples: concurrent, patient with a full queue or a restart, each sample once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np

from trm_jax.serve import wire
from trm_jax.serve._access import check_authority, is_loopback
from trm_jax.serve._requests import Completion, SampleRequest

__all__ = ["Connection", "RolloutClient", "ServingError"]

_Code = grpc.StatusCode
_AWAY = (_Code.UNAVAILABLE, _Code.ABORTED)  # gone, or back with other weights than asked for
_BUSY = (_Code.RESOURCE_EXHAUSTED, _Code.CANCELLED)  # its queue is full, or gRPC there dropped the call under a flood
_LOSSES = 10  # times that a server may go away with a request in its hands: that request may be what brings it down
_TOO_LARGE = "larger than max"  # what gRPC says of a message beyond either side's limit, with RESOURCE_EXHAUSTED too
_T = TypeVar("_T")


class ServingError(RuntimeError):
    """The server did not answer as asked, and asking again will not help."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Connection:
    """Where the server is and how to talk to it.

    Attributes:
      target: ``host:port``.
      certificate: PEM file of the authority that signed the server's certificate; None talks without TLS.
      token: bearer token; without TLS only for a server on this machine.
      concurrency: requests in flight.
      patience: seconds that a server may stay away, or its queue full, before a request fails.
      max_reply_mb: largest message that is accepted.

    Raises:
      ValueError: a number out of range, a file that is no certificate, or a token that others could read.
    """

    target: str
    certificate: Path | None = None
    token: str | None = None
    concurrency: int = 256
    patience: float = 120.0
    max_reply_mb: int = 256

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.max_reply_mb < 1 or not self.patience >= 0:
            raise ValueError("concurrency and max_reply_mb must be at least 1, patience at least 0.")
        if self.certificate is not None:
            check_authority(self.certificate)
        host = self.target.rpartition(":")[0].strip("[]")
        if self.token is not None and self.certificate is None and not is_loopback(host):
            raise ValueError(
                f"target={self.target!r}: a token would cross the network in the clear; give a certificate."
            )


class RolloutClient:
    """Blocking calls over one connection, made by an event loop in a thread of its own. Close it, or use ``with``.

    Args:
      connection: to what server.
      on_return: called after the server was away and before it is asked again, e.g. to give it the weights anew.
    """

    def __init__(self, connection: Connection, *, on_return: Callable[[], None] | None = None) -> None:
        self.connection = connection
        self._on_return = on_return
        self._running: set[concurrent.futures.Future[Any]] = set()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts-client", daemon=True)
        self._thread.start()
        self._run(self._open())

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; what is being asked over it ends as ``interrupt`` says."""
        self._closed = True  # a thread that gives the weights again would wait for ever for a loop that has ended
        self.interrupt()
        asyncio.run_coroutine_threadsafe(self._channel.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def interrupt(self) -> None:
        """Calls under way in other threads raise ``concurrent.futures.CancelledError``; the server hears of it."""
        for future in list(self._running):
            future.cancel()

    def generate(self, requests: Sequence[SampleRequest]) -> list[list[Completion]]:
        """Every sample of every request, whole, in order.

        A request is asked again when the server was away or its queue full. Its seeds determine its samples under the
        same weights, and an answer is used only when it is complete, so nothing is lost and nothing counted twice.

        Raises:
          ValueError: the server refused a request as malformed.
          ServingError: it failed, did not come back in time, sent something incomplete, or went away ten times while
            it served the same request.
        """
        answers: list[list[Completion]] = self._run(self._generate_all(requests))
        return answers

    def status(self) -> Any:
        """The server's ``StatusReply``."""
        return self._run(self._patiently(lambda _: self._status(wire.Empty(), metadata=self._metadata)))

    def load(self, version: int, *, weights: str = "", finish_first: bool = False) -> Any:
        """Has the server take a version from its weight directory; its ``StatusReply`` after that.

        Args:
          version: its number.
          weights: identity that it must have there; empty takes any.
          finish_first: let sequences in flight finish before.

        Raises:
          ServingError: it was refused; the server keeps the weights that it has.
        """
        request = wire.LoadRequest(version=version, weights=weights, finish_first=finish_first)
        return self._run(self._patiently(lambda _: self._load(request, metadata=self._metadata)))

    def metrics(self) -> str:
        """The server's metrics in Prometheus' text format."""
        text: str = self._run(self._patiently(lambda _: self._metrics(wire.Empty(), metadata=self._metadata))).text
        return text

    def _run(self, coroutine: Any) -> Any:
        if self._closed:
            coroutine.close()
            raise concurrent.futures.CancelledError
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._running.add(future)
        try:
            return future.result()
        except BaseException:  # an interrupt: the server shall not go on for nobody
            future.cancel()
            raise
        finally:
            self._running.discard(future)

    async def _open(self) -> None:
        connection = self.connection
        options = [
            ("grpc.max_receive_message_length", connection.max_reply_mb * 2**20),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 2000),  # the default lets a server that is back wait for two minutes
        ]
        if connection.certificate is None:
            self._channel = grpc.aio.insecure_channel(connection.target, options=options)
        else:
            credentials = grpc.ssl_channel_credentials(connection.certificate.read_bytes())
            self._channel = grpc.aio.secure_channel(connection.target, credentials, options=options)
        self._metadata = () if connection.token is None else (("authorization", f"Bearer {connection.token}"),)
        self._slots = asyncio.Semaphore(connection.concurrency)

        def method(name: str, kind: Any, reply: Any) -> Any:
            return kind(f"/{wire.SERVICE}/{name}", lambda message: message.SerializeToString(), reply.FromString)

        self._generate = method("Generate", self._channel.unary_stream, wire.DecodeResponse)
        self._status = method("Status", self._channel.unary_unary, wire.StatusReply)
        self._load = method("Load", self._channel.unary_unary, wire.StatusReply)
        self._metrics = method("Metrics", self._channel.unary_unary, wire.MetricsReply)
        self._returning = asyncio.Lock()
        self._returned = 0.0

    async def _generate_all(self, requests: Sequence[SampleRequest]) -> list[list[Completion]]:
        async def one(request: SampleRequest) -> list[Completion]:
            async with self._slots:
                return await self._patiently(lambda accepted: self._samples(request, accepted), notify=True)

        tasks = [asyncio.ensure_future(one(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _samples(self, request: SampleRequest, accepted: asyncio.Event) -> list[Completion]:
        pieces: dict[int, list[Completion]] = {i: [] for i in range(len(request.seeds))}
        call = self._generate(wire.to_message(request), metadata=self._metadata)
        if any(key == wire.ACCEPTED for key, _ in await call.initial_metadata()):  # a refusal has metadata too
            accepted.set()
        async for reply in call:
            for sample in reply.stream_content.samples:
                piece = wire.completion_of(sample)
                if piece.sample not in pieces or (pieces[piece.sample] and pieces[piece.sample][-1].finish):
                    raise ServingError(f"the server sent more of sample {piece.sample} than was asked for.")
                pieces[piece.sample].append(piece)
        missing = [i for i, parts in pieces.items() if not parts or not parts[-1].finish]
        if missing:
            raise ServingError(f"the server ended without finishing samples {missing}.")
        samples = [_joined(parts) for parts in pieces.values()]
        if request.weights is not None and any(done.weights != (request.weights,) for done in samples):
            accepted.clear()  # it was not served: patience goes on running
            none = grpc.aio.Metadata()
            message = "the server's weights were changed by another client while it sampled"
            raise grpc.aio.AioRpcError(_Code.ABORTED, none, none, details=message)
        return samples

    async def _patiently(self, call: Callable[[asyncio.Event], Awaitable[_T]], *, notify: bool = False) -> _T:
        """Calls until it is answered, or was refused for ``patience`` seconds since it was last accepted."""
        began, wait, losses = time.monotonic(), 0.02, 0
        while True:
            asked_at, accepted = time.monotonic(), asyncio.Event()
            try:
                return await call(accepted)
            except grpc.aio.AioRpcError as error:
                code, text = error.code(), error.details() or ""
                if code == _Code.INVALID_ARGUMENT:
                    raise ValueError(f"the server at {self.connection.target} refused: {text}") from error
                if code == _Code.RESOURCE_EXHAUSTED and _TOO_LARGE in text:
                    raise ServingError(
                        f"a message from or to the server at {self.connection.target} is too large ({text}): raise "
                        f"max_reply_mb={self.connection.max_reply_mb}, or ask for fewer samples, tokens or records."
                    ) from error
                if accepted.is_set():
                    began, wait = time.monotonic(), 0.02
                    losses += code == _Code.UNAVAILABLE
                if losses == _LOSSES:
                    raise ServingError(
                        f"the server at {self.connection.target} went away {losses} times while it served the same "
                        f"request (last: {text}): see its log for what ends it, e.g. memory for max_tokens this long."
                    ) from error
                late = time.monotonic() - began > self.connection.patience
                if code not in (*_AWAY, *_BUSY) or late:
                    raise ServingError(
                        f"the server at {self.connection.target} answered {code.name}: {text}"
                    ) from error
                await asyncio.sleep(wait)
                wait = min(2 * wait, 1.0)
                if notify and code in _AWAY:
                    await self._came_back(asked_at)

    async def _came_back(self, asked_at: float) -> None:
        """Lets one of the requests that failed together call ``on_return``."""
        if self._on_return is None:
            return
        async with self._returning:
            if self._returned < asked_at:
                await asyncio.to_thread(self._on_return)
                self._returned = time.monotonic()


def _joined(parts: list[Completion]) -> Completion:
    """The pieces of one sample as one."""
    if len(parts) == 1:
        return parts[0]

    def joined(name: str) -> Any:
        arrays = [getattr(part, name) for part in parts]
        return None if arrays[0] is None else np.concatenate(arrays)

    offsets = None
    if parts[0].support_offsets is not None:
        counts = np.concatenate([np.diff(part.support_offsets) for part in parts if part.support_offsets is not None])
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    names = (
        *("tokens", "logps", "model_logps", "versions", "support_tokens", "hidden", "logsumexp"),
        *("top_tokens", "top_logps", "routed_experts"),
    )
    return Completion(
        sample=parts[0].sample,
        finish=parts[-1].finish,
        weights=tuple(dict.fromkeys(identity for part in parts for identity in part.weights)),
        support_offsets=offsets,
        **{name: joined(name) for name in names},
    )
