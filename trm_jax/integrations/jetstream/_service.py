"""The gRPC methods: JetStream's ``Decode`` and ``HealthCheck``; our ``Generate``, ``Status``, ``Load``, ``Metrics``."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import prometheus_client

from trm_jax.integrations.jetstream._driver import RolloutDriver
from trm_jax.integrations.jetstream._metrics import metrics_text
from trm_jax.integrations.jetstream._provenance import Provenance
from trm_jax.integrations.jetstream._state import QueueFull, Unavailable
from trm_jax.integrations.jetstream._work import Failure, Work
from trm_jax.rollout import SamplingConfig, SlotEngine, TextCodec
from trm_jax.serve import Completion, Limits, SampleRequest, WeightsRefused, wire

__all__ = ["BearerToken", "RolloutService"]

_Code = grpc.StatusCode
_CODES = {"internal": _Code.INTERNAL, "unavailable": _Code.UNAVAILABLE, "cancelled": _Code.CANCELLED}


class RolloutService:
    """What the server answers.

    Args:
      driver: runs requests.
      engine: its engine.
      tokenizer: text to ids and back, or None for ids only.
      sampling: what a request samples that does not say.
      limits: of one request.
      stream_every: tokens a message to stock clients, which cannot ask.
      load: takes a policy version, whether sequences finish first, and the identity of the version or ""; returns when
        it is in use. Called by one thread.
      provenance: identities of the weights in use.
      registry: of metrics.
    """

    def __init__(
        self,
        driver: RolloutDriver,
        engine: SlotEngine,
        *,
        tokenizer: TextCodec | None,
        sampling: SamplingConfig,
        limits: Limits,
        stream_every: int,
        load: Callable[[int, bool, str], None],
        provenance: Provenance,
        registry: prometheus_client.CollectorRegistry,
    ) -> None:
        self._driver, self._engine, self._tokenizer = driver, engine, tokenizer
        self._sampling, self._limits, self._stream_every = sampling, limits, stream_every
        self._load, self._provenance, self._registry = load, provenance, registry
        self._loader = ThreadPoolExecutor(1, "rollouts-load")  # one: each load holds a second copy of the weights

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """Both services, for ``grpc.aio.Server.add_generic_rpc_handlers``."""

        def unary(method: Callable[..., Awaitable[Any]], request: Any) -> grpc.RpcMethodHandler:
            async def handle(data: bytes, context: grpc.aio.ServicerContext) -> Any:
                try:
                    message = wire.parsed(request, data)
                except ValueError as error:
                    await context.abort(_Code.INVALID_ARGUMENT, _short(str(error)))
                return await method(message, context)

            return grpc.unary_unary_rpc_method_handler(handle, None, lambda reply: reply.SerializeToString())

        decode = grpc.unary_stream_rpc_method_handler(self.decode, None, lambda reply: reply.SerializeToString())
        return [
            grpc.method_handlers_generic_handler(
                wire.ORCHESTRATOR, {"Decode": decode, "HealthCheck": unary(self.health_check, wire.Empty)}
            ),
            grpc.method_handlers_generic_handler(
                wire.SERVICE,
                {
                    "Generate": decode,
                    "Status": unary(self.status, wire.Empty),
                    "Load": unary(self.load, wire.LoadRequest),
                    "Metrics": unary(self.metrics, wire.Empty),
                },
            ),
        ]

    async def decode(self, data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Samples a prompt; with ``sampling`` in the request every piece has its record, without, it is JetStream's."""
        try:
            message = wire.parsed(wire.DecodeRequest, data)
            stock = not message.HasField("sampling")
            request = await self._request(message, stock)
            self._limits.check(request)
        except ValueError as error:
            await context.abort(_Code.INVALID_ARGUMENT, _short(str(error)))
        mark = self._provenance.mark()
        if request.version is not None and request.version != self._driver.version:
            await context.abort(
                _Code.ABORTED, f"policy version {request.version} was asked for; the server has {self._driver.version}."
            )
        used = self._provenance.at(mark)
        if request.weights not in (None, used):
            await context.abort(
                _Code.ABORTED, f"weights {request.weights} were asked for; the server has {used or 'its own'}."
            )
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Completion | Failure]()

        def emit(piece: Completion | Failure) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        work = Work(request, emit, self._tokenizer)
        try:
            self._driver.place(work)
        except QueueFull as error:
            await context.abort(_Code.RESOURCE_EXHAUSTED, _short(str(error)))
        except Unavailable as error:
            await context.abort(_Code.UNAVAILABLE, _short(str(error)))
        text = _TextStream(self._tokenizer) if stock and message.HasField("text_content") else None
        left = len(request.seeds)
        try:
            await context.send_initial_metadata(((wire.ACCEPTED, "1"),))
            while left:
                piece = await pieces.get()
                if isinstance(piece, Failure):
                    await context.abort(_CODES[piece.kind], _short(piece.message))
                assert isinstance(piece, Completion)
                left -= piece.finish != ""
                reply = wire.DecodeResponse()
                sample = reply.stream_content.samples.add()
                if stock:
                    ids = [token for token in piece.tokens.tolist() if token not in self._engine.eos_ids]
                    sample.token_ids.extend(ids)
                    if text is not None:
                        sample.text = text.more(ids, last=left == 0)
                else:
                    wire.put_completion(dataclasses.replace(piece, weights=self._provenance.since(mark)), sample)
                yield reply
            if stock:  # as the stock server ends
                yield wire.DecodeResponse(stream_content={"samples": [{}]})
        finally:
            self._driver.cancel(work)

    async def _request(self, message: Any, stock: bool) -> SampleRequest:
        """The request in our terms.

        Raises:
          ValueError: neither text nor ids; text without a tokenizer or outside its alphabet; an option out of range.
        """
        content = message.WhichOneof("content")
        if content is None:
            raise ValueError("the request has neither text_content nor token_content.")
        if content == "text_content":
            if self._tokenizer is None:
                raise ValueError("this server has no tokenizer: send token_content.")
            # In a thread: it may be megabytes, and others are answered meanwhile.
            prompt = list(await asyncio.to_thread(self._tokenizer.encode, message.text_content.text))
        else:
            prompt = list(message.token_content.token_ids)
        if not stock:
            return wire.request_of(message, prompt, self._sampling)
        return SampleRequest(
            prompt=prompt,
            seeds=[secrets.randbits(32)],
            max_tokens=message.max_tokens,
            sampling=self._sampling,
            stream_every=self._stream_every,
        )

    async def health_check(self, message: Any, context: grpc.aio.ServicerContext) -> Any:
        """JetStream's: is it alive?"""
        return wire.HealthCheckResponse(is_live=self._driver.health().live)

    async def status(self, message: Any, context: grpc.aio.ServicerContext) -> Any:
        """Health, version, queue depth, limits."""
        health, limits = self._driver.health(), self._limits
        return wire.StatusReply(
            live=health.live,
            reason=health.reason,
            version=self._driver.version,
            weights=self._provenance.at(self._provenance.mark()),
            queue_depth=health.queue_depth,
            queue_limit=self._driver.queue_limit,
            slots=self._engine.config.slots,
            slots_busy=health.slots_busy,
            restarts=self._driver.counters.restarts,
            max_prompt_length=limits.prompt,
            max_response_length=limits.response,
            max_samples=limits.samples,
            vocab_size=limits.vocab_size,
            numerics=self._engine.numerics_json(),
            eos_ids=self._engine.eos_ids,
            hidden=limits.hidden,
            top_logps=limits.top_logps,
            routes=limits.routes,
            stop=limits.stop,
        )

    async def load(self, message: Any, context: grpc.aio.ServicerContext) -> Any:
        """Takes a version from the weight directory."""
        try:
            asked = (message.version, message.finish_first, message.weights)
            await asyncio.get_running_loop().run_in_executor(self._loader, self._load, *asked)
        except (WeightsRefused, ValueError) as error:
            await context.abort(_Code.FAILED_PRECONDITION, _short(str(error)))
        except Unavailable as error:
            await context.abort(_Code.UNAVAILABLE, _short(str(error)))
        return await self.status(message, context)

    async def metrics(self, message: Any, context: grpc.aio.ServicerContext) -> Any:
        """Prometheus' text format."""
        return wire.MetricsReply(text=metrics_text(self._registry))

    def close(self) -> None:
        """Waits for a load under way; those behind it are dropped."""
        self._loader.shutdown(cancel_futures=True)


def _short(text: str) -> str:
    """An error's words within what gRPC lets a trailer hold: some quote the whole request, or a compiler at length."""
    return text if len(text) <= 1000 else f"{text[:700]} ... {text[-200:]}"


class _TextStream:
    """Text of a growing response, without half a character: a byte-level token may hold a part of one."""

    def __init__(self, tokenizer: TextCodec | None) -> None:
        assert tokenizer is not None
        self._tokenizer, self._ids, self._sent = tokenizer, list[int](), 0

    def more(self, ids: list[int], *, last: bool) -> str:
        """What the new ids add."""
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        end = len(text) if last else len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        new, self._sent = text[self._sent : end], max(self._sent, end)
        return new


class BearerToken(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Answers only calls that carry the token, whatever the method.

    Args:
      token: compared in constant time.
    """

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

        async def refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
            await context.abort(_Code.UNAUTHENTICATED, "this server asks for a bearer token in 'authorization'.")

        self._refusal = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        """gRPC's hook."""
        given = [value for key, value in details.invocation_metadata if key == "authorization"]
        found = [hmac.compare_digest(str(value).encode(), self._expected) for value in given]
        return await continuation(details) if found and all(found) else self._refusal
