"""The messages on the wire: JetStream's own with fields added, and those of our service.

``jetstream_proto.Orchestrator`` and its messages are those of google-jetstream 0.2.2 (and of its unreleased successor);
ours stand in fields from 1001 on. A stock client skips what it does not know, a stock request lacks our fields and gets
a stock answer. The messages live in a descriptor pool of their own, so that they do not clash with JetStream's module
when both are imported, and nothing has to be generated. Arrays travel as little-endian bytes.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from trm_jax.rollout import SamplingConfig
from trm_jax.serve._requests import Completion, SampleRequest

__all__ = [
    "ACCEPTED",
    "ORCHESTRATOR",
    "SERVICE",
    "DecodeRequest",
    "DecodeResponse",
    "Empty",
    "HealthCheckResponse",
    "LoadRequest",
    "MetricsReply",
    "StatusReply",
    "completion_of",
    "parsed",
    "put_completion",
    "request_of",
    "to_message",
]

ORCHESTRATOR = "jetstream_proto.Orchestrator"
SERVICE = "trm_jax.Rollouts"
ACCEPTED = "trm-jax-accepted"
"""Initial metadata of a request that was taken: by it a client tells being served from being refused."""

_TYPES = {"int32": 5, "uint32": 13, "uint64": 4, "double": 1, "bool": 8, "string": 9, "bytes": 12}
_PATH = ".jetstream_proto.DecodeResponse.StreamContent"

# Message → (number, type, name, oneof). A type with a dot is a message; "repeated " stands before a repeated field.
_JETSTREAM: dict[str, list[tuple[int, str, str, str]]] = {
    "DecodeRequest.TextContent": [(1, "string", "text", "")],
    "DecodeRequest.TokenContent": [(1, "repeated int32", "token_ids", "")],
    "DecodeRequest": [
        (1, "string", "session_cache", ""),
        (3, "int32", "priority", ""),
        (4, "int32", "max_tokens", ""),
        (5, ".jetstream_proto.DecodeRequest.TextContent", "text_content", "content"),
        (6, ".jetstream_proto.DecodeRequest.TokenContent", "token_content", "content"),
        (1001, ".jetstream_proto.Sampling", "sampling", ""),
    ],
    "DecodeResponse.InitialContent": [],
    "DecodeResponse.StreamContent.Sample": [
        (1, "string", "text", ""),
        (2, "repeated int32", "token_ids", ""),
        (1001, ".jetstream_proto.Record", "record", ""),
    ],
    "DecodeResponse.StreamContent": [(1, f"repeated {_PATH}.Sample", "samples", "")],
    "DecodeResponse": [
        (2, ".jetstream_proto.DecodeResponse.InitialContent", "initial_content", "content"),
        (3, _PATH, "stream_content", "content"),
    ],
    "HealthCheckRequest": [],
    "HealthCheckResponse": [(1, "bool", "is_live", "")],
    "Sampling": [
        (1, "repeated uint32", "seeds", ""),
        (2, "double", "temperature", ""),
        (3, "double", "top_p", ""),
        (4, "int32", "top_k", ""),
        (5, "double", "min_p", ""),
        (6, "bool", "greedy", ""),
        (7, "bool", "hidden", ""),
        (8, "int32", "stream_every", ""),
        (9, "bool", "checks_version", ""),
        (10, "int32", "version", ""),
        (11, "repeated string", "stop", ""),
        (12, "int32", "top_logps", ""),
        (13, "bool", "routes", ""),
        (14, "string", "weights", ""),
    ],
    "Record": [
        (1, "int32", "sample", ""),
        (2, "string", "finish", ""),
        (3, "bytes", "logps", ""),
        (4, "bytes", "model_logps", ""),
        (5, "bytes", "versions", ""),
        (6, "bytes", "support_tokens", ""),
        (7, "bytes", "support_offsets", ""),
        (8, "bytes", "hidden", ""),
        (9, "string", "hidden_dtype", ""),
        (10, "bytes", "logsumexp", ""),
        (11, "bytes", "top_tokens", ""),
        (12, "bytes", "top_logps", ""),
        (13, "bytes", "routed_experts", ""),
        (14, "repeated int32", "routed_shape", ""),
        (15, "repeated string", "weights", ""),
    ],
    "Empty": [],
    "LoadRequest": [
        (1, "int32", "version", ""),
        (2, "bool", "finish_first", ""),
        (3, "string", "weights", ""),
    ],
    "MetricsReply": [(1, "string", "text", "")],
    "StatusReply": [
        (1, "bool", "live", ""),
        (2, "string", "reason", ""),
        (3, "int32", "version", ""),
        (4, "int32", "queue_depth", ""),
        (5, "int32", "queue_limit", ""),
        (6, "int32", "slots", ""),
        (7, "int32", "slots_busy", ""),
        (8, "int32", "restarts", ""),
        (9, "int32", "max_prompt_length", ""),
        (10, "int32", "max_response_length", ""),
        (11, "int32", "max_samples", ""),
        (12, "int32", "vocab_size", ""),
        (13, "string", "numerics", ""),
        (14, "repeated int32", "eos_ids", ""),
        (15, "bool", "hidden", ""),
        (16, "int32", "top_logps", ""),
        (17, "bool", "routes", ""),
        (18, "bool", "stop", ""),
        (19, "string", "weights", ""),
    ],
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="trm_jax/rollouts.proto", package="jetstream_proto", syntax="proto3")
    made: dict[str, Any] = {}
    for path in sorted(_JETSTREAM, key=lambda path: path.count(".")):  # the outer message first
        outer, _, name = path.rpartition(".")
        message = (made[outer].nested_type if outer else file.message_type).add(name=name)
        made[path] = message
        for number, kind, field_name, oneof in _JETSTREAM[path]:
            repeated = kind.startswith("repeated ")
            base = kind.removeprefix("repeated ")
            field = message.field.add(name=field_name, number=number, label=3 if repeated else 1)
            if base in _TYPES:
                field.type = _TYPES[base]
            else:
                field.type, field.type_name = 11, base
            if oneof:
                if not message.oneof_decl:
                    message.oneof_decl.add(name=oneof)
                field.oneof_index = 0
    return file


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_file())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"jetstream_proto.{name}"))


DecodeRequest: Any = _message("DecodeRequest")
"""JetStream's request, with ``sampling`` (1001): seeds (a sample each) and options, 0 meaning the server's default."""
DecodeResponse: Any = _message("DecodeResponse")
"""JetStream's response; each sample has ``record`` (1001) when the request had ``sampling``."""
Empty: Any = _message("Empty")
"""Nothing."""
HealthCheckResponse: Any = _message("HealthCheckResponse")
"""JetStream's."""
LoadRequest: Any = _message("LoadRequest")
"""Policy version to load from the server's weight directory, whether sequences in flight finish first, and the identity
that the version must have there (empty takes any)."""
MetricsReply: Any = _message("MetricsReply")
"""Prometheus' text format."""
StatusReply: Any = _message("StatusReply")
"""Health, version and identity of the weights, queue depth, and what the server is made for."""

