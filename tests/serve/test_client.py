"""The client against a server that a test makes up: what it asks again, for how long, and what it never uses."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from trm_jax.serve import Completion, Connection, RolloutClient, SampleRequest, ServingError, wire

REQUEST = SampleRequest(prompt=[1], seeds=[0], max_tokens=2, version=4, weights="5e")


def reply(*weights: str, tokens: int = 2, finish: str = "length") -> Any:
    logps = np.zeros(tokens, np.float32)
    done = Completion(
        sample=0,
        tokens=np.arange(tokens, dtype=np.int32),
        logps=logps,
        model_logps=logps,
        versions=np.full(tokens, 4, np.int32),
        finish=finish,
        weights=weights,
    )
    message = wire.DecodeResponse()
    wire.put_completion(done, message.stream_content.samples.add())
    return message


@contextmanager
def answering(generate: Callable[[int, grpc.ServicerContext], Any], *first: Any) -> Iterator[str]:
    """A server whose ``n``-th request for samples, from 0 on, is taken and answered by ``first`` and then by
    ``generate(n, context)``. Before it has read what came first, a client cannot see how a call ends.
    """
    count = itertools.count()

    def taken(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        context.send_initial_metadata(((wire.ACCEPTED, "1"),))
        yield from first
        yield generate(next(count), context)

    method = grpc.unary_stream_rpc_method_handler(
        taken, wire.DecodeRequest.FromString, lambda message: message.SerializeToString()
    )
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, {"Generate": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def _end_what_goes_on_for_ever(n: int, context: grpc.ServicerContext) -> None:
    """So that a client without patience's end fails its test instead of keeping it."""
    if n > 100:
        context.abort(grpc.StatusCode.INTERNAL, "asked a hundred times")


@pytest.mark.parametrize("code", [grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED])
def test_what_was_dropped_is_asked_again(code):
    """Under a flood of calls gRPC's core drops some with CANCELLED before the server's code sees them."""

    def generate(n: int, context: grpc.ServicerContext) -> Any:
        if n < 2:
            context.abort(code, "dropped")
        return reply("5e")

    with answering(generate) as target, RolloutClient(Connection(target=target, patience=60)) as client:
        ((done,),) = client.generate([REQUEST])
        assert done.tokens.tolist() == [0, 1]


def test_a_reply_that_is_too_large_is_not_asked_for_again():
    """It was taken each time, which without this rule begins patience anew for ever."""
    asked = []

    def generate(n: int, context: grpc.ServicerContext) -> Any:
        asked.append(n)
        _end_what_goes_on_for_ever(n, context)
        return reply("5e", tokens=2**19)

    with (
        answering(generate) as target,
        RolloutClient(Connection(target=target, patience=60, max_reply_mb=1)) as client,
        pytest.raises(ServingError, match=r"too large .*raise max_reply_mb=1"),
    ):
        client.generate([REQUEST])
    assert asked == [0]


def test_a_request_that_brings_the_server_down_each_time_is_given_up():
    """It was taken each time, which begins patience anew."""
    asked = []

    def generate(n: int, context: grpc.ServicerContext) -> Any:
        asked.append(n)
        _end_what_goes_on_for_ever(n, context)
        return context.abort(grpc.StatusCode.UNAVAILABLE, "killed")

    with (
        answering(generate, reply("5e", finish="")) as target,
        RolloutClient(Connection(target=target, patience=60)) as client,
        pytest.raises(ServingError, match=r"went away 10 times while it served the same request .*killed"),
    ):
        client.generate([REQUEST])
    assert len(asked) == 10


def test_an_answer_of_other_weights_is_not_used_and_patience_ends():
    asked = []

    def generate(n: int, context: grpc.ServicerContext) -> Any:
        asked.append(n)
        _end_what_goes_on_for_ever(n, context)
        return reply("5e", "6f")  # they changed on the way, under the same version

    with (
        answering(generate) as target,
        RolloutClient(Connection(target=target, patience=0.3)) as client,
        pytest.raises(ServingError, match="weights were changed by another client while it sampled"),
    ):
        client.generate([REQUEST])
    assert len(asked) > 1  # it may have been a passing visitor
    with answering(generate) as target, RolloutClient(Connection(target=target)) as client:
        anything = SampleRequest(prompt=[1], seeds=[0], max_tokens=2)
        assert client.generate([anything])[0][0].weights == ("5e", "6f")


def test_who_asks_a_closed_client_is_told_and_does_not_wait():
    client = RolloutClient(Connection(target="127.0.0.1:1"))
    client.close()
    outcome: list[BaseException] = []

    def ask() -> None:
        try:
            client.status()
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert isinstance(outcome[0], concurrent.futures.CancelledError)
