"""Faults between real processes: a killed server, a killed client, a taken port, a stalled start, a wrong command."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax import cli
from trm_jax.rollout import EngineConfig, InProcessEngine, RolloutNumerics, SamplingConfig
from trm_jax.serve import Connection, RemoteEngine, RolloutClient, SampleRequest, ServingError
from trm_jax.train import load_config, open_experiment
from trm_jax.types import PromptBatch

CONFIG = """
[task]
params = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }
train_size = 50
[model]
d_model = 16
n_layers = 1
n_heads = 2
d_ff = 16
[warmstart]
steps = 0
[rollout]
prompts_per_step = 2
samples_per_prompt = 4
max_prompt_length = 4
max_response_length = 48
slots = 4
prefill_rows = 2
decode_chunk = 2
numerics = { batch_invariant = true }
[eval]
prompts = 0
"""
SIZES = EngineConfig(slots=4, prefill_rows=2, decode_chunk=2, max_prompt_length=4, max_response_length=48)
NUMERICS = RolloutNumerics(batch_invariant=True)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("serve") / "run.toml"
    path.write_text(CONFIG)
    return path


def start(file: Path, *options: str) -> tuple[subprocess.Popen, str]:
    """A server process and its address, once it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trm_jax", "serve", str(file), *options], stdout=subprocess.PIPE, text=True
    )
    line = process.stdout.readline()
    assert line.startswith("serving on "), line
    return process, line.split()[-1]


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait(timeout=60)
    process.stdout.close()


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def prompts(rows: int) -> PromptBatch:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 10, (rows, 4))
    return PromptBatch(
        tokens=jnp.asarray(tokens, jnp.int32),
        mask=jnp.ones((rows, 4), bool),
        group_ids=jnp.arange(rows, dtype=jnp.int32),
        seeds=jnp.asarray(7 + np.arange(rows), jnp.uint32),
    )


@pytest.mark.slow
def test_a_server_killed_in_a_batch_costs_no_sample_and_doubles_none(file, tmp_path, tools):
    """Killed by SIGKILL while it samples, started again with its first weights: the batch ends as if nothing was."""
    port, batch = free_port(), prompts(64)
    options = ("--port", str(port), "--weights", str(tmp_path / "weights"))
    with open_experiment(load_config(file).arms[0].train) as experiment:
        model, eos = experiment.model, experiment.tokenizer.eos_ids
    params = nnx.state(model, nnx.Param)
    reference = InProcessEngine(model, SIZES, numerics=NUMERICS, sampling=SamplingConfig(), eos_ids=eos)
    reference.update_weights(4, params)
    expected = reference.generate(batch)

    process, target = start(file, *options)
    remote = watcher = None
    try:
        remote = RemoteEngine(
            model,
            SIZES,
            numerics=NUMERICS,
            sampling=SamplingConfig(),
            eos_ids=eos,
            connection=Connection(target=target, patience=300.0),
            weights=tmp_path / "weights",
        )
        remote.update_weights(4, params)
        found: list = []
        thread = threading.Thread(target=lambda: found.append(remote.generate(batch)))
        with RolloutClient(Connection(target=target)) as watcher:
            thread.start()
            tools.until(lambda: "finished_total 0.0" not in watcher.metrics())
            assert watcher.status().slots_busy > 0
        end(process)
        assert not found
        process, _ = start(file, *options)
        thread.join(timeout=600)
        assert found, "the batch did not end after the restart"
        mask = np.asarray(expected.response_mask)
        np.testing.assert_array_equal(found[0].response_mask, mask)
        for name in ("response_tokens", "rollout_logps", "versions"):
            ours, theirs = np.asarray(getattr(found[0], name)), np.asarray(getattr(expected, name))
            np.testing.assert_array_equal(ours[mask], theirs[mask], err_msg=name)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        end(process)
        if remote is not None:
            remote.close()


@pytest.mark.slow
def test_a_killed_client_frees_its_slots_and_a_second_server_finds_the_port_taken(file, tools):
    process, target = start(file)
    program = f"""
        from trm_jax.serve import *
        request = SampleRequest(prompt=[1, 2, 3], seeds=range(200), max_tokens=48)
        with RolloutClient(Connection(target="{target}")) as client:
            while True:
                client.generate([request] * 4)
    """
    client = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    try:
        with RolloutClient(Connection(target=target)) as watcher:
            tools.until(lambda: watcher.status().slots_busy == 4)
            second = subprocess.run(
                [sys.executable, "-m", "trm_jax", "serve", str(file), "--port", target.rpartition(":")[2]],
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert second.returncode == 2, second.stderr
            assert "port is taken" in second.stderr
            assert second.stderr.count("\n") == 1
            tools.until(lambda: watcher.status().slots_busy == 4)
            os.kill(client.pid, signal.SIGKILL)
            client.wait(timeout=60)
            tools.until(lambda: watcher.status().slots_busy == 0 and watcher.status().queue_depth == 0)
            assert "cancelled_total 0.0" not in watcher.metrics()
            assert watcher.status().live
    finally:
        client.kill()
        client.wait(timeout=60)
        end(process)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--host", "0.0.0.0"), "can be reached by others"),
        (("--arm", "none"), "no such arm"),
        (("--queue-limit", "0"), "queue_limit=0"),
        (("--certificate", "c.pem"), "both a certificate and its key"),
        (("rollout.slots=0",), "slots"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line_before_anything_starts(file, capsys, options, words):
    assert cli.main(["serve", str(file), *options]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_server_that_does_not_answer_ends_its_requests_and_itself(file):
    """The first decode call compiles, which takes longer than this server may."""
    process, target = start(file, "--stall-seconds", "0.05")
    try:
        refused = pytest.raises(ServingError, match=r"no decode call returned for 0\.05 s")
        with RolloutClient(Connection(target=target, patience=0)) as client, refused:
            client.generate([SampleRequest(prompt=[1, 2], seeds=[0], max_tokens=4)])
        assert process.wait(timeout=300) == 1
    finally:
        end(process)


@pytest.mark.slow
def test_ten_thousand_requests_of_mixed_length_lose_nothing_and_leave_no_memory_behind(file):
    process, target = start(file, "rollout.slots=64", "rollout.prefill_rows=32", "rollout.decode_chunk=8")
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 49, 10_000)

    def resident() -> int:
        listed = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(process.pid)], capture_output=True, text=True, check=True
        )
        return int(listed.stdout)

    try:
        with RolloutClient(Connection(target=target, concurrency=128, patience=300)) as client:
            sizes, tokens = [], 0
            for i in range(0, 10_000, 2000):
                batch = lengths[i : i + 2000]
                answers = client.generate(
                    [
                        SampleRequest(prompt=rng.integers(0, 10, 1 + n % 4).tolist(), seeds=[n], max_tokens=int(n))
                        for n in batch
                    ]
                )
                for n, (done,) in zip(batch, answers, strict=True):
                    assert done.tokens.size == n if done.finish == "length" else done.tokens.size <= n
                    assert np.isfinite(done.logps).all()
                    tokens += done.tokens.size
                sizes.append(resident())
            assert "finished_total 10000.0" in client.metrics()
            assert f"tokens_total {float(tokens)}" in client.metrics()
            status = client.status()
            assert (status.live, status.restarts, status.queue_depth) == (True, 0, 0)
        assert sizes[-1] < 1.05 * sizes[0], f"resident kB after every 2,000 requests: {sizes}"
    finally:
        end(process)
