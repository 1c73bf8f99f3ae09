"""Every way that a server's answer can be unfit for training is an error that names it, or a row that is rejected."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from jax import numpy as jnp

from trm_jax.correction import correct, presets
from trm_jax.integrations.openai import ServerFailed, UnfitServer
from trm_jax.types import ScoredBatch

ALL = ("vllm", "sglang", "llama.cpp")
AT_OPENING = [
    ("vllm", "nobody", r"owned_by='nobody', which is none of \['llamacpp', 'sglang', 'vllm'\]: set dialect"),
    ("vllm", "small context", r"context holds 8 tokens, prompt and response need 11.*--max-model-len"),
    ("llama.cpp", "other vocabulary", r"vocabulary of 14, this run's has 13"),
    ("vllm", "no top", r"no top log-probs.*--max-logprobs"),
    ("vllm", "own temperature", r"neither raw \(1\) nor processed \(0\.5\)"),
    *((dialect, "two kinds", r"sampled token \d+ has log-prob -\S+, and -\S+ among") for dialect in ALL[1:]),
    ("vllm", "no log-probs", r"no log-probs although"),
    ("sglang", "no log-probs", r"no log-probs although.*return_logprob"),
    ("llama.cpp", "no log-probs", r"no probabilities after sampling.*post_sampling_probs"),
    ("llama.cpp", "old", r"no probabilities after sampling.*post_sampling_probs"),
    ("llama.cpp", "text", r"no token ids.*return_tokens"),
    ("vllm", "truncates", r"the prompt has 4 tokens and the server counts 3.*--max-model-len"),
    ("sglang", "truncates", r"the prompt has 4 tokens and the server counts 3.*--context-length"),
    ("llama.cpp", "truncates", r"the prompt has 4 tokens and the server counts 3.*--ctx-size"),
    ("vllm", "other model", r"the answer is of model 'other', 'policy' was asked for"),
    ("vllm", "no JSON", r"is not JSON"),
]
IN_A_BATCH = [
    *((dialect, "foreign id", r"id 13, outside this model's vocabulary \[0, 13\)") for dialect in ALL),
    *((dialect, "loses a sample", r"4 samples were asked for, 3 came: set group_samples=False") for dialect in ALL),
    *((dialect, "short context", r"cut after 4 of 6 tokens: the server's context is shorter") for dialect in ALL),
    *((dialect, "odd end", r"not known here: 'repetition'") for dialect in ALL),
    *((dialect, "sentinel log-prob", r"has log-prob -9999\.0") for dialect in ALL),
    *(
        (dialect, "goes on", r"end token \d+ stands at position \d of 6: the server goes on after it")
        for dialect in ALL
    ),
    *((dialect, "drops the end", r"ended with 'stop' at id \d+, which is none of eos_ids=\[3, 7\]") for dialect in ALL),
    *((dialect, "few log-probs", r"tokens (have|were sampled and) \d") for dialect in ALL),
    *((dialect, "positive log-prob", r"has log-prob 0\.5") for dialect in ALL),
    *((dialect, "null log-prob", r"has log-prob nan") for dialect in ("vllm", "sglang")),
    *((dialect, "nan log-prob", r"has log-prob nan") for dialect in ("vllm", "sglang")),
    ("llama.cpp", "other model", r"the answer is of model 'other'"),
    ("vllm", "runs on", r"the response has 7 tokens, 6 were asked for"),
    ("llama.cpp", "own settings", r"the server sampled with temperature=0\.8, 1\.0 was asked for"),
    ("sglang", "other weights", r"weights \"somebody's\", policy version 0 was published"),
    ("vllm", "other ids", r"token_ids .* and the tokens of logprobs .* differ"),
]


@pytest.mark.parametrize(("dialect", "fault", "words"), AT_OPENING)
def test_an_unfit_server_is_refused_at_once(tools: Any, dialect: str, fault: str, words: str) -> None:
    with tools.serving(dialect, fault) as server, pytest.raises((UnfitServer, ServerFailed), match=words):
        tools.engine(server)


@pytest.mark.parametrize(("dialect", "fault", "words"), IN_A_BATCH)
def test_an_answer_that_is_unfit_is_refused(tools: Any, tmp_path: Any, dialect: str, fault: str, words: str) -> None:
    with tools.serving(dialect) as server:
        engine = tools.engine(server, **({"weights": tmp_path} if fault == "other weights" else {}))
        if fault == "other weights":
            from flax import nnx

            engine.update_weights(0, nnx.state(tools.model(), nnx.Param))
        server.faults.add(fault)
        with pytest.raises(UnfitServer, match=words):
            engine.generate(tools.prompts())


@pytest.mark.parametrize("fault", ["other ids", "text"])
def test_vllm_without_usable_ids_is_refused(tools: Any, fault: str) -> None:
    """Without ``token_ids`` the named tokens must be ids: text is never tokenised again."""
    with tools.serving("vllm") as server:
        engine = tools.engine(server)
        server.faults |= {"old", "text"} if fault == "text" else {fault}
        with pytest.raises(
            UnfitServer, match="no token ids, and text is not tokenised" if fault == "text" else "differ"
        ):
            engine.generate(tools.prompts())


def test_vllm_that_counts_well_and_runs_another_prompt_is_refused(tools: Any) -> None:
    with tools.serving("vllm") as server:
        engine = tools.engine(server)
        server.faults |= {"truncates", "counts well"}
        with pytest.raises(UnfitServer, match=r"ran another prompt: id \d+ at position 0"):
            engine.generate(tools.prompts())


def test_a_model_that_is_not_served(tools: Any) -> None:
    with (
        tools.serving("vllm") as server,
        pytest.raises(UnfitServer, match=r"lists models \['policy'\], this run expects 'x'"),
    ):
        tools.engine(server, model="x")


def test_single_faulty_rows_can_be_left_to_the_corrections(tools: Any) -> None:
    """The first sample of every prompt lacks a log-prob."""
    with tools.serving("vllm") as server:
        whole = tools.engine(server).generate(tools.prompts())
        engine = tools.engine(server, faulty_rows="drop")
        server.faults.add("null in the first")
        out = engine.generate(tools.prompts())
    faulty, mask = np.arange(12) % 4 == 0, np.asarray(out.response_mask)
    np.testing.assert_array_equal(out.response_tokens, whole.response_tokens)
    np.testing.assert_array_equal(np.asarray(out.rollout_logps)[~faulty], np.asarray(whole.rollout_logps)[~faulty])
    logps = np.asarray(out.rollout_logps)
    assert (np.isnan(logps).any(1) == faulty).all()
    assert np.isnan(logps[faulty][mask[faulty]]).all()
    scored = ScoredBatch(
        proximal_logps=jnp.where(jnp.isnan(out.rollout_logps), -1.0, out.rollout_logps),
        rollout_logps=out.rollout_logps,
        response_mask=out.response_mask,
    )
    for name in ("none", "tis", "cis"):
        kept = correct(scored, presets[name])
        assert (np.asarray(kept.sequence_keep) == ~faulty).all(), name


def test_mostly_faulty_rows_raise_in_any_case(tools: Any) -> None:
    with tools.serving("vllm") as server:
        engine = tools.engine(server, faulty_rows="drop")
        server.faults.add("null log-prob")
        with pytest.raises(UnfitServer, match=r"\(12 of 12 rows are faulty\)"):
            engine.generate(tools.prompts())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask": np.zeros((12, 5), bool)}, "row 0 has 0 tokens"),
        ({"mask": np.tile([True, False, True, False, False], (12, 1))}, "row 0 is not left-aligned"),
        ({"tokens": np.full((12, 5), 13)}, r"row 0, position 0: token id 13 is outside the vocabulary \[0, 13\)"),
        ({"tokens": np.ones((12, 9)), "mask": np.ones((12, 9), bool)}, "row 0 has 9 tokens; the engine takes 1 to"),
    ],
)
def test_prompts_are_checked(tools: Any, change: dict[str, Any], words: str) -> None:
    with tools.serving("vllm") as server:
        engine = tools.engine(server)
        with pytest.raises(ValueError, match=words):
            engine.generate(dataclasses.replace(tools.prompts(), **change))
