"""Routed experts through the driver: every position of prompt and response, as the in-process engine has them."""

from __future__ import annotations

import itertools
import queue

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.integrations.jetstream import RolloutDriver, RolloutEngine, Work
from trm_jax.models import Transformer, TransformerConfig
from trm_jax.rollout import EngineConfig, InProcessEngine, RolloutNumerics, SamplingConfig, SlotEngine
from trm_jax.serve import Completion, SampleRequest
from trm_jax.types import PromptBatch

SIZES = EngineConfig(slots=3, prefill_rows=2, decode_chunk=2, max_prompt_length=5, max_response_length=6)
PROMPTS = ([1, 2, 4], [5], [7, 7, 2, 1, 0])


@pytest.fixture(scope="module")
def model() -> Transformer:
    shape = {"vocab_size": 13, "d_model": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "d_ff": 16}
    return Transformer(TransformerConfig(**shape, n_experts=4, experts_per_token=2), rngs=nnx.Rngs(3))


@pytest.mark.slow
def test_they_are_those_of_the_in_process_engine(model):
    params = nnx.state(model, nnx.Param)
    kind = {"numerics": RolloutNumerics(), "eos_ids": (3,), "record_routes": True}
    lengths = np.array([len(prompt) for prompt in PROMPTS]).repeat(2)
    tokens = np.zeros((6, 5), np.int32)
    for row, length in enumerate(lengths):
        tokens[row, :length] = PROMPTS[row // 2]
    reference = InProcessEngine(model, SIZES, sampling=SamplingConfig(), record_hidden=False, **kind)
    reference.update_weights(1, params)
    expected = reference.generate(
        PromptBatch(
            tokens=jnp.asarray(tokens),
            mask=jnp.asarray(np.arange(5) < lengths[:, None]),
            group_ids=jnp.arange(6),
            seeds=jnp.arange(6, dtype=jnp.uint32),
        )
    )
    engine = SlotEngine(model, SIZES, record_hidden=False, **kind)
    with RolloutDriver(RolloutEngine(engine), engine.load(1, params), queue_limit=8) as driver:
        for (i, prompt), stream_every in itertools.product(enumerate(PROMPTS), (0, 1)):
            pieces: queue.Queue[Completion] = queue.Queue()
            request = SampleRequest(
                prompt=prompt, seeds=[2 * i, 2 * i + 1], max_tokens=6, routes=True, stream_every=stream_every
            )
            driver.place(Work(request, pieces.put))
            found: dict[int, list[Completion]] = {0: [], 1: []}
            while not all(parts and parts[-1].finish for parts in found.values()):
                piece = pieces.get(timeout=300)
                assert isinstance(piece, Completion), piece
                found[piece.sample].append(piece)
            for sample, parts in found.items():
                row = 2 * i + sample
                ids = np.concatenate([part.tokens for part in parts])
                np.testing.assert_array_equal(ids, expected.response_tokens[row, : ids.size])
                routes = np.concatenate([part.routed_experts for part in parts])
                ran = len(prompt) + ids.size - 1
                assert routes.shape == (ran, 1, 2)
                assert routes.dtype == np.int16
                np.testing.assert_array_equal(routes, expected.routed_experts[row, :ran])
                assert (np.asarray(expected.routed_experts[row, ran:]) == -1).all()
                assert (len(parts) > 1) == (stream_every > 0 and ids.size > 2) or ids.size <= 2