_Record: Any = _message("Record")
_F4, _I4, _I2 = np.dtype("<f4"), np.dtype("<i4"), np.dtype("<i2")


def parsed(kind: Any, data: bytes) -> Any:
    """The message in ``data``.

    Raises:
      ValueError: they are no such message.

    >>> parsed(LoadRequest, bytes([8, 3])).version
    3
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ValueError(f"{len(data)} bytes that are no {kind.DESCRIPTOR.name}: {error}") from error


def to_message(request: SampleRequest) -> Any:
    """The request as a ``DecodeRequest``."""
    sampling = request.sampling
    return DecodeRequest(
        max_tokens=request.max_tokens,
        token_content={"token_ids": [int(i) for i in request.prompt]},
        sampling={
            "seeds": [int(seed) for seed in request.seeds],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "greedy": sampling.greedy,
            "hidden": request.hidden,
            "stream_every": request.stream_every,
            "checks_version": request.version is not None,
            "version": request.version or 0,
            "stop": sampling.stop,
            "top_logps": request.top_logps,
            "routes": request.routes,
            "weights": request.weights or "",
        },
    )


def request_of(message: Any, prompt: list[int], default: SamplingConfig) -> SampleRequest:
    """The ``SampleRequest`` of a ``DecodeRequest`` that has ``sampling``.

    Args:
      message: received.
      prompt: its token ids (text is encoded elsewhere).
      default: what a temperature or top_p of 0, which are not legal values, stands for.

    Raises:
      ValueError: an option out of range.
    """
    asked = message.sampling
    return SampleRequest(
        prompt=prompt,
        seeds=list(asked.seeds),
        max_tokens=message.max_tokens,
        sampling=SamplingConfig(
            temperature=asked.temperature or default.temperature,
            top_p=asked.top_p or default.top_p,
            top_k=asked.top_k,
            min_p=asked.min_p,
            greedy=asked.greedy,
            stop=tuple(asked.stop),
        ),
        hidden=asked.hidden,
        top_logps=asked.top_logps,
        routes=asked.routes,
        stream_every=asked.stream_every,
        version=asked.version if asked.checks_version else None,
        weights=asked.weights or None,
    )


def put_completion(completion: Completion, sample: Any) -> None:
    """Writes a completion into a ``DecodeResponse.StreamContent.Sample``."""
    sample.token_ids.extend(completion.tokens.tolist())
    record = sample.record
    record.sample, record.finish = completion.sample, completion.finish
    record.weights.extend(completion.weights)
    record.logps = completion.logps.astype(_F4, copy=False).tobytes()
    record.model_logps = completion.model_logps.astype(_F4, copy=False).tobytes()
    record.versions = completion.versions.astype(_I4, copy=False).tobytes()
    if completion.support_tokens is not None and completion.support_offsets is not None:
        record.support_tokens = completion.support_tokens.astype(_I4, copy=False).tobytes()
        record.support_offsets = completion.support_offsets.astype(_I4, copy=False).tobytes()
    if completion.hidden is not None and completion.logsumexp is not None:
        bfloat16 = completion.hidden.dtype.name == "bfloat16"
        record.hidden_dtype = "bfloat16" if bfloat16 else "float32"
        record.hidden = completion.hidden.astype(completion.hidden.dtype if bfloat16 else _F4, copy=False).tobytes()
        record.logsumexp = completion.logsumexp.astype(_F4, copy=False).tobytes()
    if completion.top_tokens is not None and completion.top_logps is not None:
        record.top_tokens = completion.top_tokens.astype(_I4, copy=False).tobytes()
        record.top_logps = completion.top_logps.astype(_F4, copy=False).tobytes()
    if completion.routed_experts is not None:
        record.routed_experts = completion.routed_experts.astype(_I2, copy=False).tobytes()
        record.routed_shape.extend(completion.routed_experts.shape)


def completion_of(sample: Any) -> Completion:
    """The completion in a ``DecodeResponse.StreamContent.Sample``.

    Raises:
      ValueError: an array whose length does not fit the tokens; a response that was cut or forged is not used.
    """
    record, count = sample.record, len(sample.token_ids)

    def array(name: str, dtype: Any, length: int) -> Any:
        data = getattr(record, name)
        found = np.frombuffer(data, dtype) if len(data) % np.dtype(dtype).itemsize == 0 else None
        if found is None or (length >= 0 and found.size != length):
            raise ValueError(f"a response of {count} tokens came with {len(data)} bytes of {name}: it is not whole.")
        return found

    offsets = array("support_offsets", _I4, count + 1) if record.support_offsets else None
    hidden = None
    if record.hidden:
        flat = array("hidden", jnp.bfloat16 if record.hidden_dtype == "bfloat16" else _F4, -1)
        hidden = flat.reshape(count, -1)
    top_tokens = array("top_tokens", _I4, -1).reshape(count, -1) if record.top_tokens else None
    routes = None
    if record.routed_shape:
        shape = tuple(record.routed_shape)
        routes = array("routed_experts", _I2, math.prod(shape)).reshape(shape)
    return Completion(
        sample=record.sample,
        tokens=np.array(sample.token_ids, np.int32),
        logps=array("logps", _F4, count),
        model_logps=array("model_logps", _F4, count),
        versions=array("versions", _I4, count),
        finish=record.finish,
        weights=tuple(record.weights),
        support_tokens=None if offsets is None else array("support_tokens", _I4, int(offsets[-1])),
        support_offsets=offsets,
        hidden=hidden,
        logsumexp=array("logsumexp", _F4, count) if record.hidden else None,
        top_tokens=top_tokens,
        top_logps=None if top_tokens is None else array("top_logps", _F4, top_tokens.size).reshape(count, -1),
        routed_experts=routes,
    )
