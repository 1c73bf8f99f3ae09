"""Joining prompt and response, by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax.rescore import training_rows
from trm_jax.types import RolloutBatch


def rollout_of(prompts, prompt_mask, responses, response_mask) -> RolloutBatch:
    shape = np.shape(responses)
    return RolloutBatch(
        prompt_tokens=jnp.array(prompts),
        prompt_mask=jnp.array(prompt_mask, bool),
        response_tokens=jnp.array(responses),
        response_mask=jnp.array(response_mask, bool),
        rollout_logps=jnp.zeros(shape),
        versions=jnp.zeros(shape, jnp.int32),
        finished=jnp.zeros(shape[:1], bool),
        group_ids=jnp.zeros(shape[:1], jnp.int32),
    )


def test_rows_by_hand():
    rollout = rollout_of(
        [[5, 6, 7], [8, -9, -9]],
        [[1, 1, 1], [1, 0, 0]],
        [[1, 2], [3, -9]],
        [[1, 1], [1, 0]],
    )
    tokens, states = training_rows(rollout)
    # Row 0: prompt 5 6 7, response 1 2; token 1 is predicted at position 2, token 2 at 3.
    # Row 1: prompt 8, response 3, padding; token 3 is predicted at position 0.
    assert tokens.tolist() == [[5, 6, 7, 1, 2], [8, 3, 0, 0, 0]]
    assert states.tolist() == [[2, 3], [0, 1]]


def test_the_padding_id_is_a_token_like_any_other_inside_a_response():
    tokens, _ = training_rows(rollout_of([[0, 4, 9]], [[1, 1, 0]], [[0, 0, 7, 9]], [[1, 1, 1, 0]]))
    assert tokens.tolist() == [[0, 4, 0, 0, 7, 0, 0]]


@pytest.mark.parametrize("extra", [0, 3])
def test_wider_padding_only_adds_zeros_on_the_right(extra):
    pad = [0] * extra
    base = rollout_of([[5, 6, *pad]], [[1, 1, *pad]], [[1, 2, *pad]], [[1, 1, *pad]])
    tokens, states = training_rows(base)
    assert tokens.tolist() == [[5, 6, 1, 2] + 2 * pad]
    assert states[0, :2].tolist() == [1, 2]
    assert int(states.max()) < tokens.shape[1]


def test_an_empty_row_has_legal_indices():
    tokens, states = training_rows(rollout_of([[9, 9]], [[0, 0]], [[9, 9]], [[0, 0]]))
    assert tokens.tolist() == [[0, 0, 0, 0]]
    assert states.tolist() == [[0, 0]]
