"""A conforming server's record is true; what is asked of it reaches it; nothing is lost, doubled or guessed."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.integrations.openai import Cuts, ServerFailed, ServerOptions, UnfitServer, open_engine
from trm_jax.models import ComputeConfig
from trm_jax.rescore import rescore
from trm_jax.rollout import EngineConfig, SamplingConfig
from trm_jax.types import RolloutBatch

# Float32 forward passes of a padded row and of a joined one, on logits of about 10: some 1e-6 apart.
CLOSE = 2e-5


@functools.partial(
    jax.jit,
    static_argnames="graphdef",
    compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
)
def _proximal(graphdef: Any, params: Any, rollout: RolloutBatch) -> Any:
    return rescore(graphdef, params, rollout, None, compute=ComputeConfig())[0].proximal_logps


def rescored(model: Any, rollout: RolloutBatch) -> np.ndarray:
    """Difference of the training side's log-probs and the recorded ones at response tokens."""
    found = _proximal(*nnx.split(model, nnx.Param), rollout)
    return np.asarray(found - rollout.rollout_logps)[np.asarray(rollout.response_mask)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rescoring_a_conforming_servers_record_finds_no_mismatch(tools: Any, dialect: str, temperature: float) -> None:
    with tools.serving(dialect, mode="tempered" if dialect == "sglang" else "processed") as server:
        engine = tools.engine(server, SamplingConfig(temperature=temperature), version=7)
        out = engine.generate(tools.prompts())
    assert (engine.dialect, engine.logp_mode) == (dialect, "tempered" if dialect == "sglang" else "processed")
    assert (out.processed_logps, out.temperature, out.top_p) == (True, temperature, 1.0)
    log_ratio = rescored(tools.model(), out)
    assert np.abs(log_ratio).max() < CLOSE
    assert (np.expm1(log_ratio) - log_ratio).mean() < 1e-9
    mask = np.asarray(out.response_mask)
    assert (np.asarray(out.versions) == np.where(mask, 7, -1)).all()
    ends = np.asarray(out.response_tokens)[np.arange(len(mask)), mask.sum(1) - 1]
    assert (np.asarray(out.finished) == np.isin(ends, (3, 7))).all()
    assert 0 < np.asarray(out.finished).sum() < len(mask), "the case holds both ends"
    assert (mask.sum(1)[~np.asarray(out.finished)] == 6).all()


@pytest.mark.parametrize(
    ("sampling", "cuts"),
    [
        (SamplingConfig(temperature=1.3, top_p=0.8), Cuts(support_tokens=13)),
        (SamplingConfig(), Cuts(top_k=4, support_tokens=4)),
        (SamplingConfig(), Cuts(min_p=0.2, support_tokens=13)),
    ],
)
@pytest.mark.parametrize("dialect", ["vllm", "llama.cpp"])
def test_a_cut_distributions_support_is_recorded(tools: Any, dialect: str, sampling: Any, cuts: Cuts) -> None:
    with tools.serving(dialect) as server:
        out = tools.engine(server, sampling, cuts).generate(tools.prompts())
    if sampling.top_p < 1:
        assert np.abs(rescored(tools.model(), out)).max() < CLOSE
    policy, mask = tools.policy(), np.asarray(out.response_mask)
    kept = np.unpackbits(np.asarray(out.support), axis=-1, bitorder="little")[..., :13]
    smaller = 0
    for row, t in zip(*np.nonzero(mask), strict=True):
        context = [
            *np.asarray(out.prompt_tokens)[row][np.asarray(out.prompt_mask)[row]].tolist(),
            *np.asarray(out.response_tokens)[row, :t].tolist(),
        ]
        true = tools.cut(policy(context, sampling.temperature), sampling.top_p, cuts.top_k, cuts.min_p)
        assert (kept[row, t] == np.isfinite(true)).all()
        assert abs(true[int(out.response_tokens[row, t])] - float(out.rollout_logps[row, t])) < CLOSE
        smaller += np.isfinite(true).sum() < 13
    assert smaller > 10, "the case cuts"


def test_a_support_larger_than_its_record_is_a_fault(tools: Any) -> None:
    with tools.serving("vllm") as server:
        engine = tools.engine(server, SamplingConfig(top_p=0.99), Cuts(support_tokens=2))
        with pytest.raises(UnfitServer, match=r"the 2 tokens of support_tokens hold 0\.\d+ of the mass.*ask for more"):
            engine.generate(tools.prompts())


def test_a_sampled_token_with_two_log_probs_is_a_fault(tools: Any) -> None:
    with tools.serving("llama.cpp") as server:
        engine = tools.engine(server, SamplingConfig(top_p=0.9), Cuts(support_tokens=13))
        server.faults.add("two kinds")
        with pytest.raises(UnfitServer, match=r"token \d: sampled token \d+ has log-prob -\S+, and -\S+ among"):
            engine.generate(tools.prompts())


def test_greedy_takes_the_most_likely_token_and_records_a_point_mass(tools: Any, dialect: str) -> None:
    with tools.serving(dialect) as server:
        out = tools.engine(server, SamplingConfig(greedy=True)).generate(tools.prompts(rows=4, samples=2))
    policy = tools.policy()
    for row in range(4):
        ids = np.asarray(out.prompt_tokens)[row][np.asarray(out.prompt_mask)[row]].tolist()
        for token in np.asarray(out.response_tokens)[row][np.asarray(out.response_mask)[row]].tolist():
            assert token == int(np.argmax(policy(ids, 1.0)))
            ids.append(token)
    assert (np.asarray(out.rollout_logps) == 0).all()
    assert out.processed_logps


def test_raw_log_probs_are_recorded_as_raw_and_refused_where_they_do_not_fit(tools: Any) -> None:
    with tools.serving("vllm", mode="raw") as server:
        engine = tools.engine(server, SamplingConfig(temperature=0.7), logps="raw")
        assert engine.logp_mode == "raw"
        warm = engine.generate(tools.prompts())
        assert not warm.processed_logps
        with pytest.raises(ValueError, match="raw model's"):
            rescored(tools.model(), warm)
        plain = engine.generate(tools.prompts(), SamplingConfig())
        assert plain.processed_logps, "at temperature 1 without a cut they are the same"
        assert np.abs(rescored(tools.model(), plain)).max() < CLOSE


@pytest.mark.parametrize(
    ("mode", "claim", "words"),
    [
        ("raw", "processed", r"'processed' is claimed and raw was measured\. .*--logprobs-mode processed_logprobs"),
        ("processed", "raw", r"'raw' is claimed and processed was measured"),
        ("tempered", "raw", r"'raw' is claimed and tempered was measured"),
    ],
)
def test_a_claim_that_contradicts_the_measurement_is_refused(tools: Any, mode: str, claim: str, words: str) -> None:
    with tools.serving("vllm", mode=mode) as server, pytest.raises(UnfitServer, match=words):
        tools.engine(server, logps=claim)


@pytest.mark.parametrize("mode", ["raw", "tempered", "processed"])
def test_the_mode_is_measured(tools: Any, dialect: str, mode: str) -> None:
    with tools.serving(dialect, mode=mode) as server:
        assert tools.engine(server).logp_mode == mode


@pytest.mark.parametrize("mode", ["raw", "tempered"])
def test_a_cut_that_the_log_probs_do_not_show_is_refused(tools: Any, mode: str) -> None:
    with tools.serving("sglang", mode=mode) as server:
        engine = tools.engine(server, SamplingConfig(top_p=0.9), Cuts(support_tokens=13))
        with pytest.raises(ValueError, match=f"top_p=0.9.* are {mode}: what was cut cannot be seen"):
            engine.generate(tools.prompts())
        if mode == "tempered":
            with pytest.raises(ValueError, match="have the temperature and not the cut"):
                tools.engine(server, SamplingConfig(top_p=0.9, temperature=0.5)).generate(tools.prompts())
            out = tools.engine(server, SamplingConfig(top_p=0.9)).generate(tools.prompts())
            assert not out.processed_logps


def test_rows_come_back_in_their_places_whatever_the_grouping_and_concurrency(tools: Any, dialect: str) -> None:
    """Seeds determine samples. Where a server counts seeds on from the first, seeds that count on are comparable."""
    prompts = dataclasses.replace(tools.prompts(), seeds=jnp.arange(40, 52, dtype=jnp.uint32))
    with tools.serving(dialect) as server:
        once = tools.engine(server).generate(prompts)
        grouped = len(server.bodies)
        again = tools.engine(server, group_samples=False, concurrency=3).generate(prompts)
        assert server.most <= 64
        single = [body for _, body in server.bodies[grouped:]]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), once, again)
    name = {"vllm": "seed", "llama.cpp": "seed"}.get(dialect)
    sent = [body[name] if name else body["sampling_params"][0]["sampling_seed"] for body in single[-12:]]
    assert sorted(sent) == list(range(40, 52))


