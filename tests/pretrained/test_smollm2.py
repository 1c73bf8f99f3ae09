"""SmolLM2-135M-Instruct: the real file against PyTorch's numbers. Slow tests fetch 93 MB once."""

from __future__ import annotations

import numpy as np
import pytest

from trm_jax.models.pretrained import SMOLLM2_135M, load_smollm2

# "What is the capital of France?" in the chat template, with its default system message.
PROMPT_IDS = [
    *[1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2],
    *[198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
]


def test_another_model_is_refused(write_tiny_llama):
    path = write_tiny_llama().path
    with pytest.raises(ValueError, match=r"not SmolLM2-135M-Instruct: vocab_size=40 \(not 49152\), hidden_size=64"):
        load_smollm2(path)


def test_goldens_are_consistent(goldens):
    """What holds for any logits: the largest first, the argmax on top, logsumexp >= the maximum (equal at p = 1)."""
    assert goldens["prompt_ids"].tolist() == PROMPT_IDS
    assert (np.diff(goldens["top_logits"], axis=-1) <= 0).all()
    assert (goldens["top_ids"][:, 0] == goldens["argmax"][-4:]).all()
    assert (goldens["logsumexp"][-4:] >= goldens["top_logits"][:, 0]).all()
    assert goldens["greedy_ids"][0] == goldens["argmax"][-1]


@pytest.mark.slow
def test_tokenizer_of_the_real_file(smollm2_path, goldens):
    _, _, tokenizer = load_smollm2(smollm2_path)
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_ids) == (49_152, 2, frozenset({2}))
    assert tokenizer.apply_chat_template([{"role": "user", "content": str(goldens["question"])}]) == PROMPT_IDS
    assert tokenizer.decode(goldens["greedy_ids"].tolist()) == "The capital of France is Paris."
    assert tokenizer.encode("  1") == [256, 33]  # digits stand alone: two spaces, then the digit
    assert len(tokenizer.encode("1234567890")) == 10
    assert 2 not in tokenizer.encode("<|im_end|>")
    for text in ("naïve — 北京 🙂\t\n  x=3.14²", "def f(x):\n    return x**2\n", " ", "\u0000é"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert 9690 not in tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])[3:]  # one system turn only


@pytest.mark.slow
def test_weights_of_the_real_file_against_pytorch(smollm2_path, goldens, llama_forward):
    """Float32 sums in another order: 7e-5 apart when this was written, for logits from -31 to 38."""
    config, weights, _ = load_smollm2(smollm2_path)
    assert config == SMOLLM2_135M
    loaded = dict(weights)
    assert len(loaded) == 272
    assert sum(value.size for value in loaded.values()) == 134_515_008
    hidden, logits = llama_forward(config, loaded, goldens["prompt_ids"])
    assert logits.dtype == np.float32
    top = np.maximum.reduce(logits.astype(np.float64), axis=-1)
    logsumexp = top + np.log(np.exp(logits.astype(np.float64) - top[:, None]).sum(-1))
    np.testing.assert_array_equal(logits.argmax(-1), goldens["argmax"])
    np.testing.assert_allclose(logsumexp, goldens["logsumexp"], rtol=0, atol=5e-4)
    np.testing.assert_allclose(
        np.take_along_axis(logits[-4:], goldens["top_ids"], axis=-1), goldens["top_logits"], rtol=0, atol=5e-4
    )
    np.testing.assert_allclose(hidden[-2:], goldens["hidden"], rtol=0, atol=5e-4)
