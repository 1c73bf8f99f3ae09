"""The server over gRPC in this process: records, stock clients, weights, refusals, access, clients that leave."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jetstream.core.proto import jetstream_pb2 as pb2
from jetstream.core.proto import jetstream_pb2_grpc as pb2_grpc

from trm_jax.rollout import Engine, SamplingConfig
from trm_jax.serve import (
    Access,
    Connection,
    RemoteEngine,
    RolloutClient,
    SampleRequest,
    ServingError,
    WeightDirectory,
    wire,
)
from trm_jax.types import PromptBatch


def prompts(rows: int = 12, samples: int = 2) -> PromptBatch:
    rng = np.random.default_rng(0)
    groups = np.arange(rows) // samples
    lengths, tokens = rng.integers(1, 6, rows)[groups], rng.integers(0, 13, (rows, 5))[groups]
    return PromptBatch(
        tokens=jnp.asarray(tokens, jnp.int32),
        mask=jnp.asarray(np.arange(5) < lengths[:, None]),
        group_ids=jnp.asarray(groups, jnp.int32),
        seeds=jnp.asarray(100 + np.arange(rows), jnp.uint32),
    )


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def server(tools, weights):
    with tools.serving(weights=weights, tokenizer=tools.tokenizer) as server:
        yield server


@pytest.fixture(scope="module")
def remote(tools, server, weights):
    engine = remote_engine(tools, server, weights, record_top_logps=3)
    yield engine
    engine.close()


def remote_engine(tools, server, weights, **options) -> RemoteEngine:
    return RemoteEngine(
        tools.model(),
        tools.config,
        numerics=tools.numerics,
        sampling=SamplingConfig(),
        eos_ids=tools.eos,
        connection=Connection(target=server.target),
        weights=weights,
        **options,
    )


@contextmanager
def held_back(server) -> Iterator[threading.Semaphore]:
    """Decodes only as often as the semaphore is released."""
    steps, engine = threading.Semaphore(0), server.driver._engine
    original = engine.generate

    def gated(*call):
        steps.acquire()
        return original(*call)

    engine.generate = gated
    try:
        yield steps
    finally:
        engine.generate = original
        steps.release(10)


@pytest.fixture
def client(server):
    with RolloutClient(Connection(target=server.target, patience=0)) as client:
        yield client


@pytest.mark.slow
def test_the_engine_of_the_documents(tools, tmp_path):
    page = (Path(__file__).resolve().parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    given = {"model": tools.model(), "sizes": tools.config, "numerics": tools.numerics}
    given |= {"tokenizer": SimpleNamespace(eos_ids=tools.eos), "prompts": prompts()}
    given |= {"version": 1, "params": tools.params()}
    with tools.serving(weights=tmp_path, tokenizer=tools.tokenizer) as server:
        for written, meant in {"127.0.0.1:PORT": server.target, "/shared/weights": str(tmp_path)}.items():
            assert code.count(written) == 1, written
            code = code.replace(written, meant)
        exec(code, given)
        given["engine"].close()
    reference = tools.in_process()
    reference.update_weights(1, tools.params())
    expected = reference.generate(prompts())
    mask = np.asarray(expected.response_mask)
    np.testing.assert_array_equal(given["rollout"].response_mask, mask)
    np.testing.assert_array_equal(
        np.asarray(given["rollout"].rollout_logps)[mask], np.asarray(expected.rollout_logps)[mask]
    )


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SamplingConfig(), marks=pytest.mark.slow),
        SamplingConfig(top_p=0.7),
        SamplingConfig(temperature=0.8, top_k=5, min_p=0.05, stop=("7", "12")),
        pytest.param(SamplingConfig(greedy=True), marks=pytest.mark.slow),
    ],
)
def test_a_rollout_through_the_server_is_the_in_process_rollout_to_the_bit(tools, server, remote, sampling):
    reference: Engine = tools.in_process()
    for version, weights in ((1, 0), (2, 1)):
        params = tools.params(weights)
        reference.update_weights(version, params)
        remote.update_weights(version, params)
        before = server.driver.counters.prefills
        found, expected = remote.generate(prompts(), sampling), reference.generate(prompts(), sampling)
        assert server.driver.counters.prefills - before <= 6  # two samples of a prompt share its run
        mask = np.asarray(expected.response_mask)
        np.testing.assert_array_equal(found.response_mask, mask)
        for name in ("prompt_mask", "finished", "group_ids"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
        np.testing.assert_array_equal(
            np.where(found.prompt_mask, found.prompt_tokens, 0), np.where(found.prompt_mask, expected.prompt_tokens, 0)
        )
        names = ("response_tokens", "rollout_logps", "versions", "hidden", "support", "top_tokens", "top_logps")
        for name in names:
            ours, theirs = getattr(found, name), getattr(expected, name)
            assert (ours is None) == (theirs is None), name
            if ours is not None:
                assert ours.dtype == theirs.dtype
                np.testing.assert_array_equal(np.asarray(ours)[mask], np.asarray(theirs)[mask], err_msg=name)
        if sampling.stop:
            ids = [np.asarray(row)[real].tolist() for row, real in zip(found.response_tokens, mask, strict=True)]
            ends = [any(s in tools.tokenizer.decode(row) for s in sampling.stop) for row in ids]
            assert 0 < sum(ends) < len(ends)
            assert np.asarray(found.finished)[ends].all()
        assert (found.temperature, found.top_p) == (expected.temperature, expected.top_p)
        np.testing.assert_array_equal(remote.head_matrix(), reference.head_matrix())
        assert remote.version == server.driver.version == version


def test_damaged_weights_are_refused_and_the_old_ones_go_on(tools, server, remote, weights):
    remote.update_weights(5, tools.params())
    directory = WeightDirectory(weights)
    arrays = next(directory.publish(6, tools.params(1)).glob("*/arrays"))
    largest = max((file for file in arrays.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 4
    largest.write_bytes(data)
    with RolloutClient(Connection(target=server.target)) as client:
        with pytest.raises(ServingError, match=r"FAILED_PRECONDITION.*SHA-256"):
            client.load(6)
        with pytest.raises(ServingError, match="no policy version 77"):
            client.load(77)
        with pytest.raises(ServingError, match="must lie in"):
            client.load(-3)
        assert client.status().version == 5
    assert set(np.asarray(remote.generate(prompts(2)).versions).ravel().tolist()) <= {5, -1}


def test_a_server_with_other_weights_than_asked_for_says_so(tools, server, remote):
    remote.update_weights(5, tools.params())
    server.driver.update(server.engine.load(0, tools.params(1)))  # as after a restart
    assert server.driver.version == 0
    assert set(np.asarray(remote.generate(prompts(2)).versions).ravel().tolist()) <= {5, -1}
    assert server.driver.version == 5
    with (
        RolloutClient(Connection(target=server.target, patience=0.1)) as client,
        pytest.raises(ServingError, match="version 9 was asked for; the server has 5"),
    ):
        client.generate([SampleRequest(prompt=[1], seeds=[0], max_tokens=2, version=9)])


def test_another_runs_version_of_the_same_number_is_refused(tools, tmp_path):
    """The server was started on a directory where an earlier run left a version 1; the trainer writes elsewhere."""
    WeightDirectory(tmp_path / "old").publish(1, tools.params(1))
    with tools.serving(weights=tmp_path / "old") as server:
        engine = remote_engine(tools, server, tmp_path / "new")
        try:
            with pytest.raises(ServingError, match=r"FAILED_PRECONDITION: policy version 1 .* another run wrote it"):
                engine.update_weights(1, tools.params())
            assert (server.driver.version, engine.version) == (-1, -1)
        finally:
            engine.close()


def test_status_and_every_answer_say_which_weights(tools, tmp_path):
    directory = WeightDirectory(tmp_path)
    request = SampleRequest(prompt=[1, 2, 4], seeds=[0, 1], max_tokens=6, stream_every=2)
    with (
        tools.serving(weights=tmp_path) as server,
        RolloutClient(Connection(target=server.target, patience=0)) as client,
    ):
        assert client.status().weights == ""  # no trainer's
        assert {done.weights for done in client.generate([request])[0]} == {("",)}
        directory.publish(1, tools.params())
        one = directory.identity(1)
        assert client.load(1).weights == client.load(1, weights=one).weights == client.status().weights == one
        assert {done.weights for done in client.generate([request])[0]} == {(one,)}
        with pytest.raises(ServingError, match="another run wrote it"):
            client.load(1, weights="0" * 64)
        with pytest.raises(ServingError, match=f"ABORTED: weights 5e were asked for; the server has {one}"):
            client.generate([SampleRequest(**vars(request) | {"version": 1, "weights": "5e"})])
        assert client.generate([SampleRequest(**vars(request) | {"version": 1, "weights": one})])


def test_weights_that_change_under_a_sequence_are_named(tools, tmp_path):
    """Under the same version number, too: the second one is another run's."""
    directory = WeightDirectory(tmp_path)
    directory.publish(1, tools.params())
    one = directory.identity(1)
    request = SampleRequest(prompt=[1, 2, 4], seeds=tools.long_seeds(1), max_tokens=6, version=1)
    asked = SampleRequest(**vars(request) | {"weights": one})
    with (
        tools.serving(weights=tmp_path) as server,
        held_back(server) as steps,
        RolloutClient(Connection(target=server.target, patience=0)) as client,
        ThreadPoolExecutor(3) as pool,
    ):
        client.load(1)
        whatever, ours = pool.submit(client.generate, [request]), pool.submit(client.generate, [asked])
        tools.until(lambda: server.driver.health().slots_busy == 2)
        steps.release()
        directory.publish(1, tools.params(1))
        other = directory.identity(1)
        load = pool.submit(client.load, 1)
        tools.until(lambda: server.driver._exchange.waiting)
        steps.release(40)
        assert load.result().weights == other
        ((done,),) = whatever.result()
        assert done.weights == (one, other)
        assert set(done.versions.tolist()) == {1}  # by the number alone nobody would know
        with pytest.raises(ServingError, match=r"ABORTED: the server's weights were changed by another client"):
            ours.result()


