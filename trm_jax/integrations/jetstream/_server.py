"""A running server: driver, gRPC event loop, watchdog, metrics endpoint; started and stopped as one."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import socket
import threading
from pathlib import Path
from typing import Any, Self

import grpc
import jax
import prometheus_client
from flax import nnx

from trm_jax.integrations.jetstream._driver import RolloutDriver
from trm_jax.integrations.jetstream._engine import RolloutEngine
from trm_jax.integrations.jetstream._metrics import make_registry
from trm_jax.integrations.jetstream._provenance import Provenance
from trm_jax.integrations.jetstream._service import BearerToken, RolloutService
from trm_jax.models import Transformer
from trm_jax.rollout import SamplingConfig, SlotEngine, TextCodec
from trm_jax.serve import Access, Limits, WeightDirectory

__all__ = ["RolloutServer", "ServerOptions"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How much a server takes on.

    Attributes:
      queue_limit: requests that may wait; further ones are told to come again.
      max_samples: most samples of one prompt in a request.
      max_request_mb: largest request message.
      stream_every: tokens a message to stock JetStream clients.
      metrics_port: of a Prometheus endpoint on loopback, or None.
      stall_seconds: a decode call that takes longer is a fault; above the time that compiling takes.
      load_timeout: seconds that a change of weights may wait for sequences in flight.

    Raises:
      ValueError: naming field, value and rule.
    """

    queue_limit: int = 1024
    max_samples: int = 256
    max_request_mb: int = 4
    stream_every: int = 8
    metrics_port: int | None = None
    stall_seconds: float = 300.0
    load_timeout: float = 600.0

    def __post_init__(self) -> None:
        for name in ("queue_limit", "max_samples", "max_request_mb", "stream_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1.")
        for name in ("stall_seconds", "load_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0.")
        if self.metrics_port is not None and not 1 <= self.metrics_port < 65536:
            raise ValueError(f"metrics_port={self.metrics_port}: must lie in [1, 65535].")


