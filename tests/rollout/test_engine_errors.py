"""What an engine refuses, by name."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from trm_jax.rollout import EngineConfig, InProcessEngine, RolloutNumerics, SamplingConfig

SIZES = EngineConfig(max_prompt_length=5, max_response_length=6)


def changed(prompts, row, *, tokens=None, mask=None):
    return dataclasses.replace(
        prompts,
        tokens=prompts.tokens if tokens is None else prompts.tokens.at[row].set(jnp.array(tokens)),
        mask=prompts.mask if mask is None else prompts.mask.at[row].set(jnp.array(mask, bool)),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": [0, 0, 0, 0, 0]}, r"row 2 has 0 tokens; the engine takes 1 to max_prompt_length=5"),
        ({"tokens": [1] * 5, "mask": [1, 0, 1, 1, 0]}, r"row 2 is not left-aligned.*gap before token 3"),
        ({"tokens": [1, 13, 1, 1, 1], "mask": [1, 1, 0, 0, 0]}, r"row 2, position 1: token id 13 .*\[0, 13\)"),
        ({"tokens": [1, 1, -1, 1, 1], "mask": [1] * 5}, r"row 2, position 2: token id -1"),
    ],
)
def test_bad_prompts_are_named(tools, change, message):
    with pytest.raises(ValueError, match=message):
        tools.engine().generate(changed(tools.prompts(4), 2, **change))


def test_a_prompt_that_is_too_long_is_named(tools):
    prompts = tools.prompts(3)
    wide = dataclasses.replace(
        prompts,
        tokens=jnp.zeros((3, 9), jnp.int32),
        mask=jnp.pad(prompts.mask, [(0, 0), (0, 4)]).at[1].set(jnp.arange(9) < 6),
    )
    with pytest.raises(ValueError, match=r"row 1 has 6 tokens; .* max_prompt_length=5"):
        tools.engine().generate(wide)


def test_without_weights_nothing_is_generated(tools):
    engine = InProcessEngine(
        tools.model(), SIZES, numerics=RolloutNumerics(), sampling=SamplingConfig(), eos_ids=tools.eos
    )
    assert engine.version == -1
    with pytest.raises(RuntimeError, match="call update_weights"):
        engine.generate(tools.prompts(1))
    with pytest.raises(RuntimeError, match="call update_weights"):
        engine.head_matrix()


@pytest.mark.parametrize("eos", [(13,), (-1, 3)])
def test_an_end_token_outside_the_vocabulary_is_refused(tools, eos):
    with pytest.raises(ValueError, match=r"eos_ids=.*vocab_size=13"):
        InProcessEngine(tools.model(), SIZES, numerics=RolloutNumerics(), sampling=SamplingConfig(), eos_ids=eos)


def test_router_noise_on_a_dense_model_is_refused(tools):
    with pytest.raises(ValueError, match=r"routing_jitter=0\.1 needs a mixture of experts"):
        InProcessEngine(
            tools.model(),
            SIZES,
            numerics=RolloutNumerics(routing_jitter=0.1),
            sampling=SamplingConfig(),
            eos_ids=tools.eos,
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingConfig(temperature=0.0), r"temperature=0\.0.*greedy"),
        (lambda: SamplingConfig(temperature=float("nan")), "temperature=nan"),
        (lambda: SamplingConfig(top_p=0.0), r"top_p=0\.0"),
        (lambda: SamplingConfig(top_p=1.1), r"top_p=1\.1"),
        (lambda: SamplingConfig(top_k=-1), "top_k=-1"),
        (lambda: SamplingConfig(min_p=1.0), r"min_p=1\.0"),
        (
            lambda: RolloutNumerics(kv_cache_dtype="int4"),
            "kv_cache_dtype='int4': choose one of float32, bfloat16, int8",
        ),
        (lambda: RolloutNumerics(weight_format="int3"), "weight_format='int3': choose one of float32, bfloat16"),
        (lambda: RolloutNumerics(group_size=0), "group_size=0"),
        (lambda: RolloutNumerics(quantize_head=True), "quantize_head=true needs a quantised weight_format"),
        (lambda: RolloutNumerics(dtype="float16"), "dtype='float16'"),
        (lambda: RolloutNumerics(routing_jitter=-1.0), r"routing_jitter=-1\.0"),
        (lambda: EngineConfig(slots=0, max_prompt_length=1, max_response_length=1), "slots=0"),
        (lambda: EngineConfig(max_prompt_length=0, max_response_length=1), "max_prompt_length=0"),
        (lambda: EngineConfig(max_prompt_length=1, max_response_length=0), "max_response_length=0"),
        (lambda: EngineConfig(max_prompt_length=1, max_response_length=1, decode_chunk=0), "decode_chunk=0"),
        (lambda: EngineConfig(max_prompt_length=1, max_response_length=1, prefill_rows=0), "prefill_rows=0"),
    ],
)
def test_options_out_of_range_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_row_length_is_prompt_and_response():
    assert SIZES.sequence_length == 11