def test_tokens_of_weights_that_are_not_ours_have_no_version(tools, tmp_path):
    """Where weights may change in flight, samples are of what the server has; what is not known counts as stale."""
    with tools.serving(weights=tmp_path) as server:
        engine = remote_engine(tools, server, tmp_path, in_flight=True, record_hidden=False)
        try:
            engine.update_weights(1, tools.params())
            assert set(np.unique(np.asarray(engine.generate(prompts(2)).versions))) <= {-1, 1}
            assert (np.asarray(engine.generate(prompts(2)).versions) == 1).any()
            WeightDirectory(tmp_path).publish(1, tools.params(1))  # by none of its engines
            with RolloutClient(Connection(target=server.target)) as another:
                another.load(1)
            found = engine.generate(prompts(2))
            assert np.asarray(found.response_mask).any()
            assert (np.asarray(found.versions) == -1).all()
            engine.update_weights(2, tools.params())
            assert (np.asarray(engine.generate(prompts(2)).versions) == 2).any()
        finally:
            engine.close()


def test_a_server_that_names_no_weights_is_not_trusted(tools, tmp_path, monkeypatch):
    with tools.serving(weights=tmp_path) as server:
        monkeypatch.setattr(server._provenance, "at", lambda mark: "")  # as a server without identities says nothing
        engine = remote_engine(tools, server, tmp_path)
        try:
            with pytest.raises(ServingError, match=r"says that it has 1 \(no identity\.\.\.\)"):
                engine.update_weights(1, tools.params())
            assert engine.version == -1
        finally:
            engine.close()