def test_tokens_past_the_limit_to_the_end_of_a_character_are_cut(tools: Any) -> None:
    with tools.serving("llama.cpp") as server:
        engine = tools.engine(server)
        expected = engine.generate(tools.prompts())
        server.faults.add("runs on")
        found = engine.generate(tools.prompts())
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), expected, found)


def test_no_more_than_concurrency_requests_are_under_way(tools: Any) -> None:
    with tools.serving("vllm") as server:
        engine = tools.engine(server, group_samples=False, concurrency=2)
        server.meeting = threading.Barrier(2)  # no request is answered alone
        engine.generate(tools.prompts())
        assert server.most == 2


def test_prompts_go_as_ids_and_everything_that_a_model_could_set_is_set(tools: Any) -> None:
    with tools.serving("vllm") as server:
        tools.engine(server, SamplingConfig(temperature=0.9, top_p=0.95)).generate(tools.prompts(rows=4))
        path, body = server.bodies[-1]
    row = np.asarray(tools.prompts(rows=4).tokens)[0]
    assert path == "/v1/completions"
    assert body["prompt"] == row[row >= 0].tolist()
    assert {key: body[key] for key in ("temperature", "top_p", "top_k", "min_p", "n", "max_tokens")} == {
        "temperature": 0.9, "top_p": 0.95, "top_k": -1, "min_p": 0.0, "n": 4, "max_tokens": 6,
    }  # fmt: skip
    assert (body["repetition_penalty"], body["presence_penalty"], body["frequency_penalty"]) == (1, 0, 0)
    assert (body["stop_token_ids"], body["return_token_ids"]) == ([3, 7], True)