class RolloutServer:
    """Serves one model. Use as a context manager.

    Args:
      engine: what decodes.
      model: whose weights it starts with.
      sampling: of requests that do not say.
      access: where it listens and whom it answers.
      options: how much it takes on.
      tokenizer: for text requests; None serves ids only.
      weights: directory from which clients may have later versions loaded; None refuses them.
      version: policy version of these weights; -1 says that no trainer made them.

    Raises:
      OSError: on entry, when the port is taken.
    """

    def __init__(
        self,
        engine: SlotEngine,
        model: Transformer,
        *,
        sampling: SamplingConfig,
        access: Access,
        options: ServerOptions,
        tokenizer: TextCodec | None = None,
        weights: Path | None = None,
        version: int = -1,
    ) -> None:
        self._access, self._options = access, options
        self.engine = engine
        params = nnx.state(model, nnx.Param)
        self._template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        self._weights = None if weights is None else WeightDirectory(weights)
        self._first = self.engine.load(version, params)
        self._provenance = Provenance("" if version < 0 else secrets.token_hex(32))
        self._sampling, self._tokenizer = sampling, tokenizer
        self._port = 0
        self._stopping = threading.Event()
        self.failure = ""

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._port

    @property
    def target(self) -> str:
        """``host:port`` for clients on this machine."""
        return dataclasses.replace(self._access, port=self._port).address

    def __enter__(self) -> Self:
        self.driver = RolloutDriver(
            RolloutEngine(self.engine, tokenizer=self._tokenizer, sampling=self._sampling),
            self._first,
            queue_limit=self._options.queue_limit,
            stall_seconds=self._options.stall_seconds,
        )
        registry = make_registry(self.driver)
        try:
            self._start(registry)
        except BaseException:
            self.driver.stop()
            raise
        self._watchdog = threading.Thread(target=self._watch, name="rollouts-watchdog", daemon=True)
        self._watchdog.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._watchdog.join()
        self.driver.stop()  # first: it ends every request, so that nothing is left for gRPC to wait for
        self._service.close()
        asyncio.run_coroutine_threadsafe(self._server.stop(grace=1.0), self._loop).result()
        self._end_loop()
        if self._metrics is not None:
            http, thread = self._metrics
            http.shutdown()
            http.server_close()
            thread.join()

    def wait(self, seconds: float) -> bool:
        """Waits; False as soon as the driver does not answer any more, with the reason in ``failure``."""
        self._stopping.wait(seconds)
        return not self.failure

    def load(self, version: int, finish_first: bool, identity: str = "") -> None:
        """Takes a version from the weight directory; the old weights stay when it is refused. One call at a time.

        Args:
          version: its number.
          finish_first: whether sequences in flight end before.
          identity: that it must have; empty takes any.

        Raises:
          ValueError: this server has no weight directory.
          WeightsRefused: the version is absent, half written, damaged, of another model, or of another identity.
        """
        if self._weights is None:
            raise ValueError("this server was started without a weight directory and keeps its weights.")
        identity = identity or self._weights.identity(version)
        policy = self.engine.load(version, self._weights.read(version, self._template, identity=identity))
        with self._provenance.changing(identity):
            self.driver.update(policy, finish_first=finish_first, timeout=self._options.load_timeout)

    def _start(self, registry: Any) -> None:
        service = self._service = RolloutService(
            self.driver,
            self.engine,
            tokenizer=self._tokenizer,
            sampling=self._sampling,
            limits=Limits.of(self.engine, samples=self._options.max_samples, stop=self._tokenizer is not None),
            stream_every=self._options.stream_every,
            load=self.load,
            provenance=self._provenance,
            registry=registry,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts-grpc", daemon=True)
        self._thread.start()
        self._metrics: tuple[Any, Any] | None = None
        try:
            asyncio.run_coroutine_threadsafe(self._listen(service), self._loop).result()
            if self._options.metrics_port is not None:
                self._metrics = prometheus_client.start_http_server(
                    self._options.metrics_port, addr="127.0.0.1", registry=registry
                )
        except BaseException:
            self._end_loop()
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self, service: RolloutService) -> None:
        token = self._access.token()
        self._server = grpc.aio.server(
            interceptors=() if token is None else (BearerToken(token),),
            options=[
                ("grpc.so_reuseport", 0),  # or two servers would share a port, each with a part of the requests
                ("grpc.max_receive_message_length", self._options.max_request_mb * 2**20),
                ("grpc.max_send_message_length", -1),
            ],
            maximum_concurrent_rpcs=2 * self._options.queue_limit + 2 * self.engine.config.slots + 64,
        )
        self._server.add_generic_rpc_handlers(service.handlers())
        _check_free(self._access)
        try:
            if self._access.certificate is not None and self._access.key is not None:
                identity = (self._access.key.read_bytes(), self._access.certificate.read_bytes())
                credentials = grpc.ssl_server_credentials([identity])
                self._port = self._server.add_secure_port(self._access.address, credentials)
            else:
                self._port = self._server.add_insecure_port(self._access.address)
        except RuntimeError as error:
            raise OSError(_cannot_listen(self._access)) from error
        await self._server.start()

    def _watch(self) -> None:
        while not self._stopping.wait(0.5):
            health = self.driver.watch()
            if not health.live:
                self.failure = health.reason
                self._stopping.set()


def _check_free(access: Access) -> None:
    """Finds a taken port before gRPC does, which would also print about it."""
    with socket.socket(socket.AF_INET6 if ":" in access.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((access.host, access.port))
        except OSError as error:
            raise OSError(_cannot_listen(access)) from error


def _cannot_listen(access: Access) -> str:
    return (
        f"cannot listen on {access.address}: the port is taken or the address is not this machine's. "
        "Choose another port, or 0 for a free one."
    )