def test_loads_come_one_after_another(tools, tmp_path, monkeypatch):
    """Each holds a second copy of the weights."""
    WeightDirectory(tmp_path).publish(1, tools.params())
    with tools.serving(weights=tmp_path) as server:
        under_way, most, original = [], [], server._weights.read

        def read(*args, **options):
            under_way.append(1)
            most.append(len(under_way))
            time.sleep(0.05)
            under_way.pop()
            return original(*args, **options)

        monkeypatch.setattr(server._weights, "read", read)
        with RolloutClient(Connection(target=server.target)) as client, ThreadPoolExecutor(6) as pool:
            list(pool.map(client.load, [1] * 6))
        assert most == [1] * 6


def test_a_server_that_is_made_for_something_else_is_refused(tools, server, weights):
    from trm_jax.rollout import RolloutNumerics

    for change, words in (
        ({"numerics": RolloutNumerics(weight_format="int8")}, "numerics="),
        ({"eos_ids": (4,)}, "eos_ids="),
    ):
        common = {"numerics": tools.numerics, "eos_ids": tools.eos} | change
        with pytest.raises(ValueError, match=words):
            RemoteEngine(
                tools.model(),
                tools.config,
                sampling=SamplingConfig(),
                connection=Connection(target=server.target),
                weights=weights,
                **common,
            )