def test_seeds_can_be_left_out(tools: Any, dialect: str) -> None:
    with tools.serving(dialect) as server:
        tools.engine(server, seeded=False).generate(tools.prompts())
        assert not any("seed" in json.dumps(body) for _, body in server.bodies)


def test_an_older_vllm_gives_ids_as_tokens(tools: Any) -> None:
    with tools.serving("vllm", "old") as server:
        assert np.abs(rescored(tools.model(), tools.engine(server).generate(tools.prompts()))).max() < CLOSE


def test_a_busy_aborting_or_dying_server_is_asked_again(tools: Any, dialect: str) -> None:
    with tools.serving(dialect) as server:
        expected = tools.engine(server, group_samples=False).generate(tools.prompts())
        engine = tools.engine(server, group_samples=False)
        server.busy[:] = [503, 429, 0, 502]
        if dialect != "llama.cpp":
            server.faults.add("aborts once")
        found = engine.generate(tools.prompts())
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), expected, found)


def test_patience_ends(tools: Any) -> None:
    with tools.serving("vllm") as server:
        engine = tools.engine(server, patience=0.3)
        server.busy[:] = [429] * 1000
        with pytest.raises(ServerFailed, match=r"/v1/completions: status 429: not now For 0\.3 s"):
            engine.generate(tools.prompts())
    with tools.serving("vllm") as server:  # another, which no request from before still asks
        engine = tools.engine(server, patience=0.3)
        server.busy[:] = [500] + [429] * 1000
        with pytest.raises(ServerFailed, match="status 500: not now"):
            engine.generate(tools.prompts())
    with pytest.raises(ServerFailed, match=r"no answer \(ConnectionRefusedError"):
        tools.engine(server, patience=0.1)


def test_a_request_that_fails_ends_the_others(tools: Any) -> None:
    with tools.serving("vllm") as server:
        engine = tools.engine(server, group_samples=False, concurrency=4)
        server.busy[:] = [1, 1, 1, 500]
        began = time.monotonic()
        with pytest.raises(ServerFailed, match="status 500: not now"):
            engine.generate(tools.prompts())
        assert time.monotonic() - began < 30, "the others would take a minute"
        server.busy.clear()
        assert np.asarray(engine.generate(tools.prompts()).response_mask).any(1).all(), "and it can be asked again"


