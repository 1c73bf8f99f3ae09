"""The command that tells whether a server samples what a checkpoint says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from trm_jax.integrations.openai import agreement_of
from trm_jax.integrations.openai.__main__ import main
from trm_jax.models import export_pretrained
from trm_jax.types import ScoredBatch


def write_checkpoint(root: Path, model: Any) -> Path:
    """A directory whose tokenizer knows the first letters of the questions, and the end tokens of the small server."""
    tokenizers = pytest.importorskip("tokenizers")
    export_pretrained(model, root, dtype="float32")
    words = ["W", "N", "C", "</s>", "a4", "a5", "a6", "</t>", "a8", "a9", "b0", "b1", "b2"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (root / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7]}))
    return root


def test_the_command(tools: Any, tmp_path: Path, capsys: Any) -> None:
    checkpoint = write_checkpoint(tmp_path / "m", tools.model())
    with tools.serving("llama.cpp") as server:
        assert main([server.address, str(checkpoint), "--prompts", "6", "--tokens", "6"]) == 0
        found = json.loads(capsys.readouterr().out)
        server.faults.add("other model")
        assert main([server.address, str(checkpoint)]) == 1
    assert "the answer is of model 'other'" in capsys.readouterr().err
    assert (found["dialect"], found["logps"], found["faulty_rows"]) == ("llama.cpp", "processed", 0)
    assert 6 <= found["tokens"] <= 36
    assert found["mean_abs"] <= found["max_abs"] < 2e-5
    assert found["k3"] < 1e-9


def test_statistics_leave_padding_and_faulty_rows_out() -> None:
    nan = jnp.nan
    scored = ScoredBatch(
        proximal_logps=jnp.array([[-1.0, -1.0, nan], [-3.0, -2.0, -1.0], [-1.0, -1.0, -1.0]]),
        rollout_logps=jnp.array([[-1.5, -1.0, nan], [-2.0, -2.0, -1.0], [-1.0, nan, -1.0]]),
        response_mask=jnp.array([[True, True, False], [True, False, False], [True, True, True]]),
    )
    found = agreement_of(scored)
    # d = 0.5, 0, -1: k3 = (e^0.5 - 1.5) + 0 + (e^-1 - 1 + 1), over 3
    assert (found.tokens, found.faulty_rows, found.mean_abs, found.max_abs) == (3, 1, 0.5, 1.0)
    assert found.k3 == pytest.approx((0.148721270700128 + 0.367879441171442) / 3, rel=1e-12)
    with pytest.raises(ValueError, match="nothing to compare"):
        agreement_of(ScoredBatch(**{**vars(scored), "response_mask": jnp.zeros((3, 3), bool)}))
