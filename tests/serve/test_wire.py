"""The messages: what is sent arrives, what is not whole is not used, and JetStream's own fields keep their places."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jetstream.core.proto import jetstream_pb2 as theirs

from trm_jax.serve import Completion, SampleRequest, SamplingOptions, wire


def completion(hidden_dtype=np.float32) -> Completion:
    rng = np.random.default_rng(0)
    return Completion(
        sample=2,
        tokens=np.array([5, 0, 7], np.int32),
        logps=rng.standard_normal(3, np.float32),
        model_logps=rng.standard_normal(3, np.float32),
        versions=np.array([4, 4, 5], np.int32),
        finish="stop",
        support_tokens=np.array([5, 6, 0, 7], np.int32),
        support_offsets=np.array([0, 2, 3, 4], np.int32),
        hidden=rng.standard_normal((3, 4), np.float32).astype(hidden_dtype),
        logsumexp=rng.standard_normal(3, np.float32),
        top_tokens=np.array([[5, 1], [0, 2], [7, 3]], np.int32),
        top_logps=rng.standard_normal((3, 2)).astype(np.float32),
        routed_experts=rng.integers(-1, 300, (6, 2, 2)).astype(np.int16),
        weights=("", "5e"),
    )


def sent(item: Completion):
    reply = wire.DecodeResponse()
    wire.put_completion(item, reply.stream_content.samples.add())
    return wire.DecodeResponse.FromString(reply.SerializeToString()).stream_content.samples[0]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_a_completion_arrives_to_the_bit(dtype):
    item = completion(dtype)
    back = wire.completion_of(sent(item))
    for field in dataclasses.fields(item):
        expected, found = getattr(item, field.name), getattr(back, field.name)
        if isinstance(expected, np.ndarray):
            assert found.dtype == expected.dtype, field.name
            np.testing.assert_array_equal(found, expected)
        else:
            assert found == expected


def test_what_was_not_recorded_arrives_as_none():
    optional = [field.name for field in dataclasses.fields(Completion) if field.default is None]
    assert len(optional) == 7
    back = wire.completion_of(sent(dataclasses.replace(completion(), **dict.fromkeys(optional))))
    assert [getattr(back, name) for name in optional] == [None] * 7


@pytest.mark.parametrize(
    "name",
    [
        *("logps", "model_logps", "versions", "support_offsets", "support_tokens", "logsumexp"),
        *("top_tokens", "top_logps", "routed_experts"),
    ],
)
def test_a_response_that_is_not_whole_is_not_used(name):
    sample = sent(completion())
    setattr(sample.record, name, getattr(sample.record, name)[:-3])
    with pytest.raises(ValueError, match=f"bytes of {name}: it is not whole"):
        wire.completion_of(sample)


def test_a_request_arrives_as_it_was_sent_and_zero_takes_the_servers_default():
    request = SampleRequest(
        prompt=[1, 2],
        seeds=[0, 2**32 - 1],
        max_tokens=3,
        sampling=SamplingOptions(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop=("a\n", "é")),
        hidden=True,
        top_logps=4,
        routes=True,
        stream_every=4,
        version=0,
        weights="5e",
    )
    message = wire.DecodeRequest.FromString(wire.to_message(request).SerializeToString())
    assert wire.request_of(message, [1, 2], SamplingOptions()) == request
    message.sampling.temperature = message.sampling.top_p = 0
    message.sampling.checks_version = False
    message.sampling.weights = ""
    back = wire.request_of(message, [1, 2], SamplingOptions(temperature=0.3, top_p=0.4))
    assert (back.sampling.temperature, back.sampling.top_p, back.version, back.weights) == (0.3, 0.4, None, None)


@pytest.mark.parametrize("data", [b"\xff\x00garbage", bytes([42, 4, 10, 2, 255, 254]), bytes([8])])
def test_bytes_that_are_no_message_are_refused_in_words(data):
    """No wire format, text that is not UTF-8, cut off."""
    with pytest.raises(ValueError, match=f"{len(data)} bytes that are no DecodeRequest"):
        wire.parsed(wire.DecodeRequest, data)


def test_the_messages_are_a_superset_of_jetstreams():
    def fields(descriptor):
        return {
            (f.name, f.number, f.type, f.is_repeated, f.message_type and f.message_type.full_name, oneof(f))
            for f in descriptor.fields
        }

    def oneof(field):
        return field.containing_oneof and field.containing_oneof.name

    ours = {"DecodeRequest": wire.DecodeRequest, "DecodeResponse": wire.DecodeResponse}
    pairs = [(getattr(theirs, name).DESCRIPTOR, ours[name].DESCRIPTOR) for name in ours]
    seen = 0
    while pairs:
        their, our = pairs.pop()
        extra = fields(our) - fields(their)
        assert fields(their) <= fields(our), their.full_name
        assert all(number > 1000 for _, number, *_ in extra), extra
        pairs += [(nested, our.nested_types_by_name[name]) for name, nested in their.nested_types_by_name.items()]
        seen += 1
    assert seen == 7
