"""The JAX model with SmolLM2's weights against PyTorch's logits (float32)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax.models import Transformer, load_smollm2_model

ATOL = 5e-4  # float32 sums in another order, for logits from -31 to 38 (7e-5 in a NumPy forward pass)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def loaded(smollm2_path):
    return load_smollm2_model(smollm2_path)


def logits_of(model: Transformer, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    hidden = model(jnp.asarray(tokens, jnp.int32)).hidden
    logits = jnp.matmul(hidden, model.head().T, precision=jax.lax.Precision.HIGHEST)
    return np.asarray(hidden), np.asarray(logits, np.float64)


def logsumexp(logits: np.ndarray) -> np.ndarray:
    top = logits.max(-1, keepdims=True)
    return (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[..., 0]


def test_logits_agree_with_pytorch(loaded, goldens):
    model, _ = loaded
    tokens = goldens["prompt_ids"][None, :]
    hidden, logits = logits_of(model, tokens)
    assert hidden.shape == (1, 37, 576)
    assert logits.shape == (1, 37, 49_152)
    np.testing.assert_array_equal(logits[0].argmax(-1), goldens["argmax"])
    np.testing.assert_allclose(logsumexp(logits[0]), goldens["logsumexp"], rtol=0, atol=ATOL)
    top = np.take_along_axis(logits[0, -4:], goldens["top_ids"], axis=-1)
    np.testing.assert_allclose(top, goldens["top_logits"], rtol=0, atol=ATOL)
    np.testing.assert_allclose(hidden[0, -2:], goldens["hidden"], rtol=0, atol=ATOL)


def test_padding_and_neighbours_change_nothing(loaded, goldens):
    """Two rows padded to 48 slots: the prompt, and its first 20 tokens, followed by ids that must not be seen."""
    model, _ = loaded
    prompt = goldens["prompt_ids"]
    tokens = np.full((2, 48), 7, np.int32)
    tokens[:, : len(prompt)] = prompt
    tokens[1, 20:] = 4_093
    _, logits = logits_of(model, tokens)
    np.testing.assert_allclose(logsumexp(logits[0, :37]), goldens["logsumexp"], rtol=0, atol=ATOL)
    np.testing.assert_allclose(logsumexp(logits[1, :20]), goldens["logsumexp"][:20], rtol=0, atol=ATOL)
    np.testing.assert_array_equal(logits[1, :20].argmax(-1), goldens["argmax"][:20])


def test_greedy_answer_agrees_with_pytorch(loaded, goldens):
    """Teacher-forced: each greedy token is the argmax given PyTorch's tokens before it."""
    model, tokenizer = loaded
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": str(goldens["question"])}])
    assert prompt == goldens["prompt_ids"].tolist()
    greedy = goldens["greedy_ids"]
    tokens = np.concatenate([goldens["prompt_ids"], greedy])[None, :]
    _, logits = logits_of(model, tokens)
    predicted = logits[0].argmax(-1)[len(prompt) - 1 : -1]
    np.testing.assert_array_equal(predicted, greedy)
    assert int(greedy[-1]) in tokenizer.eos_ids
    assert tokenizer.decode(predicted) == "The capital of France is Paris."