def test_tls(tools: Any, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    with tools.serving("vllm", tls=(certificate, key)) as server:
        assert tools.engine(server, certificate=certificate, token="secret").logp_mode == "processed"
        with pytest.raises(ServerFailed, match="self-signed certificate; set certificate"):
            tools.engine(server)


def test_a_server_that_comes_back_gets_its_weights_again_and_must_be_as_it_was(tools: Any, tmp_path: Path) -> None:
    params = nnx.state(tools.model(), nnx.Param)
    with tools.serving("sglang") as server:
        engine = tools.engine(server, weights=tmp_path, export="float32", patience=20.0)
        engine.update_weights(4, params)
        server.busy[:] = [0]
        assert np.abs(rescored(tools.model(), engine.generate(tools.prompts()))).max() < CLOSE
        assert server.loads == ["version_00000004"] * 2
        server.busy[:] = [503]
        server.mode = "raw"
        with pytest.raises(UnfitServer, match="came back with raw log-probs, processed before"):
            engine.generate(tools.prompts())


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_new_weights_are_exported_loaded_and_stamped(tools: Any, tmp_path: Path, dialect: str) -> None:
    first = nnx.state(tools.model(), nnx.Param)
    second = jax.tree.map(lambda x: 0.5 * x, first)
    with tools.serving(dialect) as server:
        publish = None if dialect == "sglang" else lambda version, path: server.load(path, str(version))
        engine = tools.engine(server, weights=tmp_path, export="float32", publish=publish)
        assert engine.version == -1
        with pytest.raises(RuntimeError, match="call update_weights"):
            engine.generate(tools.prompts())
        for version, params in ((10, first), (11, second), (12, first)):
            engine.update_weights(version, params)
            out = engine.generate(tools.prompts())
            assert engine.version == version
            assert set(np.unique(np.asarray(out.versions)).tolist()) <= {-1, version}
            served = nnx.merge(nnx.graphdef(tools.model()), params)
            assert np.abs(rescored(served, out)).max() < CLOSE
        assert sorted(path.name for path in tmp_path.iterdir()) == ["version_00000011", "version_00000012"]


def test_a_refused_update_leaves_the_version(tools: Any, tmp_path: Path) -> None:
    with tools.serving("sglang", "refuses weights") as server:
        engine = tools.engine(server, weights=tmp_path)
        with pytest.raises(ServerFailed, match="did not take policy version 3: no"):
            engine.update_weights(3, nnx.state(tools.model(), nnx.Param))
        assert engine.version == -1


def test_what_a_fixed_server_cannot_do(tools: Any, tmp_path: Path) -> None:
    with tools.serving("vllm") as server:
        engine = tools.engine(server)
        with pytest.raises(NotImplementedError, match="fixed weights: give weights"):
            engine.update_weights(1, nnx.state(tools.model(), nnx.Param))
        with pytest.raises(NotImplementedError, match="record_hidden=false"):
            engine.head_matrix()
        with pytest.raises(ValueError, match="vllm has no call that loads weights"):
            tools.engine(server, weights=tmp_path)


def test_a_token_is_sent(tools: Any) -> None:
    with tools.serving("vllm", "needs a token") as server:
        assert tools.engine(server, token="secret").version == 0
        with pytest.raises(ServerFailed, match=r"status 401: who are you\?"):
            tools.engine(server)


def test_open_engine(tools: Any) -> None:
    with tools.serving("llama.cpp") as server:
        engine = open_engine(
            server.address,
            tools.model(),
            EngineConfig(max_prompt_length=5, max_response_length=6),
            sampling=SamplingConfig(),
            eos_ids=(3, 7),
            logps="processed",
        )
        assert engine.dialect == "llama.cpp"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"address": "127.0.0.1:80"}, "address='127.0.0.1:80': must be http"),
        ({"address": "http://h:1/v1"}, "without a path"),
        ({"address": "http://h:1", "token": "t"}, "in the clear"),
        ({"address": "http://h:1", "concurrency": 0}, "concurrency must be at least 1"),
        ({"address": "http://h:1", "dialect": "tgi"}, "dialect='tgi': must be one of"),
        ({"address": "http://h:1", "logps": "true"}, "logps='true': must be one of"),
        ({"address": "http://h:1", "faulty_rows": "keep"}, "faulty_rows='keep': must be one of"),
    ],
)
def test_server_options_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServerOptions(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 3}, "top_k=3, min_p=0.0 cut the distribution: set support_tokens"),
        ({"min_p": 0.1}, "set support_tokens"),
        ({"top_k": 9, "support_tokens": 4}, "support_tokens=4: must be at least top_k=9"),
        ({"min_p": 1.0, "support_tokens": 4}, r"min_p in \[0, 1\)"),
    ],
)
def test_cuts_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Cuts(**options)


def test_the_engine_of_the_documents(tools: Any) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "engines.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, flags=re.S)[0]
    with tools.serving("vllm") as server:
        here = {"http://127.0.0.1:8000": server.address, "=1024": "=5", "=4096": "=6"}
        for written, meant in here.items():
            assert code.count(written) == 1, written
            code = code.replace(written, meant)
        tokenizer = SimpleNamespace(eos_ids=(3, 7))
        given: dict[str, Any] = {"model": tools.model(), "tokenizer": tokenizer, "prompts": tools.prompts()}
        exec(code, given)
        expected = tools.engine(server).generate(tools.prompts())
    jax.tree.map(np.testing.assert_array_equal, given["rollout"], expected)