def test_pieces_join_to_the_whole_and_say_where_they_end(client):
    whole = SampleRequest(prompt=[1, 2, 4], seeds=[3, 4, 5], max_tokens=6, hidden=True)
    (expected,) = client.generate([whole])
    (joined,) = client.generate([SampleRequest(**vars(whole) | {"stream_every": 1})])
    for one, other in zip(expected, joined, strict=True):
        assert one.finish == other.finish
        for name in ("tokens", "logps", "model_logps", "versions", "hidden", "logsumexp"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def test_a_stock_client_gets_text_and_ids_and_an_empty_sample_at_the_end(tools, server):
    with grpc.insecure_channel(server.target) as channel:
        stub = pb2_grpc.OrchestratorStub(channel)
        assert stub.HealthCheck(pb2.HealthCheckRequest()).is_live
        for _ in range(6):
            for content in (
                {"text_content": pb2.DecodeRequest.TextContent(text="1+2")},
                {"token_content": pb2.DecodeRequest.TokenContent(token_ids=[1, 10, 2])},
            ):
                replies = [r.stream_content.samples[0] for r in stub.Decode(pb2.DecodeRequest(max_tokens=6, **content))]
                assert (list(replies[-1].token_ids), replies[-1].text) == ([], "")
                ids = [token for reply in replies for token in reply.token_ids]
                assert len(ids) <= 6
                assert not set(ids) & set(tools.eos)
                text = "".join(reply.text for reply in replies)
                assert text == (tools.tokenizer.decode(ids) if "text_content" in content else "")


def test_a_malformed_request_is_refused_and_says_why(server, client):
    for request, words in (
        ({"prompt": []}, "0 tokens"),
        ({"prompt": [1] * 6}, "6 tokens; the engine takes 1 to 5"),
        ({"prompt": [13]}, "token id 13"),
        ({"max_tokens": 7}, "max_tokens=7"),
        ({"seeds": [0] * 300}, "300 seeds"),
    ):
        with pytest.raises(ValueError, match=words):
            client.generate([SampleRequest(**{"prompt": [1], "seeds": [0], "max_tokens": 2} | request)])
    with grpc.insecure_channel(server.target) as channel:
        decode = channel.unary_stream(
            f"/{wire.ORCHESTRATOR}/Decode", lambda m: m.SerializeToString(), wire.DecodeResponse.FromString
        )
        for message, words in (
            (wire.DecodeRequest(max_tokens=3), "neither"),
            (wire.DecodeRequest(max_tokens=3, text_content={"text": "x"}), "x"),
            (wire.DecodeRequest(max_tokens=3, token_content={}), "0 tokens"),
            (wire.DecodeRequest(token_content={"token_ids": [1]}), "max_tokens=0"),
        ):
            with pytest.raises(grpc.RpcError) as error:
                list(decode(message))
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert words in error.value.details()
        raw = channel.unary_stream(f"/{wire.SERVICE}/Generate", None, None)
        load = channel.unary_unary(f"/{wire.SERVICE}/Load", None, None)
        options = {"seeds": [0], "stop": ["", "7" * 10**5]}  # the refusal quotes them; a trailer holds a few kilobytes
        long_winded = wire.DecodeRequest(max_tokens=3, token_content={"token_ids": [1]}, sampling=options)
        for call, words in (
            (lambda: list(raw(b"\xff\x00garbage")), "9 bytes that are no DecodeRequest"),
            (lambda: load(b"\x08"), "1 bytes that are no LoadRequest"),
            (lambda: list(decode(long_winded)), "an empty string would end every response"),
        ):
            with pytest.raises(grpc.RpcError) as error:
                call()
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert words in error.value.details()
            assert len(error.value.details()) < 2000


def test_a_client_that_goes_away_frees_its_slots(tools, server, client):
    with held_back(server) as steps:
        with grpc.insecure_channel(server.target) as channel:
            decode = channel.unary_stream(
                f"/{wire.SERVICE}/Generate", lambda m: m.SerializeToString(), wire.DecodeResponse.FromString
            )
            request = SampleRequest(prompt=[1, 2, 4], seeds=tools.long_seeds(4), max_tokens=6)
            call = decode(wire.to_message(request))
            tools.until(lambda: server.driver.health().slots_busy == 4)
            before = server.driver.counters.cancelled
            call.cancel()
            tools.until(lambda: server.driver.counters.cancelled == before + 1)
        steps.release()
        tools.until(lambda: server.driver.health().slots_busy == 0)  # after one chunk of the three that they had left
    assert client.generate([SampleRequest(prompt=[1], seeds=[0], max_tokens=2)])


def test_a_full_queue_makes_the_client_wait_and_nothing_is_lost(tools):
    with tools.serving(queue_limit=2) as server:
        with RolloutClient(Connection(target=server.target, concurrency=64)) as client:
            params = jax.tree.leaves(tools.params())
            assert params
            requests = [SampleRequest(prompt=[1, 2, 4], seeds=[seed], max_tokens=6) for seed in range(40)]
            answers = client.generate(requests)
            again = client.generate(requests)
        assert server.driver.counters.refused > 0
        assert server.driver.counters.finished == 80
        for (one,), (other,) in zip(answers, again, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)


def test_a_taken_port_is_said_and_leaves_nothing_running(tools, server):
    threads = threading.active_count()
    with pytest.raises(OSError, match="the port is taken"), tools.serving(Access(port=server.port)):
        pass
    tools.until(lambda: threading.active_count() <= threads)


def test_token_and_tls_are_asked_for_and_wrong_ones_refused(tools, tmp_path):
    key, certificate, token = tmp_path / "key.pem", tmp_path / "cert.pem", tmp_path / "token"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    token.write_text("0123456789abcdef0123")
    token.chmod(0o600)
    with tools.serving(Access(certificate=certificate, key=key, token_file=token)) as server:
        good = Connection(target=server.target, certificate=certificate, token="0123456789abcdef0123", patience=0.5)
        with RolloutClient(good) as client:
            assert client.status().live
            assert client.generate([SampleRequest(prompt=[1], seeds=[0], max_tokens=2)])
            assert "trm_jax_rollouts_finished_total 1.0" in client.metrics()
        for wrong in (None, "0123456789abcdef0124"):
            bad = Connection(target=server.target, certificate=certificate, token=wrong, patience=0.5)
            with RolloutClient(bad) as client:
                for call in (
                    client.status,
                    lambda client=client: client.generate([SampleRequest(prompt=[1], seeds=[0], max_tokens=2)]),
                ):
                    with pytest.raises(ServingError, match="UNAUTHENTICATED"):
                        call()
        plain = Connection(target=server.target, token="0123456789abcdef0123", patience=0.5)
        with RolloutClient(plain) as client, pytest.raises(ServingError, match="UNAVAILABLE"):
            client.status()


def test_status_and_metrics_agree(server, client):
    status, text = client.status(), client.metrics()
    assert (status.live, status.reason, status.slots, status.queue_limit) == (True, "", 4, 1024)
    assert f"trm_jax_rollouts_policy_version {float(status.version)}" in text
    assert f"trm_jax_rollouts_finished_total {float(server.driver.counters.finished)}" in text
