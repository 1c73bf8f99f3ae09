"""Prompt batches."""

from __future__ import annotations

import numpy as np
import pytest

from trm_jax.data import CharTokenizer, Problem, encode_prompts

TOKENIZER = CharTokenizer("0123456789+=")


def problems(*prompts: str) -> list[Problem]:
    return [Problem(prompt=p, reference="", source="made", index=i) for i, p in enumerate(prompts)]


def encode(*prompts: str, **changes: int):  # type: ignore[no-untyped-def]
    options = {"max_prompt_length": 5, "samples_per_prompt": 2, "seed": 7, "step": 3} | changes
    return encode_prompts(problems(*prompts), TOKENIZER, **options)


def test_rows_are_grouped_by_prompt_and_padded_on_the_right() -> None:
    batch = encode("1+2=", "30+4=")
    # ids: digits are themselves, "+" 10, "=" 11, end 12, padding 13
    np.testing.assert_array_equal(
        batch.tokens, [[1, 10, 2, 11, 13], [1, 10, 2, 11, 13], [3, 0, 10, 4, 11], [3, 0, 10, 4, 11]]
    )
    np.testing.assert_array_equal(np.asarray(batch.mask).sum(axis=1), [4, 4, 5, 5])
    np.testing.assert_array_equal(batch.group_ids, [0, 0, 1, 1])
    assert [np.asarray(x).dtype for x in (batch.tokens, batch.mask, batch.group_ids, batch.seeds)] == [
        np.int32,
        np.bool_,
        np.int32,
        np.uint32,
    ]


def test_seeds_are_fixed_by_run_step_and_row_and_differ_between_them() -> None:
    seeds = encode("1", "2", "3").seeds
    np.testing.assert_array_equal(seeds, encode("4", "5", "6").seeds)
    every = np.concatenate([encode("1", "2", "3", seed=seed, step=step).seeds for seed in (0, 1) for step in (0, 1, 2)])
    assert len(set(every.tolist())) == 36


def test_a_step_spread_over_processes_has_the_seeds_and_groups_of_the_whole() -> None:
    whole = encode("1", "2", "3")
    part = encode("3", first_group=2)
    np.testing.assert_array_equal(part.seeds, np.asarray(whole.seeds)[4:])
    np.testing.assert_array_equal(part.group_ids, [2, 2])


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ValueError, match=r"made\[1\] takes 6 tokens, more than max_prompt_length=5"):
        encode("1", "123456")
    with pytest.raises(ValueError, match="no problems"):
        encode()
    with pytest.raises(ValueError, match="samples_per_prompt must be at least 1, got 0"):
        encode("1", samples_per_prompt=0)
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        encode("1", step=-1)
